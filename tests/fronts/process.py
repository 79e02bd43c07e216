"""Starts a training script of this folder in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

HERE = Path(__file__).parent


def environment(root: Path, **more: str) -> dict[str, str]:
    """What a training process sees: our packages, a spool, no network."""
    return {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GAPLESS_DIR": str(root),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def train(script: str, root: Path, *arguments: str | Path, **more: str) -> str:
    """What the script says on stdout. Fails with its stderr when it fails."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *map(str, arguments)],
        env=environment(root, **more),
        cwd=root.parent,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_ranks(script: str, root: Path, *arguments: str | Path, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks of the script, started together; what each said and how it ended."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env=environment(root, RANK=str(rank), WORLD_SIZE="2", **more),
            cwd=root.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ended = [(process, process.communicate(timeout=240)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, out, err) for p, (out, err) in ended]


@dataclass
class Trained:
    """The spool of a training of two ranks that was killed and started again, by itself under its root."""

    root: Path
    printed: list[str]
    """What the second start's ranks said."""


def train_twice(folder: Path, script: str, **environment: str) -> None:
    """Both phases of a loop into FOLDER/spool: the first is killed on both ranks, the second ends."""
    root = folder / "spool"
    first = train_ranks(script, root, folder, "first", **environment)
    assert [rank.returncode for rank in first] == [-signal.SIGKILL] * 2, first
    second = train_ranks(script, root, folder, "second", **environment)
    assert [rank.returncode for rank in second] == [0, 0], second
    (folder / "printed.json").write_text(json.dumps([rank.stdout for rank in second]))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` filled, in whichever of pytest-xdist's workers came first."""
    shared = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder = shared / f"fronts-{name}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "made").exists():
            folder.mkdir()
            make(folder)
            (folder / "made").touch()
    return folder
