"""The console sink in the contract suite: what it printed, parsed back from verl's line."""

import ast
import io
from math import inf, nan
from pathlib import Path

from gapless_uploader.sink import RunView
from gapless_uploader.sinks.console import ConsoleSink
from tests.sinks.harness import Point, SinkHarness


class Harness(SinkHarness):
    kind = "console"
    tells_runs_apart = False
    never_away = "standard output is there as long as the process"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.stream = io.StringIO()

    def sink(self) -> ConsoleSink:
        return ConsoleSink(stream=self.stream)

    def _pairs(self) -> list[tuple[int, str, str]]:
        found = []
        for line in self.stream.getvalue().splitlines():
            head, *pairs = line.split(" - ")
            if head.startswith("step:"):
                found += [(int(head[5:]), *pair.rsplit(":", 1)) for pair in pairs]
        return found

    def points(self, run: RunView) -> list[Point]:
        return [Point(step, key, number(text)) for step, key, text in self._pairs() if number(text) is not None]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        return {(step, key): text for step, key, text in self._pairs() if number(text) is None}

    def state(self, run: RunView) -> str | None:
        last = self.stream.getvalue().splitlines()[-1].split(",")[0]
        return last if last in ("finished", "failed", "crashed") else None


def number(text: str) -> float | bool | None:
    try:
        return {"nan": nan, "inf": inf, "-inf": -inf}.get(text) or ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
