"""The process in which the real library runs: what it sees, asking it, and ending it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from gapless_uploader.sink import Misconfigured, Retryable
from gapless_uploader.sinks import _swanlab_child

_PROBES = ("HARDWARE", "RUNTIME", "REQUIREMENTS", "CONDA", "GIT", "SWANLAB", "MONITOR")
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


class LibraryRefused(Exception):
    """The library raised on a message."""


class LibraryProcess:
    """The process of one part."""

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        log = open(folder / "library.log", "wb")  # noqa: SIM115 - the child keeps it
        with log:
            # -P: the folder of the child's own file, where a module of ours is called swanlab, stays off its path.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_swanlab_child.__file__)],
                cwd=folder,
                env=child_environment(os.environ, folder),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def ask(self, message: dict[str, Any]) -> None:
        """Send a message and wait for its answer. Raises LibraryRefused, Retryable or Misconfigured."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the child has no pipes")
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
        except OSError:
            raise Retryable("the swanlab library's process ended; its library.log says why") from None
        answer = self._answer(stdout)
        if "error" not in answer:
            return
        if "init" in message:
            raise Misconfigured(f"the swanlab library does not begin a run: {answer['error']}")
        raise LibraryRefused(answer["error"])

    def _answer(self, stdout: IO[bytes]) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(stdout.fileno(), 1 << 16) if ready else b""
            if not chunk:
                why = "ended" if ready else f"gave no answer within {self._timeout_s:g} s"
                raise Retryable(f"the swanlab library's process {why}; its library.log says why")
            line += chunk
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """The process is gone when this returns."""
        if self._process.stdin is not None:
            with suppress(OSError):  # what it did not read, it does not need any more
                self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def child_environment(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """What the child sees: nothing of SwanLab's but that its probes and its capture of the terminal are off."""
    return {
        **{name: environ[name] for name in _KEPT if name in environ},
        "SWANLAB_ROOT": str(folder),
        "SWANLAB_INTERACTIVE": "false",
        "SWANLAB_TERMINAL_PROXY_TYPE": "none",
        **{f"SWANLAB_PROBE_{name}": "false" for name in _PROBES},
    }
