"""Texts, tables, images and sounds as the files that SwanLab keeps, named as its library names them.

A file's name is made of its step and its bytes, so putting it twice is harmless. At most 108 files a row, 10 MB each.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import orjson

from gapless_uploader.operations import Media, Table, Text
from gapless_uploader.sinks._swanlab_portion import MediaRow

MAX_ITEMS = 108
MAX_ITEM_BYTES = 10 << 20
_EXACT = 1 << 53
_TYPES = {
    "txt": "text/plain",
    "json": "application/json",
    "png": "image/png",
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "bmp": "image/bmp",
    "gif": "image/gif",
    "wav": "audio/x-wav",
}
_TAKEN = {"image": ("png", "jpg", "jpeg", "bmp", "gif"), "video": ("gif",), "audio": ("wav",)}

_NO_PAYLOAD = (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
"""What no waiting mends: the payload is gone, a link, a socket, or not ours to read."""

Refuse = Callable[[str], None]


@dataclass(slots=True)
class _File:
    folder: str
    extension: str
    content: bytes
    caption: str


def encode_media(row: MediaRow, put: Callable[[str, bytes, str], None], refuse: Refuse) -> bytes | None:
    """The JSON of a media row whose files were `put` (path, bytes, content type); None when nothing of it fits.

    `refuse` is told what does not arrive. Raises what `put` raises.
    """
    paths, captions = [], []
    for file in _files(row.value, refuse):
        digest = sha256(file.content).hexdigest()[:8]
        path = f"media/{file.folder}/{row.step:03d}-{digest}.{file.extension}"
        put(path, file.content, _TYPES[file.extension])
        paths.append(path)
        captions.append(file.caption)
    if not paths:
        return None
    # SwanLab's own list of captions leaves out items without one, which moves the others: all have one, or none.
    more = [{"caption": caption} for caption in captions] if any(captions) else []
    body = {"key": row.name, "index": row.step, "data": paths, "more": more, "create_time": row.t.decode()}
    return orjson.dumps(body)


def _files(value: Text | Table | Media, refuse: Refuse) -> list[_File]:
    if isinstance(value, Text):
        content = value.text.encode("utf-8", "replace")
        if len(content) > MAX_ITEM_BYTES:
            refuse("text beyond 10 MB is cut")
            content = content[:MAX_ITEM_BYTES].decode("utf-8", "ignore").encode()
        return [_File("text", "txt", content, "")]
    if isinstance(value, Table):
        return [_File("echarts", "json", _table(value, refuse), "")]
    if value.type == "histogram":
        return [_File("echarts", "json", _table(_histogram(item.info), refuse), "") for item in value.items]
    if len(value.items) > MAX_ITEMS:
        refuse(f"media items beyond {MAX_ITEMS} of one step")
    found = []
    for item in value.items[:MAX_ITEMS]:
        if item.path is not None:
            file = _file(value.type, item.path, item.info, refuse)
            if file is not None:
                found.append(file)
    return found


def _file(kind: str, path: Path, info: dict[str, Any], refuse: Refuse) -> _File | None:
    extension = path.suffix.lower().lstrip(".")
    if extension not in _TAKEN.get(kind, ()):
        refuse(f"{kind} of format {extension}: SwanLab takes {', '.join(_TAKEN.get(kind, ()))}")
        return None
    content = _read(path, refuse)
    if content is None:
        return None
    folder = "image" if kind == "video" else kind
    return _File(folder, extension, content, _text(info.get("caption") or ""))


def _read(path: Path, refuse: Refuse) -> bytes | None:
    """A payload's bytes; nothing that is no regular file is followed or waited for."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _NO_PAYLOAD:
            raise
        refuse(f"a payload that cannot be read ({os.strerror(error.errno or 0)})")
        return None
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            refuse("a payload that is no regular file")
            return None
        if found.st_size > MAX_ITEM_BYTES:
            refuse("a media item beyond 10 MB")
            return None
        return file.read(MAX_ITEM_BYTES)


def _table(table: Table, refuse: Refuse) -> bytes:
    """An ECharts table as `swanlab.echarts.Table` makes it; rows are left out from the end until it fits."""
    columns = _distinct(table.columns)
    rows = [{name: _cell(cell) for name, cell in zip(columns, cells, strict=False)} for cells in table.rows]
    while True:
        document = {"_swanLab": "table", "colDefs": [{"field": name} for name in columns], "rowData": rows}
        content = json.dumps(document).encode()
        if len(content) <= MAX_ITEM_BYTES or not rows:
            return content
        keep = int(len(rows) * MAX_ITEM_BYTES / len(content) * 0.95)
        for _ in range(len(rows) - keep):
            refuse("a table row beyond 10 MB of one table")
        rows = rows[:keep]


def _distinct(columns: list[str]) -> list[str]:
    """Column names that are all different: a table's row is a dictionary there."""
    found: list[str] = []
    for column in map(_text, columns):
        name, count = column, 1
        while name in found:
            count += 1
            name = f"{column} ({count})"
        found.append(name)
    return found


def _cell(value: Any) -> Any:
    """A cell; what a browser's number cannot hold is text."""
    match value:
        case float() if not isfinite(value):
            return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case str():
            return _text(value)
        case bool() | float() | None:
            return value
        case int():
            return value if -_EXACT <= value <= _EXACT else str(value)
        case list() | tuple():
            return [_cell(inner) for inner in value]
        case dict():
            return {_text(key): _cell(inner) for key, inner in value.items()}
        case _:
            return _text(value)


def cells_of(rows: list[list[Any]]) -> list[list[Any]]:
    """A table's rows as JSON holds them."""
    return [[_cell(cell) for cell in row] for row in rows]


def _text(value: Any) -> str:
    """`value` as text that UTF-8 can hold."""
    return str(value).encode("utf-8", "replace").decode()


def _histogram(info: dict[str, Any]) -> Table:
    edges, counts = list(info.get("edges") or []), list(info.get("counts") or [])
    return Table(["from", "to", "count"], [list(row) for row in zip(edges, edges[1:], counts, strict=False)])
