"""What a value means: any Python object as plain JSON values, with marks for what JSON cannot hold.

Numbers stay numbers, exactly: bf16, fp8 and float32 are widened, never rounded. Only objects that nobody knows become
text, with a `repr` mark. Nothing is imported: numpy, torch, OmegaConf and pydantic are known by what their objects
offer, and no tensor or graph is held. Nothing raises for an odd value except `Refused`.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from decimal import Decimal
from enum import Enum
from math import isfinite, isnan
from os import PathLike, fspath
from typing import Any, TypeVar
from uuid import UUID

from gapless.numeric import Refused, as_number, detached, shape_of
from gapless.redact import REDACTED, holds_secrets, is_secret_name, scrub_flags, scrub_text, scrub_value

MAX_DEPTH = 100
MAX_REPR_CHARS = 10_000
MAX_CONFIG_ITEMS = 1_000
"""An array in a config with more items is told by its shape."""
_INT64 = 1 << 63

Path = tuple[str | int, ...]
T = TypeVar("T")


class Plain:
    """Turns values into plain ones and gathers their marks.

    `config` says where: a config's texts are redacted and its arrays told, a metric's large arrays are `Refused`.
    """

    def __init__(self, *, config: bool = False, clash: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.marks: list[list[Any]] = []
        self._clash = clash
        self._open: set[int] = set()

    def value(self, value: Any, path: Path) -> Any:
        """`value` as None, bool, int, float, str, list or dict. Raises `Refused` for what cannot be kept here."""
        kind = type(value)
        if kind is str:
            return self._text(value, path)
        if kind is float:
            return self._float(value, path)
        if kind is bool or value is None:
            return value
        if kind is int:
            return self._int(value, path)
        return self._object(value, path)

    def _object(self, value: Any, path: Path) -> Any:
        if len(path) > MAX_DEPTH:
            return self._repr("<nested too deeply>", path)
        return carefully(lambda: self._known(value, path), value)

    def _known(self, value: Any, path: Path) -> Any:
        number = as_number(value)
        if number is not None:
            return self.value(number, path)
        if isinstance(value, Enum):
            return self.value(value.value if isinstance(value.value, str | tuple | list) else value.name, path)
        if isinstance(value, str):
            return self._text(str.__str__(value), path)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._repr(bytes(value).decode("utf-8", "backslashreplace"), path)
        if isinstance(value, Decimal):
            return self._repr(str(value), path)
        if isinstance(value, (UUID, PathLike)):
            return self._text(str(value) if isinstance(value, UUID) else _path_text(value), path)
        if isinstance(value, datetime.timedelta):
            return value.total_seconds()
        if isinstance(value, (datetime.date, datetime.time)):
            return value.isoformat()
        if id(value) in self._open:
            return self._repr("<refers to itself>", path)
        self._open.add(id(value))
        try:
            return self._holder(value, path)
        finally:
            self._open.discard(id(value))

    def _holder(self, value: Any, path: Path) -> Any:
        array = shape_of(value)
        if array is not None:
            return self._array(value, array, path)
        fields = as_mapping(value)
        if fields is not None:
            return self.mapping(fields, path)
        if isinstance(value, (AbstractSet, types.MappingProxyType)):
            return self._items(_ordered(value), path)
        if isinstance(value, (Sequence, range)) or type(value).__name__ in (
            "deque",
            "ListConfig",
            "dict_values",
            "dict_keys",
        ):
            return self._items(value, path)
        return self._unknown(value, path)

    def top(self, fields: Mapping[Any, Any]) -> dict[str, Any]:
        """The whole of a config. Raises `Refused` when it cannot be read."""
        self._open.add(id(fields))
        return self.mapping(fields, ())

    def mapping(self, fields: Mapping[Any, Any], path: Path) -> dict[str, Any]:
        """A mapping with text keys; values whose key is a credential's name are redacted in a config."""
        plain: dict[str, Any] = {}
        for name, item in entries(fields):
            if name in plain and self._clash is not None:
                self._clash("/".join(str(part) for part in (*path, name)))
            try:
                plain[name] = self.value(item, (*path, name))
            except Refused as why:
                plain[name] = self._repr(f"<refused: {why}>", (*path, name))
        return plain

    def _items(self, items: Iterable[Any], path: Path) -> list[Any]:
        if self.config:
            items = list(items)
            if any(type(item) is str and item.startswith("-") for item in items):
                items = scrub_flags(items)
        return [self.value(item, (*path, index)) for index, item in enumerate(items)]

    def _array(self, value: Any, shape: tuple[int, ...], path: Path) -> Any:
        size = 1
        for length in shape:
            size *= length
        if size == 1:
            with suppress(Exception):  # unreadable: told by its shape below
                item = detached(value).item()
                if shape_of(item) is None:
                    return self.value(item, path)
        if self.config and size <= MAX_CONFIG_ITEMS:
            with suppress(Exception):  # a tensor that cannot be read (meta, fake, sparse) is told by its shape below
                return self.value(detached(value).tolist(), path)
        shown = f"{type(value).__name__}(shape={tuple(shape)}, dtype={getattr(value, 'dtype', None)})"
        if self.config:
            return self._repr(shown, path)
        raise Refused(f"{shown} is no single number")

    def _text(self, text: str, path: Path) -> str:
        if self.config:
            key = next((part for part in reversed(path) if type(part) is str), "")
            if text and (is_secret_name(str(key)) or any(type(part) is str and holds_secrets(part) for part in path)):
                return REDACTED
            text = scrub_value(text, str(key))
        if text.isascii():
            return text
        clean = encodable(text)
        if clean is not text:
            self.marks.append([list(path), "repr"])
        return clean

    def _float(self, value: float, path: Path) -> float | None:
        if isfinite(value):
            return value
        self.marks.append([list(path), "nan" if isnan(value) else "inf" if value > 0 else "-inf"])
        return None

    def _int(self, value: int, path: Path) -> int | str:
        if -_INT64 <= value < _INT64:
            return value
        if value.bit_length() > 14_000:  # int() of a longer text is refused by Python itself
            return self._repr(hex(value), path)
        self.marks.append([list(path), "int"])
        return str(value)

    def _repr(self, text: str, path: Path) -> str:
        key = next((part for part in reversed(path) if type(part) is str), "")
        if self.config:
            text = REDACTED if text and is_secret_name(str(key)) else scrub_text(text)
        self.marks.append([list(path), "repr"])
        return encodable(text)

    def _unknown(self, value: Any, path: Path) -> str:
        kind = type(value)
        if kind.__module__.partition(".")[0] in ("torch", "numpy") and kind.__name__ in ("dtype", "device", "layout"):
            return str(value)
        if "DType" in kind.__name__:
            return str(value)
        if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
            return self._repr(f"{value.__module__}.{value.__qualname__}", path)
        try:
            text = repr(value)
        except Exception:  # noqa: BLE001  # a repr is anybody's code
            text = object.__repr__(value)
        if len(text) > MAX_REPR_CHARS:
            text = f"{text[:MAX_REPR_CHARS]}... ({len(text)} characters)"
        return self._repr(text, path)


def carefully(read: Callable[[], T], value: object) -> T:
    """`read()`, which looks at `value`: an exception of the value's own code becomes `Refused`."""
    try:
        return read()
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001  # a value is anybody's code
        raise Refused(f"{type(value).__name__} cannot be read: {type(error).__name__}") from None


def told(value: object) -> str:
    """A short repr of `value` for a message."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a repr is anybody's code
        text = object.__repr__(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def as_mapping(value: Any) -> Mapping[Any, Any] | None:
    """The fields of an object that is a mapping at heart; None for any other."""
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    kind = type(value)
    if kind.__module__.startswith("omegaconf"):
        return _omegaconf(value)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=False))
    if hasattr(kind, "model_fields") or hasattr(kind, "__pydantic_fields__"):
        return {**vars(value), **(getattr(value, "__pydantic_extra__", None) or {})}
    if hasattr(kind, "__attrs_attrs__"):
        return {field.name: getattr(value, field.name, None) for field in kind.__attrs_attrs__}
    if kind.__name__ == "Namespace" or isinstance(value, types.SimpleNamespace):
        return dict(vars(value))
    for name in ("to_dict", "dict"):
        method = getattr(value, name, None)
        if callable(method) and isinstance(method, types.MethodType):
            with suppress(Exception):  # anybody's code
                fields = method()
                if isinstance(fields, Mapping):
                    return dict(fields)
    return None


def _omegaconf(value: Any) -> Mapping[Any, Any] | None:
    conf = sys.modules.get("omegaconf")
    if conf is None or not conf.OmegaConf.is_dict(value):
        return None
    for resolve in (True, False):  # an interpolation that does not resolve stays as written
        with suppress(Exception):
            plain = conf.OmegaConf.to_container(value, resolve=resolve)
            if isinstance(plain, Mapping):
                return plain
    return None


def key_text(key: Any) -> str:
    """The text of a key; what UTF-8 cannot hold is escaped."""
    if type(key) is not str:
        if isinstance(key, Enum):
            key = key.value if isinstance(key.value, str) else key.name
        elif isinstance(key, bytes):
            key = key.decode("utf-8", "backslashreplace")
        key = str.__str__(key) if isinstance(key, str) else str(key)
    return encodable(key)


def encodable(text: str) -> str:
    """`text` itself, or with lone surrogates escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def _path_text(value: Any) -> str:
    text = fspath(value)
    return text.decode("utf-8", "backslashreplace") if isinstance(text, bytes) else text


def _ordered(value: Iterable[Any]) -> list[Any]:
    items = list(value)
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: f"{type(item).__name__} {told(item)}")


def entries(fields: Mapping[Any, Any]) -> list[tuple[str, Any]]:
    """The items of a mapping, their keys as texts. Raises `Refused`."""
    return carefully(lambda: [(key_text(key), value) for key, value in fields.items()], fields)
