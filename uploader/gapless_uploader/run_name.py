"""A run's name, without reading the run, and which runs some globs ask for."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from gapless_schemas import Damaged, decode
from gapless_uploader.merge import attempt_order
from gapless_uploader.spool import SpoolRun
from gapless_uploader.tail import SegmentFile

_HEAD_BYTES = 64 << 10


def name_in(run: SpoolRun) -> str | None:
    """The run's name, from its newest attempt that has one; only the start of a segment is read."""
    for header in sorted(run.attempts.values(), key=attempt_order, reverse=True):
        segments = run.segments.get(header.attempt_id)
        if not segments:
            continue
        try:
            with SegmentFile(segments[min(segments)].path) as file:
                data = file.pread(_HEAD_BYTES, 0)
        except OSError:
            continue
        for line in data.split(b"\n")[1:-1]:
            try:
                record = decode(line)
            except Damaged:
                continue
            if record.kind == "run":
                name = record.data.get("name")
                if isinstance(name, str) and name:
                    return name
                break
    return None


def is_asked_for(run: SpoolRun, projects: Sequence[str], runs: Sequence[str]) -> bool:
    """Whether the run's project matches one of `projects`, and its id or name one of `runs`; no glob matches all."""
    project, run_id = run.key
    if projects and not any(fnmatchcase(project, glob) for glob in projects):
        return False
    if not runs or any(fnmatchcase(run_id, glob) for glob in runs):
        return True
    name = name_in(run)
    return name is not None and any(fnmatchcase(name, glob) for glob in runs)
