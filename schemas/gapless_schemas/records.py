"""Lines of a spool segment: how one is sealed, and what a whole one must be.

A line is strict JSON whose last field is `crc`, the CRC-32 of the bytes before `,"crc":`. The crc stands at a fixed
distance from the end, so a line is checked before it is parsed. A line that fails is `Damaged`, never half read.
"""

from __future__ import annotations

from binascii import hexlify
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from zlib import crc32

import orjson

from gapless_schemas.marks import apply_marks

FORMAT_VERSION: Final = 1
MAX_LINE_BYTES: Final = 1 << 20
"""The longest line a writer makes."""
MAX_READ_BYTES: Final = 2 << 20
"""A longer line is damage; a reader skips it without holding it."""
SEGMENT_BYTES: Final = 128 << 20
"""A writer begins a new segment beyond this size."""
MAX_TIME: Final = 253_402_300_800.0
"""Unix seconds of the year 10000: no tool shows a later time, and milliseconds are beyond it."""
MAX_STEP: Final = (1 << 53) - 1
"""The largest step that every tool keeps as an exact number."""
CRC_MARK: Final = b',"crc":"'
"""What stands before the eight digits."""
CRC_BYTES: Final = len(CRC_MARK + b'01234567"}')
SEALED: Final = slice(None, -CRC_BYTES - 1)
SEAL: Final = slice(-CRC_BYTES - 1, -3)
"""Of a line with its newline: what the crc is of, and the mark with the digits behind it."""

KINDS: Final = frozenset(
    [
        "header",
        "run",
        "system",
        "config",
        "metrics",
        "summary",
        "table",
        "text",
        "media",
        "axis",
        "alive",
        "log",
        "gap",
        "finish",
    ]
)


class Damaged(ValueError):
    """A line that is not a sound record; its text says why."""


class UnsupportedVersion(ValueError):
    """A header of a major version this reader does not know."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line of a segment."""

    project: str
    run_id: str
    writer: str
    attempt: int
    attempt_id: str
    """32 hex digits, unique to one `init` of one writer."""
    segment: int
    first_seq: int
    """The seq of the first record that follows."""
    host: str
    pid: int
    boot_id: str
    created: float
    """Unix seconds at which the attempt began, the same in all its segments."""
    resume_step: int | bool | None
    """A step: older rows from it on go. False: none go. None: inferred from the first metrics step."""
    v: int = FORMAT_VERSION


class Record(NamedTuple):
    """One sound line after the header. `data` has its marks applied."""

    seq: int
    t: float
    mono: float
    kind: str
    step: int | None
    data: dict[str, Any]
    skip_sinks: Sequence[str] = ()
    """Kinds of tracker that the record is not for."""


def seal(body: bytes) -> bytes:
    """`body`, a JSON object's bytes, with its crc as the last field and a newline."""
    head = body[:-1]
    return b"".join((head, CRC_MARK, hexlify(crc32(head).to_bytes(4, "big")), b'"}\n'))


def encode_header(header: Header) -> bytes:
    """The header's line."""
    fields: dict[str, Any] = {"kind": "header", "v": header.v}
    fields.update((name, getattr(header, name)) for name in Header.__slots__ if name != "v")
    return seal(orjson.dumps(fields))


def encode_record(
    seq: int,
    t: float,
    mono: float,
    kind: str,
    step: int | None,
    data: bytes,
    marks: bytes | None = None,
    skip_sinks: bytes | None = None,
) -> bytes:
    """A record's line. `data`, `marks` and `skip_sinks` are JSON already; `t` and `mono` are finite."""
    # One text and one encoding: this stands in the caller's way at every `log`.
    if step is None:
        text = f'{{"seq":{seq},"t":{t!r},"mono":{mono!r},"kind":"{kind}","data":'
    else:
        text = f'{{"seq":{seq},"t":{t!r},"mono":{mono!r},"kind":"{kind}","step":{step},"data":'
    head = text.encode() + data
    if marks is not None:
        head = b'%b,"marks":%b' % (head, marks)
    if skip_sinks is not None:
        head = b'%b,"skip_sinks":%b' % (head, skip_sinks)
    return b'%b,"crc":"%08x"}\n' % (head, crc32(head))


_PLAIN: Final = (
    orjson.OPT_STRICT_INTEGER
    | orjson.OPT_PASSTHROUGH_DATACLASS
    | orjson.OPT_PASSTHROUGH_DATETIME
    | orjson.OPT_PASSTHROUGH_SUBCLASS
)


def encode_row(seq: int, t: float, mono: float, step: int, data: dict[str, Any]) -> bytes | None:
    """The line of a metrics record, in one go; None where `data` has more than plain finite values, or is too long."""
    fields = {"seq": seq, "t": t, "mono": mono, "kind": "metrics", "step": step, "data": data}
    try:
        text = orjson.dumps(fields, option=_PLAIN)
    except TypeError:  # a key that is no text, an integer beyond 53 bits, a lone surrogate, an object
        return None
    # `null` stands for NaN and infinities, a third brace for a nested dict: both need more than this. A sum is quicker
    # than a search: it is finite where all are.
    try:
        total = sum(data.values())
        finite = total - total == 0
    except TypeError:  # texts, lists, None
        finite = b"null" not in text
    if not finite or text.find(b"{", text.find(b"{", 1) + 1) > 0 or len(text) > MAX_LINE_BYTES - CRC_BYTES:
        return None
    return seal(text)


def decode(line: bytes) -> Record:
    """The record of a whole line, its newline taken off. Raises `Damaged`."""
    return decode_lines((line + b"\n",))[0]


def decode_lines(lines: Iterable[bytes]) -> list[Record]:
    """The records of whole lines, each with its newline. Raises `Damaged` if one of them is no sound record."""
    # `unseal`, without the calls: this is done for every line of a spool.
    records: list[Record] = []
    add = records.append
    try:
        for line in lines:
            # Half the time of formatting the number and comparing it. What stands behind it is for the parser to find.
            if line[SEAL] != CRC_MARK + hexlify(crc32(line[SEALED]).to_bytes(4, "big")):
                raise _unsealed(line[:-1])
            fields = orjson.loads(line)
            if type(fields) is not dict:
                raise Damaged("no JSON object")
            seq, t, mono, kind, data = fields["seq"], fields["t"], fields["mono"], fields["kind"], fields["data"]
            step = fields.get("step")
            if not (
                type(seq) is int
                and seq > 0
                and type(kind) is str
                and type(data) is dict
                and (step is None or (type(step) is int and 0 <= step <= MAX_STEP))
            ):
                raise Damaged("a field of the wrong type")
            if type(t) is not float or type(mono) is not float:
                if not _is_number(t) or not _is_number(mono):
                    raise Damaged("a field of the wrong type")
                t, mono = float(t), float(mono)
            if not (0.0 <= t < MAX_TIME and 0.0 <= mono < MAX_TIME):
                raise Damaged("a time that is none")
            skip_sinks: Sequence[str] = ()
            if len(fields) > _NUM_FIELDS or step is None:
                skip_sinks = _apply_options(fields, data)
            # As `Record(...)`, likewise.
            add(_new(Record, (seq, t, mono, kind, step, data, skip_sinks)))
    except orjson.JSONDecodeError as error:
        raise Damaged(f"no JSON: {error}") from None
    except KeyError as missing:
        raise Damaged(f"no field {missing}") from None
    return records


_new: Final = tuple.__new__
_NUM_FIELDS: Final = 7
"""Of a line that has a step, and none of the fields that few lines have."""


def _apply_options(fields: dict[str, Any], data: dict[str, Any]) -> Sequence[str]:
    """Apply the line's marks to `data`; its `skip_sinks`. Raises `Damaged`."""
    if "marks" in fields:
        try:
            apply_marks(data, fields["marks"])
        except (TypeError, ValueError, LookupError) as error:
            raise Damaged(f"marks that fit no value: {error}") from None
    if "skip_sinks" not in fields:
        return ()
    skip_sinks: list[str] = fields["skip_sinks"]
    if type(skip_sinks) is not list or not all(type(kind) is str for kind in skip_sinks):
        raise Damaged("a field of the wrong type")
    return skip_sinks


def decode_header(line: bytes) -> Header:
    """The header of a whole first line. Raises `Damaged`, or `UnsupportedVersion` for a newer major version."""
    fields = unseal(line)
    if fields.get("kind") != "header":
        raise Damaged("the first line is no header")
    version = fields.get("v")
    if type(version) is not int or version < 1:
        raise Damaged("a header without a version")
    if version > FORMAT_VERSION:
        raise UnsupportedVersion(f"format version {version}, this reader knows up to {FORMAT_VERSION}: update gapless")
    try:
        header = Header(**{name: fields[name] for name in Header.__slots__})
    except KeyError as missing:
        raise Damaged(f"a header without {missing}") from None
    for name in ("project", "run_id", "writer", "attempt_id", "host", "boot_id"):
        if type(getattr(header, name)) is not str:
            raise Damaged(f"a header whose {name} is no text")
    for name in ("attempt", "segment", "first_seq", "pid"):
        if type(getattr(header, name)) is not int:
            raise Damaged(f"a header whose {name} is no integer")
    if not _is_number(header.created) or not 0 <= header.created < MAX_TIME:
        raise Damaged("a header without a time")
    resume = header.resume_step
    if resume is not None and resume is not False and (type(resume) is not int or resume < 0):
        raise Damaged("a header whose resume_step is no step")
    return header


def unseal(line: bytes) -> dict[str, Any]:
    """The fields of a sealed line, its newline taken off. Raises `Damaged`."""
    if line[-CRC_BYTES:] != b',"crc":"%08x"}' % crc32(line[:-CRC_BYTES]):
        raise _unsealed(line)
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise Damaged(f"no JSON: {error}") from None
    if type(fields) is not dict:
        raise Damaged("no JSON object")
    return fields


def _unsealed(line: bytes) -> Damaged:
    sealed = line[-CRC_BYTES:-10] == CRC_MARK and line[-2:] == b'"}'
    return Damaged("the crc does not match" if sealed else "no crc at the end")


def _is_number(value: object) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MAX_STEP)
