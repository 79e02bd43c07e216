"""Training metrics into an append-only spool.

Importing this package loads nothing heavy, opens nothing and starts nothing. `stats_tracker`, `stats_logger` and
`tracking` are modules that load when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from gapless.opening import init
from gapless.payloads import Audio, File, Histogram, Image, Table, Text, Video
from gapless.run import Run
from gapless.tally import Stats

__all__ = [
    "Audio",
    "File",
    "Histogram",
    "Image",
    "Run",
    "Stats",
    "Table",
    "Text",
    "Video",
    "init",
    "stats_logger",
    "stats_tracker",
    "tracking",
]

_ON_FIRST_USE = frozenset({"stats_logger", "stats_tracker", "tracking"})


def __getattr__(name: str) -> ModuleType:
    if name in _ON_FIRST_USE:
        return import_module(f"gapless.{name}")
    raise AttributeError(f"module 'gapless' has no attribute {name!r}")
