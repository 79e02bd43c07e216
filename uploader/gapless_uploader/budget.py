"""How many requests and bytes a sink may send: one token bucket per sink, shared by all its runs.

1. A bucket never gives more than its rate in any window of the rate's period, however long it was idle before.
2. The turn asks `wait_s` before it hands out a step, and hands out heartbeats first, then runs in turn: that is what
   makes the sharing fair. An admitted step holds one request in reserve.
3. A sink that makes several requests a step has an attribute `meter` and calls it before each of them, with the bytes
   it is about to send; `meter` waits until the bucket has one. For any other sink a step counts as one request, and
   as the bytes of spool that it read.
4. A request is never cut: bytes may put the bucket into debt, and the next step waits until it is paid.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gapless_uploader.sink import Misconfigured, Retryable

_PERIODS: Final = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "hour": 3600.0}
_BYTES: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_RATE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*/\s*([a-z]+)\s*", re.IGNORECASE)
_BANDWIDTH: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)\s*/\s*([a-z]+)\s*", re.IGNORECASE)
_BURST_SHARE: Final = 20


@dataclass(frozen=True, slots=True)
class Rate:
    """`amount` per `period_s` seconds."""

    amount: float
    period_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sink may use; None is without a limit."""

    requests: Rate | None = None
    bandwidth: Rate | None = None


def parse_rate(text: str) -> Rate:
    """`200/min`, `5/s`, `1000/h`. Raises Misconfigured."""
    found = _RATE.fullmatch(text)
    if found is None or found[2].lower() not in _PERIODS or not float(found[1]) >= 1.0:
        raise Misconfigured(f"rate is {text!r}; it is a number of requests, at least 1, and a time, as in '200/min'")
    return Rate(float(found[1]), _PERIODS[found[2].lower()])


def parse_bandwidth(text: str) -> Rate:
    """`1MB/s`, `512KiB/s`, `2GB/h`. Raises Misconfigured."""
    found = _BANDWIDTH.fullmatch(text)
    if found is None or found[3].lower() not in _PERIODS or not float(found[1]) > 0.0:
        raise Misconfigured(f"bandwidth is {text!r}; it is an amount of bytes and a time, as in '1MB/s'")
    return Rate(float(found[1]) * _BYTES[found[2].lower()], _PERIODS[found[3].lower()])


class Bucket:
    """Tokens that come at a steady rate. Not thread safe.

    A twentieth of the amount may come at once, and the rest is spread so that no window of `period_s`, its end left
    out, sees more than the amount.
    """

    def __init__(self, rate: Rate) -> None:
        self._burst = max(1.0, rate.amount // _BURST_SHARE)
        self._per_s = (rate.amount - self._burst + 1.0) / rate.period_s * (1 - 1e-9)
        self._tokens = self._burst
        self._at: float | None = None

    def wait_s(self, now: float, amount: float = 1.0) -> float:
        """Seconds until `amount` tokens are there; 0 when they are."""
        self._fill(now)
        missing = amount - self._tokens
        # A microsecond more than is needed: a wait that rounding made too short would be followed by one of nothing.
        return missing / self._per_s + 1e-6 if missing > 0.0 else 0.0

    def take(self, now: float, amount: float = 1.0) -> None:
        """Take tokens, into debt if need be."""
        self._fill(now)
        self._tokens -= amount

    def _fill(self, now: float) -> None:
        if self._at is not None and now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now if self._at is None else max(now, self._at)


class Budget:
    """One sink's buckets. `meter` is called from the sink's workers; the rest from the turn."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        """`pause` waits that many seconds in place of the budget's own event, for tests on a clock of their own."""
        self.limits = limits
        self._requests = Bucket(limits.requests) if limits.requests else None
        self._bytes = Bucket(limits.bandwidth) if limits.bandwidth else None
        self._clock = clock
        self._closing = threading.Event()
        self._pause = pause or self._closing.wait
        self._lock = threading.Lock()
        self._reserved = 0
        self._mine = threading.local()

    def wait_s(self, now: float) -> float:
        """Seconds until one more step may start; 0 when it may now."""
        with self._lock:
            return self._wait_s(now, 1 + self._reserved)

    def reserve(self) -> None:
        """A step starts: its first request is kept for it until `step` is over."""
        with self._lock:
            self._reserved += 1

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a reserved step, in the worker's thread."""
        self._mine.reserved = True
        try:
            yield
        finally:
            with self._lock:
                self._use_reserve()

    def meter(self, num_bytes: int = 0) -> None:
        """Wait until one more request may be sent, and count it. Raises Retryable when the uploader stops."""
        while True:
            with self._lock:
                now = self._clock()
                mine = getattr(self._mine, "reserved", False)
                wait = self._wait_s(now, 1 if mine else 1 + self._reserved)
                if wait <= 0.0:
                    self._use_reserve()
                    if self._requests is not None:
                        self._requests.take(now)
                    if self._bytes is not None:
                        self._bytes.take(now, num_bytes)
                    return
            if self._closing.is_set():
                raise Retryable("the uploader stops")
            self._pause(wait)

    def charge(self, num_bytes: int) -> None:
        """Count bytes that were sent already."""
        if self._bytes is not None and num_bytes:
            with self._lock:
                self._bytes.take(self._clock(), num_bytes)

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closing.set()

    def _wait_s(self, now: float, requests: int) -> float:
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.wait_s(now, requests))
        if self._bytes is not None:
            waits.append(self._bytes.wait_s(now, 0.0))
        return max(waits)

    def _use_reserve(self) -> None:
        if getattr(self._mine, "reserved", False):
            self._mine.reserved = False
            self._reserved -= 1


def live_runs_carried(limits: Limits, heartbeat_s: float | None) -> int | None:
    """How many live runs' heartbeats the budget carries; None when nothing limits them."""
    if limits.requests is None or heartbeat_s is None:
        return None
    return int(limits.requests.amount / limits.requests.period_s * heartbeat_s)
