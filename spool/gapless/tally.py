"""What was written, refused and lost: the numbers that `Run.stats` gives."""

from __future__ import annotations

from dataclasses import dataclass

from gapless.warn import Warner


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one attempt, at one moment."""

    written: int = 0
    """Records that are in a segment."""
    synced: int = 0
    """Records that are on the disk for certain."""
    queued: int = 0
    """Records that wait in memory to be written."""
    dropped: int = 0
    """Records lost because the ring was full; each is named in a `gap` record."""
    refused: int = 0
    """Values that have no place in the spool."""
    clashes: int = 0
    """Values whose key another value of the same row or config has."""
    bad_steps: int = 0
    """Rows kept without a step, because theirs was none."""
    late: int = 0
    """Calls after `finish`."""
    forked: int = 0
    """Calls in a child process that did not open the run."""
    failing: bool = False
    """The disk takes no rows at this moment."""


class Tally:
    """Counts what could not be kept as it was given, and warns about it. Thread safe, give or take one."""

    def __init__(self, warner: Warner) -> None:
        self.refused = 0
        self.clashes = 0
        self.bad_steps = 0
        self.late = 0
        self.forked = 0
        self._warner = warner

    def report(self, counter: str, topic: str, text: str) -> None:
        """Count under `counter`, and print `text` as often as its topic may be."""
        setattr(self, counter, getattr(self, counter) + 1)
        self._warner.warn(topic, text)
