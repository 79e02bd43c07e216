"""The uploader only reads the spool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.uploader.spool_made import MadeRun

ENVIRONMENT = {**os.environ, "PYTHONPATH": "uploader:schemas"}
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && ! touch "$0/x" 2>/dev/null && exec "$@"'


def can_mount(folder: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "sh", "-c", READ_ONLY, str(folder), "true"], timeout=60).returncode == 0


def snapshot(folder: Path) -> list[tuple[str, int, int]]:
    """Path, mtime and ctime of everything: whatever writes changes one of them."""
    found = [folder, *folder.rglob("*")]
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in found)


@pytest.mark.parametrize(
    "args", [["replay"], ["watch", "--exit-when-done"], ["watch", "--exit-when-done", "--no-events"]]
)
def test_nothing_is_written_into_the_spool(tmp_path: Path, args: list[str]):
    """A replay and a watch leave every file and folder of the spool as they were, to the nanosecond."""
    MadeRun(tmp_path / "spool").rows(0, 50).rotate().rows(50, 50).finish()
    before = snapshot(tmp_path / "spool")
    flags = ["--to", f"file:{tmp_path}/out", "--state", f"{tmp_path}/state"]
    done = subprocess.run(
        [sys.executable, "-m", "gapless_uploader", args[0], str(tmp_path / "spool"), *args[1:], *flags],
        env=ENVIRONMENT,
        timeout=120,
        capture_output=True,
    )

    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "spool") == before


@pytest.mark.parametrize("args", [["replay"], ["watch", "--exit-when-done"]])
def test_a_read_only_bind_mount(tmp_path: Path, args: list[str]):
    """On a spool that is mounted read-only, and where no event ever comes from below, everything is uploaded."""
    root = tmp_path / "spool"
    MadeRun(root).rows(0, 50).finish()
    if not can_mount(root):
        pytest.skip("no right to mount here")
    flags = ["--to", f"file:{tmp_path}/out", "--state", f"{tmp_path}/state"]
    uploading = [sys.executable, "-m", "gapless_uploader", args[0], str(root), *args[1:], *flags]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", READ_ONLY, str(root), *uploading],
        env=ENVIRONMENT,
        timeout=120,
        capture_output=True,
    )

    assert done.returncode == 0, done.stderr
    (rows,) = (tmp_path / "out" / "grpo").glob("*.jsonl")
    assert len(rows.read_bytes().splitlines()) == 50
