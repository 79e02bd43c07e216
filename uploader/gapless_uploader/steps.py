"""What a pipeline's step is given, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from gapless_schemas import Header
from gapless_uploader.operations import Operation
from gapless_uploader.sink import Refusal
from gapless_uploader.tail import Damage


class Files(msgspec.Struct, frozen=True):
    """What the scan saw of a run; nothing of it changes any more."""

    headers: Mapping[str, Header]
    paths: Mapping[str, Mapping[int, Path]]
    sizes: Mapping[str, Mapping[int, int]]
    crashed: bool = False
    """Nobody writes the run's newest attempt any more."""


class Outcome(msgspec.Struct):
    """What one step did."""

    progress: dict[str, Any] | None = None
    """To be made durable before the next step."""
    rows: int = 0
    more: bool = False
    """There is more to do at once."""
    retry_in_s: float | None = None
    look_again_s: float | None = None
    """Part of the spool has not arrived yet, though the file's size says it has."""
    failed: str | None = None
    parked: str | None = None
    parked_sink: bool = False
    recovered_after: int = 0
    new_state: str | None = None
    damage: list[tuple[str, Damage]] = msgspec.field(default_factory=list)
    refused: list[Refusal] = msgspec.field(default_factory=list)
    crashed: str | None = None
    """What the sink raised though no sink may: the pipeline is of no use any more."""
    num_bytes: int = 0
    """Of spool that was read, for the sink's budget."""
    dead: list[tuple[Operation, str]] = msgspec.field(default_factory=list)
    """Operations that the tracker rejected for good."""
    check: dict[str, Any] | None = None
    """What a sink found when it compared an ended run with the tracker: `ok`, and `text` for a person."""


class PipelineOptions(msgspec.Struct, frozen=True):
    """How a pipeline behaves; the same for all runs of a sink."""

    on_rewind: str = "new-run"
    """What becomes of rows that were uploaded and rewound, where the tracker cannot take them back."""
    grace_s: float = 30.0
    """How long NUL bytes inside a segment may be blocks that have not arrived."""
