"""What a person sees in a terminal: the live table of `watch`, the progress of `replay`, the table of `status`."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gapless_uploader.events import Event, RunFound, SinkFailed, StateChanged, Uploaded, describe, printable
from gapless_uploader.spool import RunKey
from gapless_uploader.status import Status
from gapless_uploader.uploader import Uploader

_RECENT = 6
_ROWS_SHOWN = 30
PATIENCE_S = 600.0


class LiveTable:
    """Events as a table that is drawn again twice a second: runs, sinks, last step, rows, trouble."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._places: dict[tuple[str, str], dict[str, object]] = {}
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._drawn = 0.0

    @classmethod
    def on(cls, stream: TextIO) -> LiveTable | None:
        """A table on `stream`, or None when it is no terminal."""
        return cls(Console(file=stream)) if stream.isatty() else None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Uploaded):
            place = self._place(event.run, event.sink)
            place["step"] = event.step
            place["rows"] = int(str(place.get("rows", 0))) + event.rows
            place["at"] = time.monotonic()
            place.pop("trouble", None)
        elif isinstance(event, StateChanged):
            self._place(event.run, event.sink)["state"] = event.state
        elif isinstance(event, SinkFailed):
            self._place(event.run, event.sink)["trouble"] = event.reason
        if not isinstance(event, Uploaded | RunFound):
            self._recent.append(f"{time.strftime('%H:%M:%S')} {describe(event)}")

    def refresh(self, now: float) -> None:
        """Draw again when it is time."""
        if now - self._drawn >= 0.5:
            self._drawn = now
            self._live.update(self._draw(now), refresh=True)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.update(self._draw(time.monotonic()), refresh=True)
        self._live.stop()

    def _place(self, run: str, sink: str) -> dict[str, object]:
        return self._places.setdefault((run, sink), {"state": "running"})

    def _draw(self, now: float) -> Group:
        table = Table("run", "sink", "state", title="gapless watch", title_justify="left")
        for name in ("step", "rows", "last row"):
            table.add_column(name, justify="right")
        table.add_column("trouble")
        latest = sorted(self._places.items(), key=lambda item: -float(str(item[1].get("at", 0.0))))
        for (run, sink), place in latest[:_ROWS_SHOWN]:
            at = place.get("at")
            age = f"{now - float(str(at)):.0f} s ago" if at is not None else ""
            table.add_row(
                Text(printable(run)),
                Text(printable(sink.removesuffix(":"))),
                str(place["state"]),
                str(place.get("step", "")),
                str(place.get("rows", 0)),
                age,
                Text(printable(str(place.get("trouble", "")))),
            )
        more = len(self._places) - _ROWS_SHOWN
        lines = [Text(line) for line in self._recent]
        if more > 0:
            lines.insert(0, Text(f"and {more} more: gapless status shows all"))
        return Group(table, *lines)


class ReplayProgress:
    """A bar with bytes, rows, rate and what is left; also what decides that a replay is done."""

    def __init__(self, uploader: Uploader, stream: TextIO, plain: bool = False) -> None:
        self.left: list[tuple[RunKey, str]] = []
        """Runs and sinks that could not be finished, once `is_done` said so."""
        self._uploader = uploader
        self._began = time.monotonic()
        self._failing_since: float | None = None
        self._next = 0.0
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("replay"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %  {task.fields[mb]:.1f} MB  {task.fields[rows]} rows"),
            TextColumn("{task.fields[rate]:.0f} rows/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(file=stream),
            auto_refresh=False,
            disable=plain or not stream.isatty(),
        )

    def __enter__(self) -> ReplayProgress:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def is_done(self, uploader: Uploader, now: float) -> bool:
        """Whether nothing is left but what is parked, or has failed for `PATIENCE_S`."""
        left = uploader.behind()
        if not left:
            self.left = []
            return True
        if any(place not in uploader.failed for place in left):
            self._failing_since = None
            return False
        if self._failing_since is None:
            self._failing_since = now
        if all(place in uploader.parked for place in left) or now - self._failing_since > PATIENCE_S:
            self.left = left
            return True
        return False

    def refresh(self, now: float) -> None:
        """Draw again when it is time."""
        if now < self._next or self._progress.disable:
            return
        self._next = now + 0.25
        total, done = self._uploader.bytes_total_and_done()
        rows = self._uploader.rows
        rate = rows / max(1e-9, now - self._began)
        if self._task is None:
            self._task = self._progress.add_task("replay", total=total, mb=0.0, rows=0, rate=0.0)
        self._progress.update(
            self._task, total=total, completed=done, refresh=True, mb=done / 1e6, rows=rows, rate=rate
        )

    def summary(self) -> str:
        """One line for the end."""
        seconds = time.monotonic() - self._began
        rows = self._uploader.rows
        total, done = self._uploader.bytes_total_and_done()
        text = f"{rows} rows uploaded in {seconds:.1f} s" if rows else "up to date: nothing to upload"
        if total > done and not self.left:
            text += f"; {total - done} bytes are the torn end of a segment: they will follow if their writer goes on"
        return text


def status_table(status: Status) -> Group:
    """Runs x sinks as a table, notes and problems under it."""
    table = Table("run", "state", title="gapless status", title_justify="left")
    for name in ("attempts", "written", "step", "idle"):
        table.add_column(name, justify="right")
    table.add_column("sink")
    for name in ("uploaded", "at step", "behind", "refused", "lost"):
        table.add_column(name, justify="right")
    notes: list[Text] = []
    for run in status.runs:
        step = "" if run.step is None else str(run.step)
        first = [
            f"{run.project}/{run.run}",
            run.state,
            str(run.attempts),
            str(run.records),
            step,
            f"{run.idle_s:.0f} s",
        ]
        for sink in run.sinks or [None]:  # type: ignore[list-item]
            cells = ["", "", "", "", "", ""]
            if sink is not None:
                at = "" if sink.step is None else str(sink.step)
                behind = f"{sink.behind_bytes} B"
                cells = [sink.sink, str(sink.uploaded), at, behind, str(sum(sink.refused.values())), str(sink.lost)]
                notes.extend(
                    Text(f"{run.project}/{run.run} -> {sink.sink}: {count} refused: {printable(reason)}")
                    for reason, count in sink.refused.items()
                )
                if sink.check is not None:
                    notes.append(Text(printable(f"{run.project}/{run.run} -> {sink.sink}: {sink.check['text']}")))
            table.add_row(*[Text(printable(cell)) for cell in (*first, *cells)])
            first = [""] * len(first)
        notes.extend(Text(f"{run.project}/{run.run}: {printable(note)}") for note in run.notes)
    notes.extend(Text(printable(problem)) for problem in status.problems)
    return Group(table, *notes)
