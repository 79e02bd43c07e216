"""Strict JSON of a config or a table, for trackers that show it as text."""

from __future__ import annotations

import json
from math import isfinite, isnan
from typing import Any


def as_json(value: Any, indent: int | None = None) -> str:
    """`value` as JSON that every parser takes: NaN and infinities as texts of that name, integers of any length.

    What has no JSON form is its `str`.
    """
    return json.dumps(_plain(value), ensure_ascii=False, indent=indent, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
