"""Rows as they were received, kept for ever: the server only appends.

A `Batch` holds the bytes of one accepted request and parses them when somebody looks. `Rows` is the
append-only list of an experiment, with the two readings of it that matter: raw, where a repeated (key, step)
counts twice, and de-duplicated, where the first one stands.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tests.servers.swanlab.clock import unix

MAX_KEY_LENGTH = 512
MAX_STEP = 2**48
CONTROL = re.compile(r"[\x00-\x1f\x7f]")

# The envelope as clients write it, the rows last. The ids are read without parsing the rows behind them.
ENVELOPE = re.compile(
    rb'\s*\{\s*(?:"(?:type|projectId|experimentId|flagId)"\s*:\s*(?:"[^"\\]*"|null)\s*,\s*){3,4}"metrics"\s*:\s*\['
)
ENVELOPE_FIELD = re.compile(rb'"(type|projectId|experimentId)"\s*:\s*"([^"\\]*)"')


class BadBatch(ValueError):
    """A body that no real client sends; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row as sent: `data` is a float or "nan" (scalar), a list of paths (media) or the line (log)."""

    kind: str
    key: str
    step: int
    data: Any
    create_time: str
    ingest_time: float
    batch: int
    more: Any = None

    @property
    def value(self) -> float:
        """The scalar's value, NaN for "nan"."""
        return float(self.data)


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Rows beyond the first of their (kind, key, step), by whether they say the same."""

    identical: int
    conflicting: int
    keys: tuple[str, ...]

    @property
    def total(self) -> int:
        return self.identical + self.conflicting


@dataclass(slots=True)
class Batch:
    """The bytes of one accepted request and what is known of it without parsing."""

    number: int
    kind: str
    project_id: str
    experiment_id: str
    body: bytes
    ingest_time: float = 0.0
    half: bool = False
    _rows: list[Row] | None = field(default=None, repr=False)

    def rows(self) -> list[Row]:
        """The rows that were stored, parsed at the first call. BadBatch if the body is none."""
        if self._rows is None:
            items = _items(self.body)
            if self.half:
                items = items[: len(items) // 2]
            self._rows = [self._row(item) for item in items]
        return self._rows

    def _row(self, item: dict[str, Any]) -> Row:
        common = (item.get("create_time", ""), self.ingest_time, self.number)
        if self.kind == "log":
            more = {"level": item["level"]}
            return Row("log", "LOG", item["epoch"], item["message"], *common, more=more)
        return Row(self.kind, item["key"], item["index"], item["data"], *common, more=item.get("more"))


def read_envelope(body: bytes) -> tuple[str, str, str]:
    """(type, projectId, experimentId) of a metrics request, parsing the rows only if they come first."""
    head = ENVELOPE.match(body)
    if head is not None:
        found = {name.decode(): value.decode() for name, value in ENVELOPE_FIELD.findall(head.group())}
    else:
        try:
            found = json.loads(body)
        except ValueError as error:
            raise BadBatch(f"not JSON: {error}") from None
        if not isinstance(found, dict):
            raise BadBatch("not an object")
    try:
        kind, project_id, experiment_id = found["type"], found["projectId"], found["experimentId"]
    except KeyError as error:
        raise BadBatch(f"{error} is missing") from None
    if kind not in CHECKS:
        raise BadBatch(f"type is {kind!r}")
    return kind, project_id, experiment_id


def check_rows(kind: str, body: bytes) -> int:
    """The number of rows in `body`; BadBatch names the first row that the real library would never send."""
    items = _items(body)
    check = CHECKS[kind]
    for at, item in enumerate(items):
        fault = "not an object" if not isinstance(item, dict) else check(item)
        if fault:
            raise BadBatch(f"metrics[{at}]: {fault}")
    return len(items)


def _items(body: bytes) -> list[dict[str, Any]]:
    def refuse(text: str) -> float:
        raise BadBatch(f"{text} is not JSON")

    try:
        items = json.loads(body, parse_constant=refuse)["metrics"]
    except BadBatch:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise BadBatch(f"not a metrics request: {error}") from None
    if not isinstance(items, list) or not items:
        raise BadBatch("metrics is not a list with rows")
    return items


def _check_key_and_step(item: dict[str, Any]) -> str | None:
    key, step = item.get("key"), item.get("index")
    if not isinstance(key, str) or not _is_key(key):
        return f"key {str(key)[:40]!r}"
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        return f"index {step!r}"
    return _check_time(item)


def _check_time(item: dict[str, Any]) -> str | None:
    text = item.get("create_time")
    return None if isinstance(text, str) and _is_time(text) else f"create_time {text!r}"


# Remembered, since the rows of a step share their time and all steps share their keys.
@lru_cache(maxsize=100_000)
def _is_key(key: str) -> bool:
    return 0 < len(key) <= MAX_KEY_LENGTH and CONTROL.search(key) is None


@lru_cache(maxsize=10_000)
def _is_time(text: str) -> bool:
    try:
        unix(text)
    except ValueError:
        return False
    return True


def _check_scalar(item: dict[str, Any]) -> str | None:
    data = item.get("data")
    if isinstance(data, int | float) and not isinstance(data, bool):
        # A comparison, since math.isfinite raises for an integer beyond a double.
        sound = abs(data) <= sys.float_info.max
    else:
        sound = data == "nan"
    if not sound:
        return f"data {data!r}"
    return _check_key_and_step(item)


def _check_media(item: dict[str, Any]) -> str | None:
    data = item.get("data")
    if not isinstance(data, list) or not data or not all(isinstance(path, str) for path in data):
        return f"data {data!r}"
    return _check_key_and_step(item)


def _check_log(item: dict[str, Any]) -> str | None:
    if item.get("level") not in ("INFO", "ERROR") or type(item.get("epoch")) is not int:
        return "level or epoch"
    return _check_time(item) if isinstance(item.get("message"), str) else "message"


CHECKS = {"scalar": _check_scalar, "media": _check_media, "log": _check_log}


class Rows:
    """An experiment's batches in the order they arrived. Callers hold the server's lock."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self._rows: list[Row] = []
        self._num_parsed = 0

    def append(self, batch: Batch) -> None:
        self.batches.append(batch)

    def all(self) -> list[Row]:
        """Every row ever stored, in order of arrival, repeats included."""
        for batch in self.batches[self._num_parsed :]:
            self._rows.extend(batch.rows())
            self._num_parsed += 1
        return self._rows

    def first(self, kind: str | None = None) -> dict[tuple[str, str, int], Row]:
        """The de-duplicated view: the first row of each (kind, key, step)."""
        seen: dict[tuple[str, str, int], Row] = {}
        for row in self.all():
            if kind is None or row.kind == kind:
                seen.setdefault((row.kind, row.key, row.step), row)
        return seen

    def duplicates(self, kind: str | None = None) -> Duplicates:
        """Repeats, counted against the first row of their (kind, key, step): same data and time, or not."""
        first: dict[tuple[str, str, int], Row] = {}
        counts: Counter[bool] = Counter()
        keys: dict[str, None] = {}
        for row in self.all():
            if kind is not None and row.kind != kind:
                continue
            stands = first.setdefault((row.kind, row.key, row.step), row)
            if stands is not row:
                same = (row.data, row.create_time) == (stands.data, stands.create_time)
                counts[same] += 1
                keys[row.key] = None
        return Duplicates(identical=counts[True], conflicting=counts[False], keys=tuple(keys))
