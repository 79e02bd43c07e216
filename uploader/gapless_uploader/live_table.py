"""The live table of `watch` on a terminal."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gapless_uploader.events import (
    CallStuck,
    Event,
    RunFound,
    RunParked,
    SinkFailed,
    SinkRecovered,
    StateChanged,
    Uploaded,
    describe,
    printable,
)
from gapless_uploader.ledger import name_of
from gapless_uploader.run_name import name_in
from gapless_uploader.uploader import Uploader
from gapless_uploader.wording import age, label, size

_RECENT = 6
_ROWS_SHOWN = 30
_RATE_S = 10.0
"""Rates are means over so long."""
_STYLES = {"finished": "green", "failed": "red", "crashed": "red"}


@dataclass(slots=True)
class _Place:
    state: str = "running"
    step: int | None = None
    rows: int = 0
    at: float | None = None
    """Monotonic seconds of the newest row."""
    recent: deque[tuple[float, int]] = field(default_factory=deque)
    trouble: str = ""

    def rate(self, now: float) -> float:
        """Rows a second lately."""
        while self.recent and now - self.recent[0][0] > _RATE_S:
            self.recent.popleft()
        since = self.recent[0][0] if self.recent else now
        return sum(rows for _, rows in self.recent) / min(_RATE_S, max(1.0, now - since))


class LiveTable:
    """Events as a table that is drawn again twice a second: runs, sinks, step, rows, rate, lag, trouble."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._began = clock()
        self._live = Live(console=console, auto_refresh=False, transient=False, vertical_overflow="crop")
        self._places: dict[tuple[str, str], _Place] = {}
        self._names: dict[str, str] = {}
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._drawn = -math.inf
        self._uploader: Uploader | None = None

    @classmethod
    def on(cls, stream: TextIO) -> LiveTable | None:
        """A table on `stream`, or None when it is no terminal."""
        return cls(Console(file=stream)) if stream.isatty() else None

    def follow(self, uploader: Uploader) -> None:
        """Take names and lag from here."""
        self._uploader = uploader

    def __call__(self, event: Event) -> None:
        match event:
            case Uploaded():
                place = self._place(event.run, event.sink)
                place.step, place.at, place.trouble = event.step, self._clock(), ""
                place.rows += event.rows
                place.recent.append((place.at, event.rows))
            case StateChanged():
                self._place(event.run, event.sink).state = event.state
            case SinkFailed() | RunParked():
                self._place(event.run, event.sink).trouble = event.reason
            case SinkRecovered():
                self._place(event.run, event.sink).trouble = ""
            case CallStuck():
                self._place(event.run, event.sink).trouble = f"no answer for {event.after_s:.0f} s"
            case _:
                pass
        if not isinstance(event, Uploaded | RunFound | StateChanged):
            self._recent.append(f"{time.strftime('%H:%M:%S')} {describe(event)}")

    def refresh(self, now: float) -> None:
        """Draw again when it is time."""
        if now - self._drawn >= 0.5:
            self._drawn = now
            with suppress(OSError):  # the terminal is gone; the uploading goes on
                self._live.update(self.draw(now), refresh=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(OSError):
            self._live.update(self.draw(self._clock()), refresh=True)
            self._live.stop()

    def draw(self, now: float) -> Group:
        """The table, the newest events under it."""
        rows = sum(place.rows for place in self._places.values())
        rate = sum(place.rate(now) for place in self._places.values())
        lag = self._lag()
        runs = len({run for run, _ in self._places})
        head = f"gapless watch  {runs} runs  {rows} rows  {rate:.0f} rows/s  {size(sum(lag.values()))} behind"
        head += f"  up {age(now - self._began)}"
        table = Table(title=head, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.add_column("run", no_wrap=True, overflow="ellipsis", ratio=3, min_width=16)
        table.add_column("sink", no_wrap=True, overflow="ellipsis", max_width=18)
        table.add_column("state", no_wrap=True)
        for name in ("step", "rows", "rows/s", "behind", "last row"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("trouble", no_wrap=True, overflow="ellipsis", ratio=2)
        table.expand = True
        latest = sorted(self._places.items(), key=lambda item: (not item[1].trouble, -(item[1].at or 0.0)))
        shown = max(3, min(_ROWS_SHOWN, self._console.height - 2 * _RECENT - 6))
        for (run, sink), place in latest[:shown]:
            table.add_row(
                Text(printable(self._name(run))),
                Text(printable(sink.removesuffix(":"))),
                Text(printable(place.state), style=_STYLES.get(place.state, "")),
                "" if place.step is None else str(place.step),
                str(place.rows),
                f"{place.rate(now):.1f}",
                size(lag.get((run, sink), 0)),
                "" if place.at is None else f"{age(now - place.at)} ago",
                Text(printable(place.trouble.rsplit(": ", 1)[-1]), style="red"),
            )
        lines = [Text(line, overflow="fold") for line in self._recent]
        if len(self._places) > shown:
            lines.insert(0, Text(f"and {len(self._places) - shown} more: gapless status shows all"))
        return Group(table, *lines)

    def _place(self, run: str, sink: str) -> _Place:
        return self._places.setdefault((run, sink), _Place())

    def _lag(self) -> dict[tuple[str, str], int]:
        if self._uploader is None:
            return {}
        return {(name_of(key), sink): left for (key, sink), left in self._uploader.lag().items()}

    def _name(self, run: str) -> str:
        if run not in self._names and self._uploader is not None:
            found = next((held for key, held in self._uploader.spool.runs.items() if name_of(key) == run), None)
            name = name_in(found) if found is not None else None
            self._names[run] = run if name is None or found is None else label(*found.key, name)
        return self._names.get(run, run)
