"""The table of `status`, as a person sees it in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from gapless_uploader.events import printable
from gapless_uploader.status import SinkStatus, Status
from gapless_uploader.wording import age, label, size


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
