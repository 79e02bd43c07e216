"""Rows from the ring to the disk: written to segments, synced, and written again elsewhere after any error.

Rows stay in memory until they are synced. After an error the segment is left and the next one begins with the first
row that is not surely kept, under its old seq. A failed sync is never tried again on the same file: the kernel forgets
what it could not write, and then says yes.

Whoever works here holds `lock`: the writer's thread, or with `write` and `sync` the caller too. Only a sync may run
outside of it. An interrupt may break off a caller between any two steps; what is written is therefore one number,
and a segment is `dirty` from before a write until after that number moved.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock
from time import monotonic

import orjson

from gapless.encode import Report
from gapless.numeric import Refused
from gapless.place import Place
from gapless.ring import Gap, Ring, Row
from gapless.segment import Segment
from gapless.warn import Warner
from gapless_schemas import SEGMENT_BYTES, encode_record

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
MAX_BATCH_ROWS = 4096
MAX_BATCH_BYTES = 1 << 20


class Journal:
    """What of an attempt is on the disk, and the segment that takes the rest."""

    def __init__(self, place: Place, ring: Ring, warner: Warner, report: Report) -> None:
        self.lock = Lock()
        self.written = 0
        """Rows up to this number are in a segment."""
        self.synced = 0
        """Rows up to this number are on the disk for certain."""
        self.last_sync = monotonic()
        self.failing = False
        self.retry_at = 0.0
        self.lost = 0
        """Rows that a failed sync may have lost: they had left memory."""
        self.owed: bytes | None = None
        """The data of a `gap` record that is to be handed to the ring."""
        self._place = place
        self._ring = ring
        self._warner = warner
        self._report = report
        self._kept: list[Row] = []
        """Rows that are not synced, in order."""
        self._synced_seq = 0
        self._released_seq = 0
        self._segment: Segment | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._failing_since = 0.0

    @property
    def is_open(self) -> bool:
        return self._segment is not None

    def is_crowded(self, share: float) -> bool:
        """Whether more than `share` of the ring's limits is held."""
        ring = self._ring
        number, end = ring.released
        return ring.last.end - end > ring.max_bytes * share or ring.last.number - number > ring.max_rows * share

    def drain(self) -> None:
        """Write everything that is in the ring; after an error do nothing until it is time to try again."""
        if self.retry_at and monotonic() < self.retry_at:
            return
        try:
            if self._segment is not None and self._segment.dirty:
                self._leave_segment()
            if self._segment is None:
                self._begin()
            self._rotate()
            self._take()
            while self._kept and self._kept[-1].number > self.written:
                self._write(self._index(self.written))
                if self._ring.inbox:
                    self._take()
        except (OSError, MemoryError) as error:
            self._fail(error)
        else:
            if self.failing:
                self._recovered()

    def write_one(self) -> bool:
        """Write the one row that waits, the short way; False, and nothing done, where anything is out of the way."""
        inbox, kept, segment = self._ring.inbox, self._kept, self._segment
        if len(inbox) != 1 or segment is None or segment.dirty or self.failing or segment.size >= SEGMENT_BYTES:
            return False
        row = inbox[0]
        if row.line is None or row.number != self.written + 1 or (kept and kept[-1].number != self.written):
            return False
        kept.append(row)
        inbox.popleft()
        try:
            segment.append(row.line)
        except (OSError, MemoryError) as error:
            self._fail(error)
        else:
            self.written = row.number
            segment.dirty = False
        return True

    def sync(self) -> None:
        """Sync what is written; an error is handled like one of `drain`."""
        segment = self._segment
        if segment is None or self.synced >= self.written:
            return
        try:
            segment.sync()
        except OSError as error:
            segment.sync_failed = True
            self._fail(error)
        else:
            self._note_synced(self.written)

    def sync_beside(self) -> None:
        """Sync what is written, while callers go on writing; takes the lock by itself, for its bookkeeping only."""
        with self.lock:
            segment, upto = self._segment, self.written
            if segment is None:
                return
            segment.syncing = True
        failure: OSError | None = None
        try:
            segment.sync()
        except OSError as error:
            failure = error
        finally:
            with self.lock:
                segment.syncing = False
                current = segment is self._segment
                if not current:  # a caller has met an error meanwhile and begun another
                    segment.leave()
                if failure is None:
                    self._note_synced(upto)
                    self.trim()
                elif current:
                    segment.sync_failed = True
                    self._fail(failure)

    def trim(self) -> None:
        """Let go of the rows that are synced."""
        self._release(self.synced)

    def make_room(self) -> None:
        """Let go of the rows that are written: a sync that hangs is no reason to drop new ones."""
        self._release(self.written)

    def close(self) -> None:
        """Close the segment; nothing is left to write."""
        self._leave_segment()
        self.failing = False  # it may have failed to open a segment that nothing is left for

    def _take(self) -> None:
        inbox = self._ring.inbox
        taken = self._kept[-1].number if self._kept else self._ring.released[0]
        while inbox:
            row = inbox[0]
            if row.number > taken and (row.line is not None or row.late is not None):
                self._kept.append(row)
                taken = row.number
            inbox.popleft()

    def _index(self, number: int) -> int:
        """Where in `_kept` the row after `number` stands."""
        return number + 1 - self._kept[0].number if self._kept else 0

    def _write(self, start: int) -> None:
        lines: list[bytes] = []
        size = 0
        for index in range(start, min(len(self._kept), start + MAX_BATCH_ROWS)):
            row = self._kept[index]
            if row.line is None:
                if lines:
                    break  # what is ready goes first: storing a payload may take its time
                row = self._finished(row)
                self._kept[index] = row
            assert row.line is not None  # noqa: S101  # finished above
            lines.append(row.line)
            size += len(row.line)
            if size >= MAX_BATCH_BYTES:
                break
        segment = self._segment
        assert segment is not None  # noqa: S101  # `drain` began one
        segment.append(lines[0] if len(lines) == 1 else b"".join(lines))
        self.written = self._kept[start].number + len(lines) - 1
        segment.dirty = False
        self._rotate()

    def _rotate(self) -> None:
        """Begin a new segment where this one is long enough. Raises OSError."""
        segment = self._segment
        # Not beside a running sync: the kernel tells an error once, and to only one of two syncs.
        if segment is not None and segment.size >= SEGMENT_BYTES and not segment.syncing:
            self.sync()
            self._leave_segment()
            self._begin()

    def _finished(self, row: Row) -> Row:
        """`row` with its line, its payload stored. Raises OSError."""
        late = row.late
        assert late is not None  # noqa: S101  # a row has a line or is late
        data = late.data
        if late.payload is not None:
            try:
                data = late.payload.store(self._place.store.put)
            except Refused as why:
                data = orjson.dumps({"error": str(why)})
                self._report("refused", "payload", str(why))
            for text in late.payload.failed:
                self._report("refused", "payload", text)
        step = late.step
        if late.floating and step is not None:
            step += self._ring.base_step or 0
        line = encode_record(row.seq, late.t, late.mono, late.kind, step, data, late.marks, late.skip_sinks)
        return row._replace(line=line, late=None)

    def _begin(self) -> None:
        """Open the next segment, at the first row that is not surely kept. Raises OSError."""
        self._place.prepare(self._ring)
        if self._ring.released[0] > self.synced:
            self._own_up()
        self._take()
        self.written = self.synced
        first = self._index(self.written)
        first_seq = self._kept[first].seq if first < len(self._kept) else self._ring.last.seq + 1
        self._segment = self._place.new_segment(first_seq)

    def _own_up(self) -> None:
        """Rows that waited for a sync were let go, and then the sync failed: owe a gap record for them."""
        number = self._ring.released[0]
        gap = Gap(number - self.synced, self._synced_seq + 1, self._released_seq, None, None, "a sync failed")
        self.lost += gap.rows
        self.synced, self._synced_seq = number, self._released_seq
        self.owed = gap.data()

    def _leave_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.leave()

    def _fail(self, error: BaseException) -> None:
        now = monotonic()
        segment = self._segment
        if segment is not None and not segment.syncing and not segment.sync_failed:
            with suppress(OSError):
                segment.sync()
                self._note_synced(self.written)
        self._leave_segment()
        if not self.failing:
            self.failing = True
            self._failing_since = now
            self._backoff_s = FIRST_BACKOFF_S
        self.retry_at = now + self._backoff_s
        self._backoff_s = min(LAST_BACKOFF_S, self._backoff_s * 2)
        waiting = self._ring.last.number - self.synced
        self._warner.warn(
            "disk", f"{self._place.folder} takes no rows: {error}; training goes on, {waiting} rows wait in memory"
        )

    def _recovered(self) -> None:
        self.failing = False
        self.retry_at = 0.0
        took = monotonic() - self._failing_since
        self._warner.warn("disk back", f"{self._place.folder} takes rows again after {took:.1f} s")

    def _note_synced(self, upto: int) -> None:
        if upto > self.synced:
            index = self._index(upto) - 1
            self._synced_seq = self._kept[index].seq if index >= 0 else self._released_seq
            self.synced = upto
            # An older segment was synced after all: what it holds need not be written again.
            self.written = max(self.written, upto)
        self.last_sync = monotonic()

    def _release(self, upto: int) -> None:
        num = self._index(upto)
        if num > 0 and self._kept:
            last = self._kept[num - 1]
            del self._kept[:num]
            self._released_seq = last.seq
            self._ring.released = (last.number, last.end)
