"""The runs that `Tracking` opened in this process, for the loggers that are given names in place of a run."""

from __future__ import annotations

from collections.abc import Iterable
from threading import RLock
from weakref import WeakKeyDictionary

from gapless.config import read_environment
from gapless.opening import init
from gapless.run import Run

Names = tuple[str, str]
"""Project and experiment."""

TABLES_WRITER = "generations"

_lock = RLock()
_open: dict[Names, Run] = {}
_own: dict[Names, Run] = {}
"""Runs opened here because no `Tracking` was."""
_kinds: WeakKeyDictionary[Run, list[str]] = WeakKeyDictionary()
"""The kinds of tracker that a run asked for when it was opened."""


def names(project: object, experiment: object) -> Names:
    """The names under which a run is known; verl's own defaults where there are none."""
    return str(project or "default"), str(experiment or "default")


def tracker_kinds(backends: Iterable[str] | str) -> list[str]:
    """The trackers among verl's backend names, each once, under the uploader's names for them."""
    given = [backends] if isinstance(backends, str) else list(backends)
    kinds = ["wandb" if name == "tracking" else str(name) for name in given]
    return [kind for kind in dict.fromkeys(kinds) if kind != "console"]


def opened(which: Names, run: Run, kinds: list[str]) -> None:
    """`run`, which asked for the trackers `kinds`, is the one for these names from now on."""
    _open.pop(which, None)
    _open[which] = run
    _kinds[run] = kinds


def left_out(run: Run, backends: Iterable[str] | str) -> list[str]:
    """The trackers that `run` asked for and that are not among `backends`: they do not get the row."""
    named = tracker_kinds(backends)
    return [kind for kind in _kinds.get(run, ()) if kind not in named]


def closed(which: Names, run: Run) -> None:
    """`run` has ended. Takes no lock: garbage collection calls this between any two steps of a caller."""
    if _open.get(which) is run:
        _open.pop(which, None)


def run_for_tables(project: object, experiment: object, backends: Iterable[str] | str) -> Run:
    """The run that `Tracking` has open under these names, else its newest, else one of this process's own.

    verl logs generations from processes that have no `Tracking` as well. With `GAPLESS_RUN_ID` set, rows from there
    join that run under a writer of their own; else they make a run of the same name.
    """
    which = names(project, experiment)
    found = _open.get(which) or next(reversed(_open.values()), None)
    if found is not None:
        return found
    with _lock:
        run = _own.get(which)
        if run is None:
            shared = read_environment().run_id is not None
            run = _own[which] = init(
                which[0],
                which[1],
                writer=TABLES_WRITER if shared else "main",
                is_writer=True,
                sinks=tracker_kinds(backends),
            )
        return run
