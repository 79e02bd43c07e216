"""A session's first request, which W&B took: `wandb.Api` is asked to show it while later requests are sent.

The answer is waited for by nobody but who needs it. All sessions of a process share a few threads for their
questions, as many as are answered at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from gapless_uploader.sinks._wandb_proof import Proof
from gapless_uploader.sinks._wandb_reader import LOOKS_AT_ONCE


@dataclass(slots=True)
class Ahead:
    """What later requests run ahead of."""

    proof: Proof
    lines: list[str]
    offset: int
    """Of the first of the lines."""
    summary: str
    """Of the newest request, in case the lines have to be sent again."""
    answer: Future[dict[str, Any]]


class Asker:
    """Calls, begun in their order, each in a thread; one is started where all are busy. Thread safe."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[dict[str, Any]], Callable[[], dict[str, Any]]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_open = 0
        self._num_threads = 0

    def ask(self, call: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """The call's result, or what it raises, when it is there; may be cancelled before it is its turn."""
        answer: Future[dict[str, Any]] = Future()
        self._calls.put((answer, call))
        with self._lock:
            self._num_open += 1
            starts = self._num_threads < min(self._num_open, LOOKS_AT_ONCE)
            self._num_threads += starts
        if starts:
            threading.Thread(target=self._run, name="wandb read-back", daemon=True).start()
        return answer

    def _run(self) -> None:
        while True:
            answer, call = self._calls.get()
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as error:  # noqa: BLE001 - whoever waits for the answer gets it
                    answer.set_exception(error)
            del answer, call
            with self._lock:
                self._num_open -= 1


ASKER = Asker()
"""Shared by all sessions of this process."""
