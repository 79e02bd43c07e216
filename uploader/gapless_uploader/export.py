"""A run's merged history in another tool's format, by hand: once, from what the spool holds now."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from gapless_uploader.sinks import need

if TYPE_CHECKING:
    from gapless_uploader.replay import MergedRun
    from gapless_uploader.sink import Refusal
    from gapless_uploader.spool import SpoolRun


Export: TypeAlias = "tuple[Path, list[Refusal]]"
"""What was made, and what it cannot hold."""


def export_run(run: SpoolRun, kind: str, out: Path) -> Export:
    """Write `run` as `kind` under the folder `out`. Raises OSError, Misconfigured and Retryable."""
    from gapless_uploader.replay import merged_run

    return FORMATS[kind](merged_run(run), out)


def _wandb_offline(merged: MergedRun, out: Path) -> Export:
    """W&B's own offline folder, written by its own client."""
    need("wandb", "wandb")
    offline = import_module("gapless_uploader.sinks._wandb_offline")
    made: Export = offline.export_offline(merged, out)
    return made


FORMATS: dict[str, Callable[[MergedRun, Path], Export]] = {"wandb-offline": _wandb_offline}
