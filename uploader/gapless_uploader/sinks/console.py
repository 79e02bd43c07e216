"""Metrics on the terminal: verl's line, `step:7 - loss:0.5 - lr:0.001`, or a table as AReaL prints it.

A line that tells run from run, `==> project/run <==`, comes before the first row and whenever another run writes.
Names and texts come from a spool that nobody vouches for, so control characters are shown as `\\x1b` and the like.
A terminal takes nothing back: rows come at least once, and what was rewound stays on the screen.
"""

from __future__ import annotations

import sys
import unicodedata
from threading import Lock
from typing import TextIO

from gapless_uploader.operations import Amend, Log, Media, Missing, Rewind, Row, State, Table, Text, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Refusal, RunView

_TEXT_CHARACTERS = 200


class ConsoleSink:
    """Prints to standard output."""

    kind = "console"
    capabilities = Capabilities(
        exactly_once="at least once: a terminal takes nothing back, so a batch in flight at a crash is printed again",
        unstepped=True,
        text=True,
        end_state=True,
        original_time=False,
        settles_intents=False,
    )

    def __init__(
        self, target: str = "", *, style: str = "line", columns: int = 2, stream: TextIO | None = None
    ) -> None:
        """`style`: `line`, verl's, or `table`, AReaL's. `columns`: metrics beside each other in a table.

        `stream` takes the place of standard output.
        """
        if target:
            raise Misconfigured(f"sink 'console' has no target, and was given {target!r}: use --to console")
        if style not in ("line", "table"):
            raise Misconfigured(f"sink 'console': style is {style!r}; it is 'line' or 'table'")
        if columns < 1:
            raise Misconfigured(f"sink 'console': columns is {columns}; it is at least 1")
        self.target = ""
        self._style = style
        self._columns = columns
        self._stream = stream
        self._lock = Lock()
        self._last = ""

    def open(self, run: RunView, memo: Memo) -> ConsoleSession:
        """A session that prints what comes from now on."""
        return ConsoleSession(self)

    def show(self, run: RunView, lines: list[str]) -> None:
        """Print the lines of one run together. Safe from several threads."""
        if not lines:
            return
        name = printable(f"{run.project}/{run.name or run.tracker_id}")
        stream = self._stream or sys.stdout
        with self._lock:
            if name != self._last:
                lines = [f"==> {name} <==", *lines]
                self._last = name
            stream.write("\n".join(lines) + "\n")
            stream.flush()

    def row(self, step: int | None, values: dict[str, Value], refused: list[Refusal]) -> str:
        """One row, in the sink's style."""
        shown = []
        for key, value in values.items():
            text = _shown(value)
            if text is None:
                reason = value.reason if isinstance(value, Missing) else "a terminal shows numbers and texts"
                refused.append(Refusal(step, key, reason))
            else:
                shown.append((printable(key), text))
        head = "step:-" if step is None else f"step:{step}"
        if self._style == "line":
            return " - ".join([head, *(f"{key}:{text}" for key, text in shown)])
        return f"{head}\n{_table(shown, self._columns)}"


class ConsoleSession:
    """One run's session."""

    def __init__(self, sink: ConsoleSink) -> None:
        self._sink = sink

    def write(self, batch: Batch) -> Ack:
        """Print the batch. A change prints the changed keys of its step."""
        lines: list[str] = []
        refused: list[Refusal] = []
        for operation in batch.operations:
            match operation:
                case Row(step=step, values=values):
                    lines.append(self._sink.row(step, values, refused))
                case Amend(step=step, values=values, changed=changed):
                    part = {key: values[key] for key in changed if key in values}
                    lines.append(self._sink.row(step, part, refused))
                case Rewind(step=step):
                    lines.append(f"rows from step {step} on are taken back")
                case State(state=state, exit_code=code) if state != "running":
                    lines.append(f"{printable(state)}{'' if code is None else f', exit code {code}'}")
                case Log(stream=stream, lines=printed):
                    lines += (f"{printable(stream)}: {printable(line)}" for line in printed)
                case _:
                    pass
        self._sink.show(batch.run, lines)
        return Ack(len(batch.operations), {}, refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: a terminal does not beat."""

    def flush(self) -> Memo:
        """Every write is flushed already."""
        return {}

    def close(self) -> None:
        """Nothing is held. May be called twice."""


def printable(text: str) -> str:
    """`text` in one line, with every control, format and surrogate character as its escape."""
    return "".join(
        character if unicodedata.category(character) not in _UNSAFE else character.encode("unicode_escape").decode()
        for character in text
    )


_UNSAFE = frozenset(["Cc", "Cf", "Cs", "Zl", "Zp"])


def _shown(value: Value) -> str | None:
    match value:
        case bool() | int() | float():
            return repr(value)
        case str() | Text():
            text = value.text if isinstance(value, Text) else value
            return printable(text if len(text) <= _TEXT_CHARACTERS else f"{text[:_TEXT_CHARACTERS]}...")
        case list():
            return _shown(repr(value))
        case Table() | Media() | Missing():
            return None


def _table(shown: list[tuple[str, str]], columns: int) -> str:
    """Keys and values in a frame, `columns` pairs a line, the values to the right."""
    if not shown:
        return "(no values)"
    short = [(key, _short(text)) for key, text in shown]
    keys = max(len(key) for key, _ in short)
    values = max(len(text) for _, text in short)
    cells = [f" {key:<{keys}} | {text:>{values}} " for key, text in short]
    cells += [f" {'':<{keys}} | {'':>{values}} "] * (-len(cells) % columns)
    rule = f"+{'-' * (keys + 2)}+{'-' * (values + 2)}" * min(columns, len(cells)) + "+"
    lines = [f"|{'|'.join(cells[at : at + columns])}|" for at in range(0, len(cells), columns)]
    return "\n".join([rule, *lines, rule])


def _short(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        return text
    return text if text.lstrip("-").isdigit() else f"{number:.4e}"
