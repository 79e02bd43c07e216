"""Wakes one waiting thread. `threading.Event` would not do: a handler that calls `set` inside a `set` deadlocks."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock


class Bell:
    """Anybody may `ring` at any moment, also a signal handler inside another `ring`. One thread waits."""

    def __init__(self) -> None:
        self._silent = Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """End the present wait, or the next one."""
        with suppress(RuntimeError):  # it rings already
            self._silent.release()

    def wait(self, timeout_s: float) -> None:
        """Return when it was rung since the last wait, or after `timeout_s`."""
        self._silent.acquire(timeout=timeout_s)
