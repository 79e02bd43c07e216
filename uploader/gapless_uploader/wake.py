"""What the loop waits on: set by file events' threads and by signal handlers."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Wake:
    """As `threading.Event`, but `set` may be called from a signal handler.

    A handler runs in the thread that waits, and an Event's `set` would wait for the lock that this thread holds;
    `SimpleQueue.put` is reentrant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """End a wait, the running one or the next."""
        if self._queue.empty():
            self._queue.put(None)

    def is_set(self) -> bool:
        """Whether the next wait would end at once."""
        return not self._queue.empty()

    def wait(self, timeout_s: float) -> bool:
        """Wait for `set`, at most so long; whether it came. It counts as seen."""
        try:
            self._queue.get(timeout=timeout_s)
        except Empty:
            return False
        return True

    def clear(self) -> None:
        """Forget what was set."""
        with suppress(Empty):
            while True:
                self._queue.get_nowait()
