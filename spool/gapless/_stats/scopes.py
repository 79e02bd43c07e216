"""Scopes: the prefix of every key, one stack per tracker, thread and async task.

The stacks live in one context variable, so a task that is created inside a scope starts in it, what the
task opens or closes stays its own, and a new thread starts with the tracker's name alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType, TracebackType

_NOTHING: Mapping[int, tuple[str, ...]] = MappingProxyType({})
_STACKS: ContextVar[Mapping[int, tuple[str, ...]]] = ContextVar("gapless_stats_scopes", default=_NOTHING)
_NUMBERS = itertools.count()


class Scopes:
    """The stack of one tracker. Safe to use from several threads and tasks at once."""

    def __init__(self, name: str) -> None:
        self._number = next(_NUMBERS)
        self._root: tuple[str, ...] = (name.strip("/"),) if name else ()

    def stack(self) -> tuple[str, ...]:
        """The names in force here, outermost first."""
        return _STACKS.get().get(self._number, self._root)

    def replace(self, stack: tuple[str, ...]) -> None:
        """Put another stack in force in this thread or task."""
        _STACKS.set({**_STACKS.get(), self._number: stack})

    def full_key(self, key: str) -> str:
        """`key` behind the names in force, joined with `/`."""
        stack = self.stack()
        return "/".join((*stack, key)) if stack else key


class Scope:
    """A context manager that puts one name on the stack; may be entered again, also inside itself."""

    def __init__(self, scopes: Scopes, name: str) -> None:
        self._scopes = scopes
        self.name = name.strip("/")

    def __enter__(self) -> Scope:
        self._scopes.replace((*self._scopes.stack(), self.name))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        stack = self._scopes.stack()
        # A generator may be closed in another context than it was opened in; that one's names are not ours to take.
        if stack and stack[-1] == self.name:
            self._scopes.replace(stack[:-1])
