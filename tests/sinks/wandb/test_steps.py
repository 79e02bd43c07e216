"""Steps: more keys of a step, late steps, rewinds, and a server that does not replace rows of one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless_uploader.steps import PipelineOptions
from tests.servers.wandb_server import WandbServer
from tests.sinks.wandb.lives import Clock, Lives
from tests.wandb_spool import Attempt


def test_more_keys_of_a_step_are_a_new_line_with_the_whole_row(
    lives: Lives, attempt: Attempt, server: WandbServer
) -> None:
    """An amend repeats the row under the same `_step`; the line that was acknowledged stays what it was."""
    attempt.add_rows([(0, {"loss": 1.0}), (1, {"loss": 0.5})])
    lives.run()
    attempt.add_rows([(1, {"acc": 0.25}), (2, {"loss": 0.25})])
    lives.run()
    run = server.run("grpo", "r-1")

    assert len(run.lines) == 4
    assert run.conflicts == []
    assert [row.get("acc") for row in run.rows] == [None, 0.25, None]
    assert [row["loss"] for row in run.rows] == [1.0, 0.5, 0.25]


def test_the_first_amend_of_a_session_is_proved(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """What W&B shows of a step that was sent twice is read back before the first amend counts as delivered."""
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run()
    before = server.run("grpo", "r-1").request_counts["HistoryPage"]
    attempt.add_rows([(0, {"acc": 0.25})])
    lives.run()
    once = server.run("grpo", "r-1").request_counts["HistoryPage"]
    attempt.add_rows([(0, {"f1": 0.5})])
    lives.run()

    assert once > before
    assert server.run("grpo", "r-1").request_counts["HistoryPage"] == once


def test_a_server_that_keeps_both_rows_of_a_step_gets_another_axis(
    lives: Lives, attempt: Attempt, server: WandbServer, clock: Clock
) -> None:
    """The proof fails: the whole history goes to a fresh run by line index, the training's step as its x-axis."""
    server.backend.replaces_equal_steps = False
    attempt.add_rows([(0, {"loss": 1.0}), (10, {"loss": 0.5})])
    lives.run()
    attempt.add_rows([(0, {"acc": 0.25}), (20, {"loss": 0.25})])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    lives.run()
    old, run = server.run("grpo", "r-1"), server.run("grpo", "r-1-r2")

    assert old.fields["tags"] == ["superseded-by:r-1-r2"]
    assert old.state(clock()) == "finished"
    assert [row["_step"] for row in run.rows] == list(range(len(run.rows)))
    assert points(run.rows, "loss") == [(0, 1.0), (10, 0.5), (20, 0.25)]
    assert points(run.rows, "acc") == [(0, 0.25)]
    assert run.wandb_config["m"][:2] == [
        {"1": "global_step", "6": [3, 2], "7": []}, {"2": "*", "6": [], "7": [], "5": 1}
    ]  # fmt: skip
    assert run.state(clock()) == "finished"


def test_a_lost_state_finds_the_run_that_followed(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """After a switch of the axis the mark in the old run leads an uploader without state to the new one."""
    server.backend.replaces_equal_steps = False
    attempt.add_rows([(0, {"loss": 1.0}), (0, {"acc": 0.25})])
    lives.run()
    attempt.add_rows([(0, {"f1": 0.5})])
    lives.run()
    lives.lose_state()
    attempt.add_rows([(1, {"loss": 2.0}), (0, {"more": 0.75})])
    lives.run()
    run = server.run("grpo", "r-1-r2")

    assert sorted({run for _, _, run in server.runs}) == ["r-1", "r-1-r2"]
    assert points(run.rows, "loss") == [(0, 1.0), (1, 2.0)]
    assert [points(run.rows, key) for key in ("acc", "f1", "more")] == [[(0, 0.25)], [(0, 0.5)], [(0, 0.75)]]


def test_the_axis_can_be_chosen(tmp_path: Path, attempt: Attempt, server: WandbServer, clock: Clock) -> None:
    """With late = axis one wrong high step and late steps are lines like all others, each key sent once."""
    attempt.add_rows([(1, {"a": 1.0}), (10**9, {"a": 2.0}), (2, {"a": 3.0}), (1, {"b": 4.0})])
    Lives(tmp_path / "spool", server.url, clock, late="axis").run()
    run = server.run("grpo", "r-1")

    assert [row["_step"] for row in run.rows] == [0, 1, 2, 3]
    assert points(run.rows, "a") == [(1, 1.0), (10**9, 2.0), (2, 3.0)]
    assert points(run.rows, "b") == [(1, 4.0)]


def test_one_wrong_high_step_blocks_nothing(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """Steps 1 to 100, then 10**9 by mistake, then 101 to 200: all 201 rows are at W&B."""
    attempt.add_rows([(step, {"loss": float(step)}) for step in (*range(1, 101), 10**9, *range(101, 201))])
    lives.run()

    assert [row["_step"] for row in server.run("grpo", "r-1").rows] == [*range(1, 201), 10**9]


@pytest.mark.parametrize(("policy", "losses"), [("keep-first", [0.0, 1.0, 2.0, 3.0]), ("mark", [0.0, 1.0, 20.0, 30.0])])
def test_a_rewind_follows_the_policy(
    lives: Lives, attempt: Attempt, server: WandbServer, policy: str, losses: list[float]
) -> None:
    """keep-first leaves what was uploaded, mark replaces it and tags the run."""
    lives.pipeline_options = PipelineOptions(on_rewind=policy)
    lives.kill()
    attempt.add_rows([(step, {"loss": float(step)}) for step in range(4)])
    lives.run()
    Attempt(lives.root, 2, resume_step=2).add_rows([(2, {"loss": 20.0}), (3, {"loss": 30.0}), (4, {"loss": 40.0})])
    lives.run()
    run = server.run("grpo", "r-1")

    assert [row["loss"] for row in run.rows] == [*losses, 40.0]
    assert run.conflicts == []
    assert len(server.runs) == 1


def test_a_rewind_makes_a_fresh_run_by_default(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """The corrected history goes to a run of its own; the old one is kept, ended and tagged with its successor."""
    attempt.add_rows([(step, {"loss": float(step)}) for step in range(250)])
    lives.run()
    second = Attempt(lives.root, 2, resume_step=200)
    second.add("run", {"name": "Qwen 7B"})
    second.add_rows([(step, {"loss": -float(step)}) for step in range(200, 301)])
    lives.run()
    old, run = server.run("grpo", "r-1"), server.run("grpo", "r-1-r2")

    assert [row["loss"] for row in run.rows] == [*map(float, range(200)), *(-float(step) for step in range(200, 301))]
    assert old.fields["tags"] == ["superseded-by:r-1-r2"]
    assert len(old.lines) == 250


def points(rows: list[dict[str, float]], key: str) -> list[tuple[float, float]]:
    return [(row["global_step"], row[key]) for row in rows if key in row]


def test_a_server_that_keeps_the_first_row_of_a_step_gets_another_axis_too(
    lives: Lives, attempt: Attempt, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that goes on showing its first row is looked at for a while, and then taken at its word."""
    attempt.add_rows([(0, {"loss": 1.0})])
    lives.run()
    first = {"rows": [{"_step": 0, "loss": 1.0}], "state": "running", "progress": None}
    looks: list[str] = []
    monkeypatch.setattr(lives.sink, "look", lambda place, steps: looks.append(place.run) or first)
    attempt.add_rows([(0, {"acc": 0.25})])
    while looks.count("r-1") < 20:
        lives.step()
    monkeypatch.undo()
    lives.run()

    assert "does not show it yet: '_timestamp' of step 0" in lives.failures[-1]
    assert points(server.run("grpo", "r-1-r2").rows, "acc") == [(0, 0.25)]
