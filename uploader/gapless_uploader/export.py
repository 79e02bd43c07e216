"""A run's merged history in another tool's format, by hand: once, from what the spool holds now."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gapless_uploader.sinks import need

if TYPE_CHECKING:
    from gapless_uploader.replay import MergedRun
    from gapless_uploader.spool import SpoolRun


def export_run(run: SpoolRun, kind: str, out: Path) -> Path:
    """Write `run` as `kind` under the folder `out`; what was made. Raises OSError, Misconfigured and Retryable."""
    from gapless_uploader.replay import merged_run

    return FORMATS[kind](merged_run(run), out)


def _wandb_offline(merged: MergedRun, out: Path) -> Path:
    """W&B's own offline folder, written by its own client."""
    need("wandb", "wandb")
    offline = import_module("gapless_uploader.sinks._wandb_offline")
    return Path(offline.export_offline(merged, out))


FORMATS: dict[str, Callable[[MergedRun, Path], Path]] = {"wandb-offline": _wandb_offline}
