"""The requests that took effect, in a file: a line that describes each, its body, a newline.

Written before the request is answered, in one unbuffered write, so that what was answered outlives a SIGKILL of the
server. Not synced: a machine that loses power is nobody's test here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

from tests.servers.wandb_server.messages import Request


class Journal:
    """Read it to its end first, then append."""

    def __init__(self, path: Path) -> None:
        self._file = io.FileIO(path, "ab+")

    def read(self) -> Iterator[tuple[Request, int | None]]:
        """Each request with the history lines that were kept of it (None: all); drops a torn end."""
        self._file.seek(0)
        sound = 0
        with io.BufferedReader(io.FileIO(self._file.fileno(), "rb", closefd=False)) as file:
            while (head_line := file.readline()).endswith(b"\n"):
                head = json.loads(head_line)
                body = file.read(head["length"] + 1)
                if len(body) <= head["length"]:
                    break
                sound += len(head_line) + len(body)
                request = Request(head["method"], head["path"], {}, body[:-1], head["length"], head["time"])
                yield request, head["keep"]
        self._file.truncate(sound)

    def append(self, request: Request, keep: int | None) -> None:
        head = {
            "method": request.method,
            "path": request.path,
            "time": request.time,
            "keep": keep,
            "length": len(request.body),
        }
        rest = memoryview(json.dumps(head).encode() + b"\n" + request.body + b"\n")
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def close(self) -> None:
        self._file.close()
