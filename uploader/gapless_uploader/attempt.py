"""One attempt's records, each once, over all its segments and however often the disk shows them.

A record is known by its seq. Segments are read in order; one is left for good only when its successor says that all
before it was there, so what a network disk shows late is still found. Only one thread uses an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless_schemas import Header, decode_header, decode_lines
from gapless_uploader.intervals import Intervals
from gapless_uploader.plain_records import AnyRecord
from gapless_uploader.read_ahead import ReadAhead
from gapless_uploader.tail import CHUNK_BYTES, Chunk, Damage, DecodeLines, SegmentFile, Tail


@dataclass(slots=True)
class Taken:
    """Records in the order of the spool, and where they came from."""

    segment: int
    records: list[AnyRecord]
    start: int
    end: int


class AttemptReader:
    """Reads one attempt from where `cursor` left off."""

    def __init__(
        self,
        header: Header,
        cursor: dict[str, Any] | None = None,
        grace_s: float = 30.0,
        decode_lines: DecodeLines = decode_lines,
    ) -> None:
        self.header = header
        self.seen = Intervals((cursor or {}).get("seen"))
        self.tails = {
            index: Tail(index, offset, anchor, grace_s, decode_lines)
            for index, offset, anchor in (cursor or {}).get("open", [])
        }
        self.next_segment: int = (cursor or {}).get("next", 0)
        """Segments below are known: open ones are in `tails`, the others are done."""
        self.damage: list[Damage] = []
        """Found since somebody last took it."""
        self.torn = 0
        """Segments whose last line was torn and stays so, since they have a successor."""
        self._grace_s = grace_s
        self._decode_lines = decode_lines
        self._buffer: tuple[Chunk, int, int] | None = None
        self._ahead = ReadAhead(grace_s, decode_lines)
        self._ends: dict[int, int] = {}
        self._last_segment: int | None = None
        self._wanted: Intervals | None = None
        self._damaged_at: set[tuple[int, int]] = set()
        self._taken_from = -1
        """The segment of the records taken last."""

    def cursor(self) -> dict[str, Any]:
        """What the constructor takes to go on from here: JSON."""
        return {
            "seen": self.seen.to_json(),
            "open": [[tail.segment, tail.offset, tail.anchor] for tail in self.tails.values()],
            "next": self.next_segment,
        }

    def head(self, paths: Mapping[int, Path], now: float) -> AnyRecord | None:
        """The next record that `take` would hand out; None when none is there. Raises OSError."""
        if self._buffer is None:
            self._fill(paths, now)
        if self._buffer is None:
            return None
        chunk, at, _ = self._buffer
        return chunk.records[at]

    def take(self, paths: Mapping[int, Path], now: float, until_t: float | None = None) -> Taken | None:
        """The next records, up to the first one later than `until_t`; None when none is there. Raises OSError."""
        if self.head(paths, now) is None or self._buffer is None:
            return None
        chunk, at, segment = self._buffer
        stop = len(chunk.records)
        if until_t is not None:
            stop = next((i for i in range(at + 1, stop) if chunk.records[i].t > until_t), stop)
            while stop < len(chunk.records) and chunk.ends[stop] == chunk.ends[stop - 1]:
                stop += 1  # one damaged line held both
        tail = self.tails[segment]
        start = tail.offset
        end = chunk.end if stop == len(chunk.records) else chunk.ends[stop - 1]
        with SegmentFile(paths[segment]) as file:
            tail.consume(file, end)
        records = chunk.records[at:stop]
        add, wanted = self.seen.add, self._wanted
        if wanted is not None or not self.seen.follow_on([r.seq for r in records]):
            records = [r for r in records if (wanted is None or r.seq in wanted) and add(r.seq)]
        self._buffer = None if stop == len(chunk.records) else (chunk, stop, segment)
        self._taken_from = segment
        return Taken(segment, records, start, end)

    def first_metrics_step(self, paths: Mapping[int, Path], now: float) -> int | None:
        """The step of the first metrics record within the first chunk. Moves nothing. Raises OSError."""
        if self.head(paths, now) is None or self._buffer is None:
            return None
        chunk, at, _ = self._buffer
        step = next((r.step for r in chunk.records[at:] if r.kind == "metrics" and r.step is not None), None)
        if step is None:
            self._buffer = None  # whoever asks again sees what has come since
        return step

    def read_ahead(self, paths: Mapping[int, Path], now: float, max_bytes: int) -> None:
        """Decode what `take` hands out next, and move nothing. Raises OSError and ValueError."""
        is_bounded = self._last_segment is not None or self._ends or self._wanted is not None
        if self._buffer is None and not is_bounded and self._taken_from in paths and self._taken_from in self.tails:
            self._ahead.fill(self.tails[self._taken_from], paths[self._taken_from], now, max_bytes)

    def drop_buffer(self) -> None:
        """Forget what was read and not taken: an idle attempt holds no memory."""
        self._buffer = None
        self._ahead.clear()

    def idle(self, sizes: Mapping[int, int]) -> bool:
        """Whether nothing is buffered and the segments have the sizes up to which they were read."""
        return (
            self._buffer is None
            and all(index < self.next_segment for index in sizes)
            and all(sizes.get(tail.segment, tail.offset) == tail.offset for tail in self.tails.values())
        )

    def bound(self, cursor: dict[str, Any]) -> None:
        """Read no further than `cursor`, made by `cursor()` later than this reader's own."""
        self._ends = {segment: offset for segment, offset, _ in cursor["open"]}
        self._last_segment = cursor["next"]
        self._buffer = None

    def want(self, seen: Intervals) -> None:
        """Read on without a bound, and hand out only these seqs: offsets that went back do not say where they are."""
        self._ends, self._wanted, self._buffer = {}, seen, None

    def behind(self, sizes: Mapping[int, int]) -> int:
        """Bytes of `sizes` (segment -> size) not consumed yet, a torn tail included."""
        fresh = sum(size for index, size in sizes.items() if index >= self.next_segment)
        return fresh + sum(max(0, sizes.get(tail.segment, 0) - tail.offset) for tail in self.tails.values())

    def _fill(self, paths: Mapping[int, Path], now: float) -> None:
        for index in sorted(paths):
            if self._last_segment is not None and index >= self._last_segment:
                break
            if index >= self.next_segment:
                self.tails[index] = Tail(index, grace_s=self._grace_s, decode_lines=self._decode_lines)
                self.next_segment = index + 1
        for index in sorted(self.tails):
            if index in paths:
                self._fill_from(self.tails[index], paths, now)
                if self._buffer is not None:
                    return

    def _fill_from(self, tail: Tail, paths: Mapping[int, Path], now: float) -> None:
        ready = self._ahead.take(tail)
        if ready is not None:
            self._buffer = (ready, 0, tail.segment)
            return
        with SegmentFile(paths[tail.segment]) as file:
            while True:
                chunk = tail.read(file, now, CHUNK_BYTES)
                if tail.segment in self._ends:
                    _cut(chunk, self._ends[tail.segment])
                self._note(chunk.damage)
                if chunk.records:
                    self._buffer = (chunk, 0, tail.segment)
                    return
                if chunk.end == tail.offset:
                    break
                tail.consume(file, chunk.end)
                if chunk.at_end:
                    break
            torn = file.size() > tail.offset
        self._leave_if_done(tail, torn, paths)

    def _leave_if_done(self, tail: Tail, torn: bool, paths: Mapping[int, Path]) -> None:
        following = min((index for index in self.tails if index > tail.segment and index in paths), default=None)
        if following is None:
            return
        successor = self.tails[following]
        if successor.header is None:
            try:
                successor.header = read_header(paths[following])
            except ValueError:
                return  # a damaged header says nothing about what came before it
        if successor.header is not None and self.seen.complete_to >= successor.header.first_seq - 1:
            self.torn += torn
            del self.tails[tail.segment]

    def _note(self, damage: list[Damage]) -> None:
        for found in damage:
            at = (found.segment, found.offset)
            if at not in self._damaged_at:
                self._damaged_at.add(at)
                self.damage.append(found)


def _cut(chunk: Chunk, end: int) -> None:
    """Take out of `chunk` what lies beyond `end`."""
    if chunk.end > end:
        kept = sum(1 for offset in chunk.ends if offset <= end)
        del chunk.records[kept:], chunk.ends[kept:]
        chunk.damage = [damage for damage in chunk.damage if damage.offset < end]
        chunk.end, chunk.at_end = end, True


def read_header(path: Path) -> Header | None:
    """The header of a segment; None when its first line is not there yet. Raises OSError and ValueError."""
    with SegmentFile(path) as file:
        line, newline, _ = file.pread(64 << 10, 0).partition(b"\n")
    return decode_header(line.removesuffix(b"\r")) if newline else None
