"""The garbage collector as the uploader's process needs it."""

from __future__ import annotations

import gc

_YOUNG_OBJECTS = 50_000


def calm() -> None:
    """Look at fewer objects, and less often. For a process of our own: it changes all of it.

    Modules live as long as the process, and rows come by the thousand and hold no cycles. With the interpreter's own
    threshold, 700 objects, a tenth of the time for reading and a sixth of a replay's goes into looking at them in vain.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
