"""A real read-only mount where sinks keep their files: nobody guesses, nothing is lost."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gapless_uploader.sinks._disk import disk_trouble
from tests.uploader.spool_made import MadeRun
from tests.uploader.test_read_only import ENVIRONMENT, READ_ONLY, can_mount

KINDS = ("file", "tensorboard", "spool", "trackio")


@pytest.mark.xdist_group("read-only-target")
def test_a_read_only_target_parks_the_run_with_the_way_out(tmp_path: Path) -> None:
    """Each sink of files says what is read-only and what to do; mounted writable, the same command uploads all."""
    for needed in ("tensorboard", "trackio", "fsspec"):
        pytest.importorskip(needed)
    MadeRun(tmp_path / "spool").rows(0, 50).finish()
    (tmp_path / "out").mkdir()
    if not can_mount(tmp_path / "out"):
        pytest.skip("no right to mount here")
    flags = [flag for kind in KINDS for flag in ("--to", f"{kind}:{tmp_path}/out/{kind}")]
    replay = [sys.executable, "-m", "gapless_uploader", "replay", str(tmp_path / "spool"), *flags]
    replay += ["--state", str(tmp_path / "state")]
    read_only = ["unshare", "-m", "sh", "-c", READ_ONLY, str(tmp_path / "out")]
    done = subprocess.run([*read_only, *replay], env=ENVIRONMENT, timeout=120, capture_output=True, text=True)
    parked = dict(re.findall(r"run-parked .*sink=(\w+):\S+ reason=(.*)", done.stderr))
    way_out = str(disk_trouble("", OSError(errno.EROFS, os.strerror(errno.EROFS))))

    assert done.returncode == 1
    assert set(parked) == set(KINDS)
    assert all(reason.endswith(way_out) for reason in parked.values())
    assert list((tmp_path / "out").iterdir()) == []

    done = subprocess.run(replay, env=ENVIRONMENT, timeout=120, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(KINDS)
    assert len(next((tmp_path / "out" / "file").rglob("*.jsonl")).read_bytes().splitlines()) == 50
