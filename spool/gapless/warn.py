"""Warnings that never raise: one line on stderr, the first time at once, then every 30 s with a count.

Not `warnings` (an error under `-W error`) and not `logging` (a user's handler may raise, block or log to the run).
"""

from __future__ import annotations

import sys
from contextlib import suppress
from time import monotonic

REPEAT_S = 30.0
MAX_TOPICS = 1000
"""Topics can hold metric names; beyond this many they share one."""


class Warner:
    """The warnings of one run, by topic. Thread safe."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int]] = {}
        self.quiet = False
        """Set at interpreter exit: a daemon thread that then writes to stderr could abort the process."""

    def warn(self, topic: str, text: str) -> None:
        """Print `text`, unless the topic was printed within the last 30 s; then count it for the next time."""
        # No lock: a handler that warns inside a warning must not wait for it. Two threads may print a line twice.
        if topic not in self._seen and len(self._seen) >= MAX_TOPICS:
            topic = "other"
        now = monotonic()
        last, unsaid = self._seen.get(topic, (now - REPEAT_S, 0))
        if now - last < REPEAT_S:
            self._seen[topic] = (last, unsaid + 1)
            return
        self._seen[topic] = (now, 0)
        self.say(f"{text} ({unsaid} more since the last time)" if unsaid else text)

    def warn_once(self, topic: str, text: str) -> None:
        """Print `text` the first time only."""
        if topic not in self._seen:
            self.warn(topic, text)

    def say(self, text: str) -> None:
        """Print `text` now."""
        if self.quiet:
            return
        # Whatever stands in for stderr may be closed or of the user's own making.
        with suppress(Exception):
            sys.stderr.write(f"gapless: {text}\n")
