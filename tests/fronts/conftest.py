"""The fronts read the environment: each test starts with none of its variables. And two trainings that many look at."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless._fronts import current
from gapless._fronts.noted import NOTED
from tests.fronts.process import Trained, once, train_twice

_PREFIXES = ("GAPLESS_", "WANDB_", "SWANLAB_", "SLURM_", "TORCHELASTIC_", "MLFLOW_", "RAY_", "VERL_")


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable that a front heeds or notes is set."""
    for name in [*os.environ]:
        if name.startswith(_PREFIXES) or name in NOTED or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The spool's root, named by `GAPLESS_DIR`; runs that a test left open are not the next one's."""
    monkeypatch.setenv("GAPLESS_DIR", str(tmp_path / "spool"))
    yield tmp_path / "spool"
    current._open.clear()
    current._own.clear()


def _trained(factory: pytest.TempPathFactory, script: str, **environment: str) -> Trained:
    folder = once(factory, script, lambda folder: train_twice(folder, script, **environment))
    return Trained(folder / "spool", json.loads((folder / "printed.json").read_text()))


@pytest.fixture(scope="session")
def areal_trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _trained(tmp_path_factory, "areal_loop.py")


@pytest.fixture(scope="session")
def verl_trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return _trained(tmp_path_factory, "verl_loop.py", SLURM_JOB_ID="4711")
