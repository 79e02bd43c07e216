"""The progress of `replay`: a bar on a terminal, else an event now and then; the end as a line or as JSON.

It also decides that a replay is done.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from gapless_uploader.absent import Absent
from gapless_uploader.events import Listener, Replaying
from gapless_uploader.ledger import Place
from gapless_uploader.options import PATIENCE_S
from gapless_uploader.uploader import Uploader

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


EVERY_S = 30.0
"""Between two events, where there is no bar."""
_DRAW_S = 0.25


class ReplayProgress:
    """A bar with bytes, rows, rate and what is left, or the same as events; also what decides that a replay is done."""

    def __init__(
        self,
        uploader: Uploader,
        stream: TextIO,
        listener: Listener,
        plain: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """The bar is drawn on `stream` if it is a terminal and not `plain`; else `listener` is told."""
        self.left: list[Place] = []
        """Runs and sinks that could not be finished, once `is_done` said so."""
        self.absent = Absent([], [])
        """What holds no data, for the end."""
        self.problems: list[tuple[Path, str]] = []
        """Of that, what somebody has to act on."""
        self._uploader = uploader
        self._listen = listener
        self._patience_s = patience_s
        self._began = time.monotonic()
        self._failing_since: float | None = None
        self._next: float | None = None
        self._task: TaskID | None = None
        self._bar = None if plain or not stream.isatty() else _bar(stream)

    def __enter__(self) -> ReplayProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def is_done(self, uploader: Uploader, now: float) -> bool:
        """Whether nothing is left but what is parked, or has failed for the replay's patience."""
        left = uploader.behind()
        if not left:
            self.left = []
            return True
        if any(place not in uploader.failed for place in left):
            self._failing_since = None
            return False
        if self._failing_since is None:
            self._failing_since = now
        if all(place in uploader.parked for place in left) or now - self._failing_since > self._patience_s:
            self.left = left
            return True
        return False

    def refresh(self, now: float) -> None:
        """Draw again, or tell, when it is time. `now` is monotonic seconds."""
        if self._bar is None:
            self._tell(now)
        elif self._next is None or now >= self._next:
            self._next = now + _DRAW_S
            self._draw(self._bar, now)

    def _tell(self, now: float) -> None:
        if self._next is None:
            self._next = now + EVERY_S
        if now < self._next:
            return
        self._next = now + EVERY_S
        total, done = self._uploader.bytes_total_and_done()
        runs = self._uploader.num_runs
        num_left = len({key for key, _ in self._uploader.behind()})
        self._listen(Replaying(self._uploader.rows, done, total, runs - num_left, runs))

    def _draw(self, bar: Progress, now: float) -> None:
        total, done = self._uploader.bytes_total_and_done()
        rows = self._uploader.rows
        rate = rows / max(1e-9, now - self._began)
        if self._task is None:
            self._task = bar.add_task("replay", total=total, mb=0.0, rows=0, rate=0.0)
        bar.update(self._task, total=total, completed=done, refresh=True, mb=done / 1e6, rows=rows, rate=rate)

    def to_json(self) -> dict[str, object]:
        """The end as JSON."""
        total, done = self._uploader.bytes_total_and_done()
        failed = self._uploader.failed
        left = [
            {"project": key[0], "run": key[1], "sink": sink, "reason": failed.get((key, sink), "not done")}
            for key, sink in self.left
        ]
        seconds = round(time.monotonic() - self._began, 3)
        rows = self._uploader.rows
        return {
            "event": "replayed",
            "rows": rows,
            "seconds": seconds,
            "bytes": done,
            "bytes_left": total - done,
            "left": left,
            "absent": [{"path": str(path), "reason": reason} for path, reason in self.problems],
        }

    def summary(self) -> str:
        """One line for the end."""
        seconds = time.monotonic() - self._began
        rows, spool = self._uploader.rows, self._uploader.spool
        total, done = self._uploader.bytes_total_and_done()
        if rows:
            text = f"{rows} rows uploaded in {seconds:.1f} s"
        elif self.left or self.problems or (spool.problems and not spool.runs):
            text = "nothing was uploaded"
        elif not self._uploader.num_runs and not self.absent.runs:
            options = self._uploader.options
            is_asked = spool.runs or options.projects or options.runs
            return "no run was found there that is asked for" if is_asked else "no run is there yet"
        else:
            text = "up to date: nothing to upload"
        if self.problems:
            text += f"; {len(self.problems)} without data"
        if self.left:
            text += f"; {len(self.left)} could not be finished"
        elif total > done:
            text += f"; {total - done} bytes are the torn end of a segment: they will follow if their writer goes on"
        return text


def _bar(stream: TextIO) -> Progress:
    """A bar on a terminal; where there is none, rich costs nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    return Progress(
        TextColumn("replay"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[mb]:.1f} MB  {task.fields[rows]} rows"),
        TextColumn("{task.fields[rate]:.0f} rows/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
        auto_refresh=False,
    )
