"""The fault table of docs/wandb.md, row by row: what happens, what `status` says, and that no row is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.sinks._wandb_http import MAX_WAIT_S
from gapless_uploader.state import State
from gapless_uploader.status import read_status
from tests.servers.wandb_server import DEFAULT_KEY, Staleness, WandbServer
from tests.sinks.wandb.lives import Clock, Lives
from tests.wandb_spool import Attempt, files_of

ROWS = [(step, {"loss": step + 0.5}) for step in range(30)]


def begin(lives: Lives, attempt: Attempt) -> None:
    """Half of the rows are at W&B."""
    attempt.add_rows(ROWS[:15])
    lives.run()


def end(lives: Lives, attempt: Attempt) -> None:
    """The rest of them, too."""
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    lives.run()


def assert_whole(server: WandbServer, lives: Lives, run_id: str = "r-1") -> None:
    run = server.run("grpo", run_id)
    assert [(row["_step"], row["loss"]) for row in run.rows] == [(step, values["loss"]) for step, values in ROWS]
    assert len(run.lines) == len(ROWS)
    assert (run.conflicts, run.holes) == ([], [])
    assert run.state(lives.clock()) == "finished"


def trouble(lives: Lives, tmp_path: Path) -> str | None:
    """What `gapless status` says of the run, from the committed state alone."""
    state = State(tmp_path / "state", [lives.root])
    state.open()
    state.commit([lives.committed or {}])
    state.close()
    (run,) = read_status([lives.root], tmp_path / "state").runs
    return run.sinks[0].trouble


# A request that is worth repeating


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"kind": "status", "status": 500}, "500"),
        ({"kind": "status", "status": 502}, "502"),
        ({"kind": "status", "status": 408}, "408"),
        ({"kind": "status", "status": 429}, "429"),
        ({"kind": "reset"}, "ConnectionError"),
        ({"kind": "hang", "seconds": 20.0}, "Timeout"),
        ({"kind": "drip", "seconds": 20.0}, "Timeout"),
        ({"kind": "html"}, "HTML, which is no answer of W&B's"),
        ({"kind": "html", "body": '"ok"'}, "no JSON object"),
        ({"kind": "truncated"}, "no JSON object"),
        ({"kind": "cut"}, "IncompleteRead"),
        ({"kind": "half", "lines": 5, "status": 500}, "500"),
    ],
    ids=lambda value: "-".join(str(v) for v in value.values()) if isinstance(value, dict) else None,
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_that_is_none_is_asked_for_again(
    lives: Lives, attempt: Attempt, server: WandbServer, tmp_path: Path, fault: dict[str, Any], said: str, when: str
) -> None:
    """Whether the request took effect or not, its rows come again as the same lines; status says why it waits."""
    if fault["kind"] in ("half", "drip", "cut", "truncated") and when == "after":
        pytest.skip("this fault has one kind")
    if fault["kind"] in ("hang", "drip"):
        lives.options["timeout_s"] = 0.5
        lives.kill()
    begin(lives, attempt)
    attempt.add_rows(ROWS[15:])
    armed = server.arm("file_stream", **{**fault, "when": when} if fault["kind"] != "half" else fault)
    lives.step()
    lives.step()

    assert said in lives.failures[-1]
    assert trouble(lives, tmp_path) == lives.failures[-1]

    armed.release()
    end(lives, attempt)

    assert_whole(server, lives)
    assert trouble(lives, tmp_path) is None


@pytest.mark.parametrize(("asked", "waited"), [("4", 4.0), ("999999999", MAX_WAIT_S), ("-3", 0.05), ("soon", 0.5)])
def test_retry_after_is_obeyed_within_reason(
    lives: Lives, attempt: Attempt, server: WandbServer, asked: str, waited: float
) -> None:
    """W&B's wish to wait is followed up to five minutes; nonsense means the usual back-off."""
    begin(lives, attempt)
    attempt.add_rows(ROWS[15:])
    server.arm("file_stream", "status", status=429, headers={"Retry-After": asked})
    lives.step()
    outcome = lives.step()

    assert outcome is not None
    assert outcome.retry_in_s == waited

    end(lives, attempt)

    assert_whole(server, lives)


@pytest.mark.parametrize("operation", ["UpsertBucket", "RunResumeStatus"])
@pytest.mark.parametrize("kind", ["reset", "html", "cut", "error"])
def test_trouble_at_the_start_is_never_no_such_run(
    lives: Lives, attempt: Attempt, server: WandbServer, operation: str, kind: str
) -> None:
    """An error is no answer to the question where the run stands: it is asked again, and nothing is written before."""
    begin(lives, attempt)
    lives.kill()
    attempt.add_rows(ROWS[15:])
    if kind == "error":
        body = json.dumps({"data": {"model": None}, "errors": [{"message": "internal"}]})
        server.arm(operation, "status", status=200, body=body)
    else:
        server.arm(operation, kind)
    end(lives, attempt)

    assert len(lives.failures) == 1
    assert_whole(server, lives)


def test_a_server_that_is_away_is_waited_for(
    lives: Lives, attempt: Attempt, server: WandbServer, tmp_path: Path
) -> None:
    """Offline at the start: the uploader waits, says so, and goes on when the network is there."""
    server.down()
    attempt.add_rows(ROWS)
    for _ in range(4):
        lives.step()

    assert "RunResumeStatus: ConnectionError: Connection refused" in (trouble(lives, tmp_path) or "")
    assert server.url in (trouble(lives, tmp_path) or "")

    server.up()
    end(lives, attempt)

    assert_whole(server, lives)


def test_a_host_that_is_no_wandb_is_waited_for(lives: Lives, attempt: Attempt, tmp_path: Path) -> None:
    """A wrong WANDB_BASE_URL answers something else: nothing counts as uploaded, and status names the host."""
    lives.sink.found = replace(lives.sink.found, base_url="http://127.0.0.1:9")
    attempt.add_rows(ROWS)
    lives.step()
    lives.step()

    assert "http://127.0.0.1:9" in (trouble(lives, tmp_path) or "")
    assert lives.rows == 0


# Somebody has to act


def test_a_refused_key_parks_the_sink_until_another_is_there(
    lives: Lives, attempt: Attempt, server: WandbServer, tmp_path: Path
) -> None:
    """401 while running: the sink waits, and goes on with the key that took the expired one's place."""
    begin(lives, attempt)
    server.backend.valid_keys = {"f" * 40}
    attempt.add_rows(ROWS[15:])
    lives.step()
    outcome = lives.step()

    assert outcome is not None
    assert outcome.parked_sink
    assert "wandb login" in (trouble(lives, tmp_path) or "")

    lives.sink.found = replace(lives.sink.found, api_key="f" * 40)
    lives.key = "f" * 40
    server.backend.valid_keys = {"f" * 40, DEFAULT_KEY}
    end(lives, attempt)

    assert_whole(server, lives)


def test_a_new_key_is_tried_at_once(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A key that was already replaced when the server refuses the old one costs nothing."""
    begin(lives, attempt)
    server.backend.valid_keys = {"f" * 40, DEFAULT_KEY}
    lives.sink.found = replace(lives.sink.found, api_key="f" * 40)
    server.arm("file_stream", "status", status=401)
    attempt.add_rows(ROWS[15:])
    end(lives, attempt)

    assert (lives.failures, lives.parked) == ([], [])
    assert_whole(server, lives)


@pytest.mark.parametrize(("status", "way_out"), [(403, "ask the entity's owner"), (404, "--new-id RUN=ID")])
def test_a_run_that_may_not_be_written_is_parked(
    lives: Lives, attempt: Attempt, server: WandbServer, tmp_path: Path, status: int, way_out: str
) -> None:
    """403 and 404 park the run with the way out, and it goes on when they are gone."""
    begin(lives, attempt)
    server.arm("file_stream", "status", status=status)
    attempt.add_rows(ROWS[15:])
    lives.step()
    lives.step()

    assert way_out in (trouble(lives, tmp_path) or "")

    end(lives, attempt)

    assert_whole(server, lives)


def test_a_deleted_run_is_parked_until_it_gets_another_id(
    lives: Lives, attempt: Attempt, server: WandbServer, tmp_path: Path
) -> None:
    """W&B never gives a deleted id again (409): the whole run goes up under the id that the user chooses."""
    begin(lives, attempt)
    server.run("grpo", "r-1").deleted = True
    attempt.add_rows(ROWS[15:])
    for _ in range(40):
        lives.step()

    assert "--new-id r" in (trouble(lives, tmp_path) or "") + " ".join(lives.parked)
    assert lives.parked != []

    lives.options["new_id"] = {"r-1": "r-1-again"}
    lives.kill()
    end(lives, attempt)

    assert_whole(server, lives, "r-1-again")


def test_lines_that_the_server_lost_are_not_guessed_about(
    lives: Lives, attempt: Attempt, server: WandbServer, tmp_path: Path
) -> None:
    """A server restored from a backup has fewer lines than it took: the run is parked, nothing is written over."""
    begin(lives, attempt)
    run = server.run("grpo", "r-1")
    del run.lines[10:]
    run.summary_text = "{}"
    run.snapshot(lives.clock())
    lives.kill()
    attempt.add_rows(ROWS[15:])
    for _ in range(60):
        lives.step()

    assert "took 15 lines" in (trouble(lives, tmp_path) or "")
    assert len(run.lines) == 10


# Requests that are too large, or wrong


def test_a_batch_that_is_too_large_is_sent_in_parts(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """413 halves the batch until it fits; every row arrives."""
    begin(lives, attempt)
    server.requests.clear()
    server.arm("file_stream", "status", status=413, count=None, min_bytes=900)
    attempt.add_rows(ROWS[15:])
    end(lives, attempt)
    posts = [request for request in server.requests if request.names == ["file_stream"]]

    assert_whole(server, lives)
    assert max(post.num_bytes for post in posts if post.status == 200) < 900
    assert posts[0].status == 413


def test_a_row_that_no_request_can_hold_costs_only_that_row(
    lives: Lives, attempt: Attempt, server: WandbServer
) -> None:
    """400 for one row (a limit of W&B's): the rest of the batch arrives, the end too, and the row is kept aside."""
    begin(lives, attempt)
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=lambda r: b"21.5" in r.body)
    attempt.add_rows(ROWS[15:])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    dead = []
    for _ in range(80):
        outcome = lives.step()
        dead += outcome.dead if outcome else []
    run = server.run("grpo", "r-1")

    assert [operation.step for operation, _ in dead if hasattr(operation, "step")] == [21]
    assert [row["_step"] for row in run.rows] == [step for step, _ in ROWS if step != 21]
    assert (run.conflicts, run.holes) == ([], [])


def test_a_row_over_the_limit_is_split_by_its_keys(tmp_path: Path, server: WandbServer, clock: Clock) -> None:
    """With late = axis a row above W&B's limit becomes several lines of the same training step; no key is dropped."""
    attempt = Attempt(tmp_path / "spool")
    values = {f"key/{place}": place + 0.25 for place in range(300)}
    attempt.add_rows([(0, {"loss": 1.0}), (7, values), (8, {"loss": 2.0})])
    lives = Lives(tmp_path / "spool", server.url, clock, late="axis", max_row_bytes=1_000)
    lives.run()
    rows = server.run("grpo", "r-1").rows
    parts = [row for row in rows if row["global_step"] == 7]

    assert len(parts) > 5
    assert max(map(len, server.run("grpo", "r-1").lines)) < 1_200
    assert {k: v for row in parts for k, v in row.items() if k.startswith("key/")} == values
    assert [row["_step"] for row in rows] == list(range(len(rows)))


def test_a_row_over_the_limit_waits_where_its_parts_would_replace_each_other(
    tmp_path: Path, server: WandbServer, clock: Clock
) -> None:
    """Where rows of one step replace each other nothing is dropped: the run is parked, with the way out."""
    attempt = Attempt(tmp_path / "spool")
    attempt.add_rows([(0, {"loss": 1.0}), (7, {f"key/{place}": place + 0.25 for place in range(300)})])
    lives = Lives(tmp_path / "spool", server.url, clock, max_row_bytes=1_000)
    lives.step()
    lives.step()

    assert 'late = "axis"' in lives.parked[-1]


def test_a_long_text_that_makes_its_row_too_large_becomes_a_file(
    tmp_path: Path, server: WandbServer, clock: Clock
) -> None:
    """Texts leave an overlong row for the run's files; the row says where they are and holds all its other keys."""
    attempt = Attempt(tmp_path / "spool")
    attempt.add_rows([(3, {"loss": 0.5, "prompt": "x" * 5_000, "answer": "yes"})])
    lives = Lives(tmp_path / "spool", server.url, clock, max_row_bytes=1_000)
    lives.run()
    (row,) = server.run("grpo", "r-1").rows
    name = row["prompt"].rpartition(": ")[2].rstrip("]")

    assert (row["loss"], row["answer"]) == (0.5, "yes")
    assert server.run("grpo", "r-1").files[name] == b"x" * 5_000


# What was said and what is so


def test_counts_that_lag_are_waited_out(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """After a lost state W&B's stale counts are not believed until two answers agree: no line is written twice."""
    begin(lives, attempt)
    attempt.add_rows(ROWS[15:])
    lives.step()
    lives.step()
    for name in ("counts", "summaries"):
        setattr(server.lag, name, Staleness(seconds=3.0))
    lives.lose_state()
    end(lives, attempt)

    assert_whole(server, lives)
    assert server.run("grpo", "r-1").rewrites == 0


def test_a_late_effect_of_a_request_that_timed_out_changes_nothing(
    lives: Lives, attempt: Attempt, server: WandbServer
) -> None:
    """A request that the server carries out long after everybody gave it up writes what is there already."""
    lives.options["timeout_s"] = 0.3
    lives.kill()
    begin(lives, attempt)
    attempt.add_rows(ROWS[15:])
    zombie = server.arm("file_stream", "delay", when="before")
    lives.run()
    zombie.release()
    assert zombie.played.wait(10)
    end(lives, attempt)

    assert_whole(server, lives)


def test_an_answer_lost_at_the_very_end_is_asked_for_again(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """The last request's answer is lost: it comes again, and the run is finished once."""
    begin(lives, attempt)
    attempt.add_rows(ROWS[15:])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    server.arm("file_stream", "reset", when="after")
    lives.run()

    assert_whole(server, lives)


def test_a_first_batch_that_is_half_stored_is_known_as_ours_after_a_kill(
    lives: Lives, attempt: Attempt, server: WandbServer
) -> None:
    """Lines without a summary, and no yes: the next life knows from its state that it began the run, and sends all."""
    attempt.add_rows(ROWS)
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    server.arm("file_stream", "half", lines=7, status=502)
    while not lives.failures:
        lives.step()
    assert len(server.run("grpo", "r-1").lines) == 7

    lives.kill()
    lives.run()
    assert_whole(server, lives)
    assert lives.parked == []


def test_rows_that_wandb_does_not_show_are_not_delivered(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """W&B said yes and `wandb.Api` shows nothing yet: nothing counts until it does."""
    attempt.add_rows(ROWS[:15])
    server.lag.history = Staleness(seconds=30.0)
    for _ in range(8):
        lives.step()

    assert "does not show it yet" in lives.failures[-1]
    assert lives.rows == 0
    assert len(server.run("grpo", "r-1").lines) == 15

    attempt.add_rows(ROWS[15:])
    end(lives, attempt)

    assert_whole(server, lives)


def test_a_run_of_somebody_else_is_left_alone(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A run with lines and without our mark is not written to before the user says --adopt."""
    other = Lives(lives.root, server.url, lives.clock)
    attempt.add_rows(ROWS[:5])
    other.run()
    run = server.run("grpo", "r-1")
    run.summary_text = '{"_step": 4}'
    run.snapshot(lives.clock())
    for _ in range(5):
        lives.step()

    assert "--adopt r-1" in lives.parked[-1]
    assert "--new-id r-1=ID" in lives.parked[-1]
    assert len(run.lines) == 5

    lives.options["adopt"] = ["r-1"]
    lives.kill()
    attempt.add_rows(ROWS[5:])
    end(lives, attempt)

    assert len(run.lines) == 5 + 30
    assert [row["_step"] for row in run.rows] == [step for step, _ in ROWS]


def test_the_key_is_in_no_message_and_no_state(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """However a request fails, neither its message, its traceback nor the state holds the key."""
    import traceback

    begin(lives, attempt)
    attempt.add_rows(ROWS[15:])
    for status in (400, 401, 403, 404, 500):
        server.arm("file_stream", "status", status=status)
        try:
            lives.sink._http.stream("/files/acme/grpo/r-1/file_stream", b"{}")
        except Exception:
            said = traceback.format_exc() + repr(lives.sink.found)
            assert DEFAULT_KEY not in said
    server.down()
    lives.step()

    assert DEFAULT_KEY not in json.dumps(lives.committed) + "".join(lives.failures + lives.parked)
    assert files_of(lives.root).paths
