"""The last value by step of every key of a run, for trackers that show the present and keep no history."""

from __future__ import annotations

from math import isfinite, isnan

from gapless_uploader.operations import Amend, Log, Missing, Rewind, Row, Value
from gapless_uploader.sink import Batch, Memo, Refusal

_WORDS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Latest:
    """Key -> (step, value). An older step never takes the place of a newer one."""

    def __init__(self, memo: Memo) -> None:
        self.values: dict[str, tuple[int, float]] = {
            key: (step, _WORDS[value] if isinstance(value, str) else value)
            for key, (step, value) in memo.get("latest", {}).items()
        }

    def apply(self, batch: Batch, tracker: str) -> tuple[set[str], set[str], list[Refusal]]:
        """Keys with another value, keys that are gone, and what `tracker` cannot show."""
        refused: list[Refusal] = []
        changed: set[str] = set()
        gone: set[str] = set()
        for operation in batch.operations:
            match operation:
                case Row(step=step, values=values):
                    self._put(step, values, changed, refused, tracker)
                case Amend(step=step, values=values, changed=keys):
                    part = {key: values[key] for key in keys if key in values}
                    self._put(step, part, changed, refused, tracker)
                case Rewind(step=first):
                    for key in [key for key, (step, _) in self.values.items() if step >= first]:
                        del self.values[key]
                        gone.add(key)
                case Log():
                    refused.append(Refusal(None, None, f"{tracker} has no console lines"))
                case _:
                    pass
        return changed & self.values.keys(), gone - self.values.keys(), refused

    def memo(self) -> Memo:
        """What `Latest` is made from in the next process."""
        return {
            "latest": {
                key: [step, value if isfinite(value) else _word(value)] for key, (step, value) in self.values.items()
            }
        }

    def _put(
        self, step: int | None, values: dict[str, Value], changed: set[str], refused: list[Refusal], tracker: str
    ) -> None:
        for key, value in values.items():
            if not isinstance(value, (bool, int, float)):
                reason = value.reason if isinstance(value, Missing) else f"{tracker} shows numbers alone"
                refused.append(Refusal(step, key, reason))
                continue
            try:
                number = float(value)
            except OverflowError:
                refused.append(Refusal(step, key, "an integer beyond a 64-bit float"))
                continue
            at = -1 if step is None else step
            if self.values.get(key, (-1, 0.0))[0] <= at:
                self.values[key] = at, number
                changed.add(key)


def _word(value: float) -> str:
    return "nan" if isnan(value) else "inf" if value > 0 else "-inf"
