"""Everything the uploader tells the world, as a list of named events. Text is constant, the rest is fields."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

import msgspec
import orjson

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class Event(msgspec.Struct, frozen=True):
    """Something that happened, once."""


class Started(Event, frozen=True):
    """The uploader follows these paths for these sinks."""

    paths: str
    sinks: str
    state: str


class RunFound(Event, frozen=True):
    """A run was seen for the first time."""

    run: str


class WishUnmet(Event, frozen=True):
    """A run asks for kinds of sinks that are not here."""

    run: str
    sinks: str


class Uploaded(Event, frozen=True):
    """A sink acknowledged rows."""

    run: str
    sink: str
    rows: int
    step: int | None


class StateChanged(Event, frozen=True):
    """The run's state, as the tracker now has it."""

    run: str
    sink: str
    state: str


class SinkFailed(Event, frozen=True):
    """A sink could not take a batch; it will be tried again."""

    run: str
    sink: str
    reason: str
    retry_in_s: float


class SinkRecovered(Event, frozen=True):
    """The first success after failures."""

    run: str
    sink: str
    failures: int


class RunParked(Event, frozen=True):
    """A run cannot go on at a sink until somebody acts."""

    run: str
    sink: str
    reason: str


class CallStuck(Event, frozen=True):
    """A call of a sink has not returned; other runs go on, and its answer is taken if it comes."""

    run: str
    sink: str
    after_s: float


class SinkStuck(Event, frozen=True):
    """So many calls of a sink have not returned that it gets no more until one does."""

    sink: str
    calls: int


class BudgetTooSmall(Event, frozen=True):
    """The live runs' heartbeats alone need more requests than the sink's `rate` allows."""

    sink: str
    live_runs: int
    carried: int


class RecordsRefused(Event, frozen=True):
    """A sink cannot hold some values; they stay in the spool."""

    run: str
    sink: str
    count: int
    reason: str


class RunChecked(Event, frozen=True):
    """An ended run was compared with what the tracker really holds."""

    run: str
    sink: str
    complete: bool
    result: str


class DamageFound(Event, frozen=True):
    """Bytes of a segment that are no sound record; they were put into the dead-letter file."""

    run: str
    segment: str
    offset: int
    length: int
    reason: str


class SpoolProblem(Event, frozen=True):
    """Something in the spool that cannot be read as a segment."""

    path: str
    reason: str


class StateProblem(Event, frozen=True):
    """The uploader's own state was damaged; what is readable of it holds."""

    path: str
    reason: str


class Replaying(Event, frozen=True):
    """How far a replay is, about every 30 s where no bar can be drawn."""

    rows: int
    bytes: int
    bytes_total: int
    runs: int
    """Of which every sink has all."""
    runs_total: int


class LeaseSlow(Event, frozen=True):
    """Why it takes a while to become this spool's only uploader."""

    reason: str


class WatchingByScan(Event, frozen=True):
    """File events are not to be had here: the scan alone finds new rows."""

    reason: str


class ServingMetrics(Event, frozen=True):
    """Prometheus metrics are to be had here, from this host alone."""

    url: str


class Stopping(Event, frozen=True):
    """A signal came; what is on its way is finished first."""

    signal: str


class Stopped(Event, frozen=True):
    """The end."""

    rows: int


Listener = Callable[[Event], None]
_REPEAT_S = 30.0


_GATHER_S = 5.0


class LineListener:
    """Events as plain or JSON lines.

    Rows are gathered per run and sink and said every 5 s at most; a repeated failure is said once, then every 30 s with
    its count. `flush` says what was gathered. `quiet` leaves out what a progress bar shows.
    """

    def __init__(self, stream: TextIO | None = None, as_json: bool = False, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._json = as_json
        self._quiet = quiet
        self._last: dict[tuple[object, ...], tuple[float, int]] = {}
        self._gathered: dict[tuple[str, str], Uploaded] = {}
        self._flushed = time.monotonic() - _GATHER_S

    def __call__(self, event: Event) -> None:
        if isinstance(event, Uploaded):
            held = self._gathered.get((event.run, event.sink))
            rows = event.rows + (held.rows if held else 0)
            self._gathered[(event.run, event.sink)] = Uploaded(event.run, event.sink, rows, event.step)
            if time.monotonic() - self._flushed >= _GATHER_S:
                self.flush()
            return
        times = self._times(event)
        if times == 0 or (self._quiet and isinstance(event, RunFound)):
            return
        if not isinstance(event, SinkFailed):
            self.flush()
        self._say(event, times)

    def refresh(self, now: float) -> None:
        """Say what was gathered when it is time. `now` is monotonic seconds."""
        if self._gathered and now - self._flushed >= _GATHER_S:
            self.flush()

    def flush(self) -> None:
        """Say how many rows were uploaded since it was said last."""
        self._flushed = time.monotonic()
        gathered, self._gathered = self._gathered, {}
        if not self._quiet:
            for event in gathered.values():
                self._say(event, 1)

    def _say(self, event: Event, times: int) -> None:
        if self._json:
            line = orjson.dumps({"event": _name(event), **msgspec.structs.asdict(event), "times": times}).decode()
        else:
            line = f"{time.strftime('%H:%M:%S')} {describe(event)}" + (f" times={times}" if times > 1 else "")
        # Whoever read the lines may be gone, with the terminal or the pipe; the uploading goes on.
        with suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    def _times(self, event: Event) -> int:
        """How often it happened since it was last said; 0 to stay silent."""
        if not isinstance(event, SinkFailed):
            return 1
        key = (type(event), event.run, event.sink, event.reason)
        said, held = self._last.get(key, (-_REPEAT_S, 0))
        now = time.monotonic()
        if now - said < _REPEAT_S:
            self._last[key] = (said, held + 1)
            return 0
        self._last[key] = (now, 0)
        return held + 1


def printable(text: str) -> str:
    """`text` without what moves a terminal's cursor, changes its colours or turns its direction."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def describe(event: Event) -> str:
    """The event on one line: its name, then its fields."""
    values = msgspec.structs.asdict(event)
    told = " ".join(f"{key}={printable(str(value))}" for key, value in values.items() if value is not None)
    return f"{_name(event)} {told}"


def _name(event: Event) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(event).__name__).lower()
