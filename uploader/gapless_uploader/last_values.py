"""A run's summary: the last value of each key by step, unless the training set another.

Rows mostly have the keys of the row before them, so only the newest is looked at: it is brought into the summary by
`fold`, which is called before anybody reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from gapless_uploader.operations import Value


class LastValues:
    """Not thread safe."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        """Key -> value; valid after `fold`."""
        self._steps: dict[str, int] = {}
        self._set: dict[str, Any] = {}
        """What the training set itself."""
        self._newest: tuple[int, Mapping[str, Value]] | None = None
        self._keys: list[str] = []
        """Of the newest row."""

    def note_newest(self, step: int, values: Mapping[str, Value]) -> None:
        """A row at a step that none is above."""
        keys = list(values)
        if keys != self._keys:
            if self._newest is not None and not self._newest[1].keys() <= values.keys():
                self.fold()
            self._keys = keys
        self._newest = (step, values)

    def note(self, step: int, values: Mapping[str, Value], older: bool = False) -> None:
        """A row at any step. `older`: one that is met backwards, so of two of one step the first met counts."""
        if self._newest is not None:
            self.fold()
        for key, value in values.items():
            held = self._steps.get(key, -1)
            if held < step or (held == step and not older):
                self.values[key] = value
                self._steps[key] = step
        self.values.update(self._set)

    def fold(self) -> None:
        """Bring the newest row into the summary."""
        if self._newest is not None:
            step, values = self._newest
            self._newest = None
            self.values.update(values)
            self._steps.update(dict.fromkeys(values, step))
            self.values.update(self._set)

    def put(self, data: Mapping[str, Any]) -> None:
        """The training set these itself."""
        self.fold()
        self._set.update(data)
        self.values.update(data)

    def take_back(self, lowest: int) -> set[str]:
        """Forget values from `lowest` on; their keys."""
        self.fold()
        gone = {key for key, step in self._steps.items() if step >= lowest}
        for key in gone:
            del self._steps[key]
            self.values.pop(key, None)
        return gone

    def without(self, keys: Collection[str]) -> set[str]:
        """Of `keys` those that no row has."""
        self.fold()
        return {key for key in keys if key not in self._steps}

    def settled(self, keys: Collection[str], remaining: int) -> bool:
        """Whether no row at a step up to `remaining` can change the value of any of `keys`."""
        return all(self._steps.get(key, -1) >= remaining for key in keys)

    def to_json(self) -> list[Any]:
        """What `restore` takes. NaN and infinities are in it: for Python's own json."""
        self.fold()
        plain = {key: value for key, value in self.values.items() if isinstance(value, int | float | str | list)}
        return [plain, self._steps, self._set]

    def restore(self, saved: list[Any]) -> None:
        """Go on from what `to_json` gave. Raises LookupError, TypeError or ValueError when it does not fit."""
        self.values, self._steps, self._set = saved
