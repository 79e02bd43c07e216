"""What `wandb.Api` has to show before a request counts as delivered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_SPAN = 1_000
_MAX_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Unproved:
    """What is not there; with `shows_other` a row is there with another value, or lines that were taken are not."""

    what: str
    step: int | None = None
    key: str | None = None
    shows_other: bool = False


@dataclass(slots=True)
class Proof:
    """Rows by step, and at a run's end its state and progress."""

    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    state: str | None = None
    num_lines: int = 0
    tries: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows) or self.state is not None

    def expect(self, lines: Iterable[str], steps: set[int] | None = None) -> None:
        """The rows of these lines, of equal steps the last, or only those at `steps`."""
        for text in lines:
            row = json.loads(text)
            if steps is None or row["_step"] in steps:
                self.rows[row["_step"]] = row

    def windows(self) -> list[tuple[int, int]]:
        """Closed ranges of steps to read, few and short: sparse steps are sampled, the first and last among them."""
        found: list[list[int]] = []
        for step in sorted(self.rows):
            if found and step - found[-1][0] < _SPAN:
                found[-1][1] = step
            else:
                found.append([step, step])
        if len(found) > _MAX_WINDOWS:
            last = len(found) - 1
            found = [found[round(at * last / (_MAX_WINDOWS - 1))] for at in range(_MAX_WINDOWS)]
        return [(first, last) for first, last in found]

    def shows_both(self, rows: list[dict[str, Any]]) -> bool:
        """Whether some expected step is there more than once."""
        steps = [row.get("_step") for row in rows if row.get("_step") in self.rows]
        return len(steps) != len(set(steps))

    def missing(self, found: dict[str, Any]) -> Unproved | None:
        """What is not there, or is something else; None when all of it is."""
        held = {row.get("_step"): row for row in found["rows"]}
        windows = self.windows()
        for step, row in self.rows.items():
            if not any(first <= step <= last for first, last in windows):
                continue
            if step not in held:
                return Unproved(f"the row of step {step}")
            for key, value in row.items():
                if key not in held[step] or not same(value, held[step][key]):
                    return Unproved(f"{key!r} of step {step}", step, key, shows_other=True)
        if self.state is None:
            return None
        if found["state"] != self.state:
            return Unproved(f"the state {self.state} (it shows {found['state']})")
        if (found["progress"] or {}).get("lines") != self.num_lines:
            return Unproved(f"the progress of {self.num_lines} lines")
        if found["lines"] < self.num_lines:
            return Unproved(f"more than {found['lines']} of {self.num_lines} lines", shows_other=True)
        return None


def same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal, NaN with NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if {type(one), type(other)} == {int, float}:
        try:
            return float(one) == float(other)  # W&B keeps an integer beyond 53 bits as a float may
        except OverflowError:
            return False
    return bool(one == other or (one != one and other != other))
