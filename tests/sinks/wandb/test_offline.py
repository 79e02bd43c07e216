"""W&B's own offline folders: written by the real client, synced by the real `wandb sync`, seen by the server."""

from __future__ import annotations

import json
import os
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner

from gapless_uploader.cli import main
from gapless_uploader.operations import (
    Axis,
    Config,
    Log,
    Media,
    MediaItem,
    Missing,
    Row,
    State,
    Summary,
    Superseded,
    Table,
)
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


@pytest.fixture
def sink(tmp_path: Path) -> WandbSink:
    return WandbSink(mode="offline", offline_folder=str(tmp_path / "out"))


def payload(folder: Path, content: bytes, extension: str) -> Path:
    path = folder / f"{sha256(content).hexdigest()}.{extension}"
    path.write_bytes(content)
    return path


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


ENDED = State("finished", 0, T0 + 9, 9.0)


def test_keys_that_wandb_keeps_arrive_under_another_name(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """They are the online sink's names, in every folder's rows, and the config says so in the later sessions' too."""
    values = {"": 3.0, "_step": 77.0, "_timestamp": 5.0, "_runtime": 9.0, "_wandb": 1.0, "_gapless": 2.0, "~_step": 4.0}
    run = view(config={"lr": 0.1})
    memo = write(sink, run, {}, Config(run.config), row(1), row(2, loss=1.0, **values)).memo
    ack = write(sink, run, memo, row(0, **values), row(3), ENDED)
    held = sync(server, tmp_path / "out")
    named = {f"~{key}": value for key, value in values.items()}

    assert ack.refused == []
    assert [shown["_step"] for shown in held.rows] == [0, 1, 2, 3]
    assert named.items() <= held.rows[0].items()
    assert {"loss": 1.0, **named}.items() <= held.rows[2].items()
    assert held.config == {"lr": 0.1, "gapless_renamed_keys": {name: name[1:] for name in named}}


def test_a_list_of_files_arrives_whole(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """Each is a file of the run, under the name that the online sink gives it; the folder has them, not links."""
    (tmp_path / "[1]").mkdir()
    paths = [payload(tmp_path / "[1]", content, "bin") for content in (b"1", b"2")]
    both = Media("file", [MediaItem(path, {"name": f"{at}.txt"}) for at, path in enumerate(paths)])
    one = Media("file", [MediaItem(paths[0])])
    write(sink, view(), {}, row(0, both=both, one=one), ENDED)
    for path in paths:
        path.unlink()
    held = sync(server, tmp_path / "out")
    (shown,) = held.rows

    assert [name.rpartition("/")[2] for name in shown["both"]] == ["0.txt", "1.txt"]
    assert [held.files[name] for name in (*shown["both"], shown["one"])] == [b"1", b"2", b"1"]


# Refused


def test_a_payload_that_cannot_be_logged_costs_its_key_alone(
    tmp_path: Path, server: WandbServer, sink: WandbSink
) -> None:
    """Missing, unnamed or broken: refused once, and not again by a later amend; its row and the others go on."""
    gone = MediaItem(tmp_path / f"{'a' * 64}.png", {"format": "png"})
    first = row(
        0,
        loss=1.0,
        image=Media("image", [gone]),
        file=Media("file", [MediaItem(payload(tmp_path, b"1", "bin")), gone]),
        unnamed=Media("audio", [MediaItem(None)]),
        missing=Missing("refused"),
        broken=Media("image", [MediaItem(payload(tmp_path, b"no image", "png"))]),
        histogram=Media("histogram", [MediaItem(None, {})]),
        table=Table(["a", "b"], [[1]]),
        large=1 << 2_000,
        long="x" * 11_000_000,
    )
    ack = write(sink, view(), {}, first, row(1), amend(first, acc=0.5), ENDED)
    held = sync(server, tmp_path / "out")

    assert sorted((one.step, one.key, one.reason) for one in ack.refused) == [
        (0, "broken", "image that W&B's client does not take (UnidentifiedImageError)"),
        (0, "file", "a payload that is missing (No such file or directory)"),
        (0, "histogram", "histogram that W&B's client does not take (KeyError)"),
        (0, "image", "a payload that is missing (No such file or directory)"),
        (0, "large", "an integer beyond a float's range"),
        (0, "long", "a row above W&B's 10000000 bytes"),
        (0, "missing", "a payload that is missing (refused)"),
        (0, "table", "table that W&B's client does not take (ValueError)"),
        (0, "unnamed", "a payload that is missing (no file)"),
    ]
    assert [(shown["_step"], shown["loss"]) for shown in held.rows] == [(0, 1.0), (1, 1.5)]
    assert held.rows[0]["acc"] == 0.5


def test_what_has_no_place_in_a_folder_is_counted(sink: WandbSink) -> None:
    """Console lines, and rows without a step."""
    ack = write(sink, view(), {}, row(0), Log("stdout", ["hello"], T0), Row(None, T0, 0.0, {"system.cpu": 1.0}))

    assert [one.reason for one in ack.refused] == [
        "an offline folder has no time for console lines",
        "a row without a step",
    ]


# After the run's end


def folders(folder: Path) -> int:
    """How many folders of the run there are."""
    return len(list((folder / "wandb").glob("offline-run-*")))


@pytest.mark.parametrize("is_same_session", [True, False])
@pytest.mark.parametrize(("state", "exit_code"), [("finished", 0), ("failed", 3)])
def test_a_late_row_leaves_the_run_s_end(
    tmp_path: Path, server: WandbServer, sink: WandbSink, state: str, exit_code: int, is_same_session: bool
) -> None:
    """An evaluation at an old step is one folder, with the end once more in it; so is a row at a new step."""
    ended = view(state=state, exit_code=exit_code)
    rows = [row(step) for step in range(5)]
    session = sink.open(view(), {})
    session.write(batch(view(), *rows, State(state, exit_code, T0 + 9, 9.0)))
    for num_folders, late in [(2, amend(rows[3], ev=3.0)), (3, row(9, ev=9.0))]:
        if not is_same_session:
            memo = session.flush()
            session.close()
            session = sink.open(ended, memo)
        session.write(batch(ended, late))
        held = sync(server, tmp_path / "out")

        assert folders(tmp_path / "out") == num_folders
        assert (held.state(server.clock()), held.exit_code) == (state, exit_code)

    session.close()

    assert [(shown["_step"], shown.get("ev")) for shown in held.rows] == [
        (0, None), (1, None), (2, None), (3, 3.0), (4, None), (9, 9.0)
    ]  # fmt: skip


def test_early_and_new_rows_after_the_end_leave_it(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """Of the two folders that one batch makes, the newer one has the end."""
    memo = write(sink, view(), {}, row(0), row(2), ENDED).memo
    write(sink, view(state="finished", exit_code=0), memo, row(1), row(3))
    held = sync(server, tmp_path / "out")

    assert folders(tmp_path / "out") == 3
    assert [shown["_step"] for shown in held.rows] == [0, 1, 2, 3]
    assert (held.state(server.clock()), held.exit_code) == ("finished", 0)


def test_a_run_that_goes_on_has_no_end(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """Rows after a new start are not followed by the end before it."""
    memo = write(sink, view(), {}, row(0), row(2), ENDED).memo
    session = sink.open(view(), memo)
    session.write(batch(view(), State("running", None, T0 + 10, 10.0), row(3)))
    session.write(batch(view(), row(4)))
    memo = session.flush()
    session.close()
    held = sync(server, tmp_path / "out")

    assert memo["ended"] is False
    assert held.exit_code != 0


def test_what_has_no_place_begins_no_folder_after_the_end(tmp_path: Path, sink: WandbSink) -> None:
    """Console lines that come late are counted, and nothing else."""
    memo = write(sink, view(), {}, row(0), ENDED).memo
    write(sink, view(state="finished", exit_code=0), memo, Log("stdout", ["late"], T0))

    assert folders(tmp_path / "out") == 1


# The run's own description


def test_a_new_description_begins_a_folder(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """The client takes group, job type, host and git at its start alone, so a later attempt's are in another folder."""
    session = sink.open(view(), {})
    session.write(batch(view(), row(0)))
    later = view(name="again", group="g", notes="n", host="train-8", tags=["a"])
    session.write(batch(later, row(1), ENDED))
    session.close()
    held = sync(server, tmp_path / "out")

    assert [shown["_step"] for shown in held.rows] == [0, 1]
    assert (held.fields["displayName"], held.group, held.fields["notes"]) == ("again", "g", "n")
    assert (held.fields["host"], held.fields["tags"]) == ("train-8", ["a"])


def test_the_summary_is_the_whole_run_s(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """W&B keeps the newest folder's summary: it has the last values, the training's own and rules over all rows."""
    axes = {"loss": (None, "min"), "hidden": (None, "none")}
    set_by_training = {"best": 7, "only": 3.0}
    first = row(0, loss=0.25, only=3.0, hidden=1.0)
    run = view(axes=axes, summary={**first.values, **set_by_training})
    memo = write(sink, run, {}, Axis("loss", None, "min"), Summary({"best": 7}), first).memo
    ended = view(axes=axes, summary={"loss": 2.0, "acc": 4.0, "hidden": 1.0, **set_by_training})
    write(sink, ended, memo, row(3, loss=2.0, acc=4.0), row(1, loss=0.5, acc=1.0), ENDED)
    held = sync(server, tmp_path / "out").summary

    assert {"best": 7, "only": 3.0, "acc": 4.0, "loss": {"min": 0.25}}.items() <= held.items()
    assert "hidden" not in held


def test_what_was_acknowledged_is_on_disk(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """Config, tags and summary are, without a row after them, where the client is killed at once."""
    session = sink.open(view(), {})
    session.write(batch(view(), row(0)))
    later = view(config={"late": 1}, tags=["a"])
    session.write(batch(later, Config(later.config), Summary({"best": 7})))
    session.close()
    held = sync(server, tmp_path / "out")

    assert (held.config, held.fields["tags"], held.summary["best"]) == ({"late": 1}, ["a"], 7)


def test_a_superseded_run_ends_with_its_mark(tmp_path: Path, server: WandbServer, sink: WandbSink) -> None:
    """As online: the tag names the run that holds the corrected history."""
    write(sink, view(tags=["a"]), {}, row(0), Superseded("r-1-r2"))
    held = sync(server, tmp_path / "out")

    assert held.fields["tags"] == ["a", "superseded-by:r-1-r2"]
    assert held.exit_code == 0


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
    attempt.add("summary", {"best": 7, "_step": 2})
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
    assert {"best": 7, "~_step": 2}.items() <= held.summary.items()


def test_an_export_counts_what_it_cannot_hold(tmp_path: Path) -> None:
    """The folder's path is the output; what is refused is said by reason beside it."""
    attempt = Attempt(tmp_path / "spool")
    attempt.add_rows([(0, {"loss": 0.5})])
    attempt.add("media", {"key": "image", "type": "image", "items": [{"media": f"{'a' * 64}.png"}]}, 0)
    attempt.add("metrics", {"x": 1.0})
    for text in ("one", "two"):
        attempt.add("log", {"stream": "stdout", "lines": [text]})
    done = CliRunner().invoke(
        main, ["export", str(tmp_path / "spool"), "--format", "wandb-offline", "-o", str(tmp_path / "out")]
    )
    unstepped, console, missing = done.stderr.splitlines()

    assert done.exit_code == 0, done.output
    assert Path(done.stdout.strip()).is_dir()
    assert unstepped == "1 refused: a row without a step"
    assert console == "2 refused: an offline folder has no time for console lines"
    assert missing.startswith("1 refused: a payload that is missing")
