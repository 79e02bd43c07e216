"""A reader's place found again from the seqs it had read: for what a tracker remembers of a run when nobody else does.

A place by seqs names no file, so it holds on another machine and after the spool was moved or copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gapless_uploader.intervals import Intervals
from gapless_uploader.reader import Cursor
from gapless_uploader.tail import SegmentFile, Tail


def cursor_at(
    paths: Mapping[str, Mapping[int, Path]],
    read: Mapping[str, list[list[int]]],
    now: float,
    start: Cursor | None = None,
) -> Cursor:
    """The cursor of a reader that has read exactly the seqs `read` (attempt_id -> intervals). Raises OSError.

    A segment is consumed up to its first record that was not read. `start` is a cursor known to lie before.
    """
    found: Cursor = {}
    for attempt_id, pairs in read.items():
        held = (start or {}).get(attempt_id, {"open": [], "next": 0})
        tails = {index: Tail(index, offset, anchor) for index, offset, anchor in held["open"]}
        seen, segments = Intervals(pairs), paths.get(attempt_id, {})
        for index in sorted(segments):
            if index < held["next"] and index not in tails:
                continue
            tail = tails.setdefault(index, Tail(index))
            with SegmentFile(segments[index]) as file:
                _consume(tail, file, seen, now)
        begun = [index for index, tail in tails.items() if tail.offset]
        following = max(begun, default=held["next"] - 1) + 1
        found[attempt_id] = {
            "seen": pairs,
            "open": [[t.segment, t.offset, t.anchor] for index, t in sorted(tails.items()) if index < following],
            "next": following,
        }
    return found


def _consume(tail: Tail, file: SegmentFile, seen: Intervals, now: float) -> None:
    while True:
        chunk = tail.read(file, now)
        end = chunk.end
        for at, record in enumerate(chunk.records):
            if record.seq not in seen:
                end = chunk.ends[at - 1] if at else tail.offset
                break
        if end == tail.offset:
            return
        stopped = end < chunk.end or chunk.at_end
        tail.consume(file, end)
        if stopped:
            return
