"""The `system` record, the sign of life, and console lines."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import gapless
from gapless import run as run_module
from gapless import system, writer
from gapless.config import read_environment
from tests.spool.oracle import only
from tests.spool.scripts import ROOT, patiently, run


def test_the_training_is_described(tmp_path: Path) -> None:
    """Host, user, command line, folder, versions, world size and job are those of the training process."""
    script = """
        import os, sys, torch, gapless
        os.chdir(sys.argv[2])
        with gapless.init("p", dir=sys.argv[1], id="r") as run:
            print(os.getpid())
        """
    done = run(patiently(script), tmp_path, tmp_path, SLURM_JOB_ID="77", WORLD_SIZE="4", RANK="0")
    (record,) = only(tmp_path / "p" / "r", "system")

    assert done.returncode == 0, done.stderr
    assert record.data["host"] == socket.gethostname()
    assert record.data["cwd"] == str(tmp_path)
    assert record.data["python"] == platform.python_version()
    assert record.data["torch"].startswith("2.")
    assert (record.data["world_size"], record.data["slurm_job_id"]) == (4, "77")
    assert record.data["command"].startswith(sys.executable)
    assert str(tmp_path) in record.data["command"]


def test_it_is_the_second_record_of_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a run is, it is described once, before its end."""
    monkeypatch.setattr(run_module, "DESCRIBE_TIMEOUT_S", 60.0)
    for _ in range(10):
        with gapless.init("p", dir=tmp_path) as opened:
            pass
        kinds = [record.kind for record in only(opened.path)]
        assert kinds == ["run", "system", "finish"]


def test_torch_is_described_only_when_the_training_has_loaded_it() -> None:
    """Describing imports nothing: without torch in the process its version is unknown."""
    done = run(
        """
        import sys
        from gapless.config import read_environment
        from gapless.system import describe
        found = describe(read_environment())
        print(found["torch"], found["cuda"], "torch" in sys.modules)
        """
    )

    assert done.stdout == "None None False\n", done.stderr


def test_a_slow_part_ends_the_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one second what is left is unknown; what was found is kept."""
    clock = [0.0]
    monkeypatch.setattr(system, "_command", lambda: clock.__setitem__(0, 2.0) or "slow")
    found = system.describe(read_environment(), now=lambda: clock[0])

    assert found["host"] == socket.gethostname()
    assert found["command"] == "slow"
    assert found["cwd"] is found["git"] is None


def test_a_part_that_fails_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that raises costs itself."""
    monkeypatch.setattr(system, "_user", lambda: 1 / 0)
    found = system.describe(read_environment(), now=lambda: 0.0)

    assert found["user"] is None
    assert found["python"] == platform.python_version()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["clone", "worktree", "detached"])
def test_the_commit_is_read_from_dot_git(tmp_path: Path, kind: str, packed: bool) -> None:
    """Branch and commit of a clone, a worktree and a detached head, refs packed or not, without running git."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    git = tmp_path / "main" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "config").write_text('[remote "origin"]\n\tfetch = x\n\turl = git@host:a/b.git\n')
    (git / "HEAD").write_text(commit if kind == "detached" else "ref: refs/heads/topic\n")
    if packed:
        (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/topic\n")
    else:
        (git / "refs" / "heads" / "topic").write_text(commit)
    start = tmp_path / "main" / "deep" / "folder"
    start.mkdir(parents=True)
    if kind == "worktree":
        tree = git / "worktrees" / "w"
        tree.mkdir(parents=True)
        (tree / "HEAD").write_text("ref: refs/heads/topic\n")
        (tree / "commondir").write_text("../..\n")
        start = tmp_path / "w"
        start.mkdir()
        (start / ".git").write_text(f"gitdir: {tree}\n")

    assert system._git(start) == {
        "commit": commit,
        "branch": None if kind == "detached" else "topic",
        "remote": "git@host:a/b.git",
    }


def test_this_repository_is_described() -> None:
    """What is read agrees with what git itself says."""
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if said.returncode != 0:
        pytest.skip("no git repository here")
    found = system._git(ROOT)

    assert found is not None
    assert found["commit"] == said.stdout.strip()


def test_an_attempt_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `alive` record is written at every interval while nothing is logged, and none after the end."""
    assert writer.ALIVE_S == 30.0
    monkeypatch.setattr(writer, "ALIVE_S", 0.01)
    run = gapless.init("p", dir=tmp_path)
    assert run._writer.opened.wait(60)
    while len([r for r in only(run.path) if r.kind == "alive"]) < 3:
        pass
    run.finish()
    found = only(run.path)

    assert found[-1].kind == "finish"
    assert all(r.data == {} for r in found if r.kind == "alive")


def test_console_lines_are_recorded(tmp_path: Path) -> None:
    """Lines are kept with their stream, in records that fit a line."""
    lines = [f"line {number} " + "é" * 100 for number in range(5000)]
    with gapless.init("p", dir=tmp_path) as run:
        run.console(lines, stream="stderr")
    found = only(run.path, "log")

    assert [line for record in found for line in record.data["lines"]] == lines
    assert {record.data["stream"] for record in found} == {"stderr"}
    assert len(found) > 1
