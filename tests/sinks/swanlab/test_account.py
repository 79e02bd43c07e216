"""Credentials: from the environment or `swanlab login` alone, and in nothing that the uploader leaves behind."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from gapless_uploader.sink import Misconfigured, Parked, Retryable
from gapless_uploader.sinks._swanlab_account import find_account
from gapless_uploader.sinks.swanlab import SwanlabSink
from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RealClient
from tests.sinks.harness import row, view, write
from tests.sinks.swanlab.world import World

KEY = "a-key-that-nobody-may-see"


def login(root: Path, host: str = "http://10.0.0.7:8000", key: str = KEY) -> Path:
    root.mkdir(exist_ok=True)
    (root / ".netrc").write_text(f"machine {host}\n\tlogin https://web.example\n\tpassword {key}\n")
    return root


def test_the_environment_goes_first() -> None:
    """A key and a host from the environment are used as they are; quotes and a path are taken off."""
    account = find_account({"SWANLAB_API_KEY": f'"{KEY}"', "SWANLAB_API_HOST": "swanlab.example.org/api/"})

    assert (account.key, account.api_host, account.web_host) == (KEY, "https://swanlab.example.org", account.api_host)
    assert find_account({"SWANLAB_API_KEY": KEY}).api_host == "https://api.swanlab.cn"


def test_the_login_file_brings_its_own_host(tmp_path: Path) -> None:
    """The file that `swanlab login` wrote names key and hosts."""
    account = find_account({"SWANLAB_ROOT": str(login(tmp_path / "r"))})

    assert (account.key, account.api_host, account.web_host) == (KEY, "http://10.0.0.7:8000", "https://web.example")


def test_a_key_is_used_at_its_own_host_only(tmp_path: Path) -> None:
    """A login for one host is never sent to another."""
    environ = {"SWANLAB_ROOT": str(login(tmp_path / "r")), "SWANLAB_API_HOST": "https://other.example"}
    with pytest.raises(Misconfigured, match=r"swanlab login -h https://other\.example"):
        find_account(environ)


@pytest.mark.parametrize("content", [None, "", f"machine {KEY} broken {KEY}", f"password {KEY}"])
def test_without_a_key_the_way_out_is_said(tmp_path: Path, content: str | None) -> None:
    """No file, an empty one or a broken one: the text says how to log in, and quotes nothing of the file."""
    if content is not None:
        (tmp_path / ".netrc").write_text(content)
    with pytest.raises(Misconfigured, match="swanlab login") as caught:
        find_account({"SWANLAB_ROOT": str(tmp_path)})

    assert KEY not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("host", ["https://user:pw@host", "ftp://host", "https://"])
def test_a_host_is_a_plain_one(host: str) -> None:
    """A host with credentials in it, or none at all, is refused without being shown."""
    with pytest.raises(Misconfigured, match=r"must be like https") as caught:
        find_account({"SWANLAB_API_KEY": KEY, "SWANLAB_API_HOST": host})

    assert "pw" not in str(caught.value)


def test_a_working_folder_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A login file, `.env` or `swanlab.yaml` in the working folder, which may be a spool's, is not read."""
    login(tmp_path / ".swanlab", "http://evil.example", "k")
    (tmp_path / ".env").write_text("SWANLAB_API_HOST=http://evil.example\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Misconfigured, match="no SwanLab API key"):
        find_account({"SWANLAB_ROOT": str(tmp_path / "none")})

    assert find_account({"SWANLAB_API_KEY": KEY}).api_host == "https://api.swanlab.cn"


def test_what_swanlab_login_writes_is_read(
    server: SwanLabServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real `swanlab login`, then the sink with no variable set: the run arrives."""
    client = RealClient(tmp_path / "real", server.url, server.api_key)
    client.run("swanlab", "login", "--api-key", server.api_key, "--host", server.url)
    monkeypatch.delenv("SWANLAB_API_KEY")
    monkeypatch.delenv("SWANLAB_API_HOST")
    monkeypatch.setenv("HOME", str(client.home))
    write(SwanlabSink(settle=0), view(), {}, row(0))

    assert len(server.experiments["r-1"].raw) == 2


def test_a_check_tells_key_network_and_server_apart(server: SwanLabServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `doctor` asks: who we are; a wrong key, a dead network and a captive portal each say what they are."""
    assert SwanlabSink().check() == f"tester at {server.url}"

    server.arm("login", "html")
    with pytest.raises(Retryable, match="captive portal"):
        SwanlabSink().check()
    with server.refused(), pytest.raises(Retryable, match="no connection"):
        SwanlabSink().check()
    server.arm("login", "hang")
    with pytest.raises(Retryable, match=r"no answer within 0\.2 s"):
        SwanlabSink(timeout=0.2).check()
    monkeypatch.setenv("SWANLAB_API_KEY", "wrong")
    with pytest.raises(Parked, match="does not take the API key") as caught:
        SwanlabSink().check()
    assert caught.value.whole_sink


def test_no_secret_is_left_anywhere(world: World) -> None:
    """Key and session are in no event, no state, no spool and no traceback, whatever went wrong."""
    writer = world.writer()
    writer.begin()
    for step in range(5):
        writer.row(step, loss=1.0)
    for endpoint, kind in (("login", "status"), ("metrics", "reset"), ("profile", "html"), ("metrics", "status")):
        world.server.arm(endpoint, kind, when="after", status=403)
    writer.finish()
    for _ in range(3):
        world.run()
        world.pass_time(400)
    world.server.arm("experiment.get", "status", status=403)
    sids = list(world.server.state.sessions)
    text = "".join(map(str, world.events))
    assert world.uploader is not None
    (sink,) = world.uploader.sinks.values()
    text += repr(vars(sink)) + "".join(path.read_text(errors="replace") for path in world.state.rglob("*.json*"))
    world.server.expire_sessions()
    world.server.arm("login", "status", status=403, count=None)
    try:
        sink.open(view(), {})
    except Parked as error:
        text += "".join(traceback.format_exception(error))

    assert sids
    assert [secret for secret in (world.server.api_key, *sids) if secret in text] == []
