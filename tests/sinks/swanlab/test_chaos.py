"""Kills between any two steps, every fault, lags, lost and restored states: 0 points lost, 0 doubled."""

from pathlib import Path

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.sinks.swanlab.chaos import play
from tests.sinks.swanlab.world import World


@pytest.mark.parametrize("seed", range(20))
def test_chaos(world: World, seed: int) -> None:
    """Whatever happens to the uploader and the tracker, each point of the merged history arrives once."""
    play(world, seed)


@pytest.mark.torture
@pytest.mark.parametrize("block", range(20))
def test_chaos_500(tmp_path: Path, block: int, server: SwanLabServer) -> None:
    """The same 500 times, 25 seeds a test."""
    del server
    for seed in range(20 + 25 * block, 45 + 25 * block):
        with SwanLabServer() as fresh, pytest.MonkeyPatch.context() as patch:
            patch.setenv("SWANLAB_API_HOST", fresh.url)
            world = World(tmp_path / str(seed), fresh)
            try:
                play(world, seed)
            finally:
                world.kill()
