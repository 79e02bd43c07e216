"""What a person sees in a terminal: the progress of `replay`, the table of `status`."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TextIO

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gapless_uploader.events import printable
from gapless_uploader.ledger import Place
from gapless_uploader.status import SinkStatus, Status
from gapless_uploader.uploader import Uploader
from gapless_uploader.wording import age, label, size

PATIENCE_S = 120.0
"""How long a replay tries again what fails, when nothing else is left to do."""


class ReplayProgress:
    """A bar with bytes, rows, rate and what is left; also what decides that a replay is done."""

    def __init__(self, uploader: Uploader, stream: TextIO, plain: bool = False, patience_s: float = PATIENCE_S) -> None:
        self.left: list[Place] = []
        """Runs and sinks that could not be finished, once `is_done` said so."""
        self._uploader = uploader
        self._patience_s = patience_s
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
        }

    def summary(self) -> str:
        """One line for the end."""
        seconds = time.monotonic() - self._began
        rows = self._uploader.rows
        total, done = self._uploader.bytes_total_and_done()
        if rows:
            text = f"{rows} rows uploaded in {seconds:.1f} s"
        elif self.left:
            text = "nothing was uploaded"
        elif not self._uploader.num_runs:
            return "no run was found there that is asked for"
        else:
            text = "up to date: nothing to upload"
        if self.left:
            text += f"; {len(self.left)} could not be finished"
        elif total > done:
            text += f"; {total - done} bytes are the torn end of a segment: they will follow if their writer goes on"
        return text


def status_table(status: Status) -> Group:
    """Runs x sinks as a table that fits 100 columns; what is refused, lost or wrong is listed under it."""
    table = Table(title="gapless status", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("run", overflow="fold", min_width=16, max_width=32)
    table.add_column("state", no_wrap=True)
    for name in ("records", "step", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sink", overflow="fold", max_width=20)
    for name in ("rows", "at step", "behind"):
        table.add_column(name, justify="right", no_wrap=True)
    notes: list[str] = []
    for run in status.runs:
        name = label(run.project, run.run, run.name)
        first = [name, run.state, str(run.records), _number(run.step), age(run.idle_s)]
        for sink in run.sinks:
            cells = [sink.sink, str(sink.uploaded), _number(sink.step), size(sink.behind_bytes)]
            table.add_row(*[Text(printable(cell)) for cell in (*first, *cells)])
            first = [""] * len(first)
            notes.extend(f"{name} -> {sink.sink}: {note}" for note in _sink_notes(sink))
        if not run.sinks:
            table.add_row(*[Text(printable(cell)) for cell in (*first, "", "", "", size(run.size))])
        if run.attempts > 1:
            notes.append(f"{name}: {run.attempts} attempts")
        notes.extend(f"{name}: {note}" for note in run.notes)
    notes.extend(status.problems)
    notes.extend(status.notes)
    return Group(table, *[Text(printable(note)) for note in notes])


def _sink_notes(sink: SinkStatus) -> list[str]:
    notes = [f"{count} refused: {reason}" for reason, count in sink.refused.items()]
    if sink.trouble is not None:
        notes.append(sink.trouble)
    if sink.check is not None:
        notes.append(str(sink.check["text"]))
    if sink.lost:
        notes.append(f"{sink.lost} records are lost: their seq is missing in the spool")
    if sink.damaged:
        notes.append(f"{sink.damaged} damaged lines, kept as dead letters beside the state")
    if sink.generation > 1:
        notes.append(f"rewound after upload: it goes on as generation {sink.generation}")
    if sink.superseded:
        notes.append(f"{sink.superseded} records were superseded by a newer attempt")
    return notes


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
