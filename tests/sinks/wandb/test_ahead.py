"""Requests that follow a session's first before `wandb.Api` shows it: none counts before, none is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.steps import Outcome
from tests.servers.wandb_server import WandbServer
from tests.sinks.wandb.lives import Clock, Lives, history_lines
from tests.wandb_spool import Attempt, files_of

NUM_ROWS = 1_000


class HeldBack:
    """Answers of `wandb.Api` that come when the test lets them."""

    def __init__(self, lives: Lives) -> None:
        self.let_go = threading.Event()
        self.looks = 0
        self.shown: Callable[[dict[str, Any]], dict[str, Any]] = lambda found: found
        self._lives = lives
        self.hold()

    def hold(self) -> None:
        """Take hold of the present life's answers."""
        look = self._lives.sink.look

        def held(*question: Any) -> dict[str, Any]:
            assert self.let_go.wait(60)
            self.looks += 1
            return self.shown(look(*question))

        self._lives.sink.look = held  # type: ignore[method-assign]


@pytest.fixture
def lives(tmp_path: Path, server: WandbServer, clock: Clock) -> Lives:
    attempt = Attempt(tmp_path / "spool")
    attempt.add("run", {"name": "ahead", "config": {}})
    attempt.add_rows([(step, {"loss": step / 7, "text": "x" * 3_000}) for step in range(NUM_ROWS)])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    return Lives(tmp_path / "spool", server.url, clock, max_operations=80)


@pytest.fixture
def held(lives: Lives) -> Iterator[HeldBack]:
    held = HeldBack(lives)
    yield held
    held.let_go.set()


def step_until(lives: Lives, num_lines: int, server: WandbServer) -> None:
    for _ in range(200):
        if ("acme", "grpo", "r-1") in server.runs and len(server.run("grpo", "r-1").lines) >= num_lines:
            return
        lives.step()
    raise AssertionError(lives.failures)


def watched(lives: Lives, look: Callable[[bytes], object] = lambda body: None) -> list[bytes]:
    """The bodies that go to the run's stream from now on; `look` sees each before it leaves."""
    sent: list[bytes] = []
    http: Any = lives.sink._http
    before = http.before

    def see(url: str, body: bytes) -> None:
        if url.endswith("/file_stream"):
            look(body)
            sent.append(body)
        before(url, body)

    http.before = see
    return sent


def assert_whole(lives: Lives, server: WandbServer) -> None:
    run = server.run("grpo", "r-1")
    assert [(row["_step"], row["loss"]) for row in run.rows] == [(step, step / 7) for step in range(NUM_ROWS)]
    assert len(run.lines) == NUM_ROWS
    assert lives.rewritten == []
    assert lives.committed is not None
    assert lives.committed["memo"]["lines"] == NUM_ROWS


def test_rows_follow_the_first_request_and_count_with_it(lives: Lives, held: HeldBack, server: WandbServer) -> None:
    """Full batches are sent while the first read-back is awaited; the position moves once it came, over all of them."""
    step_until(lives, 500, server)
    committed = lives.committed

    assert lives.rows == 0
    assert committed is not None
    assert (committed["cursor"], committed["done"], committed["memo"]["lines"]) == ({}, 0, 0)
    assert not lives.pipeline.idle(files_of(lives.root))

    held.let_go.set()
    lives.run()
    assert lives.rows == NUM_ROWS
    assert_whole(lives, server)


def test_the_end_waits_for_the_first_read_back(
    lives: Lives, held: HeldBack, server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that reaches the spool's end, and the run's end in it, are not sent before the first rows are shown."""
    looks_before: list[tuple[int, bool]] = []
    watched(lives, lambda body: looks_before.append((held.looks, b'"complete":true' in body)))
    prove = lives.pipeline._prove

    def let_go_and_prove(outcome: Outcome) -> None:
        held.let_go.set()
        prove(outcome)

    monkeypatch.setattr(lives.pipeline, "_prove", let_go_and_prove)
    lives.run()

    *ahead, end = looks_before
    assert len(ahead) > 4
    assert ahead == [(0, False)] * len(ahead)
    assert end == (1, True)
    assert_whole(lives, server)


@pytest.mark.parametrize("num_lines", [80, 240, 640])
def test_a_kill_ahead_of_the_read_back_doubles_nothing(
    lives: Lives, held: HeldBack, server: WandbServer, num_lines: int
) -> None:
    """The next life finds from W&B's own record where the lines end, and goes on there."""
    step_until(lives, num_lines, server)
    lives.kill()
    held.let_go.set()
    lives.run()

    assert_whole(lives, server)


def test_a_kill_within_a_request_ahead_doubles_nothing(lives: Lives, held: HeldBack, server: WandbServer) -> None:
    """Half of a batch was stored, no yes came, and the process ended: the same lines go to the same places."""
    step_until(lives, 240, server)
    server.arm("file_stream", "half", lines=7, status=502)
    lives.dies_in, lives.dies_after = 1, True
    lives.step()
    held.let_go.set()
    lives.run()

    assert_whole(lives, server)


def test_a_run_that_is_parked_ahead_claims_nothing(lives: Lives, held: HeldBack, server: WandbServer) -> None:
    """A refusal in the middle closes the session: what was not proved is not committed, and W&B says where to go on."""
    step_until(lives, 240, server)
    server.arm("file_stream", "status", status=403)
    for _ in range(3):
        if not lives.parked:
            lives.step()

    assert lives.parked
    assert lives.committed is not None
    assert (lives.committed["cursor"], lives.committed["memo"]["lines"]) == ({}, 0)
    assert "403" in lives.committed["trouble"]

    held.let_go.set()
    lives.run()
    assert_whole(lives, server)
    assert lives.committed["trouble"] is None


def test_lines_that_are_not_shown_are_sent_again(lives: Lives, held: HeldBack, server: WandbServer) -> None:
    """W&B said yes to the first request and shows none of it: it is asked, then sent again, and nothing counts."""
    step_until(lives, 240, server)
    held.shown = lambda found: {**found, "rows": []}
    held.let_go.set()
    sent = watched(lives)
    while held.looks < 7:
        lives.step()

    offsets = [lines[0][0] for body in sent if (lines := history_lines("/file_stream", body))]
    assert offsets.count(0) == 1
    assert offsets[-1] == 0
    assert "does not show it yet" in lives.failures[-1]
    assert (lives.rows, (lives.committed or {})["cursor"]) == (0, {})

    held.shown = lambda found: found
    lives.run()
    assert_whole(lives, server)


def test_no_snapshot_is_saved_ahead(lives: Lives, held: HeldBack, server: WandbServer) -> None:
    """A history's snapshot never stands behind rows that are not proved: a restart would skip them."""
    saved: list[Any] = []
    lives.pipeline._save_snapshot = saved.append
    lives.pipeline._since_snapshot = 1 << 40
    step_until(lives, 640, server)

    assert saved == []
    held.let_go.set()
    lives.run()
    assert len(saved) == 1


def test_the_first_request_is_small(lives: Lives, server: WandbServer, clock: Clock) -> None:
    """Its rows are read back and compared, so it holds 256 KiB of them and a row; those that follow are full."""
    wide = Lives(lives.root, server.url, clock, max_operations=400)
    sent = watched(wide)
    wide.run()
    sizes = [len(body) for body in sent if history_lines("/file_stream", body)]

    assert (256 << 10) < sizes[0] < (256 << 10) + 8_000
    assert max(sizes) > 3 * sizes[0]
    assert_whole(wide, server)
