"""A spool written line by line, for tests that need a hold on every byte: attempts, writers, torn ends."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from gapless_schemas import Header, SegmentName, encode_header, encode_record
from gapless_uploader.spool import Spool
from gapless_uploader.steps import Files

T0 = 1_700_000_000.0


class Attempt:
    """One attempt of one writer, in one segment. Times are one second a record."""

    def __init__(self, root: Path, number: int = 1, writer: str = "main", run_id: str = "r-1", **header: Any) -> None:
        self.number, self.seq, self.writer = number, 0, writer
        self.attempt_id = sha256(f"{writer} {run_id} {number}".encode()).hexdigest()[:32]
        self.created = T0 + 10_000 * (number - 1)
        fields = {"project": "grpo", "host": "train-7", "pid": 1, "boot_id": "b", "resume_step": None, **header}
        made = Header(
            run_id=run_id, writer=writer, attempt=number, attempt_id=self.attempt_id, segment=0, first_seq=1,
            created=self.created, **fields,
        )  # fmt: skip
        self.path = root / made.project / run_id / str(SegmentName(writer, number, self.attempt_id[:8], 0))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(encode_header(made))

    def line(self, kind: str, data: dict[str, Any], step: int | None = None, marks: Any = None) -> bytes:
        """The next record's line."""
        self.seq += 1
        t = self.created + self.seq
        packed = json.dumps(marks).encode() if marks else None
        return encode_record(self.seq, t, float(self.seq), kind, step, orjson.dumps(data), packed)

    def add(self, kind: str, data: dict[str, Any], step: int | None = None, marks: Any = None) -> float:
        """Append a record; its wall clock."""
        with self.path.open("ab") as file:
            file.write(self.line(kind, data, step, marks))
        return self.created + self.seq

    def add_rows(self, rows: list[tuple[int, dict[str, Any]]]) -> None:
        """Append many rows at once."""
        with self.path.open("ab") as file:
            file.write(b"".join(self.line("metrics", values, step) for step, values in rows))


def files_of(root: Path, run_id: str = "r-1", crashed: bool = False) -> Files:
    """What a scan of the spool sees of a run."""
    spool = Spool([root])
    spool.scan(0.0)
    run = spool.runs["grpo", run_id]
    return Files(dict(run.attempts), run.paths(), run.sizes(), crashed)
