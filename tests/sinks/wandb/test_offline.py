"""W&B's own offline folders: written by the real client, synced by the real `wandb sync`, seen by the server."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from gapless_uploader.cli import main
from gapless_uploader.operations import Config, State, Table
from gapless_uploader.sinks.wandb import WandbSink
from tests.servers.wandb_server import Run, WandbServer
from tests.servers.wandb_server.client import client_env
from tests.sinks.harness import T0, amend, batch, row, view, write
from tests.wandb_spool import Attempt


@pytest.fixture(autouse=True)
def nobody_is_logged_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def sync(server: WandbServer, folder: Path) -> Run:
    """What the real `wandb sync` of every folder, in the order of their names, leaves at the server."""
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert runs
    command = [os.path.join(os.path.dirname(os.sys.executable), "wandb"), "sync", *map(str, runs)]
    done = subprocess.run(
        command, env=client_env(server.url, folder / "client"), cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return server.run("grpo", "r-1")


def test_a_live_run_becomes_folders_that_wandb_sync_takes(tmp_path: Path, server: WandbServer) -> None:
    """Rows, a late row, more keys, a table, config and the end arrive by `wandb sync` with their own times."""
    sink = WandbSink(mode="offline", offline_folder=str(tmp_path / "out"))
    run = view(config={"lr": 0.1}, group="g", tags=["a"])
    rows = [row(step) for step in (0, 1, 2, 4)]
    memo = write(sink, run, {}, Config(run.config), *rows).memo
    session = sink.open(run, memo)
    session.write(batch(run, row(5, samples=Table(["q"], [["why"]])), amend(rows[1], acc=0.5), row(3)))
    ended = view(config={"lr": 0.1, "late": 1}, group="g", tags=["a"], state="finished", exit_code=0)
    session.write(batch(ended, Config(ended.config), row(6), State("finished", 0, T0 + 9, 9.0)))
    session.close()
    held = sync(server, tmp_path / "out")

    assert [shown["_step"] for shown in held.rows] == [0, 1, 2, 3, 4, 5, 6]
    assert [shown["_timestamp"] for shown in held.rows] == [T0, T0 + 3, *(T0 + step for step in range(2, 7))]
    assert {"loss": 1.5, "lr": 0.1, "acc": 0.5}.items() <= held.rows[1].items()
    assert held.rows[5]["samples"]["_type"] == "table-file"
    assert held.config == {"lr": 0.1, "late": 1}
    assert (held.fields["host"], held.group, held.fields["tags"]) == ("train-7", "g", ["a"])
    assert held.state(server.clock()) == "finished"


def test_wandb_mode_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """WANDB_MODE=offline makes folders, disabled makes nothing, an option stands above both."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(WandbSink(offline_folder=str(tmp_path / "one")), view(), {}, row(0))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(WandbSink(offline_folder=str(tmp_path / "two")), view(), {}, row(0))
    write(WandbSink(mode="disabled", offline_folder=str(tmp_path / "three")), view(), {}, row(0))

    assert len(list((tmp_path / "one" / "wandb").glob("offline-run-*-r-1"))) == 1
    assert not (tmp_path / "two").exists()
    assert not (tmp_path / "three").exists()


def test_a_run_is_exported_as_an_offline_folder(tmp_path: Path, server: WandbServer) -> None:
    """`gapless export --format wandb-offline` writes the merged history; `wandb sync` of it is the run."""
    attempt = Attempt(tmp_path / "spool")
    attempt.add("run", {"name": "Qwen 7B", "config": {"lr": 0.1}})
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(5)])
    attempt.add("metrics", {"acc": 0.25}, 2)
    attempt.add("axis", {"key": "loss", "axis": None, "summary": "min"})
    attempt.add("finish", {"state": "failed", "exit_code": 3})
    done = CliRunner().invoke(
        main, ["export", str(tmp_path / "spool"), "--format", "wandb-offline", "-o", str(tmp_path / "out")]
    )

    assert done.exit_code == 0, done.output
    assert Path(done.output.strip()).name.startswith("offline-run-")

    held = sync(server, tmp_path / "out")

    assert [(shown["_step"], shown["loss"]) for shown in held.rows] == [(step, step + 0.5) for step in range(5)]
    assert held.rows[2]["acc"] == 0.25
    assert (held.fields["displayName"], held.config, held.exit_code) == ("Qwen 7B", {"lr": 0.1}, 3)
    assert json.loads(held.lines[0] or "")["_timestamp"] == attempt.created + 2
