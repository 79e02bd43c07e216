"""Spools made for tests, line by line: small verbs that write what a training would."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import orjson

from gapless_schemas import Header, SegmentName, encode_header, encode_record, path_name

T0 = 1_700_000_000.0


class MadeRun:
    """One attempt of a run in the making, one segment after the other."""

    def __init__(
        self,
        root: Path,
        run_id: str = "r-1",
        project: str = "grpo",
        name: str | None = None,
        host: str = "train-7",
        pid: int = 1,
        boot_id: str = "elsewhere",
        attempt: int = 1,
        attempt_id: str | None = None,
    ) -> None:
        self.key = (project, run_id)
        self.folder = root / path_name(project) / path_name(run_id)
        self.attempt_id = attempt_id or uuid.uuid4().hex
        self.seq = 0
        self.index = 0
        self._header = {
            "project": project, "run_id": run_id, "writer": "main", "attempt": attempt, "attempt_id": self.attempt_id,
            "host": host, "pid": pid, "boot_id": boot_id, "created": T0, "resume_step": None,
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begin()
        self.append("run", {"name": name})

    @property
    def path(self) -> Path:
        """The newest segment."""
        return self.folder / str(SegmentName("main", self._header["attempt"], self.attempt_id[:8], self.index))

    def _begin(self) -> None:
        header = Header(segment=self.index, first_seq=self.seq + 1, **self._header)
        self.path.write_bytes(encode_header(header))

    def line(self, kind: str, data: dict[str, Any], step: int | None = None) -> bytes:
        """The next record's line; seq moves on."""
        self.seq += 1
        return encode_record(self.seq, T0 + self.seq, float(self.seq), kind, step, orjson.dumps(data))

    def append(self, kind: str, data: dict[str, Any], step: int | None = None) -> MadeRun:
        """One record."""
        with self.path.open("ab") as file:
            file.write(self.line(kind, data, step))
        return self

    def rows(self, first: int, count: int) -> MadeRun:
        """Rows at `count` steps from `first` on, `loss` half above the step."""
        with self.path.open("ab") as file:
            file.write(
                b"".join(self.line("metrics", {"loss": step + 0.5}, step) for step in range(first, first + count))
            )
        return self

    def rotate(self) -> MadeRun:
        """A new segment."""
        self.index += 1
        self._begin()
        return self

    def finish(self, state: str = "finished") -> MadeRun:
        """The end."""
        return self.append("finish", {"state": state, "exit_code": 0 if state == "finished" else 1})


def alive_here() -> dict[str, Any]:
    """Fields of `MadeRun` that make this test process the run's writer."""
    import socket

    from gapless_uploader.lease import boot_id

    return {"host": socket.gethostname(), "pid": os.getpid(), "boot_id": boot_id()}
