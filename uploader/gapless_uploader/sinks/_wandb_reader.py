"""Asks the `wandb` package, which runs in a child process that all sinks of this process share.

It looks at several runs at once, so that none waits for another's. A child that does not answer in time, or died, fails
all questions on their way, and is replaced by the next.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless_uploader.sinks._wandb_child_process import ChildProcess

if TYPE_CHECKING:
    from gapless_uploader.sinks._wandb_http import Credentials

LOOKS_AT_ONCE = 8
"""Others wait for their turn here, where no time limit runs yet."""
_FILE = Path(__file__).with_name("_wandb_child.py")


class Reader:
    """One child. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._looks = threading.BoundedSemaphore(LOOKS_AT_ONCE)
        self._child: ChildProcess | None = None
        self._connected: set[tuple[str, str]] = set()
        """Hosts and keys that the child was told to get ready for."""
        self._environment: dict[str, str] = {}

    def start(self) -> None:
        """Begin to load the package, and return at once."""
        with self._lock:
            self._started()

    def connect(self, found: Credentials) -> None:
        """Let the package get ready for `look` at this host, and return at once."""
        with suppress(OSError, ValueError):  # the question itself finds out, and starts another child
            with self._lock:
                child = self._started()
                is_new = (found.base_url, found.api_key) not in self._connected
                self._connected.add((found.base_url, found.api_key))
            if is_new:
                child.tell({"do": "connect", **_where(found)})

    def credentials(self, base_url: str | None, anew: bool) -> dict[str, Any]:
        """`base_url`, `api_key` (None where there is none) and `proxies` as `wandb` finds them. Raises Retryable."""
        if anew:
            self.close()  # the package keeps what it read
        return self._ask({"do": "credentials", "base_url": base_url})

    def look(self, found: Credentials, path: str, steps: list[tuple[int, int]]) -> dict[str, Any]:
        """`rows` in closed ranges of steps, `state` and `progress` of a run, through `wandb.Api`. Raises Retryable."""
        with self._looks:
            return self._ask({"do": "look", **_where(found), "path": path, "steps": steps})

    def close(self) -> None:
        """End the child, and every question on its way. May be called twice; the next question starts another."""
        with self._lock:
            self._stop()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            child = self._started()
        return child.ask(question)

    def _started(self) -> ChildProcess:
        matters = {name: value for name, value in os.environ.items() if _matters(name)}
        if self._child is not None and (not self._child.is_there or self._environment != matters):
            self._stop()
        if self._child is None:
            self._environment, self._connected = matters, set()
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._child = ChildProcess(_FILE)
        return self._child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close()


def _where(found: Credentials) -> dict[str, Any]:
    return {"base_url": found.base_url, "api_key": found.api_key, "timeout_s": 30}


def _matters(name: str) -> bool:
    """Whether an environment variable decides what `wandb` finds."""
    return name.startswith("WANDB_") or name in ("HOME", "NETRC") or name.lower().endswith("_proxy")


READER = Reader()
"""Shared by all sinks of this process."""


def head_start() -> None:
    """Begin to load the package for an upload that most likely will be online, and return at once."""
    if os.environ.get("WANDB_MODE") in (None, "", "online"):
        with suppress(Exception):  # whoever needs it starts it again, and says so
            READER.start()
