"""How far a run is at W&B: kept in the memo, and in the summary of the very request that carried the lines.

Line i of the history is the i-th row or amend operation of the run's generation. So `lines` says which operation is
next, and the place beside it says, in seqs of the spool, where an uploader that lost its state reads on.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from gapless_uploader.sink import Memo, Place

VERSION = 1


@dataclass(slots=True)
class Progress:
    """What was acknowledged."""

    lines: int = 0
    events: int = 0
    output: int = 0
    """Lines of each stream, which are also the next offsets."""
    top: int = -1
    """The highest `_step`."""
    last: list[float] = field(default_factory=list)
    """`_step`, `_timestamp` and `_runtime` of the row at the highest step."""
    late: str = ""
    """What a row below `top`, or of a step sent before, does: amend or axis; empty until it is known."""
    ended: bool = False
    """W&B was told how the run ended."""
    folds: dict[str, list[float]] = field(default_factory=dict)
    """Of keys with a summary rule: min, max, sum, count."""
    shown: dict[str, list[Any]] = field(default_factory=dict)
    """Key of a table or media -> its newest step, and what the row holds."""
    increments: dict[str, dict[str, Any]] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    """Keys that have another name at W&B."""
    refused: list[str] = field(default_factory=list)
    """Keys without which W&B took what it had refused."""
    described: str = ""
    """A digest of what the run was last said to be."""

    def copy(self) -> Progress:
        """One that may be changed while this one stays."""
        return deepcopy(self)

    def to_memo(self) -> Memo:
        """What the uploader keeps. NaN is not JSON to it, so numbers of folds travel as text."""
        return {name: _packed(name, getattr(self, name)) for name in _FIELDS}

    @staticmethod
    def from_memo(memo: Memo) -> Progress:
        """What `to_memo` made, of any version of it."""
        return Progress(**{name: _unpacked(name, memo[name]) for name in _FIELDS if name in memo})


_FIELDS = (
    "lines", "events", "output", "top", "last", "late", "ended", "folds", "shown", "increments", "renamed",
    "refused", "described",
)  # fmt: skip


def _packed(name: str, value: Any) -> Any:
    if name == "folds":
        return {key: [repr(number) for number in numbers] for key, numbers in value.items()}
    return value


def _unpacked(name: str, value: Any) -> Any:
    if name == "folds":
        return {key: [float(number) for number in numbers] for key, numbers in value.items()}
    return value


def in_summary(
    progress: Progress, generation: int, place: Place, superseded_by: int | None = None, next_late: str = ""
) -> dict[str, Any]:
    """`_gapless` of the summary. What the summary's own values say again is left out."""
    held = progress.to_memo()
    for name in ("shown", "increments", "last"):
        del held[name]
    found = {"v": VERSION, "generation": generation, **held}
    found["at"], found["to"], found["done"] = place.at, place.to, place.done
    found["held_to"] = place.top
    if place.firsts or place.batch_firsts:
        found["firsts"] = [place.firsts, place.batch_firsts]
    if superseded_by is not None:
        found["superseded_by"], found["next_late"] = superseded_by, next_late
    return found


def place_of(held: dict[str, Any]) -> Place:
    """The place that `in_summary` wrote."""
    return Place(held["at"], held["to"], held["done"], held["held_to"], *held.get("firsts", ()))


def progress_of(held: dict[str, Any], summary: dict[str, Any]) -> Progress:
    """The progress of a run whose summary holds `held`: what it left out is taken from the summary's values."""
    from gapless_uploader.sinks._wandb_media import increments_of

    progress = Progress.from_memo(held)
    progress.shown = {
        key: [-1, value] for key, value in summary.items() if isinstance(value, dict) and "_type" in value
    }
    progress.increments = increments_of(summary)
    if "_step" in summary:
        progress.last = [summary["_step"], summary.get("_timestamp", 0.0), summary.get("_runtime", 0.0)]
    return progress
