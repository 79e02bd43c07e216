"""What `init` opens and `log` records, as any reader of the spool finds it."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

import gapless
from gapless import journal
from gapless_schemas import decode
from tests.spool.oracle import header, only, records, segments


@pytest.fixture(params=["thread", "write", "sync"])
def durability(request: pytest.FixtureRequest) -> str:
    return request.param


def test_rows_come_back_as_they_were_logged(tmp_path: Path, durability: str) -> None:
    """Values, explicit steps and original times are read back bit for bit, in order."""
    run = gapless.init("p", dir=tmp_path, durability=durability)
    run.log({"a": 0.1, "b": 2}, step=3, t=1_700_000_000.25)
    run.log({"a": -0.0, "n": float("nan"), "big": 2**80}, step=7)
    run.finish()
    first, second = only(run.path, "metrics")

    assert (first.step, first.t, first.data) == (3, 1_700_000_000.25, {"a": 0.1, "b": 2})
    assert (second.step, second.data["big"]) == (7, 2**80)
    assert math.copysign(1, second.data["a"]) == -1
    assert math.isnan(second.data["n"])


def test_every_seq_is_used_once_and_the_end_state_is_last(tmp_path: Path, durability: str) -> None:
    """Within an attempt seq rises by one from 1: the `run` record first, `finish` last."""
    with gapless.init("p", dir=tmp_path, durability=durability) as run:
        for step in range(100):
            run.log({"x": step})
    found = only(run.path)

    assert [record.seq for record in found] == list(range(1, len(found) + 1))
    assert found[0].kind == "run"
    assert (found[-1].kind, found[-1].data) == ("finish", {"state": "finished", "exit_code": 0})
    assert [record.step for record in found if record.kind == "metrics"] == list(range(100))


def test_an_exception_in_the_with_block_fails_the_run(tmp_path: Path) -> None:
    """The context manager passes the exception on and ends the run with state `failed`."""
    with pytest.raises(KeyError), gapless.init("p", dir=tmp_path) as run:
        raise KeyError("x")

    assert only(run.path, "finish")[0].data == {"state": "failed", "exit_code": 1}


def test_the_same_id_again_is_a_new_attempt_that_goes_on(tmp_path: Path) -> None:
    """A second `init` with the id claims the next number, begins its own file and continues the steps."""
    for _ in range(2):
        with gapless.init("p", dir=tmp_path, id="r") as run:
            run.log({"x": 1.0})
            run.log({"x": 2.0}, step=run._ring.last.next_step + 9)
    first, second = segments(run.path)

    assert [header(first).attempt, header(second).attempt] == [1, 2]
    assert header(first).attempt_id != header(second).attempt_id
    steps = [[r.step for r in found if r.kind == "metrics"] for found in records(run.path).values()]
    assert steps == [[0, 10], [11, 21]]


def test_segments_rotate_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str) -> None:
    """Beyond 128 MiB a new segment begins, with the next seq, the next index and the same attempt."""
    assert journal.SEGMENT_BYTES == 128 << 20
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 5000)
    with gapless.init("p", dir=tmp_path, durability=durability) as run:
        for number in range(200):
            run.log({"x": number})
            if number % 20 == 0:
                run.flush()
    found = segments(run.path)
    headers = [header(path) for path in found]

    assert len(found) > 3
    assert [one.segment for one in headers] == list(range(len(found)))
    assert len({one.attempt_id for one in headers}) == 1
    for one, path in zip(headers, found, strict=True):
        lines = path.read_bytes().split(b"\n")[1:-1]
        assert not lines or decode(lines[0]).seq == one.first_seq
    assert [record.data["x"] for record in only(run.path, "metrics")] == list(range(200))


def test_without_a_thread_rows_are_written_by_log_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where no thread can be started, one warning tells, and nothing is lost."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    run = gapless.init("p", dir=tmp_path, durability=durability)
    for number in range(50):
        run.log({"x": number})
    written = len(only(run.path, "metrics"))
    assert run.flush()
    run.finish()

    assert written == 50
    assert [record.data["x"] for record in only(run.path, "metrics")] == list(range(50))
    assert only(run.path)[-1].kind == "finish"
    assert "no writer thread" in capfd.readouterr().err
