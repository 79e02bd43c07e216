"""The Slurm job script and the systemd unit of docs/deploy, tried as far as this machine allows."""

from __future__ import annotations

import configparser
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.uploader.spool_made import MadeRun, alive_here

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
SCRIPT = DEPLOY / "gapless-watch.sbatch"
UNIT = DEPLOY / "gapless-watch.service"


def job(folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The script as Slurm would start it, with a `gapless` and a `scontrol` of our own."""
    tools = folder / "bin"
    tools.mkdir()
    (tools / "gapless").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gapless_uploader "$@"\n')
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> "{folder}/scontrol.log"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "GAPLESS", "XDG"))}
    given = {
        **kept, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": "uploader:schemas", "HOME": str(folder),
        "SLURM_JOB_ID": "4711", **environment,
    }  # fmt: skip
    return subprocess.Popen(["bash", str(SCRIPT)], env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for_run(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        if b"run-found" in line:
            return
    raise AssertionError("it ended before it found the run")


def test_the_job_ends_with_the_runs(tmp_path: Path):
    """The job uploads to all its sinks, keeps its state in the home, and ends with status 0 when every run has."""
    MadeRun(tmp_path / "spool").rows(0, 5).finish()
    with job(tmp_path, SPOOL=str(tmp_path / "spool"), SINKS=f"file:{tmp_path}/a file:{tmp_path}/b") as child:
        assert child.stdout is not None
        told = child.stdout.read().decode()

    assert child.returncode == 0, told
    for sink in "ab":
        (rows,) = (tmp_path / sink / "grpo").glob("*.jsonl")
        assert len(rows.read_bytes().splitlines()) == 5
    assert (tmp_path / ".local/state/gapless").is_dir()
    assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.parametrize(("number", "requeued"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_the_time_limit_requeues_the_job(tmp_path: Path, number: signal.Signals, requeued: bool):
    """Slurm's warning before the time limit ends the uploader cleanly and requeues the job; a cancel only ends it."""
    MadeRun(tmp_path / "spool", **alive_here()).rows(0, 5)
    with job(tmp_path, SPOOL=str(tmp_path / "spool"), SINKS=f"file:{tmp_path}/a") as child:
        wait_for_run(child)
        child.send_signal(number)
        assert child.stdout is not None
        told = child.stdout.read().decode()

    assert child.returncode == 0, told
    assert "stopping signal=SIGTERM" in told
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == ("requeue 4711\n" if requeued else "")


@pytest.mark.parametrize("missing", ["SPOOL", "SINKS"])
def test_the_job_says_what_it_misses(tmp_path: Path, missing: str):
    """Without a spool or sinks the job ends at once and says what to give."""
    given = {"SPOOL": str(tmp_path), "SINKS": "console"}
    del given[missing]
    with job(tmp_path, **given) as child:
        assert child.stdout is not None
        told = child.stdout.read().decode()

    assert child.returncode != 0
    assert f"{missing}=" in told


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck here")
def test_shellcheck():
    """shellcheck has nothing to say about the job script."""
    checked = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, timeout=120)

    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_reads_the_unit(tmp_path: Path):
    """systemd-analyze has nothing to say about the unit."""
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(UNIT)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_unit_fits_the_command():
    """The unit gives the uploader more time to stop than it takes, and does not restart it for misuse."""
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    service = unit["Service"]

    assert float(service["TimeoutStopSec"]) > 10
    assert service["KillSignal"] == "SIGTERM"
    assert service["RestartPreventExitStatus"] == "2"
    assert service["ExecStart"].startswith("/usr/bin/env gapless watch ")
