"""A child process of ours that speaks one JSON object a line: asked, answered, ended. It ends when we do."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from gapless_uploader.failures import Retryable

# json is imported with the first question: the child starts sooner.

ANSWER_S = 60.0
_MAX_FOLDER = 48


class ChildProcess:
    """Runs a file of ours, with a folder of its own as its argument. Not thread safe."""

    def __init__(self, file: Path) -> None:
        self._rest = b""
        self._folder = tempfile.TemporaryDirectory(prefix="gapless-wandb-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            # -P: the file's own folder, in which a module of ours is called wandb, stays off its path.
            [sys.executable, "-P", str(file), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**_environment(), "WANDB_DIR": self._folder.name, **_own_tmp(self._folder.name)},
            cwd=self._folder.name,
            start_new_session=True,
        )

    @property
    def is_there(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def tell(self, message: dict[str, Any]) -> None:
        """Say what has no answer. Raises OSError and ValueError when it is gone."""
        import json

        stdin = cast(IO[bytes], self._process.stdin)
        stdin.write(json.dumps(message, default=str).encode() + b"\n")
        stdin.flush()

    def ask(self, question: dict[str, Any], within_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer. Raises Retryable when there is none in time, or when it is an error."""
        import json

        line = b""
        with suppress(OSError, ValueError):
            self.tell(question)
            line = self._line(time.monotonic() + within_s)
        if not line:
            self.close()
            raise Retryable("wandb, in its own process, gave no answer; it is started again")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Retryable(f"wandb said: {answer['error']}")
        return answer

    def kill(self) -> None:
        """End it, whoever waits for its answer; they get none. May be called from any thread."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """End it and let go of everything. May be called twice."""
        self.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was still to be written is of no use to a dead process
                cast(IO[bytes], stream).close()
        self._folder.cleanup()

    def _line(self, deadline: float) -> bytes:
        """Its next line; empty when it ended or takes too long."""
        handle = cast(IO[bytes], self._process.stdout).fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(handle, 1 << 16) if ready else b""
            if not part:
                return b""
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def _own_tmp(folder: str) -> dict[str, str]:
    """What the package leaves in the folder for temporary files goes with ours; its sockets there need short names."""
    return {"TMPDIR": folder} if len(folder) <= _MAX_FOLDER else {}


def _environment() -> dict[str, str]:
    """This process's environment, in which the child finds our packages and W&B's settings, and stays quiet."""
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off", "PYTHONUTF8": "1"}
    here = [str(Path(path).absolute()) for path in sys.path if path]
    kept = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_RUN_ID")}
    return {**kept, **quiet, "PYTHONPATH": os.pathsep.join(here)}
