"""One world of real ranks for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gapless.stats_tracker import DistributedStatsTracker
from tests.spool.stats.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    world = Ranks(tmp_path_factory.mktemp("world"))
    yield world
    world.close()


@pytest.fixture
def tracker() -> DistributedStatsTracker:
    return DistributedStatsTracker()
