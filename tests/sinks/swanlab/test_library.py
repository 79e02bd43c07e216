"""The library's own ways: offline and local runs made by the real library in a child process, whole after any crash."""

from __future__ import annotations

import json
import os
from math import inf, nan
from pathlib import Path

import pytest

from gapless_uploader.operations import Config, Log, Row, State, Table, Text
from gapless_uploader.sink import Memo, Misconfigured, Parked, Retryable
from gapless_uploader.sinks._swanlab_library import LibrarySession
from gapless_uploader.sinks._swanlab_process import child_environment
from gapless_uploader.sinks.swanlab import SwanlabSink
from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RealClient
from tests.sinks.harness import T0, amend, batch, row, view, write

RUN = view(config={"lr": 0.1})
END = State("finished", 0, T0 + 20, 20.0)


def run_dirs(folder: Path) -> list[Path]:
    return sorted(folder.glob("grpo/r-1/part-*/swanlog/run-*"))


def synced(server: SwanLabServer, folder: Path, tmp_path: Path) -> dict[str, dict[int, float]]:
    """What the server holds after `swanlab sync` of every part under one id."""
    client = RealClient(tmp_path / "client", server.url, server.api_key)
    for path in run_dirs(folder):
        client.run("swanlab", "sync", "--id", "r-1", str(path))
    return server.experiments["r-1"].points()


def test_an_offline_run_is_what_swanlab_sync_takes(tmp_path: Path, server: SwanLabServer) -> None:
    """Rows, text, table, config and end state go out by `swanlab sync` as from any other offline run."""
    rows = [row(step) for step in range(4)]
    odd = Row(7, T0 + 7, 7.0, {"bad": nan, "up": inf, "note": Text("hello"), "tab": Table(["a"], [[1.5]])})
    ack = write(SwanlabSink(str(tmp_path / "out"), mode="offline"), RUN, {}, Config(RUN.config), *rows, odd, END)
    points = synced(server, tmp_path / "out", tmp_path)
    held = server.experiments["r-1"]

    assert points["loss"] == {step: step + 0.5 for step in range(4)}
    assert points["up~inf"] == {7: 1.0}
    assert set(points["bad"]) == {7}
    assert held.media("note")[7][0][1] == b"hello"
    assert json.loads(held.media("tab")[7][0][1])["rowData"] == [{"a": 1.5}]
    assert held.config["lr"] == 0.1
    assert (held.state, held.duplicates.total) == ("FINISHED", 0)
    assert [refusal.reason for refusal in ack.refused] == ["an infinity is held as NaN, its sign at KEY~inf"]


def test_a_crash_anywhere_leaves_every_row_once(tmp_path: Path, server: SwanLabServer) -> None:
    """A killed child, a lost acknowledgement, a repeated batch: the part is made again from the journal."""
    sink = SwanlabSink(str(tmp_path / "out"), mode="offline")
    rows = [row(step) for step in range(9)]
    memo = write(sink, RUN, {}, Config(RUN.config), *rows[:3]).memo
    session = sink.open(RUN, memo)
    assert isinstance(session, LibrarySession)
    kept = session.write(batch(RUN, *rows[3:5])).memo
    session.write(batch(RUN, *rows[5:7]))
    assert session._child is not None
    os.kill(session._child._process.pid, 9)
    session._child._process.wait()
    with pytest.raises(Retryable, match=r"library\.log"):
        session.write(batch(RUN, rows[7]))
    session.close()
    last = write(sink, RUN, kept, *rows[5:], END).memo

    assert synced(server, tmp_path / "out", tmp_path)["loss"] == {step: step + 0.5 for step in range(9)}
    assert len(run_dirs(tmp_path / "out")) == 1
    assert (last["part"], last["length"]) == (2, 0)


def test_rows_after_the_end_make_a_new_part(tmp_path: Path, server: SwanLabServer) -> None:
    """A run that goes on after its end gets a second folder; both synced under one id are one run."""
    sink = SwanlabSink(str(tmp_path / "out"), mode="offline")
    memo = write(sink, RUN, {}, row(0), row(1), END).memo
    again = State("running", None, T0 + 30, 20.0)
    memo = write(sink, RUN, memo, again, row(2), amend(row(1), acc=0.5), END).memo

    assert len(run_dirs(tmp_path / "out")) == 2
    assert list(synced(server, tmp_path / "out", tmp_path)["loss"]) == [0, 1, 2]


def test_a_lost_journal_is_not_guessed(tmp_path: Path) -> None:
    """Without the rows that were acknowledged the run is parked, with the way out."""
    sink = SwanlabSink(str(tmp_path / "out"), mode="offline")
    memo: Memo = write(sink, RUN, {}, row(0)).memo
    (tmp_path / "out" / "grpo" / "r-1" / "journal.jsonl").unlink()

    with pytest.raises(Parked, match="put it back, or use another --state"):
        write(sink, RUN, memo, row(1))


def test_a_local_run_holds_no_nan(tmp_path: Path) -> None:
    """The local board breaks on a NaN: it is left out and counted, and so are console lines."""
    sink = SwanlabSink(str(tmp_path / "out"), mode="local")
    values = Row(0, T0, 0.0, {"loss": 0.5, "bad": nan, "up": inf})
    ack = write(sink, RUN, {}, values, Log("stdout", ["hello"], T0))
    journal = (tmp_path / "out" / "grpo" / "r-1" / "journal.jsonl").read_text()

    assert json.loads(journal) == {"rows": [[0, {"loss": 0.5, "up~inf": 1.0}]], "media": []}
    reasons = sorted(refusal.reason for refusal in ack.refused)
    assert reasons.count("a NaN breaks the local board: it is left out") == 2
    assert "console lines" in reasons


def test_the_child_sees_no_credential(tmp_path: Path) -> None:
    """The child gets a home for SwanLab's files of its own, and none of our variables."""
    seen = child_environment({"SWANLAB_API_KEY": "k" * 20, "PATH": "/bin", "WANDB_API_KEY": "w"}, tmp_path)

    assert "SWANLAB_API_KEY" not in seen
    assert "WANDB_API_KEY" not in seen
    assert seen["SWANLAB_ROOT"] == str(tmp_path)
    assert {value for name, value in seen.items() if name.startswith("SWANLAB_PROBE_")} == {"false"}


def test_the_mode_comes_from_the_option_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mode` goes before SWANLAB_MODE; anything else names what there is."""
    monkeypatch.setenv("SWANLAB_MODE", "offline")

    assert SwanlabSink().mode == "offline"
    assert SwanlabSink(mode="online").mode == "online"
    assert not SwanlabSink().capabilities.original_time
    with pytest.raises(Misconfigured, match=r"'sideways'.*offline or local"):
        SwanlabSink(mode="sideways")
