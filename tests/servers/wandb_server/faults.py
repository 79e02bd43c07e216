"""Faults that a test arms at an endpoint, each played at most `count` times.

An endpoint is matched by shell pattern against the request's name: `file_stream`, `storage` (media and artifact
bytes), `debug` never, and for GraphQL both `graphql` and the operation's own name (`UpsertBucket`, `RunResumeStatus`).
A fault comes before the request takes effect or after it did; the second kind is the lost acknowledgement.
"""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["status", "reset", "hang", "delay", "drip", "html", "truncated", "cut", "half"]
KINDS = ("status", "reset", "hang", "delay", "drip", "html", "truncated", "cut", "half")


@dataclass
class Fault:
    """One armed fault. Thread-safe through the lock of the `Faults` that holds it."""

    endpoint: str
    """Shell pattern of the endpoint's name."""
    kind: Kind
    """`status`: that status and `body`. `reset`: RST. `hang`: no answer until released, then the connection closes.
    `delay`: the true answer, late. `drip`: the true answer byte by byte. `html`: 200 and a page. `truncated`: the
    true answer's first half as a whole response. `cut`: the connection closes within the body. `half`: the first
    `lines` history lines are stored and nothing else of the request, then `status`."""
    when: Literal["before", "after"] = "before"
    """Whether the request takes effect: not at all (`delay`: later), or before the fault is played."""
    count: int | None = 1
    """How many requests are hit; None for all until disarmed."""
    skip: int = 0
    """How many matching requests pass first."""
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: str | None = None
    seconds: float | None = None
    """`hang`, `delay`, `drip`: the longest they last; None until released."""
    lines: int = 0
    """`half`: history lines that are stored."""
    run: str | None = None
    """Only requests that name this run id."""
    min_bytes: int = 0
    """Only requests with a body of at least so many bytes, as sent."""
    predicate: Callable[[Any], bool] | None = None
    """Only requests for which this is true; in-process servers only."""
    hits: int = 0
    hit: threading.Event = field(default_factory=threading.Event)
    """Set when a request is hit for the first time."""
    played: threading.Event = field(default_factory=threading.Event)
    """Set when a request was played with to its end, a late effect included."""
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}, not one of {', '.join(KINDS)}")
        if self.kind == "half" and (self.endpoint != "file_stream" or self.when == "after"):
            raise ValueError("half a batch is stored at file_stream alone, and has no whole effect to come after")
        if self.kind in ("drip", "truncated", "cut"):
            self.when = "after"  # they are ways to lose a true answer, so there has to be one

    def release(self) -> None:
        """End the hang, delay or drip of every request that is held now or later."""
        self.released.set()

    def matches(self, request: Any) -> bool:
        return (
            any(fnmatch.fnmatchcase(name, self.endpoint) for name in request.names)
            and (self.run is None or request.run_id == self.run)
            and request.num_bytes >= self.min_bytes
            and (self.predicate is None or self.predicate(request))
        )


class Faults:
    """The armed faults of a server, oldest first; a request is hit by one at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: list[Fault] = []
        self._all: list[Fault] = []

    def arm(self, fault: Fault) -> Fault:
        with self._lock:
            self._armed.append(fault)
            self._all.append(fault)
        return fault

    def disarm(self) -> None:
        """Forget every fault and let go of every request that one holds."""
        with self._lock:
            self._armed.clear()
            for fault in self._all:
                fault.release()
            self._all.clear()

    def hits(self) -> list[dict[str, Any]]:
        """Endpoint, kind and hits of every fault armed since the last `disarm`, in the order of arming."""
        with self._lock:
            return [{"endpoint": f.endpoint, "kind": f.kind, "hits": f.hits} for f in self._all]

    def take(self, request: Any) -> Fault | None:
        """The fault that this request is hit by, counted; None for most."""
        if not self._armed:
            return None
        with self._lock:
            for fault in self._armed:
                if not fault.matches(request):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.hits += 1
                fault.hit.set()
                if fault.count is not None and fault.hits >= fault.count:
                    self._armed.remove(fault)
                return fault
        return None
