"""What W&B refuses costs no more than itself: a key, a file, a description; and nothing of it is silent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.sinks._wandb_tables import collection_name
from tests.servers.wandb_server import WandbServer
from tests.servers.wandb_server.messages import Request
from tests.sinks.wandb.lives import Lives
from tests.wandb_spool import Attempt, files_of

FINISH = {"state": "finished", "exit_code": 0}
IN_SUMMARY = "a key of the summary without which W&B took what it had refused"
REFUSED = "a key without which W&B took what it had refused"


def drive(lives: Lives, max_steps: int = 200) -> list[Any]:
    """Step until the run is idle or nothing helps; the operations that were set aside."""
    dead: list[Any] = []
    for _ in range(max_steps):
        outcome = lives.step()
        dead += outcome.dead if outcome else []
        if lives.pipeline.idle(files_of(lives.root)):
            break
    return dead


def refused(lives: Lives) -> dict[str, int]:
    return dict(Counter((lives.committed or {})["refused"]))


def holds(key: str) -> Callable[[Request], bool]:
    """A line or a summary has this key."""
    text = f'{key}\\":'.encode()
    return lambda request: text in request.body


# Keys


def test_a_key_of_one_row_costs_its_value_alone(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """400 for a key (a limit of W&B's): its row arrives without it, all others as they are, and the end too."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("over"))
    attempt.add_rows([(step, {"loss": step + 0.5, **({"over": 1.0} if step == 10 else {})}) for step in range(30)])
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    run = server.run("grpo", "r-1")
    assert [(row["_step"], row["loss"]) for row in run.rows] == [(step, step + 0.5) for step in range(30)]
    assert run.state(lives.clock()) == "finished"
    assert "over" not in run.summary
    assert refused(lives) == {REFUSED: 1, IN_SUMMARY: 1}


def test_a_refused_key_is_known_from_then_on(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A key in all rows from some on: it is found out once, also by whoever comes after a kill or a lost state."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("over"))
    attempt.add_rows([(step, {"loss": step + 0.5, **({"over": 1.0} if step >= 10 else {})}) for step in range(30)])

    assert drive(lives) == []

    lives.lose_state()
    lives.run()
    server.requests.clear()
    attempt.add_rows([(step, {"loss": step + 0.5, "over": 1.0}) for step in range(30, 60)])
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    run = server.run("grpo", "r-1")
    assert [(row["_step"], row["loss"]) for row in run.rows] == [(step, step + 0.5) for step in range(60)]
    assert (run.conflicts, run.holes, run.state(lives.clock())) == ([], [], "finished")
    assert {request.status for request in server.requests} == {200}


def test_a_refused_key_of_the_summary_costs_itself(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """What the training put into the summary is refused: every row arrives, and the key is counted."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("best"))
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(30)])
    attempt.add("summary", {"best": 7})
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    run = server.run("grpo", "r-1")
    assert [row["loss"] for row in run.rows] == [step + 0.5 for step in range(30)]
    assert (run.summary["loss"], run.state(lives.clock())) == (29.5, "finished")
    assert refused(lives) == {IN_SUMMARY: 1}


def test_a_stretch_of_refusals_loses_nothing(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """Where W&B takes nothing of a run at all it is no row's fault: the run waits, with the way out."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(15)])
    lives.run()
    server.arm("file_stream", "status", status=400, count=60)
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(15, 30)])
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    assert "--new-id r-1=ID" in lives.parked[0]
    assert [row["loss"] for row in server.run("grpo", "r-1").rows] == [step + 0.5 for step in range(30)]
    assert refused(lives) == {}


def test_many_rows_follow_a_refused_one_in_few_requests(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """The batch that was halved down to one row grows again behind it."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("over"))
    attempt.add_rows([(0, {"loss": 0.0, "over": 1.0}), *((step, {"loss": float(step)}) for step in range(1, 350))])
    attempt.add("finish", FINISH)
    drive(lives)
    posts = [request for request in server.requests if request.names == ["file_stream"]]

    assert len(server.run("grpo", "r-1").rows) == 350
    assert len(posts) < 40


@pytest.mark.parametrize("bad", [{"key/c", "key/e"}, {"key/a", "key/b"}], ids=["two of six", "two others"])
@pytest.mark.parametrize("first", [0, 5], ids=["from the first row on", "from some row on"])
def test_two_keys_cost_themselves(
    lives: Lives, attempt: Attempt, server: WandbServer, bad: set[str], first: int
) -> None:
    """Two keys of six are refused: the four others arrive in all rows."""
    server.backend.keeps_bodies = True
    hits = [holds(key) for key in sorted(bad)]
    server.arm("file_stream", "status", status=400, count=None, predicate=lambda r: any(hit(r) for hit in hits))
    keys = {f"key/{letter}": 1.0 for letter in "abcdef"}
    attempt.add_rows([(step, {"loss": 0.5, **(keys if step >= first else {})}) for step in range(12)])
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    rows = server.run("grpo", "r-1").rows
    assert [set(row) & set(keys) for row in rows] == [set(keys) - bad if step >= first else set() for step in range(12)]
    assert refused(lives)[REFUSED] == 2 * (12 - first)


def test_what_the_summary_holds_later_is_tried(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """One key of the summary was refused: another that the training sets later arrives."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("bad"))
    attempt.add_rows([(0, {"loss": 0.5})])
    attempt.add("summary", {"bad": 1})
    drive(lives)
    attempt.add_rows([(1, {"loss": 1.5})])
    attempt.add("summary", {"best": 7})
    attempt.add("finish", FINISH)
    drive(lives)
    run = server.run("grpo", "r-1")

    assert (run.summary["best"], run.summary["loss"], run.state(lives.clock())) == (7, 1.5, "finished")
    assert refused(lives) == {IN_SUMMARY: 1}


def test_rows_of_a_refused_key_alone_are_soon_done(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A row without any other key says at least that it was there; the key is not asked about again."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("bad"))
    attempt.add_rows([(0, {"loss": 0.5}), *((step, {"bad": 1.0}) for step in range(1, 200))])
    attempt.add("finish", FINISH)
    drive(lives)

    assert len(server.run("grpo", "r-1").lines) == 200
    assert len(server.requests) < 100


def test_a_refused_row_leaves_an_ended_run_ended(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A late row that W&B refuses, when the run is over: it is set aside, and the run stays what it was."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(8)])
    attempt.add("finish", FINISH)
    lives.run()
    before = dict(server.run("grpo", "r-1").summary)
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=lambda r: b"0.125" in r.body)
    lives.kill()
    Attempt(lives.root, writer="eval").add_rows([(3, {"loss2": 0.125})])
    dead = drive(lives)
    lives.clock.now += 400
    run = server.run("grpo", "r-1")

    assert [operation.step for operation, _ in dead] + [len(refused(lives))] in ([3, 1], [1])
    assert run.state(lives.clock()) == "finished"
    assert {key: run.summary[key] for key in ("loss", "_step")} == {key: before[key] for key in ("loss", "_step")}


@pytest.mark.parametrize("status", [400, 403])
def test_a_run_that_may_not_change_any_more_stays_ended(
    lives: Lives, attempt: Attempt, server: WandbServer, status: int
) -> None:
    """W&B takes nothing of an ended run any more: a late row waits, and the run does not become running meanwhile."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(8)])
    attempt.add("finish", FINISH)
    lives.run()
    server.arm("file_stream", "status", status=status, count=None)
    lives.kill()
    evaluation = Attempt(lives.root, writer="eval")
    evaluation.add("run", {"name": "Qwen 7B"})
    evaluation.add_rows([(3, {"acc": 0.125})])

    assert drive(lives, 30) == []

    lives.clock.now += 400
    assert lives.parked != []
    assert server.run("grpo", "r-1").state(lives.clock()) == "finished"


def test_a_rewind_after_a_refusal_begins_its_run(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """The old run's last summary leaves out what W&B refuses: the corrected history is not held up by it."""
    server.backend.keeps_bodies = True
    server.arm("file_stream", "status", status=400, count=None, predicate=holds("bad"))
    attempt.add_rows([(step, {"loss": step + 0.5, "bad": 1.0}) for step in range(8)])
    lives.run()
    again = Attempt(lives.root, 2, resume_step=4)
    again.add_rows([(step, {"loss": step + 0.25}) for step in range(4, 8)])
    again.add("finish", FINISH)
    lives.run()
    run = server.run("grpo", "r-1-r2")

    assert [row["loss"] for row in run.rows] == [0.5, 1.5, 2.5, 3.5, 4.25, 5.25, 6.25, 7.25]
    assert run.state(lives.clock()) == "finished"
    assert {"loss", "bad"} & set(server.run("grpo", "r-1").summary) == {"loss"}


def test_a_crashed_state_that_is_refused_holds_up_nothing(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """W&B sees by itself that a run is silent."""
    attempt.add_rows([(0, {"loss": 0.5})])
    lives.run()
    server.backend.keeps_bodies = True
    server.arm("UpsertBucket", "status", status=400, count=None, predicate=lambda r: b'"crashed"' in r.body)
    for _ in range(30):
        lives.pipeline.step(files_of(lives.root, crashed=True), lives.clock())
        lives.clock.now += 30

    assert server.run("grpo", "r-1").state(lives.clock()) == "crashed"
    assert lives.pipeline.idle(files_of(lives.root, crashed=True))


def test_a_summary_that_is_too_large_costs_no_row(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """413 for the summary: its largest values go, which is counted at the end, and every row arrives whole."""
    server.arm("file_stream", "status", status=413, count=None, min_bytes=9_000)
    attempt.add_rows([(step, {f"key/{step % 25}/{place:02d}": 0.5 for place in range(20)}) for step in range(75)])
    attempt.add("finish", FINISH)

    assert drive(lives, 600) == []

    run = server.run("grpo", "r-1")
    assert [len([key for key in row if key.startswith("key/")]) for row in run.rows] == [20] * 75
    assert run.state(lives.clock()) == "finished"
    assert refused(lives)["the largest values of a summary that W&B finds too large"] > 100


# Descriptions and heartbeats


def test_a_refused_description_parks_the_run(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """What the run is has to change before W&B takes it: its own words and a way out stand in the reason."""
    body = '{"errors":[{"message":"invalid parameters: 128 limit exceeded"}]}'
    server.arm("UpsertBucket", "status", status=400, count=2, body=body)
    attempt.add_rows([(0, {"loss": 0.5})])
    lives.step()
    lives.step()

    assert "128 limit exceeded" in lives.parked[-1]
    assert "gapless.init" in lives.parked[-1]

    lives.run()

    assert len(server.run("grpo", "r-1").rows) == 1


def test_a_refused_heartbeat_is_sent_again(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """A heartbeat holds nothing that could be at fault: later rows arrive, and the run goes on as running."""
    attempt.add_rows([(0, {"loss": 0.5})])
    lives.run()
    server.arm("file_stream", "status", status=400)
    lives.clock.now += 40
    lives.step()
    attempt.add_rows([(1, {"loss": 1.5})])
    lives.run()

    assert "400" in lives.failures[0]
    assert [row["loss"] for row in server.run("grpo", "r-1").rows] == [0.5, 1.5]
    assert server.run("grpo", "r-1").state(lives.clock()) == "running"


def test_long_names_are_cut_and_whole_in_the_config(lives: Lives, attempt: Attempt, server: WandbServer) -> None:
    """W&B refuses a run whose name has more than 128 characters, or whose job type has more than 64."""
    attempt.add("run", {"name": "n" * 300, "group": "g" * 128, "job_type": "j" * 65})
    attempt.add_rows([(0, {"loss": 0.5})])
    lives.run()
    run = server.run("grpo", "r-1")

    assert (run.fields["displayName"], run.fields["jobType"]) == ("n" * 128, "j" * 64)
    assert run.group == "g" * 128
    assert run.config["gapless_cut"] == {"name": "n" * 300, "job_type": "j" * 65}


# Files


def add_file(attempt: Attempt) -> Path:
    """A file at step 5 of 9."""
    folder = attempt.path.parent / "media"
    folder.mkdir(exist_ok=True)
    path = folder / f"{sha256(b'x' * 1_000).hexdigest()}.bin"
    path.write_bytes(b"x" * 1_000)
    attempt.add("media", {"key": "dump", "type": "file", "items": [{"media": path.name, "name": "a.bin"}]}, 5)
    return path


@pytest.mark.parametrize("how", ["too large", "not readable", "no artifact"])
def test_a_refused_file_costs_its_key_alone(
    lives: Lives, attempt: Attempt, server: WandbServer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The row of a file that W&B's storage refuses, or that nobody may read, arrives with its numbers."""
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(5)])
    if how == "no artifact":
        attempt.add("table", {"key": "table", "columns": ["a"], "rows": [[1]]}, 5)
        server.arm("CreateArtifact", "status", status=400, count=None, body='{"error":"invalid artifact name"}')
    else:
        path = add_file(attempt)
    if how == "too large":
        server.arm("storage", "status", status=413, count=None, min_bytes=999)
    if how == "not readable":
        read = Path.read_bytes

        def denied(self: Path) -> bytes:
            if self == path:
                raise PermissionError(13, "Permission denied", str(self))
            return read(self)

        monkeypatch.setattr(Path, "read_bytes", denied)  # root may read everything
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(5, 9)])
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    rows = server.run("grpo", "r-1").rows
    assert [row["loss"] for row in rows] == [step + 0.5 for step in range(9)]
    assert [key for row in rows for key in row if key in ("dump", "table")] == []
    assert sum(refused(lives).values()) == 1


def test_one_name_among_many_that_is_refused_costs_its_value(
    lives: Lives, attempt: Attempt, server: WandbServer
) -> None:
    """W&B refuses to make one of several files: the others go up, and the row arrives."""
    server.backend.keeps_bodies = True
    server.arm("CreateRunFiles", "status", status=400, count=None, predicate=lambda r: b"worse" in r.body)
    for step, key in enumerate(("good", "worse", "better")):
        attempt.add("table", {"key": key, "columns": ["a"], "rows": [[step]]}, step)
    attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(3)])
    attempt.add("finish", FINISH)

    assert drive(lives) == []

    rows = server.run("grpo", "r-1").rows
    assert [row["loss"] for row in rows] == [0.5, 1.5, 2.5]
    assert [key for row in rows for key in row if key in ("good", "worse", "better")] == ["good", "better"]


def test_the_artifact_of_a_long_key_has_a_name_that_wandb_takes() -> None:
    """128 characters: the rest becomes a checksum of the whole, so that two such keys stay apart."""
    names = [collection_name(f"run-r-1-{'B' * 200}{end}") for end in "ab"]

    assert [len(name) for name in names] == [128, 128]
    assert names[0] != names[1]
    assert collection_name("run-r-1-" + "B" * 120) == "run-r-1-" + "B" * 120
