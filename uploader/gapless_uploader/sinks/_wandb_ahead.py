"""A session's first request, which W&B took: `wandb.Api` is asked to show it while later requests are sent.

The answer is waited for by nobody but who needs it. All sessions of a process share one thread for their questions,
since they are answered one after the other anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from gapless_uploader.sinks._wandb_proof import Proof


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
    """Calls in their order, in a thread that is started with the first. Thread safe."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[dict[str, Any]], Callable[[], dict[str, Any]]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def ask(self, call: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
        """The call's result, or what it raises, when it is there; may be cancelled before it is its turn."""
        answer: Future[dict[str, Any]] = Future()
        self._calls.put((answer, call))
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="wandb read-back", daemon=True)
                self._thread.start()
        return answer

    def _run(self) -> None:
        while True:
            answer, call = self._calls.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(call())
            except BaseException as error:  # noqa: BLE001 - whoever waits for the answer gets it
                answer.set_exception(error)
            del answer, call


ASKER = Asker()
"""Shared by all sessions of this process."""
