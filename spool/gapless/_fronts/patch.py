"""Ours in place of verl's logging classes, without an edit to verl or to the training script."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gapless.warn import Warner

TARGET = "verl.utils.tracking"
NAMES = ("Tracking", "ValidationGenerationsLogger", "DapoFilteredRewardTableLogger")

_ORIGINAL = "_gapless_replaced"
"""Where the module keeps verl's own classes."""


def install() -> None:
    """Put `Tracking` and the two loggers of tables in place of verl's, now or as soon as verl loads its own.

    Imports nothing of verl, and does nothing in a process that never loads it. A second call changes nothing. A module
    that took the classes from verl before keeps them, which is warned about: call this before the trainer is imported.
    """
    module = sys.modules.get(TARGET)
    if module is not None:
        _put(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Lets the other finders find verl's module, and has its loader followed by ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TARGET:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on everything that asks for the loader (inspect, pickle, reload) meets verl's own.
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        _put(module)


def _put(module: ModuleType) -> None:
    from gapless import tracking

    replaced: dict[str, Any] = vars(module).setdefault(_ORIGINAL, {})
    for name in NAMES:
        ours = getattr(tracking, name)
        theirs = getattr(module, name, ours)
        if theirs is not ours:
            replaced[name] = theirs
        setattr(module, name, ours)
    _warn_of_holders(replaced)


def _warn_of_holders(replaced: dict[str, Any]) -> None:
    holders = [
        f"{holder}.{name}"
        for holder, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and holder != TARGET
        for name, theirs in replaced.items()
        if vars(module).get(name) is theirs
    ]
    if holders:
        Warner().say(
            f"{', '.join(sorted(holders))} is verl's own: it was imported before gapless.tracking.install(), and what "
            "it logs does not reach the spool; call install() first, or start with python -m gapless.verl"
        )
