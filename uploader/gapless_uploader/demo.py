"""The demo: two real training ranks and a live upload, as child processes, then what they left.

The ranks run `gapless.demo_training` in their own interpreters: the uploader never imports the training side or torch.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from gapless_uploader.replay import find_run, merged_run
from gapless_uploader.show import metrics_table
from gapless_uploader.spool import Spool

_RANKS = 2
_PATIENCE_S = 240.0


def run_demo(folder: Path, steps: int) -> int:
    """Train, spool, follow, show; the exit status. Everything it writes is under `folder`."""
    console = Console()
    for module in ("torch", "tensorboard"):
        if find_spec(module) is None:
            console.print(f"the demo needs {module}: pip install 'gapless[demo]'")
            return 2
    spool, events = folder / "spool", folder / "tensorboard"
    try:
        spool.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"make {spool}: {error.strerror}; choose another folder with --dir")
        return 1
    console.print(f"two ranks train a character model for {steps} steps; rank 0 writes {spool}/")
    console.print(f"beside them: gapless watch {spool} --to tensorboard:{events} --state {folder / 'state'}\n")
    uploader = _watch(spool, events, folder / "state")
    ranks = _train(spool, steps)
    try:
        failed = _wait(ranks, time.monotonic() + _PATIENCE_S)
        uploader.wait(timeout=60.0)
    except subprocess.TimeoutExpired:
        failed = True
    finally:
        for process in (*ranks, uploader):
            if process.poll() is None:
                process.terminate()
                process.wait()
    if failed or uploader.returncode != 0:
        console.print(f"the demo failed: ranks {[rank.returncode for rank in ranks]}, uploader {uploader.returncode}")
        return 1
    _show(console, folder, spool, events)
    return 0


def _watch(spool: Path, events: Path, state: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "gapless_uploader", "watch", str(spool), "--to", f"tensorboard:{events}",
            "--state", str(state), "--exit-when-done",
        ]
    )  # fmt: skip


def _train(spool: Path, steps: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        subprocess.Popen(
            [
                sys.executable, "-m", "gapless.demo_training", "--dir", str(spool), "--steps", str(steps),
                "--rank", str(rank), "--world-size", str(_RANKS), "--port", str(port),
            ]
        )
        for rank in range(_RANKS)
    ]  # fmt: skip


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Wait for all ranks; whether one failed or time ran out."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.returncode for rank in ranks) or time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return any(rank.returncode for rank in ranks)


def _show(console: Console, folder: Path, spool: Path, events: Path) -> None:
    found = Spool([spool])
    found.scan(0.0)
    run = find_run(found.runs, None)
    if run is not None:
        console.print()
        console.print(metrics_table(merged_run(run), width=console.width))
    console.print(f"\nspool             {spool}/   JSON lines: jq, pandas and DuckDB read them")
    console.print(f"TensorBoard files {events}/")
    console.print("\nnext:")
    console.print(f"  tensorboard --logdir {events}")
    console.print(f"  gapless status {spool} --state {folder / 'state'}")
    console.print(f"  gapless replay {spool} --to file:{folder / 'jsonl'} --state {folder / 'state'}")
