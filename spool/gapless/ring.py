"""The rows between the callers of `log` and the writer.

Callers append under a lock among themselves; whoever writes takes rows out without it, so a caller never waits for
a disk. An interrupt (KeyboardInterrupt, or a signal handler that logs) may come between any two steps of a caller;
rows are therefore immutable, every total is part of the row, and a row is announced (`_pending`), handed over, then
confirmed (`_last`). A row whose confirmation is missing is handed over again, and the taker skips repeats by seq.

When the ring is full, new rows are dropped. They use up their seqs, and one `gap` record follows where the hole ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from threading import RLock
from time import monotonic, time
from typing import Any, Final, NamedTuple

import orjson

from gapless_schemas import MAX_STEP, encode_record, encode_row

AUTO: Final = -1
"""In place of a step: the next one."""


class Gap(NamedTuple):
    """Dropped rows, adjacent in seq."""

    rows: int
    first_seq: int
    last_seq: int
    low_step: int | None
    high_step: int | None
    reason: str

    def data(self) -> bytes:
        steps = None if self.low_step is None else [self.low_step, self.high_step]
        return orjson.dumps(
            {"rows": self.rows, "ranges": [[self.first_seq, self.last_seq]], "steps": steps, "reason": self.reason}
        )


class Late(NamedTuple):
    """A line that is finished when it is written: its payload has to be stored first, or its step is relative."""

    t: float
    mono: float
    kind: str
    step: int | None
    floating: bool
    data: bytes
    marks: bytes | None
    payload: Payload | None
    skip_sinks: bytes | None


class Payload:
    """What a row refers to: stored before the row's line is written."""

    size: int = 0
    """Memory held, in bytes."""
    failed: Sequence[str] = ()
    """Why parts of it could not be stored, after `store`."""

    def store(self, put: Callable[..., str]) -> bytes:
        """Store the payload with `put` and return the line's data. Raises OSError when the disk does."""
        raise NotImplementedError


class Row(NamedTuple):
    """One row, with the totals up to and including it."""

    seq: int
    number: int
    """Rows kept since the attempt began; dropped ones are not counted."""
    end: int
    """Their bytes."""
    next_step: int
    floating: bool
    """Steps without a number count from the predecessor's last one, which is not read yet."""
    own: bool
    """This attempt has a step of its own."""
    line: bytes | None
    late: Late | None
    gap: Gap | None
    """Set in the last dropped row of a hole that has no `gap` record yet."""


_new: Final = tuple.__new__
"""As `Row(...)`, without a Python call."""


class Ring:
    """Bounded in rows and bytes; `append` never blocks on the taker."""

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self.inbox: deque[Row] = deque()
        self.released = (0, 0)
        """Number and bytes up to the last row that nobody holds any more. Only the taker sets it."""
        self.base_step: int | None = None
        """The first step without a number; None until the predecessor was read."""
        self.dropped = 0
        self.began = monotonic()
        self.reason = "the disk did not take rows and the ring was full"
        self._lock = RLock()
        self._pending = self._last = Row(0, 0, 0, 0, True, False, None, None, None)

    @property
    def last(self) -> Row:
        return self._last

    @property
    def size_bytes(self) -> int:
        return self._last.end - self.released[1]

    def append_plain(self, step: int, data: dict[str, Any], t: float | None) -> bool:
        """Hand over one row of plain values, the short way; False, and nothing done, where anything is out of the way.

        This stands in the training's way at every `log`, so it calls as little as it can.
        """
        with self._lock:
            last = self._last
            if last.floating or last.gap is not None or self._pending is not last:
                return False
            if step == AUTO:
                step = last.next_step
                if step > MAX_STEP:
                    return False
            next_step = last.next_step if last.own and last.next_step > step else step + 1
            line = encode_row(last.seq + 1, time() if t is None else t, monotonic() - self.began, step, data)
            if line is None:
                return False
            number, end = self.released
            new_end = last.end + len(line)
            if new_end - end > self.max_bytes or last.number - number >= self.max_rows:
                return False
            row = _new(Row, (last.seq + 1, last.number + 1, new_end, next_step, False, True, line, None, None))
            # As in `_hand_over`: between this comparison and the next line no signal handler runs.
            if self._last is not last:
                return False
            self._pending = row
            self.inbox.append(row)
            self._last = self._pending
            return True

    def append(
        self,
        kind: str,
        step: int | None,
        data: bytes,
        marks: bytes | None = None,
        *,
        t: float | None = None,
        payload: Payload | None = None,
        skip_sinks: bytes | None = None,
        always: bool = False,
    ) -> int | None:
        """Hand over one row and return its step, to be given for other rows of the same step; None where it has none.

        While the first step is not known the step returned is a negative stand-in. A row that does not fit is dropped
        and counted; `always` makes it fit.
        """
        with self._lock:
            while True:
                last = self._settled()
                floating = last.floating and self.base_step is None
                next_step = last.next_step
                if last.floating and not floating:
                    next_step += self.base_step or 0
                relative = False
                own = last.own
                if step is not None:
                    if step <= AUTO:
                        actual: int | None = next_step
                        if step < AUTO:  # a stand-in
                            actual = AUTO - 1 - step + (0 if floating else self.base_step or 0)
                        next_step = max(next_step, (actual or 0) + 1)
                        relative = floating
                    else:
                        actual = step
                        next_step = step + 1 if not own or floating else max(next_step, step + 1)
                        floating = False
                    own = True
                else:
                    actual = None
                told = AUTO - 1 - actual if relative and actual is not None else actual
                now = time() if t is None else t
                mono = monotonic() - self.began
                if last.gap is not None:
                    # A hole ends when the ring is well below its limits: not at the first row that is small enough.
                    if not always and not self._has_room(last, len(data), 0.75):
                        self._drop(last, actual, next_step, floating, own)
                        return told
                    self._hand_over(last, self._gap_row(last, now, mono))
                    continue
                seq = last.seq + 1
                if relative or payload is not None:
                    late = Late(now, mono, kind, actual, relative, data, marks, payload, skip_sinks)
                    line = None
                    size = len(data) + (payload.size if payload is not None else 0)
                else:
                    late = None
                    line = encode_record(seq, now, mono, kind, actual, data, marks, skip_sinks)
                    size = len(line)
                if not always and not self._has_room(last, size, 1.0):
                    self._drop(last, actual, next_step, floating, own)
                    return told
                row = Row(seq, last.number + 1, last.end + size, next_step, floating, own, line, late, None)
                if self._hand_over(last, row):
                    return told

    def offer(self, kind: str, data: bytes, *, always: bool = False) -> bool:
        """Hand over one row without a step, unless another thread is appending; whether it was. For the taker alone.

        The taker never waits for a caller: that one may have been interrupted by a handler that waits for the taker.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self.append(kind, None, data, always=always)
        finally:
            self._lock.release()
        return True

    def close_gap(self) -> None:
        """Hand over the `gap` record of a hole that nothing followed, unless another thread is appending."""
        if self._last.gap is None or not self._lock.acquire(blocking=False):
            return
        try:
            last = self._settled()
            if last.gap is not None:
                self._hand_over(last, self._gap_row(last, time(), monotonic() - self.began))
        finally:
            self._lock.release()

    def _settled(self) -> Row:
        if self._pending is not self._last:
            if self._pending.gap is None:
                self.inbox.append(self._pending)
            self._last = self._pending
        return self._last

    def _hand_over(self, last: Row, row: Row) -> bool:
        # Between this comparison and the next line no signal handler runs: the interpreter looks for one after calls.
        if self._last is not last:
            return False
        self._pending = row
        self.inbox.append(row)
        self._last = self._pending
        return True

    def _has_room(self, last: Row, size: int, share: float) -> bool:
        number, end = self.released
        used = last.end - end
        # A payload that is larger than the ring itself passes while the ring is nearly empty.
        fits = used + size <= self.max_bytes * share or used <= self.max_bytes // 4
        return fits and last.number - number < self.max_rows * share

    def _drop(self, last: Row, step: int | None, next_step: int, floating: bool, own: bool) -> None:
        seq = last.seq + 1
        hole = last.gap or Gap(0, seq, seq, None, None, self.reason)
        low, high = hole.low_step, hole.high_step
        if step is not None:
            low = step if low is None else min(low, step)
            high = step if high is None else max(high, step)
        gap = Gap(hole.rows + 1, hole.first_seq, seq, low, high, hole.reason)
        row = Row(seq, last.number, last.end, next_step, floating, own, None, None, gap)
        if self._last is last:
            self._pending = row
            self._last = self._pending
            self.dropped += 1

    def _gap_row(self, last: Row, t: float, mono: float) -> Row:
        assert last.gap is not None  # noqa: S101  # the callers looked
        seq = last.seq + 1
        line = encode_record(seq, t, mono, "gap", None, last.gap.data())
        return Row(
            seq, last.number + 1, last.end + len(line), last.next_step, last.floating, last.own, line, None, None
        )
