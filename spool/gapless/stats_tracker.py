"""Statistics across ranks, in the words of AReaL's `areal.utils.stats_tracker`.

Every rank records into a tracker; `export` reduces what all ranks recorded to one dict of rows. Recording keeps
sums, counts, minima and maxima on the device of what is recorded; it moves nothing off the device and talks to
nobody. An export is a fixed, small number of collectives however many keys there are.

The functions of this module work on one default tracker; `get(name)` gives another by name.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

from gapless._stats.layout import ReduceType
from gapless._stats.pack import Exporter
from gapless._stats.reduce import ExportError
from gapless._stats.tracker import DistributedStatsTracker, seconds

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "DistributedStatsTracker",
    "ExportError",
    "ReduceType",
    "denominator",
    "disable_scope",
    "export",
    "export_all",
    "get",
    "record_timing",
    "scalar",
    "scope",
    "scope_func_wrapper",
    "stat",
]

_TRACKERS: dict[str, DistributedStatsTracker] = {"": DistributedStatsTracker()}
_LOCK = threading.Lock()
_ALL = Exporter()

DEFAULT_TRACKER = _TRACKERS[""]
stat = DEFAULT_TRACKER.stat
denominator = DEFAULT_TRACKER.denominator
scalar = DEFAULT_TRACKER.scalar
export = DEFAULT_TRACKER.export
scope = DEFAULT_TRACKER.scope
scope_func_wrapper = DEFAULT_TRACKER.scope_func_wrapper
disable_scope = DEFAULT_TRACKER.disable_scope
record_timing = DEFAULT_TRACKER.record_timing


def get(name: str = "") -> DistributedStatsTracker:
    """The tracker of that name, made at the first call; without a name, the default one."""
    with _LOCK:
        if name not in _TRACKERS:
            _TRACKERS[name] = DistributedStatsTracker(name)
        return _TRACKERS[name]


def export_all(
    reduce_group: dist.ProcessGroup | None = None,
    reset: bool = True,
    timeout: float | timedelta | None = None,
) -> dict[str, float]:
    """The rows of the default tracker and of all that `get` made, in one export; otherwise as `export`.

    A tracker may be missing on some ranks. Where two trackers have the same row, a warning names it and the
    tracker whose name sorts last wins.
    """
    with _LOCK:
        sources = [tracker.source for tracker in _TRACKERS.values()]
    return _ALL.export(sources, "export_all()", key=None, group=reduce_group, reset=reset, timeout_s=seconds(timeout))
