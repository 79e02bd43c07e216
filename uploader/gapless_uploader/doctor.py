"""What would fail, before it does: folders, packages, credentials and reachability, each with the way out.

A check says `ok`, `warn` or `bad`. It opens nothing for writing but a file of its own in the state folder.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gapless_uploader.absent import find_absent
from gapless_uploader.file_events import file_system, tells_events
from gapless_uploader.sink import Misconfigured, Parked, Retryable, Sink
from gapless_uploader.sinks import list_sinks
from gapless_uploader.spool import Spool
from gapless_uploader.state import State


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    grade: str
    """`ok`, `warn` or `bad`."""
    text: str


def examine(root: Path | None, state: Path, sinks: list[Sink]) -> Iterator[Finding]:
    """Look at the spool, the state folder and each sink. Raises nothing that they can cause."""
    if root is not None:
        yield from _spool(root, state)
    yield _state(state)
    ready = {one.kind: one for one in list_sinks()}
    for sink in sinks:
        listing = ready.get(sink.kind)
        if listing is not None and not listing.ready:
            yield Finding(sink.kind, "bad", listing.hint)
        else:
            yield _sink(sink)


def _spool(root: Path, folder: Path) -> Iterator[Finding]:
    spool = Spool([root])
    spool.scan(0.0)
    kind = file_system(root)
    told = f"{len(spool.runs)} runs on {kind or 'an unknown file system'}"
    if tells_events(kind):
        yield Finding("spool", "ok", f"{told}: file events wake the uploader")
    else:
        yield Finding("spool", "warn", f"{told}: no file events come from other hosts, the scan finds rows")
    state = State(folder, spool.paths)
    state.load()
    absent = find_absent(spool, state.progress).problems()
    for reason in (*spool.problems.values(), *(reason for _, reason in absent)):
        yield Finding("spool", "bad", reason)


def _state(folder: Path) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Finding("state", "bad", f"{folder}: {error.strerror}; choose another with --state")
    return Finding("state", "ok", str(folder))


def _sink(sink: Sink) -> Finding:
    check = getattr(sink, "check", None)
    if check is None:
        return Finding(sink.kind, "ok", f"installed; writes to {sink.target}" if sink.target else "installed")
    try:
        return Finding(sink.kind, "ok", str(check()))
    except Retryable as error:
        return Finding(sink.kind, "bad", f"cannot be reached: {error}; rows wait until it can")
    except (Parked, Misconfigured) as error:
        return Finding(sink.kind, "bad", str(error))
