"""`init`: from its arguments and the environment to a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from operator import index
from os import PathLike, fsdecode
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Literal

from gapless import exits
from gapless.config import Environment, read_environment
from gapless.encode import encode_plain
from gapless.journal import Journal
from gapless.norun import NoRun
from gapless.place import Place
from gapless.ring import Ring
from gapless.run import FINISH_TIMEOUT_S, LONGEST_WAIT_S, Run
from gapless.system import describe
from gapless.tally import Tally
from gapless.values import encodable
from gapless.warn import Warner
from gapless.writer import Writer
from gapless_schemas import MAX_STEP

Durability = Literal["thread", "write", "sync"]

RING_ROWS: Final = 100_000
RING_BYTES: Final = 64 << 20


def init(
    project: str,
    name: str | None = None,
    *,
    id: str | None = None,  # noqa: A002  # the trackers' name for it
    dir: str | PathLike[str] | None = None,  # noqa: A002
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
    ring_rows: int | None = None,
    ring_bytes: int | None = None,
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
      counted. Else `GAPLESS_RING_ROWS` and `GAPLESS_RING_BYTES`, else 100,000 rows and 64 MiB.
    - `finish_timeout`: seconds that `finish` and the process's end wait for the disk.

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
    if rewinds and not hasattr(resume_step, "__index__"):
        raise TypeError(f"resume_step is an integer, False or None, not {type(resume_step).__name__}")
    if resume_step is True or (rewinds and not 0 <= index(resume_step or 0) <= MAX_STEP):
        raise ValueError(f"resume_step={resume_step!r}: say a step from 0 to 2**53 - 1, False or None")
    if isinstance(is_writer, str):
        raise TypeError(f"is_writer is True, False or None, not {is_writer!r}")
    wanted = {"tags": _texts(tags=tags), "sinks": _texts(sinks=sinks)}
    if (ring_rows is not None and ring_rows < 1) or (ring_bytes is not None and ring_bytes < 1):
        raise ValueError("ring_rows and ring_bytes are at least 1")
    if isinstance(finish_timeout, bool) or not isinstance(finish_timeout, int | float) or not finish_timeout >= 0:
        raise ValueError(f"finish_timeout={finish_timeout!r}: say a number of seconds, 0 or more")
    finish_timeout = min(finish_timeout, LONGEST_WAIT_S)
    if dir is not None and "\0" in fsdecode(dir):
        raise ValueError("dir holds a NUL byte")
    # What a shell passed that is no UTF-8 has a name all the same, with its bytes written out.
    project, writer = encodable(project), encodable(writer)
    id = None if id is None else encodable(id)  # noqa: A001
    environment = read_environment()
    root = Path(dir if dir is not None else environment.root or "gapless")
    with suppress(RuntimeError):  # nobody's home: the folder is called so
        root = root.expanduser()
    root = root.absolute()
    run_id = id or _encodable(environment.run_id)
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
    tally = Tally(warner)
    ring = Ring(ring_rows or environment.ring_rows or RING_ROWS, ring_bytes or environment.ring_bytes or RING_BYTES)
    if rewinds:
        ring.base_step = index(resume_step or 0)
    spool = Writer(
        Journal(place, ring, warner, tally.report),
        ring,
        warner,
        inline=durability != "thread",
        sync_each=durability == "sync",
        describe=lambda: [part.data for part in encode_plain(describe(environment), tally.report)],
    )
    run = Run(ring, spool, place, tally, warner, finish_timeout)
    identity = {
        "name": _encodable(name),
        "group": _encodable(group),
        "job_type": _encodable(job_type),
        "notes": _encodable(notes),
        "entity": _encodable(entity),
        **wanted,
    }
    if environment.unknown_mode is not None:
        warner.say(f"GAPLESS_MODE={environment.unknown_mode} changes nothing; 'disabled' is the only mode")
    run._begin(identity, config)
    return run


def _is_rank_zero(environment: Environment) -> bool:
    distributed = sys.modules.get("torch.distributed")
    with suppress(Exception):  # half-imported or of another make
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return bool(distributed.get_rank() == 0)
    return environment.rank in (None, 0)


def _texts(**given: Any) -> list[str] | None:
    ((label, value),) = given.items()
    if value is None or isinstance(value, str):
        return None if value is None else [value]
    try:
        return [str(one) for one in value]
    except TypeError:
        raise TypeError(f"{label} is a list of texts, not {type(value).__name__}") from None


def _encodable(text: str | None) -> str | None:
    return None if text is None else encodable(text)


def _check_texts(**texts: object) -> None:
    for name, text in texts.items():
        if not isinstance(text, str):
            raise TypeError(f"{name} is a text, not {type(text).__name__}")


def _check_texts_or_none(**texts: object) -> None:
    _check_texts(**{name: text for name, text in texts.items() if text is not None})
