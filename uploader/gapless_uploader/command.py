"""The `gapless` command as it is started: what takes longest begins first, then the rest is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main() -> None:
    """Run the command that the arguments of the process name."""
    open_standard_streams()
    try:
        give_head_starts(sys.argv[1:])
        from gapless_uploader.cli import main as command
    except KeyboardInterrupt:  # as click does it, which is not there yet
        sys.stderr.write("Aborted!\n")
        sys.exit(1)
    command(prog_name="gapless")


def open_standard_streams() -> None:
    """Put the null device where a standard stream was closed: else the next file that is opened takes its place, and
    whatever writes to the stream writes there."""
    while (handle := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(handle)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def give_head_starts(arguments: Sequence[str]) -> None:
    """Begin what the sinks of a replay need and what takes long, before the arguments are understood.

    It goes by the looks of them. Where it guesses wrong, nothing is lost but the work of a process that ends with ours,
    and where it does not see a sink, that one begins a little later. Other commands have time.
    """
    if arguments[:1] != ["replay"] or not {"--dry-run", "--help", "-h"}.isdisjoint(arguments):
        return
    from gapless_uploader.sinks import HEAD_STARTS, named

    for kind, place in HEAD_STARTS.items():
        if any(word.removeprefix("--to=").partition(":")[0] == kind for word in arguments):
            named(place)()
