"""Rows as lines of W&B's history: what the line of a row is, byte by byte, and which keys get another name.

A line is the row's values with `_step`, `_timestamp` and `_runtime` before them; NaN and the infinities are bare
literals, as W&B's own client writes them. Most rows are numbers and cost one call of orjson.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from orjson import OPT_PASSTHROUGH_DATACLASS, OPT_STRICT_INTEGER, dumps

from gapless_uploader.operations import Row, Value

KEPT_BY_WANDB = frozenset(["", "_step", "_timestamp", "_runtime", "_wandb", "_gapless"])
"""Keys that W&B drops, overwrites or reads as its own."""
HEAD_BYTES = 64
"""About what a line has before the values."""
_INT64 = 1 << 63
_OPTIONS = OPT_PASSTHROUGH_DATACLASS | OPT_STRICT_INTEGER


class TooBig(ValueError):
    """An integer that is beyond what even a float can hold."""


def tracker_key(key: str) -> str:
    """The name under which `key` arrives: its own, or with a tilde before it where W&B keeps the name to itself.

    `~` before a kept name, or before any number of tildes and a kept name, is taken off again by `spool_key`.
    """
    return f"~{key}" if key.lstrip("~") in KEPT_BY_WANDB else valid(key)


def spool_key(key: str) -> str:
    """The key in the spool of a key at W&B."""
    return key[1:] if key[:1] == "~" and key.lstrip("~") in KEPT_BY_WANDB else key


def quick_body(values: Mapping[str, Value]) -> str | None:
    """The values as a JSON object, if they are plain and finite and every key keeps its name; else None."""
    try:
        text = dumps(values, option=_OPTIONS)
    except TypeError:
        return None
    # A null may stand for NaN, a tilde may begin a key that W&B keeps.
    if b"null" in text or b"~" in text or not values.keys().isdisjoint(KEPT_BY_WANDB):
        return None
    return text.decode()


def careful_body(values: Mapping[str, Any]) -> str:
    """The same for any JSON value, NaN and infinities as literals. Keys are the tracker's already."""
    return json.dumps(values, separators=(",", ":"))


def plain(value: Any) -> Any:
    """A number, text or list as the history can hold it. Raises TooBig."""
    kind = type(value)
    if kind is str:
        return valid(value)
    if kind is int and not -_INT64 <= value < _INT64:
        try:
            return float(value)
        except OverflowError:
            raise TooBig("an integer beyond a float's range") from None
    if kind is list:
        return [plain(item) for item in value]
    if kind is dict:
        return {valid(str(key)): plain(item) for key, item in value.items()}
    return value


def valid(text: str) -> str:
    """`text` as UTF-8 can hold it: half of a surrogate pair is written as its escape, where W&B would lose it."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def line(step: int, t: float, runtime: float, body: str) -> str:
    """The history line of a row whose values are the JSON object `body`."""
    head = dumps({"_step": step, "_timestamp": t, "_runtime": runtime})[:-1].decode()
    return f"{head}}}" if body == "{}" else f"{head},{body[1:]}"


def plain_lines(rows: Sequence[Row]) -> list[str]:
    """The history lines of rows whose values are still in their records."""
    times = dumps([row.t for row in rows])[1:-1].decode().split(",")
    runtimes = dumps([row.runtime for row in rows])[1:-1].decode().split(",")
    return [
        f'{{"_step":{row.step},"_timestamp":{t},"_runtime":{runtime},{row.record.members.decode()}}}'  # type: ignore[union-attr]
        for row, t, runtime in zip(rows, times, runtimes, strict=True)
    ]


def above(sizes: Mapping[str, int], max_bytes: int) -> list[str]:
    """The largest of what has these sizes, as few as leave no more than `max_bytes`."""
    left, found = sum(sizes.values()), []
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if left <= max_bytes:
            break
        found.append(name)
        left -= sizes[name]
    return found


def split(values: Mapping[str, Any], max_bytes: int) -> list[str]:
    """The bodies of as many lines as it takes for each to stay within `max_bytes`, keys in their order.

    A single key above the limit has a body of its own all the same.
    """
    bodies: list[str] = []
    part: dict[str, Any] = {}
    size = 2
    for key, value in values.items():
        added = len(careful_body({key: value})) - 1
        if part and size + added > max_bytes:
            bodies.append(careful_body(part))
            part, size = {}, 2
        part[key] = value
        size += added
    return [*bodies, careful_body(part)]
