"""`gapless doctor` says what would fail, and the way out, before it does."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gapless_uploader.cli import main
from tests.servers.swanlab import SwanLabServer
from tests.servers.wandb_server import DEFAULT_KEY, WandbServer
from tests.uploader.harness import SpoolDir


def examined(*arguments: str | Path) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(main, ["doctor", *map(str, arguments), "--json"])
    return result.exit_code, {one["what"]: one for one in json.loads(result.stdout)}


@pytest.fixture
def closed_port() -> Iterator[int]:
    """Bound and not listening: connections are refused, and nobody else is given the port."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_all_is_well(tmp_path: Path) -> None:
    """Spool, state and a sink that needs no account."""
    SpoolDir(tmp_path / "spool").attempt().log(0, a=1)

    code, found = examined(tmp_path / "spool", "--state", tmp_path / "state", "--to", f"file:{tmp_path}")

    assert code == 0
    assert {"spool", "state", "file"} == set(found)
    assert "1 runs on " in found["spool"]["text"]


def test_a_state_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """With another one as the way out."""
    (tmp_path / "file").touch()

    code, found = examined("--state", tmp_path / "file" / "state")

    assert (1, "bad") == (code, found["state"]["grade"])
    assert "--state" in found["state"]["text"]


def test_swanlab_wrong_key_and_dead_network_are_told_apart(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor's own library says "check your API key" for both."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with SwanLabServer() as server:
        monkeypatch.setenv("SWANLAB_API_HOST", server.url)
        monkeypatch.setenv("SWANLAB_API_KEY", server.api_key)
        good = examined("--state", tmp_path, "--to", "swanlab")
        monkeypatch.setenv("SWANLAB_API_KEY", "x" * 20)
        wrong = examined("--state", tmp_path, "--to", "swanlab")
    monkeypatch.setenv("SWANLAB_API_HOST", f"http://127.0.0.1:{closed_port}")
    dead = examined("--state", tmp_path, "--to", "swanlab")

    assert [0, 1, 1] == [code for code, _ in (good, wrong, dead)]
    assert "key" in wrong[1]["swanlab"]["text"]
    assert "cannot be reached" in dead[1]["swanlab"]["text"]
    assert "no connection" in dead[1]["swanlab"]["text"]


def test_wandb_wrong_key_and_dead_network_are_told_apart(
    tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key itself is in no message."""
    monkeypatch.setenv("WANDB_API_KEY", DEFAULT_KEY)
    with WandbServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        good = examined("--state", tmp_path, "--to", "wandb")
        server.backend.valid_keys = {"another" * 6}
        wrong = examined("--state", tmp_path, "--to", "wandb")
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{closed_port}")
    dead = examined("--state", tmp_path, "--to", "wandb")

    assert [0, 1, 1] == [code for code, _ in (good, wrong, dead)]
    assert "key" in wrong[1]["wandb"]["text"]
    assert "cannot be reached" in dead[1]["wandb"]["text"]
    assert all(DEFAULT_KEY not in json.dumps(found) for _, found in (good, wrong, dead))


@pytest.mark.parametrize(
    "sink",
    [
        "file:/dev/null/x",
        "tensorboard:/proc/x",
        "spool:/proc/x",
        "clearml:/dev/null/x",
        "mlflow:http://127.0.0.1:{closed}",
        "prometheus:127.0.0.1:{open}",
    ],
)
def test_a_target_that_cannot_take_anything_is_said(tmp_path: Path, closed_port: int, sink: str) -> None:
    """A folder that cannot be made, a server that is not there, a port that somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        named = sink.format(closed=closed_port, open=server.getsockname()[1])
        code, found = examined("--state", tmp_path, "--to", named)

    kind = sink.partition(":")[0]
    assert (1, "bad") == (code, found[kind]["grade"])
    assert any(word in found[kind]["text"] for word in ("/x", "127.0.0.1"))
