"""`define_axis` as W&B knows it: metric definitions in the config, and summaries by rule, which the client computes.

A definition is `{"1": name}` or `{"2": glob}` with `"5"` the 1-based place of its x-axis in the list, `"6"` options
(2 hidden, 3 defined) and `"7"` rules. Rows are not given an x-axis value that the training did not log (W&B's
`step_sync`). A dot in a name would mean nesting to W&B, so it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import isnan, nan
from typing import Any

Axes = Mapping[str, tuple[str | None, str | None]]
RULES = {"min": 1, "max": 2, "mean": 3, "last": 5, "none": 6}
_HIDDEN, _DEFINED = 2, 3
LATE_AXIS = "global_step"
"""The x-axis of everything where `_step` is the line's index."""


def definitions(axes: Axes, known: Iterable[str], late_axis: bool) -> list[dict[str, Any]]:
    """The list of definitions. A glob that W&B does not know (a star elsewhere than at the end) names `known` keys."""
    made: list[dict[str, Any]] = []
    places: dict[str, int] = {}

    def define(name: str, options: list[int]) -> dict[str, Any]:
        if name not in places:
            places[name] = len(made) + 1
            glob = name.endswith("*")
            made.append({"2" if glob else "1": name if glob else _escaped(name), "6": options, "7": []})
        entry = made[places[name] - 1]
        entry["6"] = entry["6"] or options
        return entry

    if late_axis:
        define(LATE_AXIS, [_DEFINED, _HIDDEN])
        define("*", [])["5"] = places[LATE_AXIS]
    keys = list(known)
    for pattern, (axis, rule) in axes.items():
        names = [pattern]
        if "*" in pattern[:-1] or "?" in pattern or "[" in pattern:
            names = [key for key in keys if fnmatchcase(key, pattern)]
        for name in names:
            entry = define(name, [] if name.endswith("*") else [_DEFINED])
            if rule in RULES:
                entry["7"] = [RULES[rule]]
            if axis is not None:
                define(axis, [])
                entry["5"] = places[axis]
    return made


class Rules:
    """Which summary rule a key has: its own, else that of the last glob that matches it."""

    def __init__(self, axes: Axes) -> None:
        self._named = {key: rule for key, (_, rule) in axes.items() if rule and not _is_glob(key)}
        self._globs = [(key, rule) for key, (_, rule) in axes.items() if rule and _is_glob(key)]
        self._found: dict[str, str | None] = {}
        self.any = bool(self._named or self._globs)

    def of(self, key: str) -> str | None:
        """The rule of `key`, None without one."""
        if key not in self._found:
            glob = next((rule for glob, rule in reversed(self._globs) if fnmatchcase(key, glob)), None)
            self._found[key] = self._named.get(key, glob)
        return self._found[key]


def fold(folds: dict[str, list[float]], rules: Rules, values: Mapping[str, Any]) -> None:
    """Take a row's numbers into `folds`: key -> [min, max, sum, count]. Text and media are no numbers."""
    for key, value in values.items():
        if rules.of(key) not in ("min", "max", "mean") or not isinstance(value, int | float):
            continue
        number = float(value)
        held = folds.get(key)
        if held is None:
            folds[key] = [number, number, number, 1]
        elif isnan(number) or isnan(held[0]):
            folds[key] = [nan, nan, nan, held[3] + 1]
        else:
            folds[key] = [min(held[0], number), max(held[1], number), held[2] + number, held[3] + 1]


def ruled(key: str, value: Any, rules: Rules, folds: Mapping[str, list[float]]) -> tuple[bool, Any]:
    """(whether the summary has `key`, what it holds) for a key whose last value is `value`."""
    rule = rules.of(key)
    if rule == "none":
        return False, None
    if rule == "last":
        return True, {"last": value}
    if rule in ("min", "max", "mean") and key in folds:
        low, high, total, count = folds[key]
        return True, {rule: {"min": low, "max": high, "mean": total / count}[rule]}
    return True, value


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace(".", "\\.")


def _is_glob(key: str) -> bool:
    return any(mark in key for mark in "*?[")
