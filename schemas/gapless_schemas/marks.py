"""Marks: what JSON cannot hold, kept beside `data` as a list of `[path, kind]`."""

from __future__ import annotations

from math import inf, nan
from typing import Any

_FLOATS = {"nan": nan, "inf": inf, "-inf": -inf}


def apply_marks(data: dict[str, Any], marks: list[Any]) -> None:
    """Put back into `data`, in place, what its marks say. `repr` leaves the text; an unknown kind leaves the value.

    Raises TypeError, ValueError or LookupError when a mark points at nothing.
    """
    for path, kind in marks:
        holder: Any = data
        for part in path[:-1]:
            holder = holder[part]
        last = path[-1]
        if kind in _FLOATS:
            if holder[last] is not None:
                raise ValueError(f"{path} is marked {kind} and holds a value")
            holder[last] = _FLOATS[kind]
        elif kind == "int":
            if type(holder[last]) is not str or len(holder[last]) > 4300:
                raise ValueError(f"{path} is marked int and holds no integer's text")
            holder[last] = int(holder[last])
        else:
            holder[last]
