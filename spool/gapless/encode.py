"""From what the caller gives to a line's `data` and `marks`, both JSON already.

A flat row of plain values never comes here: the ring encodes it in one go. Anything else is turned into plain values
first (`values.py`). Data too long for one line is split by keys, and a single text that is too long becomes a payload;
nothing is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import orjson

from gapless.media import Media, as_media
from gapless.numeric import Refused, as_number
from gapless.values import Plain, as_mapping, carefully, entries
from gapless_schemas import MAX_LINE_BYTES

MAX_DATA_BYTES: Final = MAX_LINE_BYTES - 512
"""What a line's `data` and `marks` may take; the rest is for its other fields."""

Report = Callable[[str, str, str], None]
"""Called with a counter's name, a topic and a text for what could not be kept as it was."""

MAX_NESTING: Final = 50

_FAST_TYPES = frozenset({float, int, bool, str})


class Part(NamedTuple):
    """The `data` and `marks` of one line."""

    data: bytes
    marks: bytes | None


def encode_metrics(data: Mapping[Any, Any], report: Report) -> tuple[list[Part], list[Media]]:
    """The lines and the payloads of one row; nested mappings are joined with `/`."""
    flat: dict[str, Any] = {}
    media: list[Media] = []
    plain = Plain(clash=lambda key: report("clashes", "clash", f"two values for {key!r} in one row: kept the last one"))
    _flatten(data, "", flat, media, plain, report, 0)
    for key in [key for key, value in flat.items() if type(value) is str and len(value) > MAX_DATA_BYTES // 6]:
        text = flat[key]
        if len(orjson.dumps(text)) > MAX_DATA_BYTES // 2:
            del flat[key]
            plain.marks = [mark for mark in plain.marks if mark[0][0] != key]
            media.append(Media.of_text(key, text))
    return split(flat, plain.marks, report), media


def _flatten(
    data: Mapping[Any, Any],
    prefix: str,
    flat: dict[str, Any],
    media: list[Media],
    plain: Plain,
    report: Report,
    depth: int,
) -> None:
    for name, value in entries(data):
        key = prefix + name
        if type(value) not in _FAST_TYPES:
            try:
                found = carefully(partial(as_media, key, value), value)
                if found is not None:
                    media.append(found)
                    continue
            except Refused as why:
                report("refused", f"value {key}", f"{key!r} was not kept: {why}")
                continue
            inner = _inner(value)
            if inner is not None and depth < MAX_NESTING:
                try:
                    _flatten(inner, key + "/", flat, media, plain, report, depth + 1)
                except Refused as why:
                    report("refused", f"value {key}", f"{key!r} was not kept: {why}")
                continue
        if key in flat:
            report("clashes", f"clash {key}", f"two values for {key!r} in one row: kept the last one")
            plain.marks = [mark for mark in plain.marks if mark[0][0] != key]
        try:
            flat[key] = plain.value(value, (key,))
        except Refused as why:
            report("refused", f"value {key}", f"{key!r} was not kept: {why}")


def _inner(value: Any) -> Mapping[Any, Any] | None:
    """The mapping that `value` is at heart; None for numbers, texts, lists and what cannot be read."""
    try:
        return None if value is None or as_number(value) is not None else as_mapping(value)
    except Exception:  # noqa: BLE001  # a value is anybody's code; `Plain` refuses it with the reason
        return None


def encode_config(data: Mapping[Any, Any], report: Report) -> list[Part]:
    """The lines of a part of a config; texts under a credential's name are redacted."""
    plain = Plain(
        config=True, clash=lambda key: report("clashes", f"clash {key}", f"two values for config key {key!r}")
    )
    return split(plain.top(data), plain.marks, report)


def encode_plain(data: dict[str, Any], report: Report) -> list[Part]:
    """The lines of data that this package made itself."""
    plain = Plain()
    return split(plain.top(data), plain.marks, report)


def split(data: dict[str, Any], marks: list[Any], report: Report, path: tuple[str, ...] = ()) -> list[Part]:
    """`data` as parts that each fit a line. What fits none is replaced with a marked text, counted and reported."""
    text = orjson.dumps(data)
    noted = orjson.dumps(marks) if marks else None
    if len(text) + (len(noted) if noted else 0) <= MAX_DATA_BYTES:
        return [Part(text, noted)] if data or not path else []
    if len(data) > 1:
        keys = list(data)
        half = len(keys) // 2
        parts: list[Part] = []
        for some in (keys[:half], keys[half:]):
            chosen = set(some)
            ours = [mark for mark in marks if mark[0][0] in chosen]
            parts += split({key: data[key] for key in some}, ours, report, path)
        return parts
    ((key, value),) = data.items()
    if len(key.encode()) > MAX_DATA_BYTES // 4:
        report("refused", "long key", f"a key of {len(key)} characters was not kept")
        return []
    if type(value) is dict:
        inner = [[mark[0][1:], mark[1]] for mark in marks]
        return [_under(key, part) for part in split(value, inner, report, (*path, key))]
    name = "/".join((*path, key))
    report(
        "refused", f"value {name}", f"{name!r} was not kept: {len(text)} bytes do not fit a line of {MAX_LINE_BYTES}"
    )
    told = f"<refused: {len(text)} bytes>"
    return [Part(orjson.dumps({key: told}), orjson.dumps([[[key], "repr"]]))]


def _under(key: str, part: Part) -> Part:
    marks = None
    if part.marks is not None:
        marks = orjson.dumps([[[key, *path], kind] for path, kind in orjson.loads(part.marks)])
    return Part(b"{%b:%b}" % (orjson.dumps(key), part.data), marks)
