"""Chunks of a segment that were decoded before anybody asked for them, while a tracker answered.

A chunk is handed out only where it begins: at the same offset, behind the same bytes, as the tail's anchor says. Only
what cannot become more is kept: whole chunks without damage, and none at the end of the file. Not thread safe.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

from gapless_uploader.tail import CHUNK_BYTES, Chunk, DecodeLines, SegmentFile, Tail


class ReadAhead:
    """The chunks of one attempt that follow on what was taken."""

    def __init__(self, grace_s: float, decode_lines: DecodeLines) -> None:
        self._grace_s = grace_s
        self._decode_lines = decode_lines
        self._chunks: deque[tuple[Tail, Chunk]] = deque()
        """Each with a tail that stands where the chunk begins."""

    def fill(self, tail: Tail, path: Path, now: float, max_bytes: int) -> None:
        """Read on from `tail`, which is left as it is, about `max_bytes`. Raises OSError and ValueError."""
        if self._chunks:
            return
        ahead = self._copy(tail)
        with SegmentFile(path) as file:
            while ahead.offset - tail.offset < max_bytes:
                begin = self._copy(ahead)
                chunk = ahead.read(file, now, CHUNK_BYTES)
                if ahead.resets or chunk.at_end or chunk.damage or not chunk.records:
                    return
                self._chunks.append((begin, chunk))
                ahead.consume(file, chunk.end)

    def take(self, tail: Tail) -> Chunk | None:
        """What `tail` would read now, if that is here."""
        if not self._chunks or self._chunks[0][0].segment != tail.segment:
            return None
        begin, chunk = self._chunks.popleft()
        if (begin.offset, begin.anchor) == (tail.offset, tail.anchor):
            return chunk
        self.clear()
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._chunks.clear()

    def _copy(self, tail: Tail) -> Tail:
        return Tail(tail.segment, tail.offset, tail.anchor, self._grace_s, self._decode_lines)
