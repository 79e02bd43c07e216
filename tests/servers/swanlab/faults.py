"""Faults that a test arms: what goes wrong, at which endpoint, before or after the server stored, how often.

`before` means nothing was stored, `after` everything was, `half` the first half of a metrics request's rows.
The client sees the same in all three, which is the point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.servers.swanlab.http import Request

KINDS = ("status", "reset", "hang", "drip", "html", "truncated", "cut")
MOMENTS = ("before", "after", "half")


@dataclass
class Fault:
    """One armed fault.

    `status` answers with that code; `reset` breaks the connection; `hang` reads the request and answers
    nothing until `release` or `seconds` have gone by, then closes; `drip` sends the true answer a byte at a
    time, `seconds` apart; `html` is a captive portal's 200; `truncated` is a 200 whose JSON ends early; `cut`
    promises more bytes than it sends.
    """

    endpoint: str
    kind: str
    when: str = "before"
    count: int | None = 1
    skip: int = 0
    status: int = 500
    retry_after: str | None = None
    seconds: float | None = None
    contains: str | None = None
    where: Callable[[Request], bool] | None = None
    num_hits: int = 0
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.when not in MOMENTS:
            raise ValueError(f"when is one of {', '.join(MOMENTS)}, got {self.when!r}")
        if self.kind == "drip" and self.when != "after":
            raise ValueError("drip sends the true answer, so it is armed with when='after'")

    def matches(self, request: Request) -> bool:
        if not fnmatchcase(request.endpoint, self.endpoint):
            return False
        if self.contains is not None and self.contains.encode() not in request.body:
            return False
        return self.where is None or self.where(request)

    def release(self) -> None:
        """Lets every request that hangs on this fault go: its connection is closed without an answer."""
        self.released.set()


class Faults:
    """The armed faults, first armed first taken. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.armed: list[Fault] = []
        self.spent: list[Fault] = []

    def arm(self, endpoint: str, kind: str, **options: object) -> Fault:
        """Arms a fault at the endpoints that match the glob `endpoint`, for `count` requests (None: for ever).

        The first `skip` requests that match pass unharmed. `where` is a predicate on the request, `contains` a
        text that its body must hold.
        """
        fault = Fault(endpoint, kind, **options)  # type: ignore[arg-type]
        with self._lock:
            self.armed.append(fault)
        return fault

    def take(self, request: Request) -> Fault | None:
        """The fault that hits this request, counted down."""
        with self._lock:
            for fault in self.armed:
                if not fault.matches(request):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.num_hits += 1
                if fault.count is not None and fault.num_hits >= fault.count:
                    self.armed.remove(fault)
                    self.spent.append(fault)
                return fault
        return None

    def clear(self) -> None:
        """Disarms everything and releases what hangs."""
        with self._lock:
            for fault in self.armed + self.spent:
                fault.release()
            self.armed.clear()
