"""How a sink fails, each with what the uploader makes of it. `sink.py` says when. Imports nothing that takes time."""

from __future__ import annotations


class Retryable(Exception):
    """The tracker cannot be reached or asks to wait; the same batch comes again. `after_s` is its own wish."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class Rejected(Exception):
    """The tracker will never take this batch as it is. `too_large` asks for a smaller one."""

    def __init__(self, reason: str, too_large: bool = False) -> None:
        super().__init__(reason)
        self.too_large = too_large


class Parked(Exception):
    """This run cannot go on here until somebody acts; the text ends with the way out.

    `whole_sink` parks every run of the sink (wrong credentials).
    """

    def __init__(self, reason: str, whole_sink: bool = False) -> None:
        super().__init__(reason)
        self.whole_sink = whole_sink


class Misconfigured(Exception):
    """The sink's options or its installation are wrong; the text ends with the way out."""
