"""Names and parameters that MLflow takes, from any that a run has, and back.

MLflow allows slashes, word characters, dots, dashes, colons and blanks, at most 250 of them, and wants a name to be a
plain relative path. Others are written as verl writes them (`@` as `_at_`, what is left as `_`); where two names would
become one, the later one ends in eight hex digits of its hash. What was changed is kept as tags, mapped name to true
name, so the mapping is read back and never made twice.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Any

_ODD = re.compile(r"[^/\w.\- :]")
_LENGTH = 230
"""Of MLflow's 250, so that a tag's prefix finds room before the name."""
TAG = "gapless.name."


class Names:
    """True names and MLflow's, of one run."""

    def __init__(self, tags: dict[str, str], held: Iterable[str]) -> None:
        """`tags` are the run's, `held` the metric names it has already."""
        self._mapped: dict[str, str] = {}
        self._taken: dict[str, str] = {name: name for name in held}
        for tag, name in tags.items():
            if tag.startswith(TAG):
                self._mapped[name] = tag[len(TAG) :]
                self._taken[tag[len(TAG) :]] = name

    def map(self, name: str, news: dict[str, str]) -> str:
        """MLflow's name for `name`; a tag that must be set with it is added to `news`."""
        if name in self._mapped:
            return self._mapped[name]
        mapped = allowed(name)
        if self._taken.get(mapped, name) != name:
            mapped = f"{mapped[: _LENGTH - 9]}_{_digest(name)}"
        if mapped != name:
            news[TAG + mapped] = name
        self._mapped[name] = mapped
        self._taken[mapped] = name
        return mapped


def allowed(name: str) -> str:
    """`name` in the form MLflow allows; itself where it may stay as it is."""
    if len(name) <= _LENGTH and not _ODD.search(name) and _is_plain_path(name):
        return name
    mapped = _ODD.sub("_", name.replace("@", "_at_"))
    parts = [part if part not in (".", "..") else "_" for part in mapped.split("/") if part]
    mapped = "/".join(parts) or "_"
    if len(mapped) > _LENGTH:
        mapped = f"{mapped[: _LENGTH - 9]}_{_digest(name)}"
    return mapped if _is_plain_path(mapped) else f"_{_digest(name)}"


def params_of(config: dict[str, Any]) -> dict[str, str]:
    """The config as MLflow parameters, flattened by verl's rules: keys joined by `/`, a list as `list_len`, `0`, ..."""
    flat: dict[str, str] = {}
    _flatten(config, "", flat)
    params: dict[str, str] = {}
    for name, value in flat.items():
        mapped = allowed(name)
        if mapped in params or (mapped != name and mapped in flat):
            mapped = f"{mapped[: _LENGTH - 9]}_{_digest(name)}"
        params[mapped] = value
    return params


def _flatten(value: Any, prefix: str, flat: dict[str, str]) -> None:
    if isinstance(value, list):
        value = {"list_len": len(value), **{str(place): inner for place, inner in enumerate(value)}}
    if isinstance(value, dict) and (value or not prefix):
        for key, inner in value.items():
            _flatten(inner, f"{prefix}/{key}" if prefix else str(key), flat)
    else:
        flat[prefix] = str(value)


def _is_plain_path(name: str) -> bool:
    normal = posixpath.normpath(name)
    return normal == name and normal != "." and not normal.startswith(("..", "/"))


def _digest(name: str) -> str:
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
