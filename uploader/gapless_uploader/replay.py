"""A run's merged history in memory, for what looks at one run: `show`, tests, and comparisons.

It is what a sink that can express everything would hold after every operation was applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from gapless_uploader.history import History
from gapless_uploader.operations import Amend, Log, Operation, Rewind, Row, Summary
from gapless_uploader.reader import RunReader
from gapless_uploader.sink import RunView
from gapless_uploader.spool import SpoolRun
from gapless_uploader.tail import Damage


@dataclass(slots=True)
class MergedRun:
    """All rows of a run by step, and what is known of the run."""

    view: RunView
    rows: dict[int, Row] = field(default_factory=dict)
    unstepped: list[Row] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """What the training set itself."""
    logs: list[Log] = field(default_factory=list)
    superseded: int = 0
    lost: int = 0
    damage: list[tuple[str, Damage]] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        """What the operation does to the rows, the summary and the console."""
        if isinstance(operation, Row):
            if operation.step is None:
                self.unstepped.append(operation)
            else:
                self.rows[operation.step] = operation
        elif isinstance(operation, Amend):
            self.rows[operation.step] = Row(operation.step, operation.t, operation.runtime, operation.values)
        elif isinstance(operation, Rewind):
            for step in [step for step in self.rows if step >= operation.step]:
                del self.rows[step]
        elif isinstance(operation, Summary):
            self.summary.update(operation.values)
        elif isinstance(operation, Log):
            self.logs.append(operation)

    def series(self) -> Mapping[str, list[tuple[int, float]]]:
        """Key -> (step, value) of its numbers, steps rising."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step in sorted(self.rows):
            for key, value in self.rows[step].values.items():
                if isinstance(value, int | float):
                    found.setdefault(key, []).append((step, _as_float(value)))
        return found


def _as_float(value: float) -> float:
    """For a curve: an integer beyond any float is infinitely high."""
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def merged_run(run: SpoolRun, now: float = 0.0) -> MergedRun:
    """The merge of everything the spool holds of `run` now. Raises OSError."""
    view = RunView(run.key[0], run.key[1], 0.0, "")
    merged = MergedRun(view)
    history, reader, paths = History(view), RunReader(grace_s=0.0), run.paths()
    for header in reader.meet(run.attempts):
        first_step = reader.first_step(header.attempt_id, paths, now)
        history.meet(header, reader.attempts[header.attempt_id].seen, first_step)
    history.apply_limits(paths)
    for attempt_id, taken in reader.read(paths, run.sizes(), now, 1 << 62):
        history.feed(attempt_id, taken, paths)
        for operation in history.take():
            merged.apply(operation)
    merged.superseded, merged.lost, merged.damage = history.superseded, history.lost(), list(reader.take_damage())
    return merged


def find_run(runs: Mapping[tuple[str, str], SpoolRun], name: str | None) -> SpoolRun | None:
    """The run with this id, or with this project/id; without a name the newest one."""
    if name is None:
        return max(runs.values(), key=lambda run: run.newest_mtime, default=None)
    for (project, run_id), run in runs.items():
        if name in (run_id, f"{project}/{run_id}"):
            return run
    return None
