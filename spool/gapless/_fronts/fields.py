"""Reading a trainer's config without knowing its class: dataclasses, OmegaConf, namespaces and dicts alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def field(holder: Any, *names: str, default: Any = None) -> Any:
    """`holder.a.b` or `holder["a"]["b"]` for the names given; `default` where one is missing, None or unreadable."""
    for name in names:
        try:
            holder = holder[name] if isinstance(holder, Mapping) else getattr(holder, name)
        except Exception:  # noqa: BLE001  # an OmegaConf value that is mandatory and missing, a property that fails
            return default
        if holder is None:
            return default
    return holder


def text_or_none(value: Any) -> str | None:
    """`value` as the text that `init` takes, None where there is none."""
    return None if value is None or value == "" else str(value)
