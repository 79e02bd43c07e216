"""How the uploader behaves: its options and their defaults. Imports nothing that takes time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gapless_uploader.budget import Limits

CALL_TIMEOUT_S = 300.0
CRASHED_AFTER_S = 300.0
PATIENCE_S = 120.0
"""How long a replay tries again what fails, when nothing else is left to do."""
SPOOL_CONFIG = "spool-config"
"""What `--to` says for the sinks that the runs ask for."""
REWINDS = ("new-run", "keep-first", "mark")
"""What `on_rewind` may be."""


@dataclass(frozen=True, slots=True)
class UploaderOptions:
    """How the uploader behaves."""

    workers: int = 4
    """Steps of one sink that run at once."""
    on_rewind: str = "new-run"
    """What becomes of rows that were uploaded and rewound: new-run, keep-first or mark."""
    crashed_after_s: float = CRASHED_AFTER_S
    """A run without a finish that has not grown for so long has crashed, when its process cannot be looked at."""
    grace_s: float = 30.0
    """How long NUL bytes inside a segment may be blocks that have not arrived."""
    projects: tuple[str, ...] = ()
    """Only projects that match one of these globs; empty means all."""
    runs: tuple[str, ...] = ()
    """Only run ids or names that match one of these globs; empty means all."""
    slow_scan_s: float = 60.0
    """The longest time between two looks at a quiet run."""
    call_timeout_s: float = CALL_TIMEOUT_S
    """A call of a sink that has not returned after so long no longer counts as one of its workers."""
    budgets: Mapping[str, Limits] = field(default_factory=dict)
    """Kind of sink -> what it may use."""


def default_state_folder() -> Path:
    """`$XDG_STATE_HOME/gapless`, else `~/.local/state/gapless`."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "gapless"
