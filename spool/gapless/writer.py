"""Who writes the journal and when: a daemon thread, beside it the callers themselves with `write` and `sync`.

The thread polls every few milliseconds while rows come, so that no caller has to wake it, and is parked when none do.
It syncs every second, describes the system once, and shows every 30 s that the attempt lives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread, get_ident
from time import monotonic, sleep

from gapless.bell import Bell
from gapless.journal import LAST_BACKOFF_S, Journal
from gapless.ring import Ring
from gapless.warn import Warner

POLL_S = 0.005
"""How often the thread looks for rows while they come."""
BUSY_S = 1.0
"""Rows came within this time: the thread polls, and nobody has to wake it."""
SYNC_S = 1.0
ALIVE_S = 30.0


class Writer:
    """The writing side of one attempt. `start` begins the thread; `nudge` is for callers, after each row."""

    def __init__(
        self,
        journal: Journal,
        ring: Ring,
        warner: Warner,
        *,
        inline: bool,
        sync_each: bool,
        describe: Callable[[], list[bytes]],
    ) -> None:
        self.journal = journal
        self.inline = inline
        """Callers write by themselves."""
        self.sync_each = sync_each
        self.threaded = False
        self.parked = False
        """The thread waits to be told of the next row."""
        self.opened = Event()
        """The first segment's header and the rows before it are written, or the first try has failed."""
        self.described = Event()
        """The `system` record was handed over."""
        self.done = Event()
        """All rows are on the disk and the last segment is closed."""
        self._ring = ring
        self._warner = warner
        self._describe: Callable[[], list[bytes]] | None = describe
        self._description: list[bytes] = []
        self._inline_by = 0
        self._last_alive = monotonic()
        self._last_row = monotonic()
        self._last_seq = 0
        self._bell = Bell()
        self._sync_wanted = False
        self._closing = False
        self._ending = False

    def start(self) -> None:
        """Start the thread, and where callers write themselves, open the first segment. Without a thread, they do."""
        if self.inline:
            self._write_inline()
            self.opened.set()
        thread = Thread(target=self._loop, name="gapless-writer", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.inline = True
            self._warner.warn("thread", f"no writer thread ({error}): log() writes by itself")
            self._write_inline()
            self.opened.set()
        else:
            self.threaded = True

    def nudge(self) -> None:
        """Called after a row was handed over: write it here, or wake the thread if it is parked."""
        if self.inline:
            self._write_inline()
        if self.parked:
            self._bell.ring()

    def sync(self) -> None:
        """Ask for a sync."""
        self._sync_wanted = True
        self._bell.ring()

    def close(self) -> None:
        """Ask for the system's description now if it was not given; `described` tells."""
        self._closing = True
        self._bell.ring()

    def end(self) -> None:
        """Ask for everything that was handed over to be written and synced; `done` tells."""
        self._ending = True
        self._bell.ring()

    def turn_inline(self) -> bool:
        """One turn of a writer that has no thread; True when all is done."""
        self._sync_wanted = True
        with suppress(Exception):  # as in the thread: whatever it is, the caller goes on
            return self._turn()
        return False

    def _write_inline(self) -> None:
        """Write what is in the ring, and sync it where each row is to be; a disk in trouble is left to the thread."""
        me = get_ident()
        if self._inline_by == me:  # a signal handler that logs while its own thread writes
            return
        journal = self.journal
        with journal.lock:
            self._inline_by = me  # at once: no handler can come between the lock and this
            try:
                journal.drain()
                if self.sync_each:
                    journal.sync()
                if not self.threaded:
                    journal.trim()
                elif journal.is_crowded(0.75):
                    journal.make_room()
            finally:
                self._inline_by = 0

    def _loop(self) -> None:
        while True:
            try:
                if self._turn():
                    return
                self._wait()
            except Exception as error:  # noqa: BLE001  # the turn of a daemon: whatever it is, rows must go on
                self._warner.warn("turn", f"the writer met {type(error).__name__}: {error}; it goes on")
                self._bell.wait(LAST_BACKOFF_S)

    def _turn(self) -> bool:
        """Do what is due; True when all is done."""
        now = monotonic()
        journal, ring = self.journal, self._ring
        with journal.lock:
            journal.drain()
        self.opened.set()
        if self._sync_due(now):
            self._sync_wanted = False
            self._sync_now()
        if journal.owed is not None and ring.offer("gap", journal.owed, always=True):
            journal.owed = None
        if journal.written >= ring.last.number:
            ring.close_gap()
        self._say_system()
        due = now - self._last_alive >= ALIVE_S and journal.is_open and not self._closing
        if due and ring.offer("alive", b"{}"):
            self._last_alive = now
        return self._ending and self._end()

    def _sync_due(self, now: float) -> bool:
        journal = self.journal
        if not journal.is_open or journal.synced >= journal.written:
            if not self._ring.inbox:
                self._sync_wanted = False
            return False
        return self._sync_wanted or self._closing or now - journal.last_sync >= SYNC_S or journal.is_crowded(0.5)

    def _sync_now(self) -> None:
        if not self.sync_each:
            self.journal.sync_beside()
            return
        with self.journal.lock:  # callers sync too: one at a time, or one of them may miss an error
            self.journal.sync()
            self.journal.trim()

    def _say_system(self) -> None:
        if self._ending:  # the disk hung so long that the `finish` record, which is the last, came first
            return
        if self._describe is not None:
            self._description = self._describe()
            self._describe = None
        while self._description and self._ring.offer("system", self._description[0]):
            del self._description[0]
        if not self._description:
            self.described.set()

    def _end(self) -> bool:
        journal, last = self.journal, self._ring.last
        if journal.owed is not None or last.gap is not None or journal.synced < last.number or self._ring.inbox:
            return False
        with journal.lock:
            journal.close()
        self.done.set()
        return True

    def _wait(self) -> None:
        now = monotonic()
        journal = self.journal
        if self._ring.last.seq != self._last_seq:
            self._last_seq = self._ring.last.seq
            self._last_row = now
        if self._closing:
            sleep(max(0.001, journal.retry_at - now))
            return
        if journal.failing:
            self._bell.wait(max(0.001, journal.retry_at - now))
            return
        due = self._last_alive + ALIVE_S
        if journal.synced < journal.written:
            due = min(due, journal.last_sync + SYNC_S)
        if not self.inline and now - self._last_row < BUSY_S:
            due = min(due, self._last_row + BUSY_S)
            while True:  # at least once: rows of a few milliseconds go out in one write
                self._bell.wait(POLL_S)
                if self._has_work() or monotonic() >= due:
                    return
        # Callers that write themselves need the thread for the sync only, and here it is due soon without them.
        self.parked = not self.inline or journal.synced >= journal.written
        # A row handed over before the line above was seen by nobody: look once more.
        if not self._has_work():
            self._bell.wait(max(0.001, due - now))
        self.parked = False

    def _has_work(self) -> bool:
        return bool(self._ring.inbox or self._closing or self._sync_wanted or self._description)
