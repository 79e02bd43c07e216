"""What the contract suite needs to know of a sink kind, and the few verbs its tests are written in.

A sink joins the suite by a module `tests/sinks/harness_<kind>.py` with one class, `class Harness(SinkHarness)`, that
makes the sink in a folder and reads back what the tracker really holds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from random import randrange
from typing import Any

from gapless_uploader.operations import Amend, Operation, Row, State, Value
from gapless_uploader.sink import Ack, Batch, Memo, RunView, Sink

SHIPS_FILES = frozenset(["spool"])
"""Kinds that copy a spool's files: the contract suite, which hands operations and has no spool, leaves them out."""
T0 = 1_700_000_000.0
"""Wall clock of step 0; long past, so that a tracker that stamps its own time is found out."""


@dataclass(frozen=True, order=True)
class Point:
    """One value of one key at one step, as the tracker holds it. A value held twice is two points."""

    step: int
    key: str
    value: Any
    t: float | None = None


class SinkHarness:
    """One kind of sink in one folder of its own. `close` ends servers."""

    kind: str
    vendor: str | None = None
    """Module without which the sink must say `pip install 'gapless[kind]'`."""
    extra: str | None = None
    """The extra that installs the vendor, where its name is not the kind's."""
    tells_runs_apart = True
    """False where two runs of one name are shown as one, or all runs together."""
    keeps_history = True
    """False for a tracker that shows the last value of a key and nothing else."""
    never_away: str | None = None
    """Why nothing can put this tracker out of reach or make it refuse; None where something can."""
    open_sessions_notice = True
    """False where a session that is open needs nothing from outside, so that an outage shows at the next start."""
    refusal_is_for_all = False
    """A refusal concerns every run of the sink, not one."""
    way_out = ""
    """Words of the way out that the refusal is told with."""
    random_histories = 40
    """How many random histories the suite plays; fewer where a tracker is slow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def sink(self) -> Sink:
        """A new sink object, as a new process would make it."""
        raise NotImplementedError

    def uploading(self) -> Sink:
        """The sink that the real uploader drives."""
        return self.sink()

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Inside the block nothing that the sink does reaches the tracker, whose data stays as it is."""
        raise NotImplementedError
        yield

    @contextmanager
    def refusal(self, run: RunView) -> Iterator[None]:
        """Inside the block the tracker takes nothing of `run`, which it knows already, however often it is asked."""
        raise NotImplementedError
        yield

    def points(self, run: RunView) -> list[Point]:
        """Every number the tracker holds of the run, read by the tracker's own means where there are some."""
        raise NotImplementedError

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        """(step, key) -> text or rendered table. Only for sinks that can."""
        raise NotImplementedError

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        """(step, key) -> the bytes of the image held. Only for sinks that can."""
        raise NotImplementedError

    def state(self, run: RunView) -> str | None:
        """The run's end state in our words, None while it runs. Only for sinks that can."""
        raise NotImplementedError

    def held(self, value: Value) -> Any:
        """The form in which the tracker holds a number; None when it must refuse it."""
        return value

    def key(self, key: str) -> str:
        """The form in which the tracker holds a key."""
        return key

    def close(self) -> None:
        """End what the harness started."""

    # What follows is the suite's, not the kind's.

    def expect(self, rows: Iterable[Row]) -> list[Point]:
        """The points that the tracker must hold when it was given `rows`, merged by step and key."""
        timed = self.sink().capabilities.original_time
        points = {}
        for row in rows:
            for key, value in row.values.items():
                t, held = row.t if timed else None, self.held(value)
                if held is None:
                    points.pop((row.step, key), None)
                    continue
                points[row.step, key] = Point(row.step or 0, self.key(key), repr(held), t)
        return sorted(points.values(), key=repr)

    def actual(self, run: RunView) -> list[Point]:
        """The tracker's points as `expect` says them: values by their repr, so that NaN, 1 and 1.0 differ."""
        timed = self.sink().capabilities.original_time
        points = (replace(point, value=repr(point.value), t=point.t if timed else None) for point in self.points(run))
        return sorted(points, key=repr)


@contextmanager
def moved_away(path: Path) -> Iterator[None]:
    """Inside the block `path` is not there; whatever is made in its place is found out."""
    aside = path.with_name(f"{path.name}.aside")
    path.rename(aside)
    try:
        yield
        assert not os.path.lexists(path), f"something was made in the place of {path}"
    finally:
        if not os.path.lexists(path):
            aside.rename(path)


@contextmanager
def pipe_in_place_of(path: Path) -> Iterator[None]:
    """Inside the block `path` is a FIFO that nobody reads or writes; it is still there at the end."""
    with moved_away(path):
        os.mkfifo(path)
        yield
        assert path.is_fifo()
        path.unlink()


@contextmanager
def foreign_file_in_place_of(path: Path) -> Iterator[None]:
    """Inside the block `path` is somebody else's file, which is left as it was."""
    with moved_away(path):
        path.write_bytes(b"somebody else's\n" * 1000)
        yield
        assert path.read_bytes() == b"somebody else's\n" * 1000
        path.unlink()


def view(**changes: Any) -> RunView:
    """A run's view."""
    return replace(RunView(project="grpo", run_id="r-1", created=T0, host="train-7", name="Qwen 7B"), **changes)


def row(step: int, t: float | None = None, **values: Value) -> Row:
    """A row one second of training after the one before."""
    return Row(step, T0 + step if t is None else t, float(step), values or {"loss": step + 0.5, "lr": 0.1})


def amend(base: Row, t: float | None = None, **changed: Value) -> Amend:
    """More or other values for the step of `base`, two seconds later."""
    assert base.step is not None
    merged = {**base.values, **changed}
    return Amend(base.step, base.t + 2 if t is None else t, base.runtime, merged, tuple(changed))


def batch(run: RunView, *operations: Operation, uncertain: bool = False) -> Batch:
    """One batch; the view says the state that its last State operation says."""
    for operation in operations:
        if isinstance(operation, State):
            run = replace(run, state=operation.state, exit_code=operation.exit_code)
    return Batch(list(operations), run, uncertain)


def write(sink: Sink, run: RunView, memo: Memo, *operations: Operation, uncertain: bool = False) -> Ack:
    """Open, write everything as the uploader does, close: one life of an uploader. The last ack, refusals added up."""
    session = sink.open(run, memo)
    left, refused = list(operations), []
    uncertain = uncertain and sink.capabilities.settles_intents
    try:
        while True:
            chunk = left[: sink.capabilities.max_operations]
            ack = session.write(batch(run, *chunk, uncertain=uncertain))
            refused += ack.refused
            left = left[ack.done :]
            if not left:
                return Ack(len(operations), session.flush(), refused)
    finally:
        session.close()


def harness_kinds() -> list[str]:
    """The kinds that have a `harness_<kind>.py` beside this file."""
    return sorted(path.stem.removeprefix("harness_") for path in Path(__file__).parent.glob("harness_*.py"))


def load_harness(kind: str) -> type[SinkHarness]:
    """The harness of `kind`, whose vendor is imported now."""
    found: type[SinkHarness] = import_module(f"{__package__}.harness_{kind}").Harness
    return found


def free_port() -> int:
    """A port that nobody listens on, and below those that the system gives away by itself."""
    while True:
        port = randrange(20_000, 32_000)
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port
