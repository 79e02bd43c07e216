"""Values of a row as TensorBoard's own protocol buffers: one `Summary.Value` a key, one `Event` a row.

Scalars are `simple_value`s of 32 bits, which is all that every reader takes: TensorBoard 2.21's own fast loader, its
default, drops 64-bit tensors unseen. `double=True` writes those, for `tensorboard --load_fast=false` and for scripts.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from gapless_uploader.operations import Media, MediaItem, Missing, Table, Text, Value
from gapless_uploader.sinks import need
from gapless_uploader.sinks._json import as_json

TEXT_SUFFIX = "/text_summary"
MAX_TABLE_ROWS = 1_000
"""TensorBoard renders a text on every page view; more rows than this are cut, with a note in the text and a count."""
_LARGEST_SINGLE = 3.4028235677973366e38
"""From here on a number would round to infinity."""
_EXACT = 1 << 53
_GENERATION = ["input", "output", "score"]


class Unfit(Exception):
    """TensorBoard cannot hold this value; the text says why."""


class Encoder:
    """Makes events. Imports the `tensorboard` package, no tensorflow. Raises Misconfigured without it."""

    def __init__(self, double: bool) -> None:
        self.event: Any = need("tensorboard", "tensorboard.compat.proto.event_pb2")
        self.summary: Any = need("tensorboard", "tensorboard.compat.proto.summary_pb2")
        self._tensor: Any = need("tensorboard", "tensorboard.compat.proto.tensor_pb2")
        self._shape: Any = need("tensorboard", "tensorboard.compat.proto.tensor_shape_pb2")
        self._types: Any = need("tensorboard", "tensorboard.compat.proto.types_pb2")
        self._hparams: Any = need("tensorboard", "tensorboard.plugins.hparams.plugin_data_pb2")
        self._hparams_meta: Any = need("tensorboard", "tensorboard.plugins.hparams.metadata")
        self._metadata = {
            name: need("tensorboard", f"tensorboard.plugins.{module}.metadata").create_summary_metadata(*arguments)
            for name, module, arguments in (
                ("scalar", "scalar", (None, None)),
                ("text", "text", (None, None)),
                ("histogram", "histogram", (None, None)),
                ("image", "image", (None, None)),
                ("audio", "audio", (None, None, 11)),
            )
        }
        self._double = double

    def file_start(self, wall_time: float) -> list[Any]:
        """The events that begin a file: its version, and the session's start, which purges nothing."""
        return [self.event.Event(wall_time=wall_time, file_version="brain.Event:2"), self.purge(0, wall_time)]

    def purge(self, step: int, wall_time: float) -> Any:
        """TensorBoard drops what it read at `step` and above."""
        return self.event.Event(
            wall_time=wall_time, step=step, session_log=self.event.SessionLog(status=self.event.SessionLog.START)
        )

    def row(self, step: int, wall_time: float, values: list[Any]) -> Any:
        """One row's event."""
        return self.event.Event(wall_time=wall_time, step=step, summary=self.summary.Summary(value=values))

    def tag(self, key: str, value: Value) -> str:
        """The tag of `key` when it holds `value`: texts have their own, so that a tag has one plugin for ever."""
        return key + TEXT_SUFFIX if isinstance(value, (str, list, Text, Table)) else key

    def value(self, key: str, value: Value, step: int) -> Any:
        """The `Summary.Value`. Raises Unfit."""
        if not key:
            raise Unfit("a tag without a name")
        match value:
            case bool() | int() | float():
                return self._scalar(key, value)
            case str():
                return self.text(key, value)
            case list():
                return self.text(key, as_json(value))
            case Text(text=text):
                return self.text(key, text)
            case Table() if value.columns[-3:] == _GENERATION:
                return self.text(key, generations(value, step))
            case Table():
                return self.text(key, markdown(value))
            case Missing(reason=reason):
                raise Unfit(reason)
            case Media(type="histogram", items=items):
                return self._histogram(key, items)
            case Media(type="image", items=items):
                return self._images(key, items)
            case Media(type="audio", items=items):
                return self._sounds(key, items)
            case Media(type=kind):
                raise Unfit(f"TensorBoard has no {kind}")

    def text(self, key: str, text: str) -> Any:
        """A text of the text plugin, which renders it as markdown."""
        return self._strings(key + TEXT_SUFFIX, "text", [text.encode()], [1])

    def hparams(self, group: str, start: float, config: dict[str, Any]) -> Any:
        """The hparams plugin's start of a session. `config` is flat: bools, numbers and texts."""
        info = self._hparams.SessionStartInfo(group_name=group, start_time_secs=start)
        for key, value in sorted(config.items()):
            if isinstance(value, bool):
                info.hparams[key].bool_value = value
            elif isinstance(value, (int, float)):
                info.hparams[key].number_value = value
            else:
                info.hparams[key].string_value = value
        return self._hparam("SESSION_START_INFO_TAG", self._hparams.HParamsPluginData(session_start_info=info))

    def session_end(self, state: str, end: float) -> Any:
        """The hparams plugin's end of a session: finished is success, failed and crashed are failure."""
        status = {"finished": 1, "failed": 2, "crashed": 2, "running": 3}.get(state, 0)
        info = self._hparams.SessionEndInfo(status=status, end_time_secs=end)
        return self._hparam("SESSION_END_INFO_TAG", self._hparams.HParamsPluginData(session_end_info=info))

    def _hparam(self, tag: str, data: Any) -> Any:
        meta = self._hparams_meta
        return self.summary.Summary.Value(
            tag=getattr(meta, tag), metadata=meta.create_summary_metadata(data), tensor=meta.NULL_TENSOR
        )

    def _scalar(self, key: str, value: float) -> Any:
        try:
            number = float(value)
        except OverflowError:
            raise Unfit("an integer beyond a 64-bit float") from None
        if not self._double:
            if isfinite(number) and abs(number) > _LARGEST_SINGLE:
                raise Unfit("a number beyond a 32-bit float")
            return self.summary.Summary.Value(tag=key, simple_value=number)
        tensor = self._tensor.TensorProto(dtype=self._types.DT_DOUBLE, double_val=[number], tensor_shape={})
        return self.summary.Summary.Value(tag=key, metadata=self._metadata["scalar"], tensor=tensor)

    def _strings(self, tag: str, plugin: str, strings: list[bytes], shape: list[int]) -> Any:
        tensor = self._tensor.TensorProto(
            dtype=self._types.DT_STRING, string_val=strings, tensor_shape=self._dimensions(shape)
        )
        return self.summary.Summary.Value(tag=tag, metadata=self._metadata[plugin], tensor=tensor)

    def _dimensions(self, shape: list[int]) -> Any:
        proto = self._shape.TensorShapeProto
        return proto(dim=[proto.Dim(size=size) for size in shape])

    def _histogram(self, key: str, items: list[MediaItem]) -> Any:
        flat: list[float] = []
        for item in items:
            edges, counts = item.info.get("edges"), item.info.get("counts")
            if not isinstance(edges, list) or not isinstance(counts, list) or len(edges) != len(counts) + 1:
                raise Unfit("a histogram without n + 1 edges and n counts")
            try:
                for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
                    flat += float(left), float(right), float(count)
            except (TypeError, ValueError, OverflowError):
                raise Unfit("a histogram whose edges or counts are no numbers") from None
        tensor = self._tensor.TensorProto(
            dtype=self._types.DT_DOUBLE, double_val=flat, tensor_shape=self._dimensions([len(flat) // 3, 3])
        )
        return self.summary.Summary.Value(tag=key, metadata=self._metadata["histogram"], tensor=tensor)

    def _images(self, key: str, items: list[MediaItem]) -> Any:
        first = items[0].info if items else {}
        size = [str(int(first.get(name) or 0)).encode() for name in ("width", "height")]
        payloads = [_payload(item) for item in items]
        return self._strings(key, "image", [*size, *payloads], [len(payloads) + 2])

    def _sounds(self, key: str, items: list[MediaItem]) -> Any:
        strings: list[bytes] = []
        for item in items:
            if (item.info.get("format") or "wav") != "wav":
                raise Unfit(f"TensorBoard plays wav, no {item.info['format']}")
            strings += _payload(item), str(item.info.get("caption") or "").encode()
        return self._strings(key, "audio", strings, [len(items), 2])


def flat_config(config: dict[str, Any], prefix: str = "") -> dict[str, bool | float | str]:
    """Nested keys joined with a dot; what is no bool, number or text becomes JSON text."""
    flat: dict[str, bool | float | str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flat_config(value, f"{name}."))
        elif isinstance(value, (bool, float, str)) or (isinstance(value, int) and abs(value) <= _EXACT):
            flat[name] = value
        else:
            flat[name] = as_json(value)
    return flat


def markdown(table: Table) -> str:
    """The table as markdown, its cells' markup neutralised."""
    lines = [_line(table.columns), "|" + " --- |" * len(table.columns)]
    lines += (_line(row) for row in table.rows[:MAX_TABLE_ROWS])
    left = len(table.rows) - MAX_TABLE_ROWS
    if left > 0:
        lines += "", f"{left} more rows are in the spool."
    return "\n".join(lines)


def generations(table: Table, step: int) -> str:
    """Generations laid out as verl lays them out for TensorBoard, their own markup neutralised."""
    parts = [f"**Generation Results - Step {step}**"]
    for place, row in enumerate(table.rows[:MAX_TABLE_ROWS], 1):
        prompt, answer, score = (_cell(cell, "<br/>") for cell in row[-3:])
        parts += f"### Sample {place}", f"**Input:** {prompt}", f"**Output:** {answer}", f"**Score:** {score}", "---"
    left = len(table.rows) - MAX_TABLE_ROWS
    if left > 0:
        parts.append(f"{left} more samples are in the spool.")
    return "\n\n".join(parts)


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


_ESCAPES = {ord(mark): f"&#{ord(mark)};" for mark in "&<>\\`*_[]|#!~"}


def _cell(cell: Any, line_break: str = " ") -> str:
    return ("" if cell is None else str(cell)).translate(_ESCAPES).replace("\n", line_break)


def _payload(item: MediaItem) -> bytes:
    if item.path is None:
        raise Unfit("a media item without its file")
    try:
        return item.path.read_bytes()
    except OSError as error:
        raise Unfit(f"its file cannot be read: {error.strerror}") from None
