"""Where old rows lie: an entry a MiB of spool, enough to read a step's records again.

An amend needs the whole row. Rows are not kept in memory; the blocks that may hold the step are read again and searched
for the step's bytes. A few blocks stay cached, since late records come in runs.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from gapless_schemas import Damaged, Record, decode
from gapless_uploader.plain_records import AnyRecord
from gapless_uploader.tail import SegmentFile, sound_parts

BLOCK_BYTES = 1 << 20
_MAX_RANGES = 4
_CACHED_BLOCKS = 8
_SPACED = re.compile(rb'"step"(?!:\d+,)')
"""A step as another program may write it, or none."""


class SparseIndex:
    """The blocks of one attempt and the steps in them. Not thread safe."""

    def __init__(self, blocks: list[list[object]] | None = None) -> None:
        self._blocks: list[_Block] = [_Block.from_json(block) for block in blocks or []]

    def note(self, segment: int, start: int, end: int, records: Sequence[AnyRecord]) -> None:
        """`records` were read from `start` to `end`."""
        steps = [record.step for record in records if record.step is not None]
        if not steps:
            return
        last = self._blocks[-1] if self._blocks else None
        if last is None or last.segment != segment or last.end > start or end - last.start > BLOCK_BYTES:
            last = _Block(segment, start, end)
            self._blocks.append(last)
        last.end = end
        last.cover(steps)

    def records_at(self, step: int, paths: Mapping[int, Path]) -> Iterator[Record]:
        """The records of `step`, in the order of the spool; the same seq may come twice. Raises OSError."""
        for block in self._blocks:
            if block.may_hold(step) and block.segment in paths:
                yield from CACHE.get(paths[block.segment], block.start, block.end).records_at(step)

    def records_above(self, step: int, paths: Mapping[int, Path]) -> Iterator[Record]:
        """Records with a step above `step`, in the order of the spool; the same seq may come twice. Raises OSError."""
        for block in self._blocks:
            if block.ranges[-1][1] > step:
                if block.segment not in paths:
                    raise OSError(f"segment {block.segment} cannot be read again: it is gone")
                for line in CACHE.get(paths[block.segment], block.start, block.end).data.split(b"\n"):
                    for record in _records_of(line):
                        if record.step is not None and record.step > step:
                            yield record

    def blocks_below(self, step: int, paths: Mapping[int, Path]) -> Iterator[tuple[Iterator[Record], int]]:
        """Blocks that may hold a step below `step`, from the newest on: their records from the newest on, and the
        highest step below `step` that the blocks after it may hold, -1 if none. Raises OSError."""
        blocks = [b for b in self._blocks if b.ranges[0][0] < step and b.segment in paths]
        while blocks:
            block = blocks.pop()
            lines = CACHE.get(paths[block.segment], block.start, block.end).data.split(b"\n")
            remaining = max((min(b.ranges[-1][1], step - 1) for b in blocks), default=-1)
            yield (record for line in reversed(lines) if line for record in _records_of(line)), remaining

    def to_json(self) -> list[list[object]]:
        """Blocks that the constructor takes."""
        return [[block.segment, block.start, block.end, block.ranges] for block in self._blocks]


class _Block:
    __slots__ = ("end", "ranges", "segment", "start")

    def __init__(self, segment: int, start: int, end: int, ranges: list[list[int]] | None = None) -> None:
        self.segment = segment
        self.start = start
        self.end = end
        self.ranges = ranges or []
        """Sorted, disjoint, closed; at most `_MAX_RANGES`, so that one late step does not widen the block's own."""

    @staticmethod
    def from_json(fields: list[object]) -> _Block:
        return _Block(*fields)  # type: ignore[arg-type]

    def may_hold(self, step: int) -> bool:
        return any(first <= step <= last for first, last in self.ranges)

    def cover(self, steps: list[int]) -> None:
        ordered = sorted(steps)
        ranges = self.ranges
        if not ranges or ordered[0] >= ranges[-1][0]:
            if ranges and (len(ranges) == 1 or ordered[0] <= ranges[-1][1] + 1):
                ranges[-1][1] = max(ranges[-1][1], ordered[-1])
            else:
                ranges.append([ordered[0], ordered[-1]])
        else:
            points = sorted([*(tuple(r) for r in ranges), *((step, step) for step in set(ordered))])
            merged: list[list[int]] = []
            for first, last in points:
                if merged and first <= merged[-1][1] + 1:
                    merged[-1][1] = max(merged[-1][1], last)
                else:
                    merged.append([first, last])
            self.ranges = ranges = merged
        while len(ranges) > _MAX_RANGES:
            at = min(range(len(ranges) - 1), key=lambda i: ranges[i + 1][0] - ranges[i][1])
            ranges[at][1] = ranges[at + 1][1]
            del ranges[at + 1]


class _Lines:
    """The bytes of a block."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @cached_property
    def _is_compact(self) -> bool:
        return _SPACED.search(self.data) is None

    def records_at(self, step: int) -> Iterator[Record]:
        """The records of `step`, in their order; the same seq may come twice."""
        data, end = self.data, 0
        plain = b'"step":%d,' % step
        spaced = None if self._is_compact else re.compile(rb'"step"\s*:\s*%d\s*,' % step)
        while True:
            if spaced is None:  # as nearly always, and a text is found five times as fast
                at = data.find(plain, end)
            else:
                match = spaced.search(data, end)
                at = match.start() if match else -1
            if at < 0:
                return
            begin = data.rfind(b"\n", 0, at) + 1
            end = data.find(b"\n", at)
            end = len(data) if end < 0 else end
            yield from (record for record in _records_of(data[begin:end]) if record.step == step)


class _Cache:
    """The last few blocks read, for the whole process. Thread safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: OrderedDict[tuple[Path, int, int], _Lines] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, start: int, end: int) -> _Lines:
        """The bytes from `start` to `end`, which were there once. Raises OSError where not all of them are now."""
        key = (path, start, end)
        with self._lock:
            lines = self._held.get(key)
            if lines is not None:
                self._held.move_to_end(key)
                return lines
        with SegmentFile(path) as file:
            data = file.pread(end - start, start)
        if len(data) < end - start:
            raise OSError(f"{path} is shorter than what was read of it")
        lines = _Lines(data)
        with self._lock:
            self._held[key] = lines
            while len(self._held) > self._size:
                self._held.popitem(last=False)
        return lines


CACHE = _Cache(_CACHED_BLOCKS)


def _records_of(line: bytes) -> Iterator[Record]:
    try:
        yield decode(line)
    except Damaged:
        for found in sound_parts(line):
            if isinstance(found, Record):
                yield found
