"""A spool written line by line, and an uploader turned by hand: the verbs that the uploader's tests speak in."""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gapless_schemas import Header, SegmentName, encode_header, encode_record, path_name
from gapless_uploader.events import Event
from gapless_uploader.options import UploaderOptions
from gapless_uploader.sink import Sink
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.uploader import Inline, Uploader

T0 = 1_700_000_000.0


@dataclass
class Attempt:
    """One attempt of one writer, with full control over what reaches the disk."""

    folder: Path
    project: str
    run_id: str
    writer: str = "main"
    number: int = 1
    resume_step: int | bool | None = None
    created: float = T0
    attempt_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    host: str = "train-7"
    pid: int = 1
    index: int = 0
    seq: int = 0
    started: bool = False
    lines: list[bytes] = field(default_factory=list)
    """Every record's line, in order."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_header()

    @property
    def path(self) -> Path:
        return self.folder / str(SegmentName(path_name(self.writer), self.number, self.attempt_id[:8], self.index))

    def header_line(self, first_seq: int) -> bytes:
        return encode_header(
            Header(
                self.project, self.run_id, self.writer, self.number, self.attempt_id, self.index, first_seq,
                self.host, self.pid, "boot", self.created, self.resume_step,
            )
        )  # fmt: skip

    def write_header(self) -> None:
        self.raw(self.header_line(self.seq + 1))

    def rotate(self, first_seq: int | None = None) -> None:
        """Go on in a new segment; `first_seq` below the next one writes those records again later."""
        self.index += 1
        self.raw(self.header_line(self.seq + 1 if first_seq is None else first_seq))

    def raw(self, data: bytes) -> None:
        with open(self.path, "ab") as file:
            file.write(data)

    def line(
        self,
        kind: str,
        data: dict[str, Any],
        step: int | None = None,
        t: float | None = None,
        marks: Any = None,
        skip_sinks: list[str] | None = None,
        mono: float | None = None,
    ) -> bytes:
        """The next record's line, not written yet."""
        self.seq += 1
        when = self.created + self.seq if t is None else t
        made = encode_record(
            self.seq,
            when,
            max(0.0, when - self.created) if mono is None else mono,
            kind,
            step,
            orjson.dumps(data),
            None if marks is None else orjson.dumps(marks),
            orjson.dumps(skip_sinks) if skip_sinks else None,
        )
        self.lines.append(made)
        return made

    def append(self, kind: str, data: dict[str, Any], step: int | None = None, **fields: Any) -> None:
        self.raw(self.line(kind, data, step, **fields))

    def run(self, config: dict[str, Any] | None = None, **fields: Any) -> None:
        names = ("name", "group", "job_type", "notes", "entity")
        self.append("run", {**dict.fromkeys(names), "tags": [], "config": config or {}, **fields})

    def log(self, step: int | None, t: float | None = None, **values: Any) -> None:
        self.append("metrics", values, step, t=t)

    def finish(self, exit_code: int | None = 0) -> None:
        self.append("finish", {"state": "failed" if exit_code else "finished", "exit_code": exit_code})


class SpoolDir:
    """A spool's root with runs in it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def attempt(self, run_id: str = "run", writer: str = "main", number: int = 1, **fields: Any) -> Attempt:
        project = fields.pop("project", "proj")
        fields.setdefault("created", T0 + 10_000 * (number - 1))
        return Attempt(self.root / path_name(project) / path_name(run_id), project, run_id, writer, number, **fields)


class Died(BaseException):
    """Stands for the end of the process."""


class Turner:
    """An uploader on one thread with a clock of its own; `crash` forgets everything that is not on disk."""

    def __init__(self, root: Path, state: Path, *sinks: Sink, offered: tuple[Sink, ...] = (), **options: Any) -> None:
        self.root, self.state_folder = root, state
        self.sinks = sinks or (MemorySink(),)
        self.offered = offered
        self.options = UploaderOptions(**{"grace_s": 30.0, **options})
        self.now = 1000.0
        self.wall = T0 + 1_000_000.0
        self.events: list[Event] = []
        self.uploader = self.start()

    @property
    def memory(self) -> MemorySink:
        sink = self.sinks[0]
        assert isinstance(sink, MemorySink)
        return sink

    def start(self) -> Uploader:
        self.uploader = Uploader(
            [self.root], self.sinks, self.state_folder, self.options, self.events.append, Inline(),
            jitter=lambda: 1.0, wall=lambda: self.wall, offered=self.offered,
        )  # fmt: skip
        self.uploader.start()
        return self.uploader

    def turn(self, seconds: float = 0.0) -> bool:
        """One turn after `seconds`, every folder looked at."""
        self.now += seconds
        for path in (self.root, *self.root.rglob("*")):
            self.uploader.spool.hint(path)
        return self.uploader.turn(self.now)

    def settle(self, turns: int = 200) -> None:
        """Turn until nothing is on its way."""
        for _ in range(turns):
            if not self.turn(0.1):
                break
        else:
            raise AssertionError("the uploader does not come to rest")

    def die_before_commit(self) -> None:
        """Turn once, die after the sinks said yes and before the state knows, and start again."""

        def die(entries: object) -> None:
            list(entries)  # type: ignore[call-overload]
            raise Died

        self.uploader.state.commit = die  # type: ignore[method-assign, assignment]
        with contextlib.suppress(Died):
            self.turn(0.1)
        self.crash()

    def crash(self) -> None:
        """Die without a word, and start again from what is on disk."""
        self.uploader.state.close()
        self.uploader.lease.release()
        self.start()


def rows_of(sink: MemorySink, run_id: str = "run", project: str = "proj") -> dict[int, dict[str, Any]]:
    """Step -> values that the memory sink holds."""
    held = sink.runs.get(f"{project}/{run_id}")
    return {step: dict(row) for step, row in sorted(held.rows.items())} if held else {}


def read_json(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
