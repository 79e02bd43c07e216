"""Lives of an uploader in one process: the real pipeline and sink, a committed state, kills at every request.

A kill drops pipeline, sink and everything that was not committed. Time is counted, never waited for, apart from what
the server's own faults take.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from gapless_uploader.pipeline import Pipeline
from gapless_uploader.sinks._wandb_http import Http
from gapless_uploader.steps import Outcome, PipelineOptions
from tests.sinks.wandb.loopback import LoopbackSink
from tests.wandb_spool import files_of

KEY = ("grpo", "r-1")


class Killed(BaseException):
    """The process ended here."""


class Clock:
    """Seconds that a test counts."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class MortalHttp(Http):
    """Requests during which the process may end: before they leave, or after their effect."""

    before: Callable[[str, bytes], None]
    after: Callable[[str, bytes, bool], None]

    def _send(self, method: str, url: str, body: bytes, *args: Any, **kwargs: Any) -> Any:
        self.before(url, body)
        answer = super()._send(method, url, body, *args, **kwargs)
        self.after(url, body, answer[0] == 200 and answer[1][:1] == b"{" and answer[1][-1:] == b"}")
        return answer


class Lives:
    """One run's uploader, killed and started again."""

    def __init__(self, root: Path, url: str, clock: Clock, max_operations: int = 400, **options: Any) -> None:
        self.root, self.url, self.clock = root, url, clock
        self.committed: dict[str, Any] | None = None
        self.options = {"settle_s": 5.0, "timeout_s": 60.0, **options}
        self.pipeline_options = PipelineOptions()
        self.max_operations = max_operations
        self.dies_in: int | None = None
        """Requests from now at which the process ends."""
        self.dies_after = False
        self.key: str | None = None
        self.failures: list[str] = []
        self.parked: list[str] = []
        self.rows = 0
        self.acknowledged: dict[str, dict[int, str]] = {}
        """Run's address -> line -> what W&B said yes to."""
        self.rewritten: list[tuple[int, str, str]] = []
        """Lines that were acknowledged and then sent with other content: (line, before, after). Always empty."""
        self.start()

    def start(self) -> None:
        """A new process: nothing is known but what was committed."""
        self.dies_in = None
        sink = LoopbackSink(self.url, clock=self.clock, **self.options)
        if self.key is not None:
            sink.found = replace(sink.found, api_key=self.key)
        http = sink._http = sink._finder._http = MortalHttp(sink.credentials, self.options["timeout_s"], "gapless")
        http.before, http.after = self._before, self._after
        sink.capabilities = replace(sink.capabilities, max_operations=self.max_operations)
        self.sink = sink
        saved = json.loads(json.dumps(self.committed)) if self.committed else None
        self.pipeline = Pipeline(KEY, sink, saved, options=self.pipeline_options, jitter=lambda: 0.5)

    def _before(self, url: str, body: bytes) -> None:
        held = self.acknowledged.setdefault(url, {})
        for line, text in history_lines(url, body):
            if held.get(line, text) != text:
                self.rewritten.append((line, held[line], text))
        self._maybe_die(False)

    def _after(self, url: str, body: bytes, is_yes: bool) -> None:
        if is_yes:
            self.acknowledged[url].update(history_lines(url, body))
        self._maybe_die(True)

    def _maybe_die(self, is_after: bool) -> None:
        if self.dies_in is None or self.dies_after != is_after:
            return
        self.dies_in -= 1
        if self.dies_in <= 0:
            raise Killed

    def kill(self) -> None:
        """End the process; begin another."""
        self.start()

    def lose_state(self) -> None:
        """End the process; its state is gone."""
        self.committed = None
        self.start()

    def step(self, commits: bool = True) -> Outcome | None:
        """One step of the pipeline, and its commit; None if the process ended in it and began anew."""
        self.clock.now = max(self.clock.now + 0.01, self.pipeline.not_before)
        try:
            outcome = self.pipeline.step(files_of(self.root), self.clock.now)
        except Killed:
            self.start()
            return None
        if outcome.failed is not None:
            self.failures.append(outcome.failed)
        if outcome.parked is not None:
            self.parked.append(outcome.parked)
        self.rows += outcome.rows
        if outcome.progress is not None:
            if not commits:
                self.start()
                return None
            self.committed = outcome.progress
        return outcome

    def run(self, max_steps: int = 2_000) -> None:
        """Step until everything is uploaded; fails if it never is."""
        for _ in range(max_steps):
            self.step()
            if self.pipeline.idle(files_of(self.root)):
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.failures[-3:]} {self.parked[-3:]}")


def history_lines(url: str, body: bytes) -> list[tuple[int, str]]:
    """(offset, text) of the history lines in a request."""
    if not url.endswith("/file_stream"):
        return []
    chunk = orjson.loads(body).get("files", {}).get("wandb-history.jsonl")
    return list(enumerate(chunk["content"], chunk["offset"])) if chunk else []


def some(chance: random.Random, rate: float) -> bool:
    return chance.random() < rate
