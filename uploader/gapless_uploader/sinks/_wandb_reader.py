"""Asks the `wandb` package, which runs in a child process that all sinks of this process share.

Nothing waits for it for longer than `ANSWER_S`; a child that does not answer, or died, is replaced by the next question.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gapless_uploader.sink import Retryable
from gapless_uploader.sinks._wandb_http import Credentials

ANSWER_S = 60.0
_MODULE = "gapless_uploader.sinks._wandb_child"


class Reader:
    """One child. Thread safe; questions are answered one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._environment: dict[str, str] = {}
        self._rest = b""

    def start(self) -> None:
        """Begin to load the package, and return at once."""
        with self._lock:
            self._started()

    def credentials(self, base_url: str | None, anew: bool) -> dict[str, Any]:
        """`base_url`, `api_key` (None where there is none) and `proxies` as `wandb` finds them. Raises Retryable."""
        if anew:
            self.close()  # the package keeps what it read
        return self._ask({"do": "credentials", "base_url": base_url})

    def look(self, found: Credentials, path: str, steps: list[tuple[int, int]]) -> dict[str, Any]:
        """`rows` in closed ranges of steps, `state` and `progress` of a run, through `wandb.Api`. Raises Retryable."""
        question = {
            "do": "look",
            "base_url": found.base_url,
            "api_key": found.api_key,
            "path": path,
            "steps": steps,
            "timeout_s": 30,
        }
        return self._ask(question)

    def close(self) -> None:
        """End the child. May be called twice; the next question starts another."""
        with self._lock:
            self._stop()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            child = self._started()
            try:
                _pipe(child.stdin).write(json.dumps(question).encode() + b"\n")
                _pipe(child.stdin).flush()
                line = self._line(child, time.monotonic() + ANSWER_S)
            except OSError:
                line = b""
            if not line:
                self._stop()
                raise Retryable("wandb, in its own process, gave no answer; it is started again")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Retryable(f"wandb said: {answer['error']}")
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        matters = {name: value for name, value in os.environ.items() if _matters(name)}
        if self._child is not None and (self._child.poll() is not None or self._environment != matters):
            self._stop()
        if self._child is None:
            self._environment = matters
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._folder = tempfile.TemporaryDirectory(prefix="gapless-wandb-", ignore_cleanup_errors=True)
            self._child = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**_environment(), "WANDB_DIR": self._folder.name},
                cwd=self._folder.name,
                start_new_session=True,
            )
        return self._child

    def _line(self, child: subprocess.Popen[bytes], deadline: float) -> bytes:
        """The child's next line; empty when it ended or takes too long."""
        handle = _pipe(child.stdout).fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(handle, 1 << 16) if ready else b""
            if not part:
                return b""
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _stop(self) -> None:
        child, self._child, self._rest = self._child, None, b""
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                _pipe(stream).close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _matters(name: str) -> bool:
    """Whether an environment variable decides what `wandb` finds."""
    return name.startswith("WANDB_") or name in ("HOME", "NETRC") or name.lower().endswith("_proxy")


def _environment() -> dict[str, str]:
    """This process's environment, in which the child finds our packages and W&B's settings, and stays quiet."""
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off", "PYTHONUTF8": "1"}
    here = [str(Path(path).absolute()) for path in sys.path if path]
    kept = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_RUN_ID")}
    return {**kept, **quiet, "PYTHONPATH": os.pathsep.join(here)}


def _pipe(stream: Any) -> Any:
    return stream


READER = Reader()
"""Shared by all sinks of this process."""
