"""What is where: runs x sinks, from the spool and the uploader's state alone. It writes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gapless_schemas import Damaged, Header, decode
from gapless_uploader.absent import AbsentRun, find_absent
from gapless_uploader.lease import is_alive
from gapless_uploader.merge import attempt_order, writer_order
from gapless_uploader.reader import RunReader
from gapless_uploader.run_name import name_in
from gapless_uploader.spool import Spool, SpoolRun
from gapless_uploader.state import State
from gapless_uploader.tail import SegmentFile

_TAIL_BYTES = 64 << 10


@dataclass(slots=True)
class SinkStatus:
    """How far one sink is with a run."""

    sink: str
    state: str
    step: int | None
    uploaded: int
    """Rows that the tracker acknowledged."""
    refused: dict[str, int]
    """Reason -> values or rows that the tracker cannot hold."""
    behind_bytes: int
    """Bytes of the spool that are not uploaded yet."""
    generation: int
    superseded: int
    damaged: int
    lost: int
    trouble: str | None = None
    """Why it does not go on, and what the way out is."""
    check: dict[str, Any] | None = None
    """What a comparison of the ended run with the tracker found: `ok`, and `text` for a person."""


@dataclass(slots=True)
class RunStatus:
    """One run of the spool."""

    project: str
    run: str
    name: str | None
    """What `init` was given, in the newest attempt of the main writer."""
    state: str
    attempts: int
    records: int
    """The newest seq of every attempt, added up: what was written."""
    step: int | None
    size: int
    idle_s: float
    sinks: list[SinkStatus] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Status:
    """Everything `gapless status` shows."""

    runs: list[RunStatus]
    problems: list[str]
    """What cannot be read, each with its path and reason."""
    notes: list[str] = field(default_factory=list)
    """What else a person should know: budgets that are too small."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @property
    def damaged(self) -> bool:
        """Whether something is lost, damaged or unreadable."""
        return bool(self.problems) or any(
            s.damaged or s.lost or (s.check is not None and not s.check["ok"]) for run in self.runs for s in run.sinks
        )


def read_status(
    paths: Iterable[Path],
    state_folder: Path,
    crashed_after_s: float = 300.0,
    wanted: Callable[[SpoolRun], bool] = lambda run: True,  # noqa: ARG005
) -> Status:
    """The status of every `wanted` run under `paths`. Raises nothing that a damaged spool can cause."""
    spool = Spool(list(paths))
    spool.scan(time.monotonic())
    state = State(state_folder, spool.paths)
    state.load()
    by_run: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for (project, run, _), progress in state.progress.items():
        by_run.setdefault((project, run), []).append(progress)
    runs = [_run(run, by_run.get(key, []), crashed_after_s) for key, run in sorted(spool.runs.items()) if wanted(run)]
    absent = find_absent(spool, state.progress, wanted)
    runs = sorted([*runs, *map(_absent_run, absent.runs)], key=lambda run: (run.project, run.run))
    problems = [reason for _, reason in [*sorted(spool.problems.items()), *sorted(absent.problems())]]
    return Status(runs, problems)


def _run(run: SpoolRun, progress: list[dict[str, Any]], crashed_after_s: float) -> RunStatus:
    records = 0
    step = None
    ends: dict[str, dict[str, Any]] = {}
    for attempt_id, segments in run.segments.items():
        if segments:
            last = _last_record(segments[max(segments)].path)
            if last is not None:
                ends[attempt_id] = last
                records += last["seq"]
                step = last["step"] if step is None or (last["step"] or -1) > step else step
    idle_s = max(0.0, time.time() - run.newest_mtime)
    status = RunStatus(
        project=run.key[0],
        run=run.key[1],
        name=name_in(run),
        state=_state(run, ends, idle_s, crashed_after_s),
        attempts=len(run.attempts),
        records=records,
        step=step,
        size=sum(s.size for found in run.segments.values() for s in found.values()),
        idle_s=round(idle_s, 1),
    )
    if run.unsupported:
        status.notes.append(run.unsupported)
    status.notes.extend(_overlaps(run))
    status.notes.extend(_cut(run, progress))
    status.sinks = [_sink(run, entry) for entry in sorted(progress, key=lambda p: str(p["sink"]))]
    return status


def _absent_run(found: AbsentRun) -> RunStatus:
    status = _run(SpoolRun(found.key), found.progress, 0.0)
    status.idle_s = 0.0
    if found.is_whole():
        status.notes.append(f"{found.folder} holds no segment any more; all of it was uploaded")
    return status


def _sink(run: SpoolRun, progress: dict[str, Any]) -> SinkStatus:
    reader = RunReader(progress.get("cursor", {}))
    reader.meet({name: header for name, header in run.attempts.items() if name in progress.get("cursor", {})})
    return SinkStatus(
        sink=str(progress["sink"]).removesuffix(":"),
        state=str(progress.get("state") or "running"),
        step=progress.get("top") if progress.get("top", -1) >= 0 else None,
        uploaded=progress.get("counts", {}).get("rows", 0),
        refused=dict(progress.get("refused", {})),
        behind_bytes=reader.behind(run.sizes()),
        generation=progress.get("generation", 1),
        superseded=progress.get("superseded", 0),
        damaged=progress.get("counts", {}).get("damaged", 0),
        lost=progress.get("lost", 0),
        trouble=progress.get("trouble"),
        check=progress.get("memo", {}).get("check"),
    )


def _state(run: SpoolRun, ends: dict[str, dict[str, Any]], idle_s: float, crashed_after_s: float) -> str:
    newest = _newest(run)
    if run.unsupported is not None:
        return "unreadable"
    if newest is None:
        return "empty"
    finish = ends.get(newest.attempt_id, {}).get("finish")
    if finish is not None:
        return str(finish)
    alive = is_alive(newest.host, newest.pid, newest.boot_id)
    if alive is False or (alive is None and idle_s > crashed_after_s):
        return "crashed"
    return "running"


def _newest(run: SpoolRun) -> Header | None:
    if not run.attempts:
        return None
    first = min((header.writer for header in run.attempts.values()), key=writer_order)
    return max((header for header in run.attempts.values() if header.writer == first), key=attempt_order)


def _overlaps(run: SpoolRun) -> list[str]:
    """Attempts of one writer that were written at the same time: two processes believed to be the writer."""
    spans: dict[str, list[tuple[float, float, Header]]] = {}
    for attempt_id, header in run.attempts.items():
        grown = max((s.mtime for s in run.segments.get(attempt_id, {}).values()), default=header.created)
        spans.setdefault(header.writer, []).append((header.created, grown, header))
    notes = []
    for writer, found in spans.items():
        found.sort(key=lambda span: span[0])
        for (_, end, one), (start, _, other) in pairwise(found):
            if end > start + 1.0:
                first, second = (f"{h.attempt} ({h.host} pid {h.pid})" for h in (one, other))
                notes.append(f"attempts {first} and {second} of writer {writer!r} overlapped by {end - start:.0f} s")
    return notes


def _cut(run: SpoolRun, progress: list[dict[str, Any]]) -> list[str]:
    """Segments that are shorter than what was uploaded of them: the spool lost bytes, the trackers did not."""
    read: dict[tuple[str, int], int] = {}
    for entry in progress:
        for attempt_id, place in entry.get("cursor", {}).items():
            for segment, offset, _ in place["open"]:
                read[attempt_id, segment] = max(offset, read.get((attempt_id, segment), 0))
    notes = []
    for (attempt_id, index), offset in sorted(read.items()):
        segment = run.segments.get(attempt_id, {}).get(index)
        if segment is not None and segment.size < offset:
            notes.append(f"{segment.name} has {segment.size} bytes, and {offset} of it were uploaded: it was cut since")
    return notes


def _last_record(path: Path) -> dict[str, Any] | None:
    """Seq, newest step and end state of a segment's last 64 KiB; None when there is no record."""
    try:
        with SegmentFile(path) as file:
            size = file.size()
            data = file.pread(_TAIL_BYTES, max(0, size - _TAIL_BYTES))
    except OSError:
        return None
    found: dict[str, Any] | None = None
    for line in data[: data.rfind(b"\n") + 1].split(b"\n"):
        try:
            record = decode(line)
        except Damaged:
            continue
        if found is None:
            found = {"seq": 0, "step": None, "finish": None}
        found["seq"] = max(found["seq"], record.seq)
        if record.step is not None:
            found["step"] = max(record.step, found["step"] or 0)
        if record.kind == "finish":
            found["finish"] = record.data.get("state", "finished")
    return found
