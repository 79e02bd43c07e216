"""The rules by which a run's attempts become one history. Pure functions; the whole contract of the merge is here.

- Within an attempt, records of one step merge by key in seq order; the row's time is its last record's.
- A new attempt supersedes older attempts of the same writer: with `resume_step=s` their rows at steps >= s, inferred
  from its first metrics step s their rows at steps > s, with `resume_step=False` none. A row that was logged after the
  new attempt had begun is no older row: two processes write side by side; their rows merge by key, the newer winning.
- Different writers merge by step; on equal keys `main` wins, then the writer's name in order.
- Attempts order by (number, created, attempt_id).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gapless_schemas import Header
from gapless_uploader.operations import Value

NO_LIMIT = 1 << 60


def attempt_order(header: Header) -> tuple[int, float, str]:
    """The key that sorts attempts of one writer, oldest first."""
    return (header.attempt, header.created, header.attempt_id)


def writer_order(writer: str) -> tuple[bool, str]:
    """The key that sorts writers, the one that wins first."""
    return (writer != "main", writer)


Cut = tuple[int, float]
"""The highest step of older attempts' rows that an attempt leaves, and when it began, unix seconds."""


def cuts(attempts: Sequence[Header], first_steps: Mapping[str, int | None]) -> dict[str, tuple[Cut, ...]]:
    """attempt_id -> the cuts of the newer attempts of the same writer."""
    found: dict[str, tuple[Cut, ...]] = {}
    newer: dict[str, tuple[Cut, ...]] = {}
    for header in sorted(attempts, key=attempt_order, reverse=True):
        found[header.attempt_id] = newer.get(header.writer, ())
        cut = _cut(header, first_steps.get(header.attempt_id))
        if cut < NO_LIMIT:
            newer[header.writer] = (*newer.get(header.writer, ()), (cut, header.created))
    return found


def survives(step: int, logged_at: float, newer: tuple[Cut, ...]) -> bool:
    """Whether a record outlives the newer attempts: it is below their cut, or was logged when they had begun already.

    `logged_at`: unix seconds of the call, by the attempt's beginning and its monotonic clock.

    The latter is no restart: two processes that both believe to be the writer run side by side, and neither loses rows.
    """
    return all(step <= cut or logged_at > began for cut, began in newer)


def _cut(header: Header, first_step: int | None) -> int:
    """The highest step of older attempts' rows that this attempt leaves."""
    if header.resume_step is False:
        return NO_LIMIT
    if header.resume_step is not None:
        return header.resume_step - 1
    return NO_LIMIT if first_step is None else first_step


def merge_row(parts: Iterable[tuple[Header, int, float, float, Mapping[str, Value]]]) -> _Merged | None:
    """One step's row from its surviving records: (header, seq, t, runtime, values) each. None when there are none.

    Its time is its last record's: of a writer the newest attempt's last, of writers side by side the latest.
    """
    ordered = sorted(parts, key=lambda part: (attempt_order(part[0]), part[1]))
    writers: dict[str, _Merged] = {}
    for header, _, t, runtime, values in ordered:
        row = writers.setdefault(header.writer, _Merged(t, runtime, {}))
        row.t, row.runtime = t, runtime
        row.values.update(values)
    merged: _Merged | None = None
    for writer in sorted(writers, key=writer_order, reverse=True):
        row = writers[writer]
        if merged is None:
            merged = row
        else:
            merged.values.update(row.values)
            if row.t >= merged.t:
                merged.t, merged.runtime = row.t, row.runtime
    return merged


class _Merged:
    __slots__ = ("runtime", "t", "values")

    def __init__(self, t: float, runtime: float, values: dict[str, Value]) -> None:
        self.t = t
        self.runtime = runtime
        self.values = values


def merge_config(into: dict[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """`into` with `part` merged deeply: dicts merge, anything else replaces, nothing is deleted. A new dict."""
    merged = dict(into)
    for key, value in part.items():
        held = merged.get(key)
        both = isinstance(held, dict) and isinstance(value, dict)
        merged[key] = merge_config(held, value) if both else value  # type: ignore[arg-type]
    return merged


def bounded(value: Any, depth: int = 64) -> Any:
    """`value` with what is nested deeper than `depth` as text: the spool is not trusted, and encoders recurse."""
    if not isinstance(value, dict | list):
        return value
    if depth == 0:
        return "nested too deeply"
    if isinstance(value, dict):
        return {key: bounded(item, depth - 1) for key, item in value.items()}
    return [bounded(item, depth - 1) for item in value]


def same(one: Value, other: Value) -> bool:
    """Whether two values are the same, NaN included, and 1, 1.0 and True told apart."""
    if type(one) is not type(other):
        return False
    return one == other or (one != one and other != other)
