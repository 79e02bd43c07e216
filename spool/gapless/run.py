"""A run as the training sees it: `init` opens one, `Run` takes what is logged.

No call here raises for a reason outside the caller's own code. In a forked child, on another rank and with
`GAPLESS_MODE=disabled` the same calls do nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from operator import index
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep, time
from types import TracebackType
from typing import Any, Final, Literal, Self

import orjson

from gapless import exits
from gapless.config import Environment, read_environment
from gapless.encode import MAX_NESTING, Part, encode_config, encode_fast, encode_metrics, encode_plain
from gapless.place import Place
from gapless.redact import scrub_text
from gapless.ring import AUTO, Ring
from gapless.system import describe
from gapless.values import Refused, as_mapping, as_number, carefully, encodable, told
from gapless.warn import Warner
from gapless.writer import Writer
from gapless_schemas import MAX_STEP

Durability = Literal["thread", "write", "sync"]

RING_ROWS: Final = 100_000
RING_BYTES: Final = 64 << 20
FINISH_TIMEOUT_S: Final = 10.0
OPEN_TIMEOUT_S: Final = 2.0
"""`init` waits this long for a disk at most, and goes on without it."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of one attempt, at one moment."""

    written: int = 0
    """Records that are in a segment."""
    synced: int = 0
    """Records that are on the disk for certain."""
    queued: int = 0
    """Records that wait in memory to be written."""
    dropped: int = 0
    """Records lost because the ring was full; each is named in a `gap` record."""
    refused: int = 0
    """Values that have no place in the spool."""
    clashes: int = 0
    """Values whose key another value of the same row or config has."""
    bad_steps: int = 0
    """Rows kept without a step, because theirs was none."""
    late: int = 0
    """Calls after `finish`."""
    forked: int = 0
    """Calls in a child process that did not open the run."""
    failing: bool = False
    """The disk takes no rows at this moment."""


@dataclass(slots=True)
class _Counts:
    refused: int = 0
    clashes: int = 0
    bad_steps: int = 0
    late: int = 0
    forked: int = 0


class Run:
    """A run that is being written. Thread safe. `init` makes one."""

    def __init__(self, ring: Ring, writer: Writer, place: Place, warner: Warner, finish_timeout: float) -> None:
        self.config = Config(self._put_config)
        self.summary = Summary(self._put_summary)
        self._ring = ring
        self._writer = writer
        self._place = place
        self._warner = warner
        self._finish_timeout = finish_timeout
        self._pid = os.getpid()
        self._finished = False
        self._counts = _Counts()

    @property
    def id(self) -> str:
        """The run id."""
        return self._place.settle_id()

    @property
    def path(self) -> Path:
        """The run's folder in the spool."""
        self._place.settle_id()
        return self._place.folder

    @property
    def is_writer(self) -> bool:
        """Whether this run writes; false for the one that does nothing."""
        return True

    def log(self, data: Mapping[Any, Any], step: int | None = None, *, t: float | datetime | None = None) -> None:
        """Record one row of values: numbers, texts, nested dicts, `Table` and the other payloads.

        Without a step the row gets the one after the largest so far. `t` is the row's time in unix seconds, now
        unless given. What cannot be kept is counted and warned about; nothing is raised.
        """
        if not self._open():
            return
        at = None if t is None else self._time(t)
        encoded = encode_fast(data)
        if encoded is None:
            self._log_any(data, step, at)
            return
        if step is None:
            step = AUTO
        elif type(step) is not int or not 0 <= step <= MAX_STEP:
            step = self._step(step)
        self._ring.append("metrics", step, encoded, None, t=at)
        self._writer.nudge()

    def define_axis(
        self, key: str, axis: str | None = None, *, summary: Literal["last", "min", "max", "mean", "none"] | None = None
    ) -> None:
        """Say that `axis` is the x-axis of `key` (a name or a glob), and which value stands for it in the summary."""
        if not self._open():
            return
        if summary not in (None, "last", "min", "max", "mean", "none"):
            self._report("refused", "axis", f"summary rule {summary!r} is none of last, min, max, mean, none")
            summary = None
        data = {
            "key": encodable(str(key)),
            "axis": None if axis is None else encodable(str(axis)),
            "summary": summary,
        }
        self._put("axis", encode_plain(data, self._report))

    def console(self, lines: Iterable[str], stream: str = "stdout") -> None:
        """Record lines of console output; what looks like a credential is taken out of them."""
        if not self._open():
            return
        batch: list[str] = []
        size = 0
        for line in [*lines, None]:
            if line is not None:
                batch.append(encodable(scrub_text(str(line).rstrip("\n"))))
                size += 6 * len(batch[-1])
            if batch and (line is None or size > 400_000):
                self._put("log", encode_plain({"stream": str(stream), "lines": batch}, self._report))
                batch, size = [], 0

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was logged so far is on the disk, `timeout` seconds at most (10); whether it is."""
        if self._pid != os.getpid():
            return False
        upto = self._ring.last.number
        deadline = monotonic() + (self._finish_timeout if timeout is None else timeout)
        while self._writer.synced < upto or (self._ring.last.gap is not None and not self._writer.done.is_set()):
            if monotonic() >= deadline:
                return False
            if self._writer.threaded:
                self._writer.sync()
            else:
                self._writer.turn_inline()
            sleep(0.001)
        return True

    def finish(self, exit_code: int | None = 0, *, timeout: float | None = None) -> None:
        """End the attempt: `finished`, or `failed` where `exit_code` is neither 0 nor None.

        Waits for the disk `timeout` seconds at most (`init`'s `finish_timeout`) and says what it could not write by
        then. A second call does nothing.
        """
        if self._finished or self._pid != os.getpid():
            return
        self._finished = True
        code = None if exit_code is None else int(exit_code)
        state = "failed" if code else "finished"
        deadline = monotonic() + (self._finish_timeout if timeout is None else timeout)
        self._writer.close(orjson.dumps({"state": state, "exit_code": code}))
        if self._writer.threaded:
            self._writer.done.wait(max(0.0, deadline - monotonic()))
        else:
            while not self._writer.turn_inline() and monotonic() < deadline:
                sleep(0.01)
        if not self._writer.done.is_set():
            left = self._ring.last.number - self._writer.written
            unsynced = self._writer.written - self._writer.synced
            self._warner.say(
                f"run {self.id} ended with {left} records not written and {unsynced} not synced to {self._place.folder}"
            )
        exits.forget(self)

    def stats(self) -> Stats:
        """What was written, waits, and was lost so far."""
        counts, writer = self._counts, self._writer
        last = self._ring.last
        return Stats(
            written=writer.written,
            synced=writer.synced,
            queued=last.number - writer.written,
            dropped=self._ring.dropped + writer.lost,
            refused=counts.refused,
            clashes=counts.clashes,
            bad_steps=counts.bad_steps,
            late=counts.late,
            forked=counts.forked,
            failing=writer.failing,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code: int | None = 0
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        elif error is not None:
            code = 1
        self.finish(code)

    def end_at_exit(self) -> None:
        """What `exits` calls when the process ends without `finish`."""
        failed = not hasattr(sys, "ps1") and getattr(sys, "last_value", None) is not None
        self.finish(1 if failed else None)
        self._warner.quiet = True

    def _begin(self, identity: dict[str, Any], config: Any) -> None:
        given: Mapping[Any, Any] | None = {}
        if config is not None:
            try:
                given = carefully(lambda: as_mapping(config), config)
                if given is None:
                    raise Refused(f"a mapping or an object with fields is one, {type(config).__name__} is not")
            except Refused as why:
                self._report("refused", "config", f"the config was not kept: {why}")
        given = given or {}
        self.config.take(given)
        parts = encode_config(given, self._report)
        scrubbed = {name: _scrubbed(value) for name, value in identity.items()}
        self._ring.append("run", None, *_run_data(scrubbed, parts[0] if parts else Part(b"{}", None)), always=True)
        for part in parts[1:]:
            self._ring.append("config", None, part.data, part.marks)
        exits.remember(self)
        self._writer.start()
        if not self._writer.opened.wait(OPEN_TIMEOUT_S):
            self._warner.warn(
                "open", f"{self._place.folder} did not answer for {OPEN_TIMEOUT_S:.0f} s; training goes on without it"
            )
        self._place.settle_id()

    def _open(self) -> bool:
        if self._pid != os.getpid():
            self._counts.forked += 1
            self._warner.warn_once(
                "fork",
                f"a child process logs to run {self.id}, which its parent writes: nothing is kept; "
                "open a run of its own with another writer= to log from it",
            )
            return False
        if self._finished:
            self._counts.late += 1
            self._warner.warn("late", f"run {self.id} has finished: this is not kept")
            return False
        return True

    def _log_any(self, data: object, step: Any, at: float | None) -> None:
        try:
            fields = carefully(lambda: as_mapping(data), data)
            if fields is None:
                raise Refused(f"log() takes a dict, not {type(data).__name__}")
            parts, media = encode_metrics(fields, self._report)
        except Refused as why:
            self._report("refused", "data", f"a row was not kept: {why}")
            return
        if parts == [Part(b"{}", None)]:
            parts = []
        if not parts and not media:
            return
        actual = AUTO if step is None else self._step(step)
        at = time() if at is None else at
        for part in parts:
            actual = self._ring.append("metrics", actual, part.data, part.marks, t=at)
        for one in media:
            actual = self._ring.append(one.kind, actual, one.data, one.marks, t=at, payload=one.payload)
        self._writer.nudge()

    def _step(self, step: Any) -> int | None:
        number: Any = step
        if type(number) is not int and not isinstance(number, bool):
            with suppress(Exception):  # a step is anybody's object
                number = as_number(step)
            if type(number) is float and number.is_integer():
                number = int(number)
        if type(number) is int and 0 <= number <= MAX_STEP:
            return number
        self._report(
            "bad_steps", "step", f"step {told(step)} is no integer from 0 to 2**53 - 1: the row is kept without a step"
        )
        return None

    def _time(self, t: float | datetime) -> float | None:
        number = None
        with suppress(Exception):  # a time is anybody's object
            number = t.timestamp() if isinstance(t, datetime) else as_number(t)
        if number is not None and not isinstance(number, bool) and isfinite(number):
            return float(number)
        self._report("refused", "time", f"t={told(t)} is no time: the row gets the present one")
        return None

    def _put(self, kind: str, parts: list[Part]) -> None:
        for part in parts:
            self._ring.append(kind, None, part.data, part.marks)
        self._writer.nudge()

    def _put_config(self, part: Any) -> None:
        if self._open():
            self._put_careful("config", part)

    def _put_summary(self, part: Any) -> None:
        if self._open():
            self._put_careful("summary", part)

    def _put_careful(self, kind: str, part: Any) -> None:
        try:
            fields = carefully(lambda: as_mapping(part), part)
            if fields is None:
                raise Refused(f"{type(part).__name__} is no mapping")
            self._put(kind, encode_config(fields, self._report))
        except Refused as why:
            self._report("refused", kind, f"a part of the {kind} was not kept: {why}")

    def _report(self, counter: str, topic: str, text: str) -> None:
        setattr(self._counts, counter, getattr(self._counts, counter) + 1)
        self._warner.warn(topic, text)


class NoRun(Run):
    """A run whose calls do nothing: another rank's, or a disabled one."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.config = Config(_nothing)
        self.summary = Summary(_nothing)
        self._run_id = run_id
        self._path = path

    @property
    def id(self) -> str:
        """The run id where it was given, else an empty text."""
        return self._run_id

    @property
    def path(self) -> Path:
        """Where the run would be; nothing is made there."""
        return self._path

    @property
    def is_writer(self) -> bool:
        return False

    def log(self, data: Mapping[Any, Any], step: int | None = None, *, t: float | datetime | None = None) -> None:
        """Do nothing."""

    def define_axis(
        self, key: str, axis: str | None = None, *, summary: Literal["last", "min", "max", "mean", "none"] | None = None
    ) -> None:
        """Do nothing."""

    def console(self, lines: Iterable[str], stream: str = "stdout") -> None:
        """Do nothing."""

    def flush(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """Nothing waits: True."""
        return True

    def finish(self, exit_code: int | None = 0, *, timeout: float | None = None) -> None:
        """Do nothing."""

    def stats(self) -> Stats:
        """All zero."""
        return Stats()


class Config(Mapping[str, Any]):
    """A run's config as it was given; setting a key records it. Nothing can be deleted."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self._values: dict[Any, Any] = {}
        self._put = put

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._values)} keys)"  # values may hold secrets

    def update(self, values: Any = (), /, **more: Any) -> None:
        """Record many keys at once; dicts merge deeply, anything else replaces."""
        given: Mapping[Any, Any] | None = None
        with suppress(Exception):  # anybody's object
            given = as_mapping(values)
            given = dict(values) if given is None else given
        if given is None:  # the writer says why
            self._put(values)
        part = {**(given or {}), **more}
        if part:
            self.take(part)
            self._put(part)

    def take(self, values: Mapping[Any, Any]) -> None:
        """Hold values that are recorded elsewhere."""
        with suppress(Exception):  # anybody's object
            _merge(self._values, values)


class Summary(Config):
    """Values that stand for the run as a whole, in place of each key's last value."""


def _merge(into: dict[Any, Any], part: Mapping[Any, Any], depth: int = 0) -> None:
    for key, value in part.items():
        if type(value) is dict and type(into.get(key)) is dict and depth < MAX_NESTING:
            _merge(into[key], value, depth + 1)
        else:
            into[key] = dict(value) if type(value) is dict else value


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(scrub_text(value))
    return [encodable(scrub_text(item)) for item in value] if isinstance(value, list) else value


def _run_data(identity: dict[str, Any], config: Part) -> tuple[bytes, bytes | None]:
    marks = None
    if config.marks is not None:
        marks = orjson.dumps([[["config", *path], kind] for path, kind in orjson.loads(config.marks)])
    return b'%b,"config":%b}' % (orjson.dumps(identity)[:-1], config.data), marks


def _nothing(_part: Any) -> None:
    return None


def init(
    project: str,
    name: str | None = None,
    *,
    id: str | None = None,  # noqa: A002  # the trackers' name for it
    dir: str | os.PathLike[str] | None = None,  # noqa: A002
    config: Any = None,
    group: str | None = None,
    job_type: str | None = None,
    tags: Iterable[str] | None = None,
    notes: str | None = None,
    entity: str | None = None,
    writer: str = "main",
    is_writer: bool | None = None,
    resume: Literal["never", "auto"] = "never",
    resume_step: int | bool | None = None,
    durability: Durability = "thread",
    sinks: Iterable[str] | None = None,
    ring_rows: int = RING_ROWS,
    ring_bytes: int = RING_BYTES,
    finish_timeout: float = FINISH_TIMEOUT_S,
) -> Run:
    """Open a run and begin an attempt of it; on ranks that do not write, a run that does nothing.

    - `dir`: the spool's root; else `GAPLESS_DIR`, else `./gapless`. `id`: else `GAPLESS_RUN_ID`, else a new one; the
      same id again is a new attempt of the same run.
    - `is_writer`: else whether this is rank 0 (torch.distributed, torchrun's `RANK`, one process).
    - `resume="auto"`: go on with the run of this `SLURM_JOB_ID` or `TORCHELASTIC_RUN_ID`.
    - `resume_step=s`: older rows from step s on are superseded; False: none are; None: told by the first step logged.
    - `durability`: `thread` never waits for the disk; `write` returns after the write, `sync` after the sync.
    - `sinks`: kinds of trackers that this run asks for, for an uploader that is told to heed it.
    - `ring_rows`, `ring_bytes`: what is kept in memory while the disk takes nothing; beyond it rows are dropped and
      counted. `finish_timeout`: seconds that `finish` and the process's end wait for the disk.

    Raises TypeError or ValueError for arguments that mean nothing, never for a disk that fails.
    """
    _check_texts(project=project, writer=writer)
    _check_texts_or_none(name=name, id=id, group=group, job_type=job_type, notes=notes, entity=entity)
    for label, value in (("project", project), ("writer", writer), ("id", id)):
        if value == "":
            raise ValueError(f"{label} is an empty text")
    if durability not in ("thread", "write", "sync"):
        raise ValueError(f"durability={durability!r}: say 'thread', 'write' or 'sync'")
    if resume not in ("never", "auto"):
        raise ValueError(f"resume={resume!r}: say 'never' or 'auto'")
    rewinds = resume_step is not None and resume_step is not False
    if resume_step is True or (rewinds and not 0 <= index(resume_step or 0) <= MAX_STEP):
        raise ValueError(f"resume_step={resume_step!r}: say a step from 0 to 2**53 - 1, False or None")
    if ring_rows < 1 or ring_bytes < 1:
        raise ValueError("ring_rows and ring_bytes are at least 1")
    environment = read_environment()
    root = (Path(dir) if dir is not None else Path(environment.root or "gapless")).absolute()
    run_id = id or environment.run_id
    if environment.disabled or not (_is_rank_zero(environment) if is_writer is None else is_writer):
        return NoRun(run_id or "", root / project / (run_id or ""))
    job = environment.job if resume == "auto" and run_id is None else None
    fresh_id = token_hex(8)
    place = Place(
        root,
        project,
        run_id if run_id is not None or job is not None else fresh_id,
        writer,
        index(resume_step or 0) if rewinds else resume_step,
        job=None if job is None else exits.nth_run_of_job(str(root), project, writer, job, name),
        fresh_id=fresh_id,
    )
    warner = Warner()
    ring = Ring(ring_rows, ring_bytes)
    if rewinds:
        ring.base_step = index(resume_step or 0)
    spool = Writer(
        place,
        ring,
        warner,
        inline=durability != "thread",
        sync_each=durability == "sync",
        describe=lambda: [part.data for part in encode_plain(describe(environment), run._report)],
    )
    ring.make_room = spool.make_room
    run = Run(ring, spool, place, warner, finish_timeout)
    identity = {
        "name": name,
        "group": group,
        "job_type": job_type,
        "tags": None if tags is None else [tags] if isinstance(tags, str) else [str(tag) for tag in tags],
        "notes": notes,
        "entity": entity,
        "sinks": None if sinks is None else [sinks] if isinstance(sinks, str) else [str(sink) for sink in sinks],
    }
    run._begin(identity, config)
    return run


def _is_rank_zero(environment: Environment) -> bool:
    distributed = sys.modules.get("torch.distributed")
    with suppress(Exception):  # half-imported or of another make
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return bool(distributed.get_rank() == 0)
    return environment.rank in (None, 0)


def _check_texts(**texts: object) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} is a text, not {type(text).__name__}")


def _check_texts_or_none(**texts: object) -> None:
    _check_texts(**{name: text for name, text in texts.items() if text is not None})
