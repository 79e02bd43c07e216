"""Values of a row that are more than a number: from a record's data to what a sink gets.

The spool is not trusted: a reference that is not a plain content name, a file that is missing, no regular file, or
not what its name says becomes `Missing`, with the reason.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

from gapless_schemas import Record, apply_marks, is_media_name
from gapless_uploader.operations import Media, MediaItem, Missing, Table, Text, Value

_TYPES = ("image", "video", "audio", "file", "histogram")
MAX_INLINE_BYTES = 256 << 20


def payload_of(record: Record, media_dir: Path) -> tuple[str, Value] | None:
    """Key and value of a `table`, `text` or `media` record; None when it has no key."""
    data = record.data
    key = data.get("key")
    if type(key) is not str:
        return None
    try:
        if record.kind == "table":
            return key, _table(data, media_dir)
        if record.kind == "text":
            return key, _text(data, media_dir)
        return key, _media(data, media_dir)
    except (OSError, ValueError, TypeError, LookupError) as error:
        return key, Missing(str(error))


def _table(data: dict[str, Any], media_dir: Path) -> Table:
    columns, rows = data["columns"], data.get("rows")
    if rows is None:
        payload = json.loads(_contents(data["media"], media_dir))
        if "marks" in payload:
            apply_marks(payload, payload["marks"])
        columns, rows = payload["columns"], payload["rows"]
    if type(rows) is not list or not all(type(row) is list for row in rows):
        raise TypeError("a table whose rows are no lists")
    if type(columns) is not list:
        raise TypeError("a table whose columns are no list")
    mode = data.get("log_mode")
    return Table([str(column) for column in columns], rows, mode if type(mode) is str else None)


def _text(data: dict[str, Any], media_dir: Path) -> Text:
    text = data.get("text")
    if text is None:
        text = _contents(data["media"], media_dir).decode("utf-8", "backslashreplace")
    return Text(str(text))


def _media(data: dict[str, Any], media_dir: Path) -> Media:
    kind = data["type"]
    if kind not in _TYPES:
        raise ValueError(f"media of unknown type {kind!r}")
    items = []
    for item in data["items"]:
        info = {key: value for key, value in item.items() if key != "media"}
        path = None
        if kind != "histogram":
            path = _path(item["media"], media_dir)
        items.append(MediaItem(path, info))
    return Media(kind, items)


def _path(name: object, media_dir: Path) -> Path:
    if not is_media_name(name):
        raise ValueError("a reference that is no content name: refused")
    path = media_dir / str(name)
    found = os.lstat(path)
    if (found.st_mode & 0o170000) != 0o100000:
        raise ValueError(f"{name} is no regular file: refused")
    return path


def _contents(name: object, media_dir: Path) -> bytes:
    path = _path(name, media_dir)
    if path.stat().st_size > MAX_INLINE_BYTES:
        raise ValueError(f"{path.name} is larger than {MAX_INLINE_BYTES} bytes")
    contents = path.read_bytes()
    if sha256(contents).hexdigest() != path.name[:64]:
        raise ValueError(f"{path.name} does not hold what its name says")
    return contents
