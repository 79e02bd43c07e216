"""Operations as one sink can express them: the rest is refused by name and counted, never silent."""

from __future__ import annotations

from functools import cache
from math import isfinite

from gapless_uploader.operations import Amend, Media, Missing, Operation, Rewind, Row, Table, Text, Value
from gapless_uploader.sink import Capabilities, Refusal

MAX_DEPTH = 32
"""Of lists and dicts in a value."""


def adapt(
    operations: list[Operation], can: Capabilities, acked_top: int
) -> tuple[list[Operation], list[Refusal], int | None]:
    """What of `operations` goes to a sink that `can` do so much, what is refused, and the rewind it cannot do.

    `acked_top` is the highest step that the tracker holds. A rewind of rows that it does not hold yet only takes them
    out of what is still to be sent.
    """
    sent: list[Operation] = []
    refused: list[Refusal] = []
    rewound: int | None = None
    top = acked_top
    taken = _taken_types(can)
    for operation in operations:
        if type(operation) is Row:
            step = operation.step
            # Nearly every operation is a row at a step above all others. Numbers alone go to every sink.
            fits = operation.is_plain or taken.issuperset(map(type, operation.values.values()))
            if fits and step is not None and step > top:
                sent.append(operation)
                top = step
                continue
        if isinstance(operation, Rewind):
            sent = [op for op in sent if not (isinstance(op, Row | Amend) and (op.step or 0) >= operation.step)]
            if operation.step > acked_top:
                continue
            if can.rewind:
                sent.append(operation)
                top = min(top, operation.step - 1)
            else:
                rewound = operation.step if rewound is None else min(rewound, operation.step)
        elif isinstance(operation, Row | Amend):
            kept = _row(operation, can, top, refused)
            if kept is not None:
                sent.append(kept)
                top = max(top, kept.step if kept.step is not None else -1)
        else:
            sent.append(operation)
    return sent, refused, rewound


def _row(row: Row | Amend, can: Capabilities, top: int, refused: list[Refusal]) -> Row | Amend | None:
    if row.step is None and not can.unstepped:
        refused.append(Refusal(None, None, "a row without a step"))
        return None
    if isinstance(row, Amend) and not can.amend:
        refused.append(Refusal(row.step, None, "more or changed keys for a step that was sent"))
        return None
    if row.step is not None and row.step < top and not can.late_steps:
        refused.append(Refusal(row.step, None, "a step below the highest one sent"))
        return None
    unfit = [(key, why) for key, value in row.values.items() if (why := _unfit(value, can)) is not None]
    if not unfit:
        return row
    refused.extend(Refusal(row.step, key, why) for key, why in unfit)
    out = {key for key, _ in unfit}
    values = {key: value for key, value in row.values.items() if key not in out}
    if isinstance(row, Amend):
        changed = tuple(key for key in row.changed if key not in out)
        added = None if row.added is None else tuple(key for key in row.added if key not in out)
        return Amend(row.step, row.t, row.runtime, values, changed, added) if changed else None
    return Row(row.step, row.t, row.runtime, values) if values else None


@cache
def _taken_types(can: Capabilities) -> frozenset[type]:
    """The types of which every value goes to a sink that `can` do so much."""
    types: set[type] = {int, bool}
    for taken, kinds in (
        (can.non_finite, [float]),
        (can.text, [str, Text]),
        (can.tables, [Table]),
        (can.media, [Media]),
    ):
        types.update(kinds if taken else [])
    return frozenset(types)


def _unfit(value: Value, can: Capabilities) -> str | None:
    if type(value) is float:
        return None if can.non_finite or isfinite(value) else "a value that is not finite"
    if isinstance(value, Missing):
        return "a payload that is missing"
    if isinstance(value, str | Text):
        return None if can.text else "text"
    if isinstance(value, Table):
        return None if can.tables else "a table"
    if isinstance(value, Media):
        return None if can.media else f"media ({value.type})"
    if isinstance(value, list):
        return None if _depth(value) <= MAX_DEPTH else f"a list nested deeper than {MAX_DEPTH}"
    return None if isinstance(value, int) else f"a value that is no number, text or list ({type(value).__name__})"


def _depth(value: object, limit: int = MAX_DEPTH + 1) -> int:
    """How deep lists and dicts are nested, counted up to `limit`."""
    if limit == 0 or not isinstance(value, list | dict):
        return 0
    inside = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(item, limit - 1) for item in inside), default=0)
