"""The benchmark measures what it says: the same rows as its peer, with the collectives that it reports."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from benchmarks import stats as benchmark
from tests.spool.stats.ranks import Ranks

pytestmark = pytest.mark.xdist_group("gloo")


def measured(group: dist.ProcessGroup, num_stats: int) -> benchmark.Row:
    benchmark.NUM_ROUNDS, benchmark.NUM_BARE = 1, 5
    return benchmark._measured(dist.group.WORLD, num_stats)


def test_the_peer_makes_a_collective_for_every_quantity(ranks: Ranks) -> None:
    """Four for a statistic, two for a scalar, one for a denominator, and a gather of the names; ours are few."""
    for row in ranks(measured, [20] * 4):
        assert row.num_ranks == 4
        assert row.peer_num_collectives == 4 * 20 + 2 * 5 + 1 + 1
        assert row.num_collectives <= 3
        assert row.num_first_collectives <= 5
        assert row.peer_held_bytes == 20 * 4 * benchmark.NUM_VALUES + benchmark.NUM_VALUES
        assert row.held_bytes < 20_000
        assert "| 4 | 20 |" in benchmark.table([row])
