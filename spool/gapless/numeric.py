"""The number that an object is, to the last bit: scalars and one-element arrays of any library.

No library is imported: numpy, torch and ml_dtypes are known by what their objects offer. No tensor or graph is held.
"""

from __future__ import annotations

from contextlib import suppress
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from math import isfinite
from typing import Any


class Refused(ValueError):
    """A value that has no place in the spool; its text says why."""


def as_number(value: Any) -> int | float | bool | None:
    """The number that `value` is: a scalar of any library, or a one-element array. None when it is none."""
    kind = type(value)
    if kind in (int, float, bool):
        return value  # type: ignore[no-any-return]
    if isinstance(value, Enum):
        return value.value if type(value.value) in (int, float, bool) else None
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Decimal | Fraction):
        return _ratio(value)
    if isinstance(value, (str, bytes, complex, type)):
        return None
    shape = shape_of(value)
    if shape is not None:
        if any(length != 1 for length in shape):
            return None
        with suppress(Exception):  # a tensor that cannot be read is no number
            return _item(detached(value))
        return None
    if hasattr(kind, "__float__") or hasattr(kind, "__index__"):
        with suppress(Exception):
            return _item(value)
    return None


def _item(value: Any) -> int | float | bool | None:
    item = value.item() if hasattr(value, "item") else value
    if type(item) in (int, float, bool):
        return item  # type: ignore[no-any-return]
    if isinstance(item, complex) or type(item).__name__ in ("datetime64", "timedelta64"):
        return None
    if hasattr(type(item), "__index__"):
        return int(item)
    if hasattr(type(item), "__float__"):
        return float(item)
    return None


def _ratio(value: Decimal | Fraction) -> int | float | None:
    if isinstance(value, Decimal) and not value.is_finite():
        return float("nan") if value.is_nan() else float(value)
    try:
        near = float(value)
    except OverflowError:
        near = float("inf")
    if isfinite(near):
        return near
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else None
    return int(value) if value.adjusted() < 4000 and value == value.to_integral_value() else None


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of an array or tensor, None when it is neither."""
    shape = getattr(value, "shape", None)
    if shape is None or not hasattr(value, "dtype") or isinstance(value, type):
        return None
    try:
        return tuple(int(length) for length in shape)
    except (TypeError, ValueError):
        return None


def detached(value: Any) -> Any:
    """`value` without its graph. Raises `Refused` for a tensor spread over ranks, since reading it would be a
    collective, and for a masked value, which stands for none."""
    mask = getattr(value, "mask", None)
    if mask is not None and type(value).__module__.startswith("numpy.ma") and bool(mask.any()):
        raise Refused("a masked value")
    if hasattr(value, "detach"):
        placements = getattr(value, "placements", None)
        if placements is not None:
            if not all(placement.is_replicate() for placement in placements):
                raise Refused("a tensor that is spread over ranks")
            value = value.to_local()
        value = value.detach()
        if "float8" in str(value.dtype):
            value = value.float()
    return value
