"""The commands with the W&B sink: replayed twice, told what to do with a run, asked why one waits."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gapless_uploader.cli import main
from gapless_uploader.config import load_config
from gapless_uploader.sink import Misconfigured
from tests.servers.wandb_server import DEFAULT_KEY, WandbServer
from tests.sinks.harness import view
from tests.sinks.wandb.loopback import make_sink
from tests.wandb_spool import Attempt


@pytest.fixture(autouse=True)
def logged_in(server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", DEFAULT_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    (tmp_path / "gapless.toml").write_text("[sinks.wandb]\nsettle_s = 0\n")


@pytest.fixture
def finished(attempt: Attempt) -> Attempt:
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(200)])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    return attempt


def gapless(tmp_path: Path, command: str, *more: str) -> Result:
    paths = ["--state", str(tmp_path / "state"), "--config", str(tmp_path / "gapless.toml")]
    return CliRunner().invoke(main, [command, str(tmp_path / "spool"), *paths, *more])


def test_a_second_replay_sends_nothing(tmp_path: Path, finished: Attempt, server: WandbServer) -> None:
    """What is uploaded is uploaded: the same command again makes no request."""
    assert gapless(tmp_path, "replay", "--to", "wandb").exit_code == 0
    server.requests.clear()
    again = gapless(tmp_path, "replay", "--to", "wandb")

    assert again.exit_code == 0, again.output
    assert "W&B counts 200 lines and wandb.Api shows the state finished" in gapless_status(tmp_path)
    assert [request.names for request in server.requests] == []
    assert len(server.run("grpo", "r-1").lines) == 200


@pytest.mark.parametrize("name", ["r-1", "grpo/r-1"])
def test_new_id_uploads_under_another_id(tmp_path: Path, finished: Attempt, server: WandbServer, name: str) -> None:
    """--new-id RUN=ID leaves what is at W&B alone and uploads beside it."""
    gapless(tmp_path, "replay", "--to", "wandb")
    run = server.run("grpo", "r-1")
    run.deleted = True
    attempt = Attempt(tmp_path / "spool", 2)
    attempt.add_rows([(200, {"loss": 1.0})])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    done = gapless(tmp_path, "replay", "--to", "wandb", "--new-id", f"{name}=r-1b")

    assert done.exit_code == 0, done.output
    assert len(server.run("grpo", "r-1b").rows) == 201
    assert len(run.lines) == 200


def test_keys_with_spaces_around_them_are_read_back(tmp_path: Path, attempt: Attempt, server: WandbServer) -> None:
    """`wandb.Api` takes spaces off the keys of a summary, and then does not find them."""
    attempt.add_rows([(1, {"acc ": 1.5, " loss": 1.0, "\u2028": 2.0, "lr": 0.5})])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    done = gapless(tmp_path, "replay", "--to", "wandb", "--patience", "20")

    assert done.exit_code == 0, done.output
    (row,) = server.run("grpo", "r-1").rows
    assert {key: row[key] for key in ("acc ", " loss", "\u2028", "lr")} == {
        "acc ": 1.5, " loss": 1.0, "\u2028": 2.0, "lr": 0.5,
    }  # fmt: skip


def test_adopt_appends_to_what_is_there(tmp_path: Path, finished: Attempt, server: WandbServer) -> None:
    """--adopt RUN appends to a run that somebody else wrote; without it the run is parked, and status says so."""
    gapless(tmp_path, "replay", "--to", "wandb")
    run = server.run("grpo", "r-1")
    run.summary_text = "{}"
    run.snapshot(server.clock())
    (tmp_path / "state").rename(tmp_path / "lost")
    adopted = gapless(tmp_path, "replay", "--to", "wandb", "--adopt", "r-1")

    assert adopted.exit_code == 0, adopted.output
    assert (len(run.lines), len(run.rows), run.conflicts) == (400, 200, [])


def test_flags_are_checked(tmp_path: Path) -> None:
    """A pair that is none is named."""
    with pytest.raises(Misconfigured, match="must be RUN=ID"):
        load_config(tmp_path / "gapless.toml", to=("wandb",), new_id=("r-1",))


def test_few_requests_carry_many_rows(tmp_path: Path, attempt: Attempt, server: WandbServer) -> None:
    """10,000 rows take few requests, so a server that allows one a second is enough."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(10_000)])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    done = gapless(tmp_path, "replay", "--to", "wandb")
    posts = [request for request in server.requests if request.names == ["file_stream"]]

    assert done.exit_code == 0, done.output
    assert len(server.run("grpo", "r-1").lines) == 10_000
    assert len(posts) <= 6


@pytest.mark.parametrize(
    ("version", "said"), [("99.1.0", "newer than 0.31"), ("0.28.0", "older than 0.31.*pip install")]
)
def test_another_library_is_said_once(
    server: WandbServer, monkeypatch: pytest.MonkeyPatch, version: str, said: str
) -> None:
    """What the library knows, or the protocol, may be another: the sink goes on, reads back, and says so."""
    sink = make_sink(server)
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.warns(RuntimeWarning, match=f"wandb {version} is {said}"):
        sink.open(view(), {})
    sink.open(view(run_id="r-2"), {})

    assert len(server.runs) == 2


def gapless_status(tmp_path: Path) -> str:
    done = CliRunner().invoke(
        main, ["status", str(tmp_path / "spool"), "--state", str(tmp_path / "state"), "--json"], catch_exceptions=False
    )
    return done.output


def has_child(pid: int) -> bool:
    """Whether one of the process's threads has started a process that is there."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            if children.read_text():
                return True
    return False


@pytest.mark.parametrize(("mode", "after_s"), [("online", 0.0), ("online", 0.3), ("online", 1.0), ("offline", 2.0)])
def test_an_uploader_that_is_killed_leaves_no_folder_behind(
    tmp_path: Path, finished: Attempt, server: WandbServer, monkeypatch: pytest.MonkeyPatch, mode: str, after_s: float
) -> None:
    """The child that holds the package removes its own folder, and with it what the package left there."""
    monkeypatch.setenv("WANDB_MODE", mode)
    with (tmp_path / "gapless.toml").open("a") as config:
        config.write(f'offline_folder = "{tmp_path / "wandb"}"\n')
    temporary = Path(tempfile.mkdtemp(prefix="g-", dir="/tmp"))  # a short name, for the sockets of the package
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = [sys.executable, "-m", "gapless_uploader", "watch", str(tmp_path / "spool"), "--to", "wandb"]
    command += ["--state", str(tmp_path / "state"), "--config", str(tmp_path / "gapless.toml")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60.0
        while not has_child(process.pid):
            assert time.monotonic() < deadline, "no child was started"
            time.sleep(0.01)
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
    while list(temporary.iterdir()):
        assert time.monotonic() < deadline, sorted(temporary.rglob("*"))
        time.sleep(0.1)
    temporary.rmdir()
