"""A child process of ours that speaks one JSON object a line: asked, answered, ended. It ends when we do.

1. A question has a `number`, and its answer the same: answers may come in any order. What has no number has no answer.
2. A thread, started with the first question, reads the answers and hands them to whoever asked.
3. A child that ends, answers with what is no JSON, or lets one question wait too long, has answered its last: all open
   questions fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from gapless_uploader.failures import Retryable

if TYPE_CHECKING:
    from queue import SimpleQueue

# json and queue are imported with the first question: the child starts sooner.

ANSWER_S = 60.0
_MAX_FOLDER = 48


class ChildProcess:
    """Runs a file of ours, with a folder of its own as its argument. Thread safe."""

    def __init__(self, file: Path) -> None:
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        self._num_asked = 0
        self._open: dict[int, SimpleQueue[dict[str, Any] | None]] = {}
        """Where the answers to questions on their way go; None says that there is none to come."""
        self._has_ended = False
        self._thread: threading.Thread | None = None
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

        line = json.dumps(message, default=str).encode() + b"\n"
        stdin = cast(IO[bytes], self._process.stdin)
        with self._writing:
            stdin.write(line)
            stdin.flush()

    def ask(self, question: dict[str, Any], within_s: float = ANSWER_S) -> dict[str, Any]:
        """The answer. Raises Retryable when there is none in time, or when it is an error."""
        from queue import Empty, SimpleQueue

        answer: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        found = None
        with suppress(OSError, ValueError, Empty):
            self.tell({**question, "number": self._expect(answer)})
            found = answer.get(timeout=within_s)
        if found is None:
            self.close()
            raise Retryable("wandb, in its own process, gave no answer; it is started again")
        if "error" in found:
            raise Retryable(f"wandb said: {found['error']}")
        return found

    def close(self) -> None:
        """End it and let go of everything; open questions fail. May be called twice, and from any thread."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._end()
        if self._thread is not None:
            self._thread.join(1.0)  # it closes what it reads
        else:
            cast(IO[bytes], self._process.stdout).close()
        with suppress(OSError):  # what was still to be written is of no use to a dead process
            cast(IO[bytes], self._process.stdin).close()
        self._folder.cleanup()

    def _expect(self, answer: SimpleQueue[dict[str, Any] | None]) -> int:
        """The number of the question whose answer goes there. Raises ValueError when none is to come."""
        with self._lock:
            if self._has_ended:
                raise ValueError("it has ended")
            self._num_asked += 1
            self._open[self._num_asked] = answer
            if self._thread is None:
                self._thread = threading.Thread(target=self._hand_out, name="wandb answers", daemon=True)
                self._thread.start()
            return self._num_asked

    def _hand_out(self) -> None:
        """Give each answer to whoever asked, until there is none to come."""
        import json

        with suppress(OSError, ValueError, KeyError), cast(IO[bytes], self._process.stdout) as answers:
            for line in answers:
                answer = json.loads(line)
                with self._lock:
                    waiting = self._open.pop(answer.pop("number"))
                waiting.put(answer)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            failed, self._open = self._open, {}
        for answer in failed.values():
            answer.put(None)


def _own_tmp(folder: str) -> dict[str, str]:
    """What the package leaves in the folder for temporary files goes with ours; its sockets there need short names."""
    return {"TMPDIR": folder} if len(folder) <= _MAX_FOLDER else {}


def _environment() -> dict[str, str]:
    """This process's environment, in which the child finds our packages and W&B's settings, and stays quiet."""
    quiet = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off", "PYTHONUTF8": "1"}
    here = [str(Path(path).absolute()) for path in sys.path if path]
    kept = {name: value for name, value in os.environ.items() if name not in ("WANDB_MODE", "WANDB_RUN_ID")}
    return {**kept, **quiet, "PYTHONPATH": os.pathsep.join(here)}
