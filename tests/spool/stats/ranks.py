"""Real gloo ranks for tests: processes that start once and are then sent work."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

NUM_RANKS = 4


class Ranks:
    """Four processes in one world. A group of n ranks is the first n of them; the whole is the world itself."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(NUM_RANKS):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, str(folder / "store")), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def __call__(self, work: Callable[..., Any], per_rank: Sequence[Any], **shared: Any) -> list[Any]:
        """What `work(group, argument, **shared)` returns on the first `len(per_rank)` ranks, or what it raised."""
        group_size = len(per_rank)
        pipes = self._pipes[:group_size]
        for pipe, argument in zip(pipes, per_rank, strict=True):
            pipe.send((work, group_size, argument, shared))
        return [pipe.recv() for pipe in pipes]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()
                process.join()


def _serve(pipe: Connection, rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 3)}
    groups[NUM_RANKS] = dist.group.WORLD
    while (task := pipe.recv()) is not None:
        work, group_size, argument, shared = task
        try:
            answer = work(groups[group_size], argument, **shared)
        except BaseException as error:
            answer = type(error)(f"{error}")
            answer.__notes__ = [traceback.format_exc()]
        pipe.send(answer)
    # A group whose rank did not come still waits in its threads: they are not waited for.
    os._exit(0)
