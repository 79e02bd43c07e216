"""The trackio sink's own promises, read back with trackio's own storage and API."""

import sqlite3
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from gapless_uploader.operations import Config, Rewind, Row, Table
from gapless_uploader.sink import Misconfigured, Retryable
from gapless_uploader.sinks.trackio import TrackioSink
from tests.sinks.harness import T0, amend, batch, row, view, write
from tests.sinks.harness_trackio import FOLDER, Harness, SQLiteStorage, trackio

RUN = view(config={"lr": 0.1, "big": 2**70}, system={"user": "me"})


def test_trackios_own_api_lists_the_run(tmp_path: Path) -> None:
    """The run is there under its name, with its config, its start and the training's user."""
    harness = Harness(tmp_path)
    write(harness.sink(), RUN, {}, Config(RUN.config), row(0))
    (run,) = trackio.Api().runs("grpo")

    assert (run.name, run.id) == ("Qwen-7B", "r-1")
    config = SQLiteStorage.get_run_config("grpo", "Qwen-7B", run_id="r-1")
    assert (config["lr"], config["big"], config["_Username"]) == (0.1, str(2**70), "me")
    assert datetime.fromisoformat(config["_Created"]).timestamp() == T0


def test_generations_are_traces_as_verls(tmp_path: Path) -> None:
    """A table of input, output and score is a conversation a row, with its score; once, also when it comes again."""
    harness = Harness(tmp_path)
    table = Table(["step", "input", "output", "score"], [[5, "2+2?", "4", 1.0], [5, "3+3?", "7", 0.0]])
    for _ in range(2):
        write(harness.sink(), RUN, {}, row(5, **{"val/generations": table}))
    traces = sorted(SQLiteStorage.get_traces("grpo", run_id="r-1"), key=lambda trace: trace["index"])

    assert [[message["content"] for message in trace["messages"]] for trace in traces] == [["2+2?", "4"], ["3+3?", "7"]]
    assert [trace["metadata"]["score"] for trace in traces] == [1.0, 0.0]
    assert [trace["step"] for trace in traces] == [5, 5]


def test_a_lost_state_sends_only_what_is_missing(tmp_path: Path) -> None:
    """A row that went in two parts and comes again as one stays as it was sent."""
    harness = Harness(tmp_path)
    first = row(3, loss=0.5)
    memo = write(harness.sink(), RUN, {}, first).memo
    write(harness.sink(), RUN, memo, amend(first, acc=0.9))
    memo = write(harness.sink(), RUN, {}, Row(3, first.t + 2, 3.0, {"loss": 0.5, "acc": 0.9})).memo
    write(harness.sink(), RUN, memo, row(4, loss=0.25))

    assert harness.expect([first, row(3, t=first.t + 2, acc=0.9), row(4, loss=0.25)]) == harness.actual(RUN)


def test_projects_that_trackio_would_join_stay_apart(tmp_path: Path) -> None:
    """`my.model` and `mymodel` are one file in trackio; here they are two projects."""
    harness = Harness(tmp_path)
    write(harness.sink(), replace(RUN, project="my.model"), {}, row(0, loss=1.0))
    write(harness.sink(), replace(RUN, project="mymodel"), {}, row(0, loss=2.0))
    write(harness.sink(), replace(RUN, project="x_traces"), {}, row(0, loss=3.0))

    assert len(SQLiteStorage.get_projects()) == 3
    assert harness.expect([row(0, loss=2.0)]) == harness.actual(replace(RUN, project="mymodel"))


def test_what_trackio_cannot_hold_is_counted(tmp_path: Path) -> None:
    """A text that would read as a number, a number beyond 64 bits and a rewind are refused with their reasons."""
    harness = Harness(tmp_path)
    ack = write(harness.sink(), RUN, {}, row(0, word="NaN", huge=2**64, loss=0.5), Rewind(0))

    assert [(one.step, one.key) for one in ack.refused] == [(0, "word"), (0, "huge"), (0, None)]
    assert harness.expect([row(0, loss=0.5)]) == harness.actual(RUN)


def test_a_second_folder_in_one_process_is_refused(tmp_path: Path) -> None:
    """trackio reads its folder once, so another one would silently be the first."""
    with pytest.raises(Misconfigured, match="start another uploader"):
        TrackioSink(str(tmp_path)).open(RUN, {})


def test_a_database_that_fails_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A locked or full database is Retryable; the same batch then arrives once."""
    harness = Harness(tmp_path)
    session = harness.sink().open(RUN, {})

    def locked(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    with monkeypatch.context() as patch:
        patch.setattr(SQLiteStorage, "bulk_log", locked)
        with pytest.raises(Retryable, match="database is locked"):
            session.write(batch(RUN, row(0)))
    session.write(batch(RUN, row(0)))
    session.close()

    assert harness.expect([row(0)]) == harness.actual(RUN)
    assert [path.suffix for path in FOLDER.glob("grpo.db")] == [".db"]
