"""A run as W&B shows it while it lives and when it ended: state, heartbeat, config, console, system metrics."""

from __future__ import annotations

import json
import shutil
from math import nan
from pathlib import Path
from typing import Any

import pytest

from tests.servers.wandb_server import CRASHED_AFTER_S, WandbServer
from tests.sinks.harness import row, view, write
from tests.sinks.wandb.lives import Clock, Lives
from tests.sinks.wandb.loopback import LoopbackSink
from tests.wandb_spool import Attempt, files_of


def test_the_first_upload_carries_everything(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """The very first request that makes the run has its whole config, names, host, program and git."""
    server.backend.keeps_bodies = True
    attempt.add("system", {"command": "python -m pkg.train --lr 1", "git": {"commit": "abc", "remote": "r"}})
    attempt.add("config", {"late": {"added": True}})
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.step()
    lives.step()
    first = next(request for request in server.requests if request.operation == "UpsertBucket")
    config = json.loads(first.variables["config"])

    assert {key: entry["value"] for key, entry in config.items() if key != "_wandb"} == {
        "lr": 0.1, "late": {"added": True}
    }  # fmt: skip
    wanted = {"displayName": "Qwen 7B", "host": "train-7", "program": "-m pkg.train", "commit": "abc", "repo": "r"}
    assert wanted.items() <= first.variables.items()


@pytest.mark.parametrize("loses", ["nothing", "the process", "the state"])
def test_a_run_that_waits_for_its_first_row_goes_on(
    lives: Lives, attempt: Attempt, server: WandbServer, loses: str
) -> None:
    """Names and config alone make the run; its first row may come after a restart or a lost state."""
    lives.run()
    if loses != "nothing":
        lives.kill() if loses == "the process" else lives.lose_state()
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run(max_steps=30)

    assert server.run("grpo", "r-1").config == {"lr": 0.1}
    assert [row["loss"] for row in server.run("grpo", "r-1").rows] == [1.0]


def test_a_changed_config_arrives_while_the_run_lives(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A config record goes up with its rows, whole."""
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run()
    attempt.add("config", {"lr": 0.05})
    lives.run()

    assert server.run("grpo", "r-1").config == {"lr": 0.05}


def test_a_live_run_beats_until_it_crashes(lives: Lives, attempt: Attempt, server: WandbServer, clock: Clock) -> None:
    """Silence with a living trainer shows as running for as long as it takes; a dead one shows as crashed."""
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run()
    run = server.run("grpo", "r-1")
    for _ in range(20):
        clock.now += 40.0
        assert lives.pipeline.heartbeat_due(clock.now)
        lives.step()

    assert clock.now - run.heartbeat_at < 40.0 < CRASHED_AFTER_S
    assert run.state(clock()) == "running"
    assert len(run.lines) == 1

    lives.pipeline.step(files_of(lives.root, crashed=True), clock.now)
    lives.pipeline.step(files_of(lives.root, crashed=True), clock.now)

    assert run.state(clock()) == "crashed"


def test_a_failed_run_shows_its_exit_code(lives: Lives, attempt: Attempt, server: WandbServer, clock: Clock) -> None:
    """Failed with the training's exit code, and running again once it was resumed."""
    attempt.add_rows([(0, {"loss": 1.0})])
    attempt.add("finish", {"state": "failed", "exit_code": 137})
    lives.run()
    run = server.run("grpo", "r-1")

    assert (run.state(clock()), run.exit_code) == ("failed", 137)

    second = Attempt(lives.root, 2)
    second.add_rows([(1, {"loss": 0.5})])
    lives.run()

    assert run.state(clock()) == "running"

    second.add("finish", {"state": "finished", "exit_code": 0})
    lives.run()

    assert (run.state(clock()), run.exit_code, len(run.lines)) == ("finished", 0, 2)


def test_the_summary_is_the_last_value_by_step(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A late row of an old step changes the summary of its own keys alone; what the training set stands above."""
    attempt.add_rows([(0, {"loss": 1.0}), (200, {"loss": 0.1}), (15, {"loss": 0.9, "eval": 0.5})])
    attempt.add("summary", {"best": 7})
    lives.run()
    summary = server.run("grpo", "r-1").summary

    assert (summary["loss"], summary["eval"], summary["best"], summary["_step"]) == (0.1, 0.5, 7, 200)


def test_rules_of_the_summary_survive_a_restart(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """min, max and mean go on where they were, after a kill and after a lost state; NaN stays NaN."""
    for key, rule in [("low", "min"), ("high", "max"), ("avg", "mean"), ("odd", "mean"), ("g/*", "max")]:
        attempt.add("axis", {"key": key, "axis": None, "summary": rule})
    attempt.add("metrics", {"odd": None}, 0, [[["odd"], "nan"]])
    values = [5.0, 1.0, 3.0, 4.0, 2.0, 9.0]
    for step, value in enumerate(values, 1):
        attempt.add_rows([(step, {"low": value, "high": value, "avg": value, "odd": value, "g/x": value})])
        lives.run()
        lives.kill() if step % 2 else lives.lose_state()
    summary = server.run("grpo", "r-1").summary

    assert (summary["low"], summary["high"], summary["avg"]) == ({"min": 1.0}, {"max": 9.0}, {"mean": 4.0})
    assert repr(summary["odd"]) == repr({"mean": nan})
    assert summary["g/x"] == {"max": 9.0}


def test_console_lines_and_samples_of_the_node_arrive(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """`log` records become output.log, rows of `system.` keys without a step the node's own metrics."""
    attempt.add("log", {"stream": "stdout", "lines": ["hello", "50%\r100%"]})
    attempt.add("log", {"stream": "stderr", "lines": ["oops"]})
    attempt.add("metrics", {"system.gpu.0.gpu": 97.5})
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run()
    lives.lose_state()
    attempt.add("log", {"stream": "stdout", "lines": ["bye"]})
    lives.run()
    run = server.run("grpo", "r-1")

    assert [line.split(" ", 1)[1] for line in run.output if line] == [
        "hello", "100%", f"{(run.output[2] or '').split(' ')[1]} oops", "bye"
    ]  # fmt: skip
    assert (run.output[2] or "").startswith("ERROR 2023-11-14T")
    (event,) = run.events
    assert json.loads(event or "")["system.gpu.0.gpu"] == 97.5
    assert [row["loss"] for row in run.rows] == [1.0]


def test_a_step_is_at_wandb_within_the_interval(
    tmp_path: Path, attempt: Attempt, server: WandbServer, clock: Clock
) -> None:
    """Requests of a live run keep the interval, and the last step waits no longer than that; an ended run waits not."""
    lives = Lives(tmp_path / "spool", server.url, clock, upload_interval=2.0)
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run()
    sent_at, lines = clock.now, server.run("grpo", "r-1").lines
    attempt.add_rows([(1, {"loss": 0.5})])

    assert sent_at < lives.pipeline.not_before <= sent_at + 2.0

    lives.run()

    assert len(lines) == 2
    assert clock.now - sent_at <= 2.1


def test_two_hundred_runs_share_their_connections(tmp_path: Path, server: WandbServer, clock: Clock) -> None:
    """200 live runs in one process keep fewer than 300 file handles open between them."""
    import os

    from gapless_uploader.sinks.wandb import WandbSink
    from tests.sinks.harness import batch, row, view
    from tests.sinks.wandb.loopback import make_sink

    before = len(os.listdir("/proc/self/fd"))
    sink: WandbSink = make_sink(server, read_back=False)
    sessions: list[Any] = []
    for place in range(200):
        run = view(run_id=f"many-{place}")
        session = sink.open(run, {})
        session.write(batch(run, row(0), row(1)))
        sessions.append(session)
    for session in sessions:
        session.heartbeat(0.0)

    assert len([run for run in server.runs.values() if len(run.lines) == 2]) == 200
    assert len(os.listdir("/proc/self/fd")) - before < 50


def test_the_budget_is_asked_before_every_request(server: WandbServer, clock: Clock) -> None:
    """With the bytes that are about to go out: several requests a step cost so many."""
    asked: list[int] = []
    sink = LoopbackSink(server.url, clock=clock, read_back=False)
    sink.meter = asked.append
    write(sink, view(), {}, row(0, loss=1.0))

    assert len(asked) == len(server.requests) > 1
    assert max(asked) > 100


@pytest.mark.parametrize("state", ["saved", "lost"])
@pytest.mark.parametrize("dies_in", range(1, 26, 3))
def test_a_kill_within_an_old_attempt_leaves_one_clean_run(
    tmp_path: Path, lives: Lives, attempt: Attempt, server: WandbServer, dies_in: int, state: str
) -> None:
    """Two attempts are there from the beginning. What the newer one supersedes is never sent, whatever dies."""
    attempt.add_rows([(step, {"loss": float(step)}) for step in range(3_000)])
    newer = Attempt(tmp_path / "spool", 2)
    newer.add_rows([(step, {"loss": float(-step)}) for step in range(1_500, 3_500)])
    newer.add("finish", {"state": "finished", "exit_code": 0})
    lives.dies_in, lives.dies_after = dies_in, bool(dies_in % 2)
    for _ in range(60):
        if lives.step() is None:
            break
    if state == "lost":
        lives.lose_state()
    lives.run()

    assert [run for _, _, run in server.backend.runs] == ["r-1"]
    rows = server.run("grpo", "r-1").rows
    assert [row["_step"] for row in rows] == list(range(3_500))
    assert [row["loss"] for row in rows] == [float(step if step < 1_500 else -step) for step in range(3_500)]
    assert lives.rewritten == []
    assert len(server.run("grpo", "r-1").lines) == 3_501  # the step at which the newer one begins has both rows


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("state", ["finished", "failed"])
def test_an_ended_run_stays_ended_whatever_its_uploader_meets(
    tmp_path: Path, server: WandbServer, clock: Clock, state: str, loses: bool, after: bool
) -> None:
    """Killed before or after the effect of each of its last requests, with its state or without: the run is over at
    W&B as it was in training, and its check says so."""
    code = int(state == "failed")
    for at in range(1, 16):
        spool = tmp_path / f"spool-{at}"
        attempt = Attempt(spool)
        attempt.add("run", {"name": "n"})
        attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(5)])
        attempt.add("finish", {"state": state, "exit_code": code})
        lives = Lives(spool, server.url, clock)
        lives.dies_in, lives.dies_after = at, after
        first = lives.pipeline
        while lives.pipeline is first and not first.idle(files_of(spool)):
            lives.step()
        if loses:
            lives.lose_state()
        lives.run()
        clock.now += 400
        run = server.run("grpo", "r-1")

        assert (run.state(clock()), run.exit_code) == (state, code), at
        assert [row["loss"] for row in run.rows] == [step + 0.5 for step in range(5)]
        assert lives.pipeline._memo["check"]["ok"], at
        server.runs.clear()


def test_lines_that_wandb_lost_show_at_the_end(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """W&B took rows and counts fewer when the run ends: the check says how many, and that it failed."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(500)])
    lives.run()
    run = server.run("grpo", "r-1")
    del run.lines[203:]
    run.snapshot(lives.clock())
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    lives.run()

    assert lives.pipeline._memo["check"] == {
        "ok": False,
        "text": "W&B was sent 500 lines and the state finished, and does not show more than 203 of 500 lines",
    }


def test_rows_that_wandb_cannot_hold_are_no_uploaded_rows(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """`uploaded` counts what is there."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(5)])
    attempt.add("metrics", {"x": 1.0})  # without a step
    lives.run()

    assert (lives.committed or {})["counts"]["rows"] == len(server.run("grpo", "r-1").rows) == 5


def test_the_next_attempt_alone_without_the_state_waits_with_the_way_out(
    tmp_path: Path, server: WandbServer, clock: Clock
) -> None:
    """Neither what was uploaded before nor its state is here: nothing is guessed, and the run goes on when it is."""
    Attempt(tmp_path / "one").add_rows([(step, {"loss": step + 0.5}) for step in range(32)])
    Lives(tmp_path / "one", server.url, clock).run()
    Attempt(tmp_path / "two", 2).add_rows([(step, {"loss": step + 0.5}) for step in range(32, 64)])
    lives = Lives(tmp_path / "two", server.url, clock)
    for _ in range(5):
        lives.step()

    assert "--new-id r-1=ID" in lives.parked[-1]
    assert len(server.run("grpo", "r-1").rows) == 32

    for segment in (tmp_path / "one").rglob("*.jsonl"):
        shutil.copy(segment, next((tmp_path / "two").rglob("*.jsonl")).parent)
    lives.run()

    assert [row["loss"] for row in server.run("grpo", "r-1").rows] == [step + 0.5 for step in range(64)]


def test_a_lost_state_is_made_anew_of_what_wandb_says(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """W&B has all that there is: the state says so again, and its trouble is over."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(5)])
    lives.run()
    before = lives.committed or {}
    lives.lose_state()
    lives.run()
    lives.step()
    after = lives.committed or {}

    assert after["cursor"] == before["cursor"]
    assert (after["memo"]["lines"], after["trouble"]) == (5, None)


def test_trouble_is_over_with_a_good_heartbeat(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A heartbeat failed and the next one did not: status says nothing any more."""
    attempt.add_rows([(0, {"loss": 0.5})])
    lives.run()
    server.arm("file_stream", "status", status=500)
    lives.clock.now += 40
    lives.step()

    assert "500" in (lives.committed or {})["trouble"]

    lives.clock.now += 40
    lives.step()

    assert (lives.committed or {})["trouble"] is None


def test_a_run_that_goes_on_after_its_end_shows_as_running(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """Another uploader goes on with an ended run, whose next attempt says the same of it: it is running again."""
    attempt.add_rows([(0, {"loss": 0.5})])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    lives.run()
    lives.kill()
    again = Attempt(lives.root, 2)
    again.add("run", {"name": "Qwen 7B", "config": {"lr": 0.1}})
    again.add_rows([(1, {"loss": 1.5})])
    lives.run()

    assert server.run("grpo", "r-1").state(lives.clock()) == "running"

    again.add("finish", {"state": "failed", "exit_code": 3})
    lives.run()

    assert server.run("grpo", "r-1").state(lives.clock()) == "failed"
