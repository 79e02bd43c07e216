"""The server's clock: the machine's time plus what a test added, so that lags and silences need no sleep."""

from __future__ import annotations

import time
from datetime import UTC, datetime


class Clock:
    """Time in unix seconds. Safe to read from any thread; `advance` only adds."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> float:
        return time.time() + self.offset_s

    def advance(self, seconds: float) -> None:
        """Moves the server's time forward by `seconds`; clients keep the machine's time."""
        if seconds < 0:
            raise ValueError(f"the clock only goes forward, got {seconds} s")
        self.offset_s += seconds


def iso(seconds: float) -> str:
    """`seconds` as the server writes times: UTC with milliseconds and a Z."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix(text: str) -> float:
    """Unix seconds of an RFC 3339 text; a text without a zone is UTC. ValueError if it is none."""
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
