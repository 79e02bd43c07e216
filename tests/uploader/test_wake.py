"""The loop's wake-up may be set from a signal handler, in the very thread that waits."""

from __future__ import annotations

import os
import signal
import threading

from gapless_uploader.wake import Wake


def test_set_ends_a_wait():
    """A wait ends when it is set, before or meanwhile, and says whether it was."""
    wake = Wake()
    assert not wake.wait(0.0)
    wake.set()
    wake.set()

    assert wake.is_set()
    assert wake.wait(0.0)
    assert not wake.wait(0.0)


def test_clear_forgets():
    """What was set and cleared ends no wait."""
    wake = Wake()
    wake.set()
    wake.clear()

    assert not wake.is_set()
    assert not wake.wait(0.0)


def test_a_signal_handler_may_set_it():
    """A thousand signals that come whenever they like never stop the waiting thread."""
    wake, handled = Wake(), 0

    def handle(number: int, frame: object) -> None:
        nonlocal handled
        handled += 1
        wake.set()

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, handle)
    done = threading.Event()

    def shower() -> None:
        while not done.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            os.sched_yield()

    sender = threading.Thread(target=shower)
    sender.start()
    try:
        while handled < 1_000:
            wake.wait(1.0)
            wake.clear()
    finally:
        done.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
