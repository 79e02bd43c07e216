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
    assert refused(lives) == {REFUSED: 1}


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
    assert refused(lives) == {REFUSED: 1}


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


def test_the_artifact_of_a_long_key_has_a_name_that_wandb_takes() -> None:
    """128 characters: the rest becomes a checksum of the whole, so that two such keys stay apart."""
    names = [collection_name(f"run-r-1-{'B' * 200}{end}") for end in "ab"]

    assert [len(name) for name in names] == [128, 128]
    assert names[0] != names[1]
    assert collection_name("run-r-1-" + "B" * 120) == "run-r-1-" + "B" * 120
