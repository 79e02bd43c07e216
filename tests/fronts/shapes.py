"""Configs with the fields that AReaL 1.0.4 and verl 0.9.1 hand to their loggers, and keys that must not be kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WANDB_KEY = "0123456789abcdef0123456789abcdef01234567"
SWANLAB_KEY = "Ab3dEf6hIj9lMn2pQr5tU"


@dataclass
class WandB:
    mode: str = "disabled"
    wandb_base_url: str = ""
    wandb_api_key: str = ""
    entity: str | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    group: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    config: dict[str, Any] | None = None
    id_suffix: str | None = "train"


@dataclass
class Swanlab:
    project: str | None = None
    name: str | None = None
    config: dict[str, Any] | None = None
    logdir: str | None = None
    mode: str = "disabled"
    api_key: str | None = None


@dataclass
class TensorBoard:
    path: str | None = None


@dataclass
class Trackio:
    mode: str = "disabled"
    project: str | None = None
    name: str | None = None
    space_id: str | None = None


@dataclass
class StatsLoggerPart:
    experiment_name: str = "gsm8k"
    trial_name: str = "t0"
    fileroot: str = ""
    wandb: WandB = field(default_factory=WandB)
    swanlab: Swanlab = field(default_factory=Swanlab)
    tensorboard: TensorBoard = field(default_factory=TensorBoard)
    trackio: Trackio = field(default_factory=Trackio)


@dataclass
class Experiment:
    experiment_name: str = "gsm8k"
    trial_name: str = "t0"
    seed: int = 1
    total_train_epochs: int = 2
    stats_logger: StatsLoggerPart = field(default_factory=StatsLoggerPart)


@dataclass
class FinetuneSpec:
    total_train_epochs: int = 2
    dataset_size: int = 40
    train_batch_size: int = 4

    @property
    def total_train_steps(self) -> int:
        return self.total_train_epochs * self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.train_batch_size


def experiment(root: Path, **parts: Any) -> Experiment:
    """AReaL's config with its files under `root`; `parts` are the trackers'."""
    return Experiment(stats_logger=StatsLoggerPart(fileroot=str(root), **parts))


def verl_config(**trainer: Any) -> dict[str, Any]:
    """What verl's trainers pass as `config`: the resolved container of their whole config."""
    return {
        "data": {"train_batch_size": 8, "tokenizer": "qwen"},
        "trainer": {
            "project_name": "p",
            "experiment_name": "e",
            "logger": ["console", "wandb"],
            "resume_mode": "auto",
            "wandb_proxy": "http://user:hunter22@proxy.example:3128",
            **trainer,
        },
    }
