"""What the environment told the trackers that verl would have started: kept as information.

Names (entity, group, job type, tags, notes) are used as names. Hosts, folders and ids are written down and nothing
else: where a run goes is the uploader's own configuration. Keys and other credentials are not looked at.
"""

from __future__ import annotations

import os
from typing import Any

from gapless._fronts.fields import text_or_none

NOTED = (
    "CLEARML_API_HOST",
    "CLEARML_WEB_HOST",
    "MLFLOW_EXPERIMENT_NAME",
    "MLFLOW_RUN_ID",
    "MLFLOW_TRACKING_URI",
    "MLP_TRACKING_REGION",
    "SWANLAB_API_HOST",
    "SWANLAB_LOG_DIR",
    "SWANLAB_MODE",
    "SWANLAB_WEB_HOST",
    "SWANLAB_WORKSPACE",
    "TENSORBOARD_DIR",
    "TRACKIO_DIR",
    "TRACKIO_SPACE_ID",
    "VERL_FILE_LOGGER_PATH",
    "VERL_FILE_LOGGER_ROOT",
    "VERL_RL_INSIGHT_ENABLE",
    "WANDB_BASE_URL",
    "WANDB_DIR",
    "WANDB_ENTITY",
    "WANDB_JOB_TYPE",
    "WANDB_MODE",
    "WANDB_NOTES",
    "WANDB_RUN_GROUP",
    "WANDB_RUN_ID",
    "WANDB_TAGS",
)


def noted_environment() -> dict[str, str]:
    """The variables of `NOTED` that are set, as they are now."""
    return {name: os.environ[name] for name in NOTED if os.environ.get(name)}


def wandb_names(noted: dict[str, str]) -> dict[str, Any]:
    """What W&B's client takes from these variables and is only a name: arguments of `init`."""
    tags = [tag for tag in noted.get("WANDB_TAGS", "").split(",") if tag]
    return {
        "entity": text_or_none(noted.get("WANDB_ENTITY")),
        "group": text_or_none(noted.get("WANDB_RUN_GROUP")),
        "job_type": text_or_none(noted.get("WANDB_JOB_TYPE")),
        "notes": text_or_none(noted.get("WANDB_NOTES")),
        "tags": tags or None,
    }
