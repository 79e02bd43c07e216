"""What is due when: keys by time, each once. Not thread safe."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Agenda(Generic[K]):
    """A queue by time. To set a key again replaces its time."""

    def __init__(self) -> None:
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._count = count()

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: K) -> bool:
        return key in self._due

    def set(self, key: K, due: float) -> None:
        """`key` is due at `due`, and at no other time."""
        if self._due.get(key) == due:
            return
        self._due[key] = due
        heappush(self._heap, (due, next(self._count), key))
        if len(self._heap) > 64 + 4 * len(self._due):
            self._heap = [(at, next(self._count), held) for held, at in self._due.items()]
            heapify(self._heap)

    def drop(self, key: K) -> None:
        """`key` is not due any more."""
        self._due.pop(key, None)

    def next_due(self) -> float:
        """When the first key is due; infinity when there is none."""
        while self._heap:
            due, _, key = self._heap[0]
            if self._due.get(key) == due:
                return due
            heappop(self._heap)
        return float("inf")

    def pop(self, now: float) -> K | None:
        """The key that is due longest, taken off; None when none is due at `now`."""
        if self.next_due() > now:
            return None
        key = heappop(self._heap)[2]
        del self._due[key]
        return key
