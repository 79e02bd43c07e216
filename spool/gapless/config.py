"""What the environment says. No other module of the training side reads environment variables for settings."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment's settings, read once for each `init`."""

    root: str | None
    """`GAPLESS_DIR`: the spool's root when `dir` is not given."""
    run_id: str | None
    """`GAPLESS_RUN_ID`: the run id when `id` is not given."""
    disabled: bool
    """`GAPLESS_MODE=disabled`: every call does nothing."""
    unknown_mode: str | None
    """Any other value of `GAPLESS_MODE`: it changes nothing."""
    job: str | None
    """What a requeued or restarted job keeps: `SLURM_JOB_ID`, else `TORCHELASTIC_RUN_ID`."""
    rank: int | None
    """`RANK`, as torchrun sets it."""
    world_size: int | None
    slurm_job_id: str | None
    ring_rows: int | None
    """`GAPLESS_RING_ROWS`: rows kept in memory for a disk that takes nothing."""
    ring_bytes: int | None
    """`GAPLESS_RING_BYTES`: their bytes."""


def read_environment() -> Environment:
    """The settings as they are now."""
    slurm = os.environ.get("SLURM_JOB_ID") or None
    elastic = os.environ.get("TORCHELASTIC_RUN_ID") or None
    if elastic == "none":  # torchrun without --rdzv-id: the same text for every job
        elastic = None
    mode = os.environ.get("GAPLESS_MODE", "").strip()
    job = f"slurm-{slurm}" if slurm else f"elastic-{elastic}" if elastic else None
    return Environment(
        root=os.environ.get("GAPLESS_DIR") or None,
        run_id=os.environ.get("GAPLESS_RUN_ID") or None,
        disabled=mode.lower() == "disabled",
        unknown_mode=mode if mode.lower() not in ("", "disabled") else None,
        job=job,
        rank=_integer("RANK"),
        world_size=_integer("WORLD_SIZE"),
        slurm_job_id=slurm,
        ring_rows=_integer("GAPLESS_RING_ROWS"),
        ring_bytes=_integer("GAPLESS_RING_BYTES"),
    )


def _integer(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
