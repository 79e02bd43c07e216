"""Takes rows out of the ring, writes them to segments, syncs them, and starts a new segment after any error.

Rows stay in memory until they are synced: what was written since the last good sync goes to the next segment again,
with its seq, when a sync fails. Who writes holds the I/O lock: the thread, or with `write` and `sync` the caller too.
Only a sync runs outside of it, so that a caller does not wait for the disk that the thread waits for.

An interrupt may break off a caller between any two steps here too. What is written is therefore one number,
`_written`, and a segment is `dirty` from before a write until after that number moved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread, get_ident
from time import monotonic, sleep

import orjson

from gapless.place import Place
from gapless.ring import Gap, Ring, Row
from gapless.segment import Segment
from gapless.values import Refused
from gapless.warn import Warner
from gapless_schemas import SEGMENT_BYTES, encode_record

POLL_S = 0.005
"""How often the thread looks for rows while they come."""
BUSY_S = 1.0
"""Rows came within this time: the thread polls, and nobody has to wake it."""
SYNC_S = 1.0
ALIVE_S = 30.0
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0
MAX_BATCH_ROWS = 4096
MAX_BATCH_BYTES = 1 << 20


class Writer:
    """The writing side of one attempt. `start` begins the thread; `write_now` writes in the caller."""

    def __init__(
        self,
        place: Place,
        ring: Ring,
        warner: Warner,
        *,
        inline: bool,
        sync_each: bool,
        describe: Callable[[], list[bytes]],
    ) -> None:
        self.inline = inline
        self.sync_each = sync_each
        self.opened = Event()
        """The first segment's header and the rows before it are written, or the first try has failed."""
        self.done = Event()
        """All rows are on the disk and the last segment is closed."""
        self.failing = False
        self.lost = 0
        """Rows that a failed sync may have lost: they had left the ring."""
        self._place = place
        self._ring = ring
        self._warner = warner
        self._describe: Callable[[], list[bytes]] | None = describe
        self._io = Lock()
        self._io_owner = 0
        self._kept: list[Row] = []
        self._written = 0
        """Rows up to this count are in a segment."""
        self._synced = 0
        self._synced_seq = 0
        self._released_seq = 0
        self._segment: Segment | None = None
        self._retry_at = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self._failing_since = 0.0
        self._last_sync = monotonic()
        self._last_alive = monotonic()
        self._last_row = monotonic()
        self._last_taken = 0
        self._wake = Event()
        self._parked = False
        self._sync_wanted = False
        self._closing = False
        self._finish: bytes | None = None
        self.threaded = False

    @property
    def written(self) -> int:
        return self._written

    @property
    def synced(self) -> int:
        return self._synced

    def start(self) -> None:
        """Start the thread, and where callers write themselves, open the first segment. Without a thread, they do."""
        if self.inline:
            self.write_now()
            self.opened.set()
        thread = Thread(target=self._loop, name="gapless-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.inline = True
            self._warner.warn("thread", f"no writer thread ({error}): log() writes by itself")
            self.write_now()
            self.opened.set()
        else:
            self.threaded = True

    def nudge(self) -> None:
        """Called after a row was handed over: wake the thread if it is parked, or write here."""
        if self.inline:
            self.write_now()
        if self._parked:
            self._wake.set()

    def write_now(self) -> None:
        """Write what is in the ring, and sync it where each row is to be; a disk in trouble is left to the thread."""
        if self._io_owner == get_ident():  # a signal handler that logs while its own thread writes
            return
        with self._io:
            self._io_owner = get_ident()
            try:
                self._drain()
                if self.sync_each and self._segment is not None and self._synced < self._written:
                    self._sync_inline()
                if not self.threaded:
                    self._trim()
            finally:
                self._io_owner = 0

    def make_room(self) -> None:
        """Forget written rows that wait for a sync, if that needs no waiting: better than to drop new ones."""
        if self._io_owner != get_ident() and self._io.acquire(blocking=False):
            try:
                self._release(self._written)
            finally:
                self._io.release()

    def sync(self) -> None:
        """Ask for a sync; `synced` tells when it is done."""
        self._sync_wanted = True
        self._wake.set()

    def close(self, last: bytes) -> None:
        """Ask the thread to write and sync everything, a `finish` record of `last` at the end; `done` tells."""
        self._finish = last
        self._closing = True
        self._wake.set()

    def turn_inline(self) -> bool:
        """One turn of a writer that has no thread; True when all is done."""
        self._sync_wanted = True
        with suppress(Exception):  # as in the thread: whatever it is, the caller goes on
            return self._turn()
        return False

    # The thread.

    def _loop(self) -> None:
        while True:
            try:
                if self._turn():
                    return
                self._wait()
            except Exception as error:  # noqa: BLE001  # the turn of a daemon: whatever it is, rows must go on
                self._warner.warn("turn", f"the writer met {type(error).__name__}: {error}; it goes on")
                self._wake.wait(LAST_BACKOFF_S)

    def _turn(self) -> bool:
        """Do what is due; True when all is done."""
        now = monotonic()
        with self._io:
            self._drain()
        self.opened.set()
        if self._sync_due(now):
            self._sync_beside()
        if not self._ring.inbox:
            self._ring.close_gap()
        if self._segment is not None:
            self._say_system()
            if now - self._last_alive >= ALIVE_S and not self._closing:
                self._last_alive = now
                self._ring.append("alive", None, b"{}")
            if self._closing and self._finish is not None:
                last, self._finish = self._finish, None
                self._ring.append("finish", None, last, always=True)
        return self._closing and self._end()

    def _end(self) -> bool:
        last = self._ring.last
        if self._finish is not None or last.gap is not None or self._synced < last.number or self._ring.inbox:
            return False
        with self._io:
            segment, self._segment = self._segment, None
            if segment is not None:
                segment.leave()
            self.failing = False  # it may have failed to open a segment that nothing is left for
        self.done.set()
        return True

    def _wait(self) -> None:
        now = monotonic()
        if self._ring.last.seq != self._last_taken:
            self._last_taken = self._ring.last.seq
            self._last_row = now
        if self.failing:
            self._wake.wait(max(0.001, self._retry_at - now))
            if not self._closing:
                self._wake.clear()
            return
        if self._closing:
            sleep(0.001)
            return
        if not self.inline and now - self._last_row < BUSY_S:
            self._wake.wait(POLL_S)
            self._wake.clear()
            return
        due = self._last_alive + ALIVE_S
        if self._synced < self._written:
            due = min(due, self._last_sync + SYNC_S)
        self._wake.clear()
        self._parked = True
        # A row handed over before the line above was seen by nobody: look once more.
        if not (self._ring.inbox or self._closing or self._sync_wanted):
            self._wake.wait(max(0.001, due - now))
        self._parked = False
        self._wake.clear()

    def _sync_due(self, now: float) -> bool:
        if self._segment is None or self._synced >= self._written:
            if not self._ring.inbox:
                self._sync_wanted = False
            return False
        return (
            self._sync_wanted
            or self._closing
            or now - self._last_sync >= SYNC_S
            or self._ring.size_bytes * 2 > self._ring.max_bytes
            or (self._ring.last.number - self._ring.released[0]) * 2 > self._ring.max_rows
        )

    def _say_system(self) -> None:
        describe, self._describe = self._describe, None
        if describe is not None:
            for data in describe():
                self._ring.append("system", None, data)

    # Writing. The I/O lock is held.

    def _drain(self) -> None:
        if monotonic() < self._retry_at:
            return
        try:
            if self._segment is not None and self._segment.dirty:
                self._leave_segment()
            if self._segment is None:
                self._begin()
            while True:
                self._take()
                start = self._index(self._written)
                if start >= len(self._kept):
                    break
                self._write(start)
        except (OSError, MemoryError) as error:
            self._fail(error)
        else:
            if self.failing:
                self._recovered()

    def _take(self) -> None:
        inbox = self._ring.inbox
        taken = self._kept[-1].number if self._kept else self._ring.released[0]
        while inbox:
            row = inbox[0]
            if row.number > taken and (row.line is not None or row.late is not None):
                self._kept.append(row)
                taken = row.number
            inbox.popleft()

    def _index(self, count: int) -> int:
        """Where in `_kept` the row after `count` stands."""
        return count + 1 - self._kept[0].number if self._kept else 0

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
        assert segment is not None  # noqa: S101  # `_drain` began one
        segment.append(b"".join(lines))
        self._written = self._kept[start].number + len(lines) - 1
        segment.dirty = False
        # Not beside a running sync: the kernel tells an error once, and to only one of two syncs.
        if segment.size >= SEGMENT_BYTES and not segment.syncing:
            self._sync_inline()
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
        step = late.step
        if late.floating and step is not None:
            step += self._ring.base_step or 0
        line = encode_record(row.seq, late.t, late.mono, late.kind, step, data, late.marks)
        return row._replace(line=line, late=None)

    def _begin(self) -> None:
        """Open the next segment, at the first row that is not surely kept. Raises OSError."""
        self._place.prepare(self._ring)
        if self._ring.released[0] > self._synced:
            self._own_up()
        self._take()
        self._written = self._synced
        first = self._index(self._written)
        first_seq = self._kept[first].seq if first < len(self._kept) else self._ring.last.seq + 1
        self._segment = self._place.new_segment(first_seq)

    def _own_up(self) -> None:
        """Rows that waited for a sync were forgotten to make room, and then the sync failed: say so in a gap record."""
        count = self._ring.released[0]
        gap = Gap(count - self._synced, self._synced_seq + 1, self._released_seq, None, None, "a sync failed")
        self.lost += gap.rows
        self._synced, self._synced_seq = count, self._released_seq
        self._ring.append("gap", None, gap.data(), always=True)

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
                self._note_synced(self._written)
        self._leave_segment()
        if not self.failing:
            self.failing = True
            self._failing_since = now
            self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = now + self._backoff_s
        self._backoff_s = min(LAST_BACKOFF_S, self._backoff_s * 2)
        waiting = self._ring.last.number - self._synced
        self._warner.warn(
            "disk", f"{self._place.folder} takes no rows: {error}; training goes on, {waiting} rows wait in memory"
        )

    def _recovered(self) -> None:
        self.failing = False
        self._retry_at = 0.0
        self._warner.say(f"{self._place.folder} takes rows again after {monotonic() - self._failing_since:.1f} s")

    # Syncing.

    def _sync_beside(self) -> None:
        with self._io:
            if self.sync_each:  # callers sync too: only one at a time
                self._sync_inline()
                self._trim()
                return
            segment, upto = self._segment, self._written
            if segment is None:
                return
            segment.syncing = True
        self._sync_wanted = False
        try:
            segment.sync()
        except OSError as error:
            with self._io:
                segment.syncing = False
                if segment is self._segment:
                    segment.sync_failed = True
                    self._fail(error)
                else:
                    segment.leave()
            return
        with self._io:
            segment.syncing = False
            if segment is not self._segment:
                segment.leave()
            self._note_synced(upto)
            self._trim()

    def _sync_inline(self) -> None:
        segment = self._segment
        if segment is None:
            return
        try:
            segment.sync()
        except OSError as error:
            segment.sync_failed = True
            self._fail(error)
        else:
            self._note_synced(self._written)

    def _note_synced(self, upto: int) -> None:
        if upto > self._synced:
            index = self._index(upto) - 1
            self._synced_seq = self._kept[index].seq if index >= 0 else self._released_seq
            self._synced = upto
        self._last_sync = monotonic()

    def _trim(self) -> None:
        self._release(self._synced)

    def _release(self, upto: int) -> None:
        num = self._index(upto)
        if num > 0 and self._kept:
            last = self._kept[num - 1]
            del self._kept[:num]
            self._released_seq = last.seq
            self._ring.released = (last.number, last.end)
