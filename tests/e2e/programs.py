"""The real programs as child processes: a trainer that logs, and the `gapless` command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TRAINER = """
import sys, time
import gapless

folder, first, last, pause, durability, resume = sys.argv[1:]
resume = None if resume == "None" else int(resume)
run = gapless.init("proj", "kills", id="run", dir=folder, durability=durability, resume_step=resume)
for step in range(int(first), int(last)):
    run.log({"loss": step / 7, "lr": 1e-3}, step=step)
    print(step, flush=True)
    if float(pause):
        time.sleep(float(pause))
run.finish()
"""


def environment() -> dict[str, str]:
    """This process's environment, with this tree's packages first and no setting of ours in it."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GAPLESS_")}
    kept["PYTHONPATH"] = os.pathsep.join(str(ROOT / name) for name in ("spool", "uploader", "schemas"))
    return kept


def trainer(
    folder: Path, first: int, last: int, pause: float = 0.0, durability: str = "write", resume: int | None = None
) -> subprocess.Popen[str]:
    """Logs steps first..last-1 and prints each step after its `log` returned."""
    arguments = [str(folder), str(first), str(last), str(pause), durability, str(resume)]
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER, *arguments], stdout=subprocess.PIPE, text=True, env=environment()
    )


def gapless(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    """The command, its events on stderr."""
    return subprocess.Popen(
        [sys.executable, "-m", "gapless_uploader", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=cwd,
    )  # fmt: skip
