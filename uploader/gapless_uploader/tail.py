"""Whole lines of a segment that may still grow, be damaged, or be replaced under the reader.

A tail takes an object with `pread(size, offset)`, so tests feed it bytes. It never holds more than one chunk: a line
above `MAX_READ_BYTES` is stepped over without being kept. It hands out sound records, and damage with its offset.

1. Read from a little before the offset and compare those bytes with what was there: another file starts from 0.
2. Split on newlines only. What follows the last newline is not there yet.
3. A line that fails its check may hold sound records whose newline was hit: look for them inside.
4. NUL bytes in a line are blocks that have not arrived (network disks): wait for `grace_s`, then call it damage.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Protocol
from zlib import crc32

from gapless_schemas import (
    CRC_BYTES,
    CRC_MARK,
    MAX_READ_BYTES,
    Damaged,
    Header,
    Record,
    UnsupportedVersion,
    decode,
    decode_header,
    decode_lines,
)
from gapless_uploader.plain_records import AnyRecord

DecodeLines = Callable[[Sequence[bytes]], Sequence[AnyRecord]]
"""Whole lines, each with its newline, to records. Raises `Damaged` if one of them is no sound record."""
CHUNK_BYTES = 256 << 10
ANCHOR_BYTES = 256
"""How many bytes before an offset are remembered by their checksum."""
_MAX_CANDIDATES = 64


class Readable(Protocol):
    """What a tail reads from."""

    def pread(self, size: int, offset: int) -> bytes:
        """At most `size` bytes at `offset`; fewer at the end of the file."""

    def size(self) -> int:
        """The file's size now, in bytes."""


class SegmentFile:
    """A segment opened anew for one reading: network disks promise what is there only at open.

    Raises OSError; a link, FIFO or device is refused with `NotASegment`.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise NotASegment(f"{path} is no regular file")

    def pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def __enter__(self) -> SegmentFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._fd)


class NotASegment(OSError):
    """Something named like a segment that is no regular file."""


@dataclass(slots=True)
class Damage:
    """Bytes that are no sound record."""

    segment: int
    offset: int
    length: int
    reason: str
    sample: bytes
    """The first 64 KiB of them."""


@dataclass(slots=True)
class Chunk:
    """What one reading found. `ends[i]` is the offset after `records[i]`'s line."""

    records: list[AnyRecord] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    end: int = 0
    """The offset up to which everything was looked at."""
    at_end: bool = True
    """Nothing whole lies beyond `end` now."""


class Tail:
    """One segment from `offset` on. Not thread safe."""

    def __init__(
        self,
        segment: int,
        offset: int = 0,
        anchor: str | None = None,
        grace_s: float = 30.0,
        decode_lines: DecodeLines = decode_lines,
    ) -> None:
        self.segment = segment
        self.offset = offset
        """The offset up to which records were consumed."""
        self.anchor = anchor
        """Checksum of the bytes before `offset`; None at 0."""
        self.header: Header | None = None
        self.resets = 0
        """How often the bytes before the offset had changed, and reading began again at 0."""
        self._grace_s = grace_s
        self._decode_lines = decode_lines
        self._nul: tuple[int, float] | None = None
        """Offset of the line that shows NUL bytes, and since when."""
        self._settled_size = 0
        """Bytes that were there when a wait ended: what they hold is all that will come."""
        self.waits = False
        """Whether NUL bytes stand where blocks may still arrive."""
        self._file: Readable | None = None
        self._searched = 0

    def read(self, file: Readable, now: float, max_bytes: int = CHUNK_BYTES) -> Chunk:
        """The records after `offset`; moves nothing: `consume` does. Raises OSError and UnsupportedVersion."""
        self._file, self.waits = file, False
        before = min(ANCHOR_BYTES, self.offset)
        held = file.pread(before + max_bytes, self.offset - before)
        if before and (len(held) < before or self.anchor != _checksum(held[:before])):
            self._restart()
            before = 0
            held = file.pread(max_bytes, 0)
        is_full = len(held) - before >= max_bytes
        chunk = Chunk(end=self.offset)
        cut = held.rfind(b"\n", before)
        if cut < 0:
            if is_full:
                self._read_long(file, chunk, now, max_bytes)
            return chunk
        self._searched = 0
        chunk.at_end = not is_full
        self._decode(held[before : cut + 1], chunk, now)
        return chunk

    def consume(self, file: Readable, end: int) -> None:
        """Everything up to `end` was taken over."""
        self.offset = end
        self.anchor = anchor_at(file, end)

    def _restart(self) -> None:
        self.offset, self.anchor, self._searched, self._settled_size = 0, None, 0, 0
        self.resets += 1

    def _decode(self, data: bytes, chunk: Chunk, now: float) -> None:
        """Take whole lines, the last newline included."""
        lines = BytesIO(data).readlines()  # several times as quick as `split`, and splits on newlines only, too
        if chunk.end == 0:
            if not self._read_header(lines[0][:-1], chunk, now):
                return
            chunk.end = len(lines.pop(0))
        try:
            records = self._decode_lines(lines)
        except Damaged:
            self._decode_each(lines, chunk, now)
            return
        ends = list(accumulate(map(len, lines), initial=chunk.end))
        chunk.end = ends[-1]
        chunk.records += records
        chunk.ends += ends[1:]

    def _decode_each(self, lines: list[bytes], chunk: Chunk, now: float) -> None:
        at = chunk.end
        add_record, add_end = chunk.records.append, chunk.ends.append
        for line in lines:
            end = at + len(line)
            try:
                (record,) = decode_lines((line,))
            except Damaged as reason:
                if not self._recover(line[:-1], at, str(reason), chunk, now):
                    chunk.end = at
                    return
            else:
                add_record(record)
                add_end(end)
            at = end
        chunk.end = at

    def _read_header(self, line: bytes, chunk: Chunk, now: float) -> bool:
        try:
            self.header = decode_header(line.removesuffix(b"\r"))
        except UnsupportedVersion:
            raise
        except Damaged as reason:
            return self._recover(line, 0, str(reason), chunk, now)
        return True

    def _recover(self, line: bytes, at: int, reason: str, chunk: Chunk, now: float) -> bool:
        """Take what is sound in a line that is not; False when it may still arrive."""
        stripped = line.strip(b" \t\r")
        if not stripped:
            return True
        end = at + len(line) + 1
        if b"\0" in stripped and self._may_arrive(at, end, now):
            self.waits = chunk.at_end = True
            return False
        sound = list(sound_parts(stripped))
        for found in sound:
            if isinstance(found, Header):
                self.header = found
            else:
                chunk.records.append(found)
                chunk.ends.append(end)
        if stripped == line or not (len(sound) == 1 and isinstance(sound[0], Record) and decodes(stripped)):
            chunk.damage.append(Damage(self.segment, at, len(line), reason, line[: 64 << 10]))
        return True

    def _may_arrive(self, at: int, end: int, now: float) -> bool:
        """Whether the NUL bytes of the line from `at` to `end` may still become data. One wait serves a whole file."""
        if end <= self._settled_size or self._file is None:
            return False
        if self._nul is None or self._nul[0] != at:
            self._nul = (at, now)
        if now - self._nul[1] < self._grace_s:
            return True
        self._settled_size = self._file.size()
        return False

    def _read_long(self, file: Readable, chunk: Chunk, now: float, max_bytes: int) -> None:
        """A line longer than a chunk: hold it up to the limit, step over it beyond."""
        data = file.pread(MAX_READ_BYTES + 1, self.offset)
        cut = data.rfind(b"\n")
        if cut >= 0:
            chunk.at_end = False
            self._decode(data[: cut + 1], chunk, now)
            return
        if len(data) <= MAX_READ_BYTES:
            return
        at = max(self._searched, self.offset + len(data))
        while piece := file.pread(max_bytes, at):
            cut = piece.find(b"\n")
            if cut >= 0:
                end = at + cut + 1
                reason = f"a line of {end - self.offset} bytes, above {MAX_READ_BYTES}"
                chunk.damage.append(Damage(self.segment, self.offset, end - self.offset - 1, reason, data[: 64 << 10]))
                chunk.end, chunk.at_end = end, False
                self._searched = 0
                return
            at += len(piece)
        self._searched = at


def anchor_at(file: Readable, offset: int) -> str | None:
    """The checksum of the bytes before `offset`, as a tail remembers them."""
    before = min(ANCHOR_BYTES, offset)
    return _checksum(file.pread(before, offset - before)) if before else None


def decodes(line: bytes) -> bool:
    """Whether `line` is a sound record."""
    try:
        decode(line)
    except Damaged:
        return False
    return True


def _checksum(data: bytes) -> str:
    return f"{crc32(data):08x}"


def sound_parts(line: bytes) -> Iterator[Record | Header]:
    """Sound records inside a damaged line, in order. The search is bounded: damage is small or hopeless."""
    start = tried = 0
    end = line.find(CRC_MARK)
    while end >= 0 and tried < _MAX_CANDIDATES:
        end += CRC_BYTES
        begin = line.rfind(b'{"seq":', start, end)
        if begin < 0:
            begin = line.rfind(b'{"kind":"header"', start, end)
        while begin >= 0 and tried < _MAX_CANDIDATES:
            tried += 1
            part = line[begin:end]
            try:
                yield decode_header(part) if part.startswith(b'{"kind":"header"') else decode(part)
            except ValueError:
                begin = line.rfind(b'{"seq":', start, begin)
            else:
                start = end
                break
        end = line.find(CRC_MARK, end - CRC_BYTES + 1)
