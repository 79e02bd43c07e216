"""A server and a run on the way to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.wandb_server import WandbServer
from tests.sinks.wandb.lives import Clock, Lives
from tests.sinks.wandb.loopback import let_questions_end
from tests.wandb_spool import Attempt


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[WandbServer]:
    with WandbServer(clock=clock) as made:
        yield made
        made.faults.disarm()
        let_questions_end()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(tmp_path / "spool")
    made.add("run", {"name": "Qwen 7B", "config": {"lr": 0.1}})
    return made


@pytest.fixture
def lives(tmp_path: Path, attempt: Attempt, server: WandbServer, clock: Clock) -> Lives:
    return Lives(tmp_path / "spool", server.url, clock)
