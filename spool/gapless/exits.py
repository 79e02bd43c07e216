"""The runs of this process that are to be finished when it ends, by whichever way it ends.

`atexit` serves an interpreter's normal end, `multiprocessing`'s finalizers a forked worker's, which ends without it.
A child process forked from this one inherits the list and finishes nothing of it: each run knows its process.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol


class Endable(Protocol):
    def end_at_exit(self) -> None: ...


_open: dict[int, Endable] = {}
_hooked_pid = 0
_names: dict[tuple[int, str, str, str, str], list[str | None]] = {}


def remember(run: Endable) -> None:
    """Finish `run` when the process ends."""
    global _hooked_pid
    if _hooked_pid != os.getpid():
        _hooked_pid = os.getpid()
        _open.clear()  # of the parent, when this process was forked
        _hook()
    _open[id(run)] = run


def forget(run: Endable) -> None:
    """`run` has finished."""
    _open.pop(id(run), None)


def nth_run_of_job(root: str, project: str, writer: str, job: str, name: str | None) -> str:
    """The job's key for a run: the job itself for the first name that this process opens, numbered for further names.

    Names may hold a time stamp, so a requeued job is known by the order in which it opens its runs.
    """
    names = _names.setdefault((os.getpid(), root, project, writer, job), [])
    if name not in names:
        names.append(name)
    place = names.index(name)
    return job if place == 0 else f"{job}.{place + 1}"


def _hook() -> None:
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, _end_all, exitpriority=100)
    # A worker started by `spawn` ends like any interpreter; finishing twice does nothing.
    atexit.register(_end_all)


def _end_all() -> None:
    if _hooked_pid != os.getpid():
        return
    for run in list(_open.values()):
        run.end_at_exit()
