"""A rank of an AReaL-shaped training: `RANK=r WORLD_SIZE=2 python areal_loop.py FOLDER PHASE`.

The calls are those of AReaL's trainers, in their order: stats in scopes on every rank, the recovery state saved before
a step's row is committed, one export over all ranks, a commit, a barrier. Phase `first` saves at step 2 and is killed
after step 4; phase `second` recovers and ends at step 6.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gapless import stats_tracker
from gapless.stats_logger import StatsLogger
from tests.fronts.shapes import SWANLAB_KEY, WANDB_KEY, FinetuneSpec, Swanlab, TensorBoard, WandB, experiment

STEPS = 7
SAVED_AT = 2
KILLED_AT = 4


@stats_tracker.scope_func_wrapper("ppo_actor")
def ppo_update(rank: int, step: int, phase: float) -> None:
    """What AReaL's actor records: masks as denominators, stats over them, scalars, a nested scope."""
    reward = torch.tensor([step, step + rank], dtype=torch.float32)
    loss_mask = torch.tensor([[1, 1, 1], [1, 0, 0]] if rank else [[1, 1, 0], [0, 0, 0]])
    stats_tracker.denominator(n_seqs=torch.ones_like(reward, dtype=torch.bool), n_valid_tokens=loss_mask.bool())
    stats_tracker.stat(task_reward=reward, denominator="n_seqs")
    stats_tracker.stat(advantages=torch.full((2, 3), step + 4.0 * rank + phase), denominator="n_valid_tokens")
    stats_tracker.scalar(eps_clip=0.25, use_dual_clip=rank)
    with stats_tracker.scope("update"):
        stats_tracker.scalar(lr=2.0**-step)


def train(folder: Path, phase: str) -> None:
    rank = dist.get_rank()
    parts: dict[str, Any] = {
        "wandb": WandB("online", wandb_api_key=WANDB_KEY, entity="acme", tags=["rl"]),
        "swanlab": Swanlab(mode="cloud", api_key=SWANLAB_KEY),
        "tensorboard": TensorBoard(str(folder / "areal_tb")),
    }
    logger = StatsLogger(experiment(folder, **parts), FinetuneSpec())
    state = folder / "stats_logger_info.json"
    start = 0
    if phase == "second":
        logger.load_state_dict(json.loads(state.read_text()))
        start = SAVED_AT + 1
    for step in range(start, STEPS):
        with stats_tracker.record_timing("train_step"):
            ppo_update(rank, step, 0.5 if phase == "second" else 0.0)
        if phase == "first" and step == SAVED_AT and rank == 0:
            state.write_text(json.dumps(logger.state_dict()))
        stats = stats_tracker.export_all(reduce_group=dist.group.WORLD)
        logger.commit(step // 10, step % 10, step, stats)
        dist.barrier()
        if phase == "first" and step == KILLED_AT:
            if rank == 0:
                assert logger.run is not None
                assert logger.run.flush()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    logger.close()


def main() -> None:
    folder, phase = Path(sys.argv[1]), sys.argv[2]
    store = dist.FileStore(str(folder / f"store-{phase}"), int(os.environ["WORLD_SIZE"]))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=120),
    )
    train(folder, phase)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
