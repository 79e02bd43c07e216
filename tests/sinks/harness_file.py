"""The file sink in the contract suite, read back with the standard library's strict JSON."""

import json
from contextlib import AbstractContextManager
from math import inf, nan
from pathlib import Path
from typing import Any

from gapless_uploader.sink import RunView
from gapless_uploader.sinks.file import FileSink
from tests.sinks.harness import Point, SinkHarness, moved_away, pipe_in_place_of


class Harness(SinkHarness):
    kind = "file"
    way_out = "put it back, or choose another folder"

    def sink(self) -> FileSink:
        return FileSink(str(self.folder / "out"))

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(self.folder / "out")

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        return pipe_in_place_of(self._stem(run).with_suffix(".jsonl"))

    def _stem(self, run: RunView) -> Path:
        found = [path for path in self.folder.rglob("*.json") if strict(path.read_text())["id"] == run.tracker_id]
        (path,) = (path for path in found if strict(path.read_text())["project"] == run.project)
        return path

    def lines(self, run: RunView) -> list[dict[str, Any]]:
        text = self._stem(run).with_suffix(".jsonl").read_text()
        return [restored(strict(line)) for line in text.splitlines()]

    def points(self, run: RunView) -> list[Point]:
        """By the documented rule that the last line of a step's key wins; a line that repeats one is a point twice."""
        newest: dict[tuple[int, str], Point] = {}
        repeated = []
        for line in self.lines(run):
            for key, value in line["data"].items():
                if isinstance(value, (bool, int, float)):
                    point = Point(line["step"], key, value, line["t"])
                    if newest.get((point.step, key)) == point:
                        repeated.append(point)
                    newest[point.step, key] = point
        return [*newest.values(), *repeated]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        return {
            (line["step"], key): value if isinstance(value, str) else json.dumps(value)
            for line in self.lines(run)
            for key, value in line["data"].items()
            if isinstance(value, str) or (isinstance(value, dict) and "rows" in value)
        }

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        return {
            (line["step"], key): (self._stem(run).with_suffix(".media") / value["items"][0]["media"]).read_bytes()
            for line in self.lines(run)
            for key, value in line["data"].items()
            if isinstance(value, dict) and "items" in value and "media" in value["items"][0]
        }

    def state(self, run: RunView) -> str | None:
        state = strict(self._stem(run).read_text())["state"]
        return None if state == "running" else state


def strict(line: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not strict JSON")

    return json.loads(line, parse_constant=refuse)


def restored(line: dict[str, Any]) -> dict[str, Any]:
    for path, kind in line.get("marks", []):
        holder = line["data"]
        for part in path[:-1]:
            holder = holder[part]
        known = {"nan": nan, "inf": inf, "-inf": -inf}
        holder[path[-1]] = int(holder[path[-1]]) if kind == "int" else known[kind]
    return line
