"""The loop around the turns: wake-ups by file events, a clean stop by a signal.

Events are hints: each marks what is to be looked at first, and wakes the loop. The scan alone finds everything, so
disks where no event ever comes (NFS, Lustre, GPFS, FUSE) only wait for the next scan.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from gapless_uploader import events
from gapless_uploader.events import Listener
from gapless_uploader.uploader import Uploader
from gapless_uploader.wake import Wake

if TYPE_CHECKING:
    from gapless_uploader.file_events import FileEvents

DEBOUNCE_S = 0.05
MAX_SLEEP_S = 1.0
BUSY_S = 0.05
"""While a step is on its way; its end wakes the loop."""


class Stop:
    """Whether a signal asked for the end. A second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._wake: Wake | None = None

    @contextmanager
    def listening(self, wake: Wake) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP set the flag while inside; the handlers before are put back.

        A SIGHUP that is ignored stays so: `nohup` means that a logout is not to end it.
        """
        self._wake = wake
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number).name
        if self._wake is not None:
            self._wake.set()


def watch(
    uploader: Uploader,
    listener: Listener,
    until: Callable[[Uploader, float], bool] = lambda uploader, now: False,  # noqa: ARG005
    on_turn: Callable[[float], None] = lambda now: None,  # noqa: ARG005
    use_events: bool = True,
) -> str | None:
    """Turn until a signal comes or `until` says so; the signal's name, if one came. Raises `Held` and OSError."""
    wake, stop = Wake(), Stop()
    hints: FileEvents | None = None
    uploader.on_step_end = wake.set
    with stop.listening(wake):
        try:
            if use_events:
                hints = _hints(listener, wake)
                hints.start(uploader.spool.paths)
            while stop.signal is None:
                now = time.monotonic()
                wake.clear()
                for path in hints.take() if hints is not None else ():
                    uploader.spool.hint(path)
                busy = uploader.turn(now)
                if hints is not None:
                    hints.compare(uploader.spool.unhinted, now)
                on_turn(now)
                if not busy and until(uploader, now):
                    break
                wait = BUSY_S if busy else min(uploader.next_due(now), MAX_SLEEP_S)
                if wake.wait(wait) and not busy and stop.signal is None:
                    time.sleep(DEBOUNCE_S)
            if stop.signal is not None:
                listener(events.Stopping(stop.signal))
        finally:
            if hints is not None:
                hints.stop()
            uploader.stop()
    return stop.signal


def _hints(listener: Listener, wake: Wake) -> FileEvents:
    from gapless_uploader.file_events import FileEvents  # watchdog, of which a replay has no use

    return FileEvents(listener, wake=wake)
