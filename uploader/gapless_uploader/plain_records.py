"""Plain records: metrics whose values are all finite numbers, under the same keys line after line.

A run logs the same keys for thousands of rows. Once they are known, a `Shape` checks a line in one call: that it is
sound JSON, has the fields of a record and no other, exactly these keys, and a number for each. What such a line says
about its values needs no Python object until somebody asks: a tracker that takes JSON gets the text as it stands.
Every other line is decoded by `decode_lines`, and the two never differ in what they say.
"""

from __future__ import annotations

from binascii import hexlify
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Final, Literal
from weakref import ReferenceType, ref
from zlib import crc32

import msgspec
import orjson

from gapless_schemas import CRC_BYTES, CRC_MARK, MAX_STEP, MAX_TIME, SEAL, SEALED, Record, decode_lines

MAX_KEYS: Final = 1_000
"""More keys have no shape: it would cost a megabyte."""
_SHAPES: Final = 64
_ENOUGH: Final = 32
"""So many rows are looked at, and half of them have to have the same keys: a shape costs as much as 100 lines."""
_MANY_BYTES: Final = 64 << 10
"""Of lines that come at once: a run that is followed live brings fewer, and builds no shape for them."""
_END: Final = -CRC_BYTES - 2
"""Of the text between the braces of `data`, where that is the last field before the crc and a newline ends the line."""
_BEFORE_CRC: Final = b"}" + CRC_MARK
_TAIL: Final = slice(_END, SEAL.stop)
_OPENING, _BACKSLASH, _RETURN = b"{\\\r"
"""Numbers: to find one in a line takes a fifth of what a text of one byte takes."""

_Time = Annotated[float, msgspec.Meta(ge=0, lt=MAX_TIME)]
_Exact = Annotated[int, msgspec.Meta(ge=-MAX_STEP, le=MAX_STEP)]
"""Integers that are the same number everywhere."""


class PlainRecord(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A metrics record with a step, all of whose values are numbers; made by a `Shape` only."""

    seq: Annotated[int, msgspec.Meta(gt=0, le=MAX_STEP)]
    t: _Time
    mono: _Time
    kind: Literal["metrics"]
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
    crc: str
    numbers: Any = msgspec.field(default=None, name="data")
    """Their types are checked here, and they are let go of."""
    members: bytes = b""
    """The text of `data` between its braces, as it stands in the line: no line break, no escape. An object that another
    program wrote may name a key twice; the last one counts."""

    skip_sinks: ClassVar[Sequence[str]] = ()
    shape: ClassVar[Shape]

    @property
    def data(self) -> dict[str, Any]:
        """The values, made anew with every call."""
        values: dict[str, Any] = orjson.loads(b"{%b}" % self.members)
        return values

    def opened(self) -> Record:
        """The same with its values at hand."""
        return Record(self.seq, self.t, self.mono, self.kind, self.step, self.data)


AnyRecord = Record | PlainRecord


class Shape:
    """Lines of the same keys in the same order."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        """`keys`: at least one, none that JSON has to escape."""
        self.keys = frozenset(keys)
        names = [f"key_{at}" for at in range(len(keys))]
        numbers = msgspec.defstruct(
            "Numbers",
            [(name, _Exact | float) for name in names],
            rename=dict(zip(names, keys, strict=True)),
            forbid_unknown_fields=True,
            gc=False,
        )
        record = msgspec.defstruct(
            "PlainRecord",
            [("numbers", numbers, msgspec.field(name="data"))],
            bases=(PlainRecord,),
            namespace={"shape": self},
            kw_only=True,
            forbid_unknown_fields=True,
            gc=False,
        )
        self.decode: Callable[[bytes], PlainRecord] = msgspec.json.Decoder(record).decode  # type: ignore[assignment]
        """A line, sound or not, as the record that it would be. Raises msgspec.DecodeError."""


@lru_cache(_SHAPES)
def shape_of(keys: tuple[str, ...]) -> Shape:
    """The shape of these keys: all runs of the process share the last few."""
    return Shape(keys)


class PlainDecoder:
    """Decodes the lines of one run, and finds out which keys they have. Not thread safe."""

    def __init__(self) -> None:
        self._shape: ReferenceType[Shape] | None = None
        """Of the rows met last; a run that rests does not keep it."""
        self._recent: deque[tuple[str, ...] | None] = deque(maxlen=_ENOUGH)
        """The keys of the newest rows, where few come at once because they are wide."""
        self._mistakes = 0
        self._wait = 0
        """How many calls may pass before the next shape is built: lines that only look alike are not tried for ever."""

    def decode_lines(self, lines: Sequence[bytes]) -> list[AnyRecord]:
        """The records of whole lines, each with its newline. Raises `Damaged` if one of them is no sound record."""
        shape = self._shape() if self._shape is not None else None
        if shape is None:
            records: list[AnyRecord] = [*decode_lines(lines)]
            self._learn(records, lines)
            return records
        records = []
        add, decode = records.append, shape.decode
        num_others = 0
        for line in lines:
            try:
                record = decode(line)
            except msgspec.DecodeError:
                records += decode_lines((line,))
                num_others += 1
                continue
            start = line.rfind(_OPENING)
            # The crc is right and last. The last brace that opens is that of `data`, and before the crc one closes: so
            # the text between them is the object, whatever whitespace and order another program wrote.
            if (
                line[_TAIL] != _BEFORE_CRC + hexlify(crc32(line[SEALED]).to_bytes(4, "big"))
                or line[start - 7 : start] != b'"data":'
                or _BACKSLASH in line
                or _RETURN in line
            ):
                records += decode_lines((line,))
                num_others += 1
                continue
            record.members = line[start + 1 : _END]
            record.numbers = None
            add(record)
        if num_others > len(lines) // 2:
            self._shape = None
            self._mistakes = min(self._mistakes + 1, 10)
            self._wait = (1 << self._mistakes) - 2  # none after the first
            self._learn(records, lines)
        else:
            self._mistakes = 0
        return records

    def _learn(self, records: Sequence[AnyRecord], lines: Sequence[bytes]) -> None:
        """Take the shape of most of the newest rows, if they have one."""
        if self._wait:
            self._wait -= 1
            return
        if len(records) < _ENOUGH and sum(map(len, lines)) < _MANY_BYTES:
            return
        recent = self._recent
        for record in records[-_ENOUGH:]:
            keys = _keys_of(record)
            recent.append(recent[-1] if recent and recent[-1] == keys else keys)
        keys, count = Counter(recent).most_common(1)[0]
        if keys is not None and count >= _ENOUGH // 2:
            self._shape = ref(shape_of(keys))
        if self._shape is not None or len(records) >= _ENOUGH:
            recent.clear()


def _keys_of(record: AnyRecord) -> tuple[str, ...] | None:
    """The keys of a row that a shape may fit; None for any other record."""
    if record.kind != "metrics" or record.step is None or type(record) is not Record:
        return None
    values = record.data
    if not 0 < len(values) <= MAX_KEYS or not {int, float}.issuperset(map(type, values.values())):
        return None
    keys = tuple(values)
    return None if b"\\" in orjson.dumps(keys) else keys
