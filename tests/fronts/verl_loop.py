"""A rank of a verl-shaped training: `RANK=r WORLD_SIZE=2 python verl_loop.py FOLDER PHASE`.

The calls are those of verl's trainers: the last rank logs, a validation before training at the loaded step, samples as
tables, one row a step, and no `finish` where `fit` returns. Phase `first` is killed after step 5, with a checkpoint at
3; phase `second` goes on from there to step 6.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from gapless.tracking import DapoFilteredRewardTableLogger, Tracking, ValidationGenerationsLogger
from tests.fronts.shapes import verl_config

CHECKPOINT = 3
KILLED_AT = 5
TOTAL = 6
BACKENDS = ["console", "wandb", "swanlab", "tensorboard"]


class Trainer:
    """Logs from the last rank, as verl's SFT and RL trainers do with pipeline stages."""

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.is_logging = dist.get_rank() == dist.get_world_size() - 1
        self.generations = ValidationGenerationsLogger(project_name="math", experiment_name="qwen")
        self.dapo = DapoFilteredRewardTableLogger(project_name="math", experiment_name="qwen")

    def validate(self, step: int) -> dict[str, float]:
        if self.is_logging:
            self.generations.log(BACKENDS, [(f"q{i}", f"a{i} at {step}", float(i)) for i in range(4)], step)
        return {"val-core/gsm8k/acc/mean@1": step / 8}

    def step(self, step: int) -> dict[str, object]:
        """Metrics averaged over ranks; the second phase's differ from the first's."""
        loss = torch.tensor(step + dist.get_rank(), dtype=torch.float32)
        dist.all_reduce(loss)
        return {
            "actor/pg_loss": loss / 2 + (0.25 if self.phase == "second" else 0.0),
            "timing_s/gen": np.float64(step / 3),
            "training/global_step": step,
        }

    def fit(self) -> None:
        logger = None
        if self.is_logging:
            config = verl_config(project_name="math", experiment_name="qwen", logger=BACKENDS)
            logger = Tracking("math", "qwen", default_backend=BACKENDS, config=config)
        step = CHECKPOINT if self.phase == "second" else 0
        found = self.validate(step)
        if logger is not None:
            logger.log(data=found, step=step)
        for step in range(step + 1, TOTAL + 1):  # noqa: B020  # as there, training goes on from the loaded step
            metrics = self.step(step)
            if step % CHECKPOINT == 0:
                metrics.update(self.validate(step))
            if logger is not None:
                logger.log(data=metrics, step=step)
                self.dapo.log(BACKENDS, {0.0: step, 1.0: 2}, step)
            if self.phase == "first" and step == KILLED_AT:
                if logger is not None:
                    assert logger.run.flush()
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()


def main() -> None:
    folder, phase = Path(sys.argv[1]), sys.argv[2]
    world = int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(folder / f"store-{phase}"), world)
    dist.init_process_group(
        "gloo", store=store, rank=int(os.environ["RANK"]), world_size=world, timeout=timedelta(seconds=120)
    )
    Trainer(phase).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
