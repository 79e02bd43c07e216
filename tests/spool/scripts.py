"""Training scripts in processes of their own, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
_OURS = ("GAPLESS_", "SLURM_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_RANK")


PATIENT = """\
import gapless.run, gapless.system
gapless.run.OPEN_TIMEOUT_S = gapless.run.DESCRIBE_TIMEOUT_S = gapless.system.LIMIT_S = 60.0
"""


def patiently(script: str) -> str:
    """`script` with the training's own limits far off: its disk may be slow, and nothing is left out for it."""
    return PATIENT + textwrap.dedent(script)


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without any job's variables, with the packages on the path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    clean["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "spool", "schemas"))
    return {**clean, **extra}


def start(script: str, *args: object, **extra: str) -> subprocess.Popen[str]:
    """Start `script`; its output is text on pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**extra),
    )


def run(script: str, *args: object, timeout_s: float = 60, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run `script` to its end."""
    process = start(script, *args, **extra)
    out, err = process.communicate(timeout=timeout_s)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
