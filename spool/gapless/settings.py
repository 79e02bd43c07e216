"""A run's config and summary: mappings that record what is set and forget nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from gapless.encode import MAX_NESTING
from gapless.values import as_mapping


class Config(Mapping[str, Any]):
    """A run's config as it was given; setting a key records it. Nothing can be deleted."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self._values: dict[Any, Any] = {}
        self._put = put

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._values)} keys)"  # values may hold secrets

    def update(self, values: Any = (), /, **more: Any) -> None:
        """Record many keys at once; dicts merge deeply, anything else replaces."""
        given: Mapping[Any, Any] | None = None
        with suppress(Exception):  # anybody's object
            given = as_mapping(values)
            given = dict(values) if given is None else given
        if given is None:  # the writer says why
            self._put(values)
        part = {**(given or {}), **more}
        if part:
            self.take(part)
            self._put(part)

    def take(self, values: Mapping[Any, Any]) -> None:
        """Hold values that are recorded elsewhere."""
        with suppress(Exception):  # anybody's object
            _merge(self._values, values)


class Summary(Config):
    """Values that stand for the run as a whole, in place of each key's last value."""


def _merge(into: dict[Any, Any], part: Mapping[Any, Any], depth: int = 0) -> None:
    for key, value in part.items():
        if type(value) is dict and type(into.get(key)) is dict and depth < MAX_NESTING:
            _merge(into[key], value, depth + 1)
        else:
            into[key] = dict(value) if type(value) is dict else value
