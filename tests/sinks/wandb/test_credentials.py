"""Where host and key come from: the environment, else where the `wandb` package keeps them."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from gapless_uploader.sink import Misconfigured, Parked, Retryable
from gapless_uploader.sinks._wandb_http import Credentials
from gapless_uploader.sinks._wandb_reader import Reader
from gapless_uploader.sinks.wandb import WandbSink
from tests.servers.wandb_server import DEFAULT_KEY, WandbServer
from tests.sinks.harness import row, view, write


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    return tmp_path


def log_in(home: Path, server: WandbServer, key: str) -> None:
    """What `wandb login` leaves."""
    host = server.url.removeprefix("http://")
    (home / ".netrc").write_text(f"machine {host}\n  login user\n  password {key}\n")
    (home / ".netrc").chmod(0o600)


def sink(**options: object) -> WandbSink:
    return WandbSink(settle_s=0.0, **options)


def test_the_environment_says_it(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """WANDB_API_KEY and WANDB_BASE_URL are enough."""
    monkeypatch.setenv("WANDB_API_KEY", DEFAULT_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url + "/")
    write(sink(), view(), {}, row(0))

    assert len(server.run("grpo", "r-1").lines) == 1


def test_netrc_says_it(server: WandbServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of `wandb login` is found for the host of WANDB_BASE_URL."""
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    log_in(home, server, DEFAULT_KEY)
    write(sink(), view(), {}, row(0))

    assert len(server.run("grpo", "r-1").lines) == 1


def test_the_settings_file_says_the_host(server: WandbServer, home: Path) -> None:
    """`wandb login --host` keeps the host in W&B's settings."""
    (home / "config").mkdir()
    (home / "config" / "settings").write_text(f"[default]\nbase_url = {server.url}\n")
    log_in(home, server, DEFAULT_KEY)
    write(sink(), view(), {}, row(0))

    assert len(server.run("grpo", "r-1").lines) == 1


def test_a_key_that_was_replaced_is_read_anew(server: WandbServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key expires while running and `wandb login` writes another: the sink goes on without a restart."""
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    log_in(home, server, DEFAULT_KEY)
    made = sink()
    session = made.open(view(), {})
    from tests.sinks.harness import batch

    session.write(batch(view(), row(0)))
    server.backend.valid_keys = {"f" * 40}
    log_in(home, server, "f" * 40)
    for _ in range(5):
        with suppress(Retryable):  # the first row's read-back may still be on its way, with the old key
            session.write(batch(view(), row(1)))
            break

    assert len(server.run("grpo", "r-1").lines) == 2


def test_without_a_key_the_sink_waits_for_one(server: WandbServer, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key anywhere parks the sink, with the way out; once there is one it goes on."""
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    made = sink()
    with pytest.raises(Parked, match="wandb login") as parked:
        made.open(view(), {})
    assert parked.value.whole_sink
    log_in(home, server, DEFAULT_KEY)
    write(made, view(), {}, row(0))

    assert len(server.run("grpo", "r-1").lines) == 1


def test_a_key_has_no_repr() -> None:
    """What is printed of credentials is the host."""
    assert "secret" not in repr(Credentials("http://host", "secret"))


def test_memos_hold_no_key(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state has the progress and nothing else."""
    monkeypatch.setenv("WANDB_API_KEY", DEFAULT_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)

    assert DEFAULT_KEY not in json.dumps(write(sink(), view(), {}, row(0)).memo)
    assert DEFAULT_KEY not in server.run("grpo", "r-1").summary_text + server.run("grpo", "r-1").config_text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "online!"}, "mode is 'online!'"),
        ({"late": "never"}, "late is 'never'"),
        ({"settle_s": -1}, "settle_s is -1"),
        ({"upload_interval": "2"}, "upload_interval is '2'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], named: str) -> None:
    """Options are checked when the sink is made."""
    with pytest.raises(Misconfigured, match=named.replace("(", "\\(")):
        WandbSink(**options)


def test_the_target_stands_above_what_the_run_says(server: WandbServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`wandb:team/project` sends every run there; host and key are never the spool's to choose."""
    monkeypatch.setenv("WANDB_API_KEY", DEFAULT_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    write(WandbSink("team/other", settle_s=0.0), view(entity="somebody"), {}, row(0))

    assert list(server.runs) == [("team", "other", "r-1")]


def test_a_question_that_hangs_holds_nobody_up_at_the_end(server: WandbServer) -> None:
    """Closing the reader ends its child at once, and whoever waits for an answer is told to try again."""
    reader = Reader()
    hang = server.arm("Run", "hang")
    raised: list[Exception] = []

    def look() -> None:
        try:
            reader.look(Credentials(server.url, DEFAULT_KEY), "acme/grpo/r-1", [])
        except Retryable as error:
            raised.append(error)

    waiting = threading.Thread(target=look)
    waiting.start()
    assert hang.hit.wait(60)
    reader.close()
    waiting.join(30)

    assert [str(error) for error in raised] == ["wandb, in its own process, gave no answer; it is started again"]


def test_a_key_that_expires_before_the_read_back_is_read_anew(
    server: WandbServer, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B took the rows and then shows nothing to the old key: the sink finds that out while it only asks."""
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    log_in(home, server, DEFAULT_KEY)
    made = sink()
    session = made.open(view(), {})
    place = made.place(view())
    server.backend.valid_keys = {"f" * 40}
    log_in(home, server, "f" * 40)
    with pytest.raises(Retryable):
        made.look(place, [(0, 0)])

    assert made.credentials(False).api_key == "f" * 40
    assert made.look(replace(place, entity="acme"), [(0, 0)])["rows"] == []
    session.close()
