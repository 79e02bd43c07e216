"""The garbage collector as the uploader's process needs it."""

from __future__ import annotations

import gc
import time

_YOUNG_OBJECTS = 50_000
_SHARE = 20
"""A sweep comes no sooner than so many times what the last one took: at most a twentieth of the time."""


class _Sweeps:
    """When the last sweep ended and how long it took, in seconds. Two threads at once only sweep once too often."""

    wanted = False
    ended = 0.0
    took = 0.0


def calm() -> None:
    """Look at fewer objects, and less often. For a process of our own: it changes all of it.

    Modules live as long as the process, and rows come by the thousand and hold no cycles. With the interpreter's own
    threshold, 700 objects, a tenth of the time for reading and a sixth of a replay's goes into looking at them in vain.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
    _Sweeps.wanted = True


def sweep() -> None:
    """Free what a failure left behind: a traceback that keeps itself keeps the rows and the request of its call too.

    Those are few objects of many bytes, so the collector would wait long. Does nothing where `calm` was not called.
    """
    began = time.monotonic()
    if _Sweeps.wanted and began - _Sweeps.ended >= _SHARE * _Sweeps.took:
        gc.collect()
        _Sweeps.ended = time.monotonic()
        _Sweeps.took = _Sweeps.ended - began
