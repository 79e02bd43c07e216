"""The records that payloads become: inline data, or bytes that the writer stores beside the spool first.

Encoding a picture or copying a file is the writer's work; the caller pays for a copy in memory only. The bytes go to
the run's `media` folder under their sha256, before the line that refers to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

import orjson

from gapless.numeric import Refused
from gapless.payloads import Audio, File, Histogram, Image, Table, Text, Video
from gapless.pixels import gif, image_array, png, video_array, wav
from gapless.ring import Payload
from gapless.store import Put
from gapless.values import Plain, encodable
from gapless_schemas import MAX_LINE_BYTES

MAX_INLINE_BYTES = MAX_LINE_BYTES // 4
"""A larger table or text goes to `media/`."""
MAX_FILE_BYTES = 1 << 30
"""A larger file is refused: a checkpoint is no metric, log its path."""
MAX_BINS = 512


class Media:
    """One record of kind `table`, `text` or `media`: inline data, or a payload that the writer stores first."""

    def __init__(self, kind: str, data: bytes, marks: bytes | None = None, payload: Payload | None = None) -> None:
        self.kind = kind
        self.data = data
        self.marks = marks
        self.payload = payload

    @staticmethod
    def of_text(key: str, text: str) -> Media:
        """The record of a text; lone surrogates are escaped and marked."""
        clean = encodable(text)
        marks = None if clean is text else orjson.dumps([[["text"], "repr"]])
        data = orjson.dumps({"key": key, "text": clean})
        if len(data) <= MAX_INLINE_BYTES:
            return Media("text", data, marks)
        return Media("text", b"", None, _Beside({"key": key}, clean.encode(), "txt"))


def as_media(key: str, value: Any) -> Media | None:
    """The record that `value` becomes, None when it is no payload. Raises `Refused`."""
    if isinstance(value, Table):
        return _table(key, value)
    if isinstance(value, Text):
        return Media.of_text(key, value.text if isinstance(value.text, str) else str(value.text))
    if isinstance(value, Histogram):
        edges, counts = _histogram(value)
        item = {"edges": edges, "counts": counts}
        return Media("media", orjson.dumps({"key": key, "type": "histogram", "items": [item]}))
    kind = _kind(value)
    if kind is not None:
        return Media("media", b"", None, _Items(key, kind, [_item(value)]))
    if isinstance(value, (list, tuple)) and value and (kind := _kind(value[0])) is not None:
        if any(_kind(item) != kind for item in value):
            raise Refused("a list of payloads holds one type only")
        return Media("media", b"", None, _Items(key, kind, [_item(item) for item in value]))
    return None


def _kind(value: Any) -> str | None:
    for cls, kind in ((Image, "image"), (Video, "video"), (Audio, "audio"), (File, "file")):
        if isinstance(value, cls):
            return kind
    return None


class _Beside(Payload):
    """Bytes that go to `media/`, and the fields of their line."""

    def __init__(self, fields: dict[str, Any], content: bytes, extension: str) -> None:
        self.size = len(content)
        self._fields = fields
        self._content = content
        self._extension = extension

    def store(self, put: Put) -> bytes:
        return orjson.dumps({**self._fields, "media": put(self._extension, content=self._content)})


class Item:
    """One picture, film, sound or file of a record: how its bytes come about, and its fields."""

    def __init__(self, fields: Mapping[str, Any], *, size: int = 0, path: str | None = None) -> None:
        self.fields = {name: value for name, value in fields.items() if value is not None}
        self.size = size
        self.path = path
        self.content: Callable[[], tuple[bytes, str, Mapping[str, Any]]] | None = None
        """Called by the writer: the bytes, their extension and further fields."""


class _Items(Payload):
    def __init__(self, key: str, kind: str, items: Sequence[Item]) -> None:
        self.size = sum(item.size for item in items)
        self._key = key
        self._kind = kind
        self._items = items

    def store(self, put: Put) -> bytes:
        items: list[dict[str, Any]] = []
        failed: list[str] = []
        for item in self._items:
            try:
                if item.content is None:
                    assert item.path is not None  # noqa: S101  # an item has the one or the other
                    extension = _extension(item.path)
                    name = put(extension, path=item.path, max_bytes=MAX_FILE_BYTES)
                    items.append({**item.fields, "media": name, "format": extension})
                else:
                    content, extension, more = item.content()
                    items.append({**item.fields, **more, "media": put(extension, content=content), "format": extension})
            except Refused as why:
                failed.append(str(why))
        data: dict[str, Any] = {"key": self._key, "type": self._kind, "items": items}
        if failed:
            data["errors"] = failed
        self.failed = failed
        return orjson.dumps(data)


def _item(value: Any) -> Item:
    data = value.data
    caption = None if value.caption is None else encodable(str(value.caption))
    fields: dict[str, Any] = {"caption": caption}
    if isinstance(value, File):
        name = value.name if value.name is not None else str(data).rpartition("/")[2]
        fields["name"] = encodable(str(name))
    if isinstance(value, Video):
        fields["fps"] = float(value.fps)
    if isinstance(value, Audio):
        fields["sample_rate"] = int(value.sample_rate)
    if (isinstance(data, (str, bytes)) and isinstance(data, str)) or hasattr(data, "__fspath__"):
        return Item(fields, path=str(data))
    if isinstance(data, (bytes, bytearray, memoryview)):
        content = bytes(data)
        extension = _clean_extension(value.format) or _sniff(content)
        item = Item(fields, size=len(content))
        item.content = lambda: (content, extension, {})
        return item
    if isinstance(value, File):
        raise Refused(f"a File needs a path, not {type(data).__name__}")
    if isinstance(value, Image):
        pixels, width, height, channels = image_array(data)
        item = Item({**fields, "width": width, "height": height}, size=len(pixels))
        item.content = lambda: (png(pixels, width, height, channels), "png", {})
        return item
    if isinstance(value, Video):
        frames, width, height = video_array(data)
        fps = float(value.fps)
        item = Item({**fields, "width": width, "height": height}, size=sum(map(len, frames)))
        item.content = lambda: (gif(frames, width, height, fps), "gif", {})
        return item
    sound = wav(data, int(value.sample_rate))
    item = Item(fields, size=len(sound))
    item.content = lambda: (sound, "wav", {})
    return item


def _table(key: str, table: Table) -> Media:
    plain = Plain()
    columns = [plain.value(column, ()) if isinstance(column, str) else str(column) for column in table.columns]
    columns = [encodable(column) for column in columns]
    plain.marks.clear()
    rows = []
    for index, row in enumerate(table.data):
        if len(row) != len(columns):
            raise Refused(f"row {index} of the table has {len(row)} cells for {len(columns)} columns")
        cells = []
        for place, cell in enumerate(row):
            path = ("rows", index, place)
            try:
                cells.append(plain.value(cell, path))
            except Refused as why:
                cells.append(f"<refused: {why}>")
                plain.marks.append([list(path), "repr"])
        rows.append(cells)
    fields: dict[str, Any] = {"key": key, "columns": columns}
    if table.log_mode is not None:
        fields["log_mode"] = str(table.log_mode)
    body = orjson.dumps({**fields, "rows": rows})
    if len(body) <= MAX_INLINE_BYTES:
        return Media("table", body, orjson.dumps(plain.marks) if plain.marks else None)
    beside: dict[str, Any] = {"columns": columns, "rows": rows}
    if plain.marks:
        beside["marks"] = plain.marks
    return Media("table", b"", None, _Beside({**fields, "num_rows": len(rows)}, orjson.dumps(beside), "json"))


def _histogram(histogram: Histogram) -> tuple[list[float], list[float]]:
    if histogram.counts is not None or histogram.edges is not None:
        counts = _numbers(histogram.counts)
        edges = _numbers(histogram.edges)
        if len(edges) != len(counts) + 1 or not counts:
            raise Refused(f"a histogram of {len(counts)} counts needs {len(counts) + 1} edges, not {len(edges)}")
        if not all(isfinite(number) for number in (*edges, *counts)):
            raise Refused("a histogram's edges and counts are finite")
        return edges, counts
    bins = max(1, min(int(histogram.bins), MAX_BINS))
    values = [number for number in _numbers(histogram.values) if isfinite(number)]
    if not values:
        raise Refused("a histogram of no finite values")
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    width = (high - low) / bins
    if not isfinite(width) or width == 0:
        raise Refused("a histogram's values span more than a float holds")
    counted = [0] * bins
    for number in values:
        counted[min(int((number - low) / width), bins - 1)] += 1
    return [low + width * index for index in range(bins)] + [high], [float(count) for count in counted]


def _numbers(values: Any) -> list[float]:
    try:
        if hasattr(values, "detach"):
            values = values.detach().double().flatten()
        elif hasattr(values, "ravel"):
            values = values.ravel()
        if hasattr(values, "tolist"):
            values = values.tolist()
        return [float(number) for number in values]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise Refused(f"a histogram needs numbers: {error}") from None


def _clean_extension(text: str | None) -> str | None:
    if text is None:
        return None
    clean = "".join(letter for letter in text.lower() if letter.isascii() and letter.isalnum())[:8]
    return clean or None


def _extension(path: str) -> str:
    name = path.rpartition("/")[2]
    return _clean_extension(name.rpartition(".")[2] if "." in name[1:] else None) or "bin"


_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpg"),
    (b"GIF8", "gif"),
    (b"\x1aE\xdf\xa3", "webm"),
    (b"OggS", "ogg"),
    (b"fLaC", "flac"),
    (b"ID3", "mp3"),
    (b"<svg", "svg"),
)


def _sniff(content: bytes) -> str:
    for signature, extension in _SIGNATURES:
        if content.startswith(signature):
            return extension
    if content[:4] == b"RIFF":
        return {b"WAVE": "wav", b"WEBP": "webp"}.get(content[8:12], "bin")
    if content[4:8] == b"ftyp":
        return "mp4"
    return "bin"
