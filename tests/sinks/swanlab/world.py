"""A spool, an uploader and a SwanLab test server in one world with one clock: nothing sleeps.

`World.settle` turns the uploader until nothing is left to do; whenever it would wait, its clock and the server's go
forward by as much. `World.kill` drops the uploader as SIGKILL would: nothing is flushed, only what is on disk stays.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any
from uuid import UUID

import orjson

from gapless_schemas import Header, SegmentName, encode_header, encode_record
from gapless_uploader.events import Event
from gapless_uploader.options import UploaderOptions
from gapless_uploader.sinks._swanlab_names import key_name
from gapless_uploader.sinks.swanlab import SwanlabSink
from gapless_uploader.uploader import Inline, Uploader
from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.model import Experiment

T0 = 1_700_000_000.0
PROJECT = "grpo"
RUN = "r-1"


class SpoolWriter:
    """One attempt's segment, written whole lines at a time."""

    def __init__(self, root: Path, attempt: int = 1, run: str = RUN, resume_step: int | bool | None = None) -> None:
        self.attempt_id = UUID(int=attempt).hex
        self._seq = 0
        self._began = T0 + 10_000 * (attempt - 1)
        folder = root / PROJECT / run
        folder.mkdir(parents=True, exist_ok=True)
        header = Header(
            PROJECT, run, "main", attempt, self.attempt_id, 1, 1, "train-7", 4711, "boot", self._began, resume_step
        )
        self.media = folder / "media"
        self._path = folder / str(SegmentName("main", attempt, self.attempt_id[:8], 1))
        self._path.write_bytes(encode_header(header))

    def add(self, kind: str, data: dict[str, Any], step: int | None = None, marks: list[Any] | None = None) -> None:
        """Append one record, a second after the one before."""
        self._seq += 1
        t = self._began + self._seq
        line = encode_record(
            self._seq, t, float(self._seq), kind, step, orjson.dumps(data), orjson.dumps(marks) if marks else None
        )
        with open(self._path, "ab") as file:
            file.write(line)

    def begin(self, **config: Any) -> None:
        """The run's own record."""
        self.add("run", {"name": "Qwen 7B", "config": config or {"lr": 0.1}})

    def row(self, step: int, **values: float) -> None:
        """A row; NaN and infinities are marked as the contract says."""
        marks = []
        plain: dict[str, Any] = {}
        for key, value in values.items():
            plain[key] = value
            if isinstance(value, float) and not isfinite(value):
                plain[key] = None
                marks.append([[key], "nan" if value != value else "inf" if value > 0 else "-inf"])
        self.add("metrics", plain, step, marks)

    def finish(self, state: str = "finished", exit_code: int = 0) -> None:
        """The end."""
        self.add("finish", {"state": state, "exit_code": exit_code})


@dataclass
class World:
    """Everything a test needs; `server` has the truth."""

    folder: Path
    server: SwanLabServer
    settle_s: float = 60.0
    on_rewind: str = "new-run"
    max_bytes: int = 2 << 20
    timeout_s: float = 30.0
    """Real seconds: short only where an answer is to be given up."""
    clock: float = 1_000.0
    uploader: Uploader | None = None
    events: list[Event] = field(default_factory=list)
    life: int = 0

    @property
    def spool(self) -> Path:
        return self.folder / "spool"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def writer(self, attempt: int = 1, **options: Any) -> SpoolWriter:
        return SpoolWriter(self.spool, attempt, **options)

    def sink(self) -> SwanlabSink:
        sink = SwanlabSink(settle=self.settle_s, timeout=self.timeout_s, now=lambda: self.clock)
        object.__setattr__(sink.capabilities, "max_bytes", self.max_bytes)
        return sink

    def start(self) -> Uploader:
        self.uploader = Uploader(
            [self.spool],
            [self.sink()],
            self.state,
            UploaderOptions(on_rewind=self.on_rewind, crashed_after_s=1e12),
            listener=self.events.append,
            executor=Inline(),
            jitter=lambda: 0.5,
        )
        self.uploader.start()
        self.life += 1
        return self.uploader

    def kill(self) -> None:
        """The process is gone: locks fall, nothing else happens."""
        if self.uploader is not None:
            self.uploader.lease.release()
            self.uploader.state.close()
            self.uploader = None

    def lose_state(self) -> None:
        shutil.rmtree(self.state, ignore_errors=True)

    def pass_time(self, seconds: float) -> None:
        self.clock += seconds
        self.server.advance(seconds)

    def turn(self) -> bool:
        """One turn of the uploader; whether it is busy."""
        uploader = self.uploader or self.start()
        return uploader.turn(self.clock)

    def run(self, turns: int = 2_000) -> None:
        """Turn until everything is uploaded or parked; time passes where the uploader waits."""
        quiet = False
        for _ in range(turns):
            busy = self.turn()
            assert self.uploader is not None
            if busy:
                continue
            left = self.uploader.behind()
            if all(place in self.uploader.parked for place in left):
                if quiet:
                    return
                # Longer than any scan waits: what was written meanwhile is seen.
                quiet = True
                self.pass_time(61.0)
                continue
            quiet = False
            self.pass_time(min(max(self.uploader.next_due(self.clock), 0.01), 3_600.0))
        raise AssertionError(f"not done after {turns} turns: {self.uploader and self.uploader.failed}")

    @property
    def experiment(self) -> Experiment:
        return self.server.experiments[RUN]

    def progress(self) -> dict[str, Any]:
        assert self.uploader is not None
        (found,) = self.uploader.state.progress.values()
        return found

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def raw_points(experiment: Experiment, kind: str = "scalar") -> list[tuple[int, str, str]]:
    """(step, key, value) of every row ever stored, repeats included."""
    return sorted((row.step, row.key, repr(row.data)) for row in experiment.raw if row.kind == kind)


def expected(rows: Iterable[tuple[int, dict[str, float]]]) -> list[tuple[int, str, str]]:
    """What `raw_points` must be for `rows`, each point once."""
    found = []
    for step, values in rows:
        for key, value in values.items():
            found.append((step, key_name(key), repr(float(value) if isfinite(value) else "nan")))
            if value in (float("inf"), float("-inf")):
                found.append((step, f"{key_name(key)}~inf", repr(1.0 if value > 0 else -1.0)))
    return sorted(found)
