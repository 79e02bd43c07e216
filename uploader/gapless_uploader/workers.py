"""The workers of one sink: daemon threads, at most so many calls at once, each with a time limit.

1. `start` runs a call in a thread of its own; `take` hands out what finished. Nothing here waits.
2. A call that runs over its limit is `overdue` once. From then on it is no longer one of the sink's workers, so the
   sink's other runs go on; its late result is still taken.
3. With `max_stuck` such calls the sink has no room until one of them returns: a dead tracker holds a few threads.

Threads are daemons: a call that never returns does not keep the process alive. Only one thread uses a `Workers`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from gapless_uploader.options import CALL_TIMEOUT_S

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MAX_STUCK = 4


class DaemonThreads(Executor):
    """Starts a daemon thread where none is idle; at most `keep` idle ones wait for the next call."""

    def __init__(self, keep: int, name: str = "worker") -> None:
        self._keep = keep
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def submit(self, fn: Callable[..., T], /, *args: object, **kwargs: object) -> Future[T]:
        """Run the call at once, in an idle thread or a new one."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whoever takes the result gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            start = self._idle == 0
            if not start:
                self._idle -= 1
        self._calls.put(call)
        if start:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let idle threads go. Waits for nobody: a call that hangs would never let it."""
        del wait, cancel_futures
        with self._lock:
            self._keep = 0
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread holds no run's memory
            with self._lock:
                if self._idle >= self._keep:
                    return
                self._idle += 1


@dataclass(slots=True)
class _Call(Generic[T]):
    future: Future[T]
    began: float
    stuck: bool = False


class Workers(Generic[K, T]):
    """Calls of one sink, by key. At most one call a key."""

    def __init__(
        self,
        size: int,
        call_timeout_s: float = CALL_TIMEOUT_S,
        max_stuck: int = MAX_STUCK,
        executor: Executor | None = None,
        name: str = "worker",
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_end` is called with the end of each call, in its thread."""
        self.size = size
        self.call_timeout_s = call_timeout_s
        self._max_stuck = max_stuck
        self._executor = executor or DaemonThreads(size, name)
        self._on_end = on_end
        self._calls: dict[K, _Call[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._calls

    def __len__(self) -> int:
        return len(self._calls)

    def keys(self) -> list[K]:
        """Of the calls on their way, stuck ones included."""
        return list(self._calls)

    @property
    def stuck(self) -> int:
        """Calls on their way that ran over the limit."""
        return sum(call.stuck for call in self._calls.values())

    @property
    def parked(self) -> bool:
        """Whether so many calls are stuck that no more is started."""
        return self.stuck >= self._max_stuck

    @property
    def has_room(self) -> bool:
        """Whether one more call may start."""
        stuck = self.stuck
        return stuck < self._max_stuck and len(self._calls) - stuck < self.size

    def start(self, key: K, now: float, fn: Callable[..., T], *args: Any) -> None:
        """Run `fn(*args)` for `key`, which has no call on its way."""
        if key in self._calls:
            raise RuntimeError(f"{key!r} has a call on its way")
        future = self._executor.submit(fn, *args)
        self._calls[key] = _Call(future, now)
        future.add_done_callback(lambda _: self._on_end())

    def overdue(self, now: float, limit_s: float | None = None) -> list[K]:
        """Keys whose call ran over the limit since this was last asked; they are stuck from now on."""
        limit = self.call_timeout_s if limit_s is None else limit_s
        found = []
        for key, call in self._calls.items():
            if not call.stuck and now - call.began >= limit and not call.future.done():
                call.stuck = True
                found.append(key)
        return found

    def take(self) -> list[tuple[K, T]]:
        """What finished, late ones included. Raises what a call raised."""
        finished = [key for key, call in self._calls.items() if call.future.done()]
        return [(key, self._calls.pop(key).future.result()) for key in finished]

    def shutdown(self) -> None:
        """Let idle threads go; calls on their way end with the process."""
        self._executor.shutdown(wait=False, cancel_futures=True)
