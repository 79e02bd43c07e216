"""Where a pipeline stands in its run: a reader and the history of what it read, at a cursor that was saved.

After a start both are made anew: from a snapshot where there is one, and read up to the cursor. What cannot be read any
more is taken from what the progress keeps of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless_uploader.history import History
from gapless_uploader.intervals import Intervals
from gapless_uploader.reader import Cursor, RunReader
from gapless_uploader.sink import Retryable, RunView
from gapless_uploader.spool import RunKey
from gapless_uploader.steps import Files
from gapless_uploader.tail import DecodeLines


class Position:
    """A run's reader and history on their way to a cursor; at the run's beginning at first."""

    def __init__(self, key: RunKey, kind: str, grace_s: float, decode_lines: DecodeLines) -> None:
        self._key, self._kind, self._grace_s, self._decode_lines = key, kind, grace_s, decode_lines
        self._begin()

    def _begin(self) -> None:
        self.history = History(RunView(self._key[0], self._key[1], 0.0, ""), self._kind)
        self.reader = RunReader(None, self._grace_s, self._decode_lines)

    def restore(self, snapshot: dict[str, Any], files: Files) -> None:
        """Stand where the snapshot was made; one that does not fit is left alone."""
        self.reader = RunReader(snapshot["cursor"], self._grace_s, self._decode_lines)
        self.reader.meet({name: header for name, header in files.headers.items() if name in snapshot["cursor"]})
        try:
            self.history.restore(snapshot["history"], files.headers, self.reader.seen())
        except (LookupError, TypeError, ValueError):
            self._begin()

    def go_to(
        self, cursor: Cursor, files: Files, now: float, attempts: dict[str, Any] | None, firsts: dict[str, int]
    ) -> None:
        """Read up to `cursor`; what was read makes no operations. `attempts` and `firsts`: `History.compact` and
        `History.unread` of that place.

        Raises OSError, and Retryable where files are gone of which nothing was kept.
        """
        self._read(cursor, files, now, firsts, keeps=False)
        self.history.operations.clear()
        missing = _missing(self.reader, cursor)
        if missing and attempts is None:
            raise Retryable(f"{len(missing)} attempts that were uploaded before cannot be read again: files are gone")
        # One of which nothing was read yet may supersede others all the same.
        unread = {name: Intervals() for name in cursor if name not in self.reader.attempts}
        if attempts is not None and (missing or unread):
            self.history.adopt(attempts, {**unread, **missing})
        self._stand_at(cursor, files)

    def read_on(self, end: Cursor, files: Files, now: float, firsts: dict[str, int]) -> None:
        """Read up to `end`, the end of a batch that was made when `firsts` was `History.unread`.

        Raises OSError, and Retryable where not all of it is there.
        """
        self._read(end, files, now, firsts, keeps=True)
        if _missing(self.reader, end):
            raise Retryable("a batch that was being sent cannot be read again: its segments are out of sight")
        self._stand_at(end, files)

    def _read(self, cursor: Cursor, files: Files, now: float, firsts: dict[str, int], keeps: bool) -> None:
        known = Files({n: h for n, h in files.headers.items() if n in cursor}, files.paths, files.sizes)
        self.reader.meet(known.headers)
        self.reader.bound(cursor)
        meet(self.reader, self.history, known, now, firsts)
        self._feed(files, now, keeps)
        missing = _missing(self.reader, cursor)
        for name, seen in missing.items():
            if name in self.reader.attempts:
                self.reader.attempts[name].want(seen)
        if missing:
            self._feed(files, now, keeps)

    def _feed(self, files: Files, now: float, keeps: bool) -> None:
        for attempt_id, taken in self.reader.read(files.paths, files.sizes, now, 1 << 62):
            self.history.feed(attempt_id, taken, files.paths)
            if not keeps:
                self.history.operations.clear()

    def _stand_at(self, cursor: Cursor, files: Files) -> None:
        """A reader at exactly `cursor`, whose seqs the history shares."""
        self.reader = RunReader(cursor, self._grace_s, self._decode_lines)
        self.reader.meet({name: header for name, header in files.headers.items() if name in cursor})
        for name, attempt in self.history.attempts.items():
            if name in self.reader.attempts:
                attempt.seen = self.reader.attempts[name].seen


def meet(
    reader: RunReader, history: History, files: Files, now: float, firsts: Mapping[str, int] | None = None
) -> None:
    """Let both know of attempts that are new, and of first steps that are. Raises OSError.

    `firsts`: the first steps that were known when what is read now was read before, so that it comes to the same.
    """
    new = reader.meet(files.headers)
    for header in new:
        if header.attempt_id in history.attempts:
            history.attempts[header.attempt_id].seen = reader.attempts[header.attempt_id].seen
    has_changed = bool(new)
    for name, header in files.headers.items():
        attempt, read = history.attempts.get(name), reader.attempts[name]
        if attempt is not None and (attempt.first_step is not None or attempt.seen):
            continue
        first_step: int | None = None
        if firsts is not None:
            first_step = firsts.get(name)
        elif attempt is None or not read.idle(files.sizes.get(name, {})):
            first_step = reader.first_step(name, files.paths, now)
        if attempt is None or first_step is not None:
            history.meet(header, read.seen, first_step)
            has_changed = True
    if has_changed:
        history.apply_limits(files.paths)


def is_read(place: dict[str, Any] | None, sizes: Mapping[int, int]) -> bool:
    """Whether an attempt's `place` in a cursor lies at the ends of its segments, known without reading."""
    if place is None:
        return not sizes
    ends = {segment: offset for segment, offset, _ in place["open"]}
    return all(ends.get(index, size if index < place["next"] else -1) == size for index, size in sizes.items())


def seqs_of(cursor: Cursor) -> dict[str, list[list[int]]]:
    """What was read at `cursor`, said without files."""
    return {name: place["seen"] for name, place in cursor.items()}


def _missing(reader: RunReader, cursor: Cursor) -> dict[str, Intervals]:
    """Attempts of which not all could be read that `cursor` says was read -> their seqs."""
    seen = reader.seen()
    return {
        name: Intervals(at["seen"])
        for name, at in cursor.items()
        if at["seen"] != (seen[name].to_json() if name in seen else [])
    }
