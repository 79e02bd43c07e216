"""A request in the making: operations as lines, events, console lines, files and artifacts, on a copy of the progress.

Nothing here is sent, so a draft may be thrown away and made again from the same operations: it comes out the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from gapless_uploader.operations import (
    Amend,
    Axis,
    Config,
    Identity,
    Log,
    Media,
    Missing,
    Operation,
    Row,
    State,
    Superseded,
    System,
    Table,
    Text,
)
from gapless_uploader.sink import Parked, Refusal, Retryable, RunView
from gapless_uploader.sinks._wandb_axes import LATE_AXIS, Rules, fold
from gapless_uploader.sinks._wandb_lines import (
    HEAD_BYTES,
    KEPT_BY_WANDB,
    TooBig,
    careful_body,
    line,
    plain,
    plain_lines,
    quick_body,
    split,
    tracker_key,
)
from gapless_uploader.sinks._wandb_media import GONE, Encoded, MediaEncoder
from gapless_uploader.sinks._wandb_progress import Progress

SYSTEM_PREFIX = "system."
REFUSED_KEY = "a key without which W&B took what it had refused"


class _NotTaken(Exception):
    """W&B does not take the value's file."""


@dataclass(slots=True)
class Limits:
    """How large things may be, and how much is read back."""

    max_row_bytes: int = 10_000_000
    """W&B's client skips a row above 10,383,360 bytes."""
    max_post_bytes: int = 8 << 20
    first_rows: int = 1_000
    first_bytes: int = 256 << 10
    """Of a session's first request: its rows are read back and compared value by value."""
    read_back: bool = True


@dataclass(slots=True)
class Draft:
    """What operations came to. `take` once."""

    run: RunView
    progress: Progress
    """As it will be when the request is acknowledged."""
    place: str
    max_row_bytes: int
    first_line: int
    """The offset of the first line."""
    lines: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    media: Encoded = field(default_factory=Encoded)
    refused: list[Refusal] = field(default_factory=list)
    done: int = 0
    """Operations taken."""
    described: bool = False
    """Something that `UpsertBucket` carries changed."""
    state: State | None = None
    superseded: str | None = None
    late_steps: list[int] = field(default_factory=list)
    """Steps that were sent before, or lie below one that was."""
    keys: set[str] = field(default_factory=set)
    """Of the rows, as the spool has them."""
    refused_files: Mapping[str, str] = field(default_factory=dict)
    """Name of a file or artifact that W&B did not take -> why."""
    _rules: Rules | None = None

    def take(self, operations: Sequence[Operation], max_rows: int, max_bytes: int) -> None:
        """Take operations until a limit is reached, one at least. Raises Parked and OSError."""
        self._rules = Rules(self.run.axes)
        is_plain = not self._rules.any and self.progress.late != "axis"
        lines, progress = self.lines, self.progress
        size, at = 0, 0
        while at < len(operations) and not (self.done and (size > max_bytes or len(lines) >= max_rows)):
            operation = operations[at]
            kind = type(operation)
            if is_plain and kind is Row and operation.record is not None:  # type: ignore[union-attr]
                rows, num_bytes = self._plain_from(operations, at, max_rows - len(lines), max_bytes - size)
                if rows:
                    lines += plain_lines(rows)
                    progress.top = rows[-1].step or 0
                    progress.last = [progress.top, rows[-1].t, rows[-1].runtime]
                    self.done += len(rows)
                    at, size = at + len(rows), size + num_bytes
                    continue
            if kind is Row or kind is Amend:
                self._row(operation)  # type: ignore[arg-type]
                size += len(lines[-1]) if lines else 0
            else:
                self._other(operation)
            self.done += 1
            at += 1
        progress.lines = self.first_line + len(lines)

    def _plain_from(
        self, operations: Sequence[Operation], at: int, max_rows: int, max_bytes: int
    ) -> tuple[list[Row], int]:
        """The rows from `at` on that need nothing but their line: numbers, each at a step above all others; one at
        least where there is one, and no more than a request has room for. With about how many bytes they have."""
        rows: list[Row] = []
        add, top, size = rows.append, self.progress.top, 0
        shape = None
        for operation in islice(operations, at, at + max(max_rows, 1)):
            if type(operation) is not Row or operation.record is None or operation.record.step <= top:
                break
            record = operation.record
            if record.shape is not shape:
                shape = record.shape
                keys = shape.keys
                if not KEPT_BY_WANDB.isdisjoint(keys) or any("~" in k for k in keys) or not self._takes_all(keys):
                    break
                self.keys |= keys
            num_bytes = len(record.members)
            if num_bytes > self.max_row_bytes or (rows and size > max_bytes):
                break
            add(operation)
            size += num_bytes + HEAD_BYTES
            top = record.step
        return rows, size

    def _row(self, row: Row | Amend) -> None:
        progress, step = self.progress, row.step
        if step is None:
            self._unstepped(row)
            return
        changed = row.changed if isinstance(row, Amend) else None
        values = row.values
        if not self._takes_all(values):
            for key in self.progress.refused:
                if key in values and (changed is None or key in changed):
                    self.refused.append(Refusal(step, key, REFUSED_KEY))
            values = {key: value for key, value in values.items() if key not in self.progress.refused}
        self.keys.update(values)
        by_axis = progress.late == "axis"
        if by_axis:
            kept = values if changed is None else {key: values[key] for key in changed if key in values}
            values = {**kept, LATE_AXIS: step}
        elif changed is not None or step <= progress.top:
            self.late_steps.append(step)
        if self._rules is not None and self._rules.any:
            new = values if changed is None else {key: values[key] for key in changed if key in values}
            fold(progress.folds, self._rules, new)
        body = quick_body(values)
        bodies = [body] if body is not None and len(body) <= self.max_row_bytes else self._careful(row, values, changed)
        for body in bodies:
            at = self.first_line + len(self.lines) if by_axis else step
            self.lines.append(line(at, row.t, row.runtime, body))
            if at >= progress.top:
                progress.top = at
                progress.last = [at, row.t, row.runtime]

    def _careful(self, row: Row | Amend, values: dict[str, Any], changed: tuple[str, ...] | None) -> list[str]:
        """The bodies of a row that is not all plain numbers, or too large for one line."""
        step = row.step or 0
        encoder = MediaEncoder(self.place, self.progress.increments)
        made: dict[str, Any] = {}
        for key, value in values.items():
            name = tracker_key(key)
            if name != key and key not in self.progress.renamed:
                self.progress.renamed.append(key)
                self.described = True
            is_new = changed is None or key in changed
            try:
                made[name] = self._value(encoder, key, step, value, is_new)
            except (TooBig, _NotTaken) as reason:
                if is_new:
                    self.refused.append(Refusal(step, key, str(reason)))
            except GONE as error:
                if is_new:
                    self.refused.append(Refusal(step, key, f"a payload that is missing ({error.strerror})"))
            except OSError as error:
                raise Retryable(f"read the payload of {key!r}: {error.strerror or error}") from error
        body = careful_body(made)
        if len(body) <= self.max_row_bytes:
            return [body]
        for name in sorted(made, key=lambda name: -_size(made[name])):
            if len(body) <= self.max_row_bytes or _size(made[name]) < 256:
                break
            if isinstance(made[name], str):
                made[name] = encoder.moved(name, step, made[name], self.media)
                body = careful_body(made)
        if len(body) <= self.max_row_bytes:
            return [body]
        if self.progress.late == "axis":
            common = {LATE_AXIS: made.pop(LATE_AXIS)}
            return [f"{careful_body(common)[:-1]},{part[1:]}" for part in split(made, self.max_row_bytes - 64)]
        raise Parked(
            f"the row of step {step} has {len(body)} bytes and W&B takes {self.max_row_bytes}; its parts would replace"
            f' each other: set late = "axis" for the sink and give the run another id, --new-id {self.run.run_id}=ID'
        )

    def _value(self, encoder: MediaEncoder, key: str, step: int, value: Any, is_new: bool) -> Any:
        if not isinstance(value, Text | Table | Media):
            if isinstance(value, Missing):
                raise FileNotFoundError(2, value.reason)
            return plain(value)
        shown = self.progress.shown.get(key)
        if not is_new and shown is not None and shown[0] == step:
            return shown[1]  # sent with this step's first line
        made = self._encoded(encoder, key, step, value)
        self.refused.extend(self.media.refused)
        self.media.refused.clear()
        if not isinstance(value, Text) and (shown is None or shown[0] <= step):
            self.progress.shown[key] = [step, made]
        return made

    def _encoded(self, encoder: MediaEncoder, key: str, step: int, value: Text | Table | Media) -> Any:
        """What the row holds for the value. Raises _NotTaken, and leaves nothing of it, where W&B refused its files."""
        media, increments = Encoded(), self.progress.increments
        before = increments.get(key)
        made = encoder.encode(key, step, value, media)
        names = [*(upload.name for upload in media.uploads), *(artifact.name for artifact in media.artifacts)]
        for name in self.refused_files.keys() & names:
            increments.pop(key, None)
            if before is not None:
                increments[key] = before
            raise _NotTaken(self.refused_files[name])
        self.media.uploads += media.uploads
        self.media.artifacts += media.artifacts
        self.media.refused += media.refused
        return made

    def _takes_all(self, keys: Iterable[str]) -> bool:
        return not self.progress.refused or not set(self.progress.refused).intersection(keys)

    def _unstepped(self, row: Row | Amend) -> None:
        """Samples of the training node's own metrics have no step; other rows cannot be placed at W&B."""
        sample = {key: value for key, value in row.values.items() if key.startswith(SYSTEM_PREFIX)}
        if len(sample) < len(row.values):
            self.refused.append(Refusal(None, None, "a row without a step"))
        if sample:
            event = {"_wandb": True, "_timestamp": row.t, "_runtime": row.runtime, **sample}
            self.events.append(careful_body({key: plain(value) for key, value in event.items()}))
            self.progress.events += 1

    def _other(self, operation: Operation) -> None:
        match operation:
            case Identity() | Config() | System() | Axis():
                self.described = True
            case State():
                self.state = operation
            case Superseded(by=by):
                self.superseded = by
            case Log():
                self.output.extend(_console(operation))
                self.progress.output += len(operation.lines)
            case _:
                pass  # the summary is written with every request; W&B has no place for a gap


def _console(log: Log) -> list[str]:
    """Lines of `output.log`: UTC time, then the text as a terminal would show it."""
    at = datetime.fromtimestamp(log.t, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")
    mark = "ERROR " if log.stream == "stderr" else ""
    return [f"{mark}{at} {text.rstrip(chr(10)).rpartition(chr(13))[2]}" for text in log.lines]


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str) else len(careful_body({"": value}))
