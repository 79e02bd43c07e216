"""One run on its way to a sink: what a yes, a no, a silence and a crash each mean for the position."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapless_schemas import encode_header, seal
from gapless_uploader import events, pipeline, uploader
from gapless_uploader.attempt import read_header
from gapless_uploader.operations import Row, State, Superseded
from gapless_uploader.pipeline import Pipeline
from gapless_uploader.sink import Batch, Misconfigured, Parked, Rejected, Retryable
from gapless_uploader.sinks import make_sink
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.status import read_status
from gapless_uploader.tail import SegmentFile
from tests.uploader.harness import T0, SpoolDir, Turner, rows_of


@pytest.fixture
def spool(tmp_path: Path) -> SpoolDir:
    (tmp_path / "spool").mkdir()
    return SpoolDir(tmp_path / "spool")


class Turners:
    """Makes turners on one spool, and stops them all in the end."""

    def __init__(self, spool: SpoolDir, state: Path) -> None:
        self.spool, self.state = spool, state
        self.made: list[Turner] = []

    def __call__(self, *sinks: MemorySink, state: Path | None = None, **options: Any) -> Turner:
        self.made.append(Turner(self.spool.root, state or self.state, *sinks, **options))
        return self.made[-1]


@pytest.fixture
def turners(spool: SpoolDir, tmp_path: Path) -> Iterator[Turners]:
    turners = Turners(spool, tmp_path / "state")
    yield turners
    for made in turners.made:
        made.uploader.stop()


def told(turner: Turner, kind: type[events.Event]) -> list[Any]:
    return [event for event in turner.events if isinstance(event, kind)]


def row_steps(batch: Batch) -> list[int | None]:
    return [op.step for op in batch.operations if isinstance(op, Row)]


def test_the_identity_and_the_whole_config_come_before_the_first_row(spool: SpoolDir, turners: Turners) -> None:
    """A tracker that makes its run at the first batch makes it complete."""
    attempt = spool.attempt()
    attempt.run({"lr": 0.1}, name="qwen", tags=["a"])
    attempt.log(0, a=1)
    views = []
    turner = turners()
    turner.memory.before_write = lambda batch: views.append((batch.run.name, batch.run.tags, dict(batch.run.config)))
    turner.settle()

    assert ("qwen", ["a"], {"lr": 0.1}) == views[0]


def test_a_second_look_sends_nothing(spool: SpoolDir, turners: Turners) -> None:
    """Progress is kept after each acknowledged batch; a restart sends nothing and writes nothing into the spool."""
    attempt = spool.attempt()
    attempt.log(0, a=1)
    attempt.finish()
    before = {path: path.stat().st_mtime_ns for path in spool.root.rglob("*")}
    turner = turners()
    turner.settle()
    batches = len(turner.memory.runs["proj/run"].batches)

    turner.crash()
    turner.settle()

    assert batches == len(turner.memory.runs["proj/run"].batches)
    assert before == {path: path.stat().st_mtime_ns for path in spool.root.rglob("*")}


def test_syncs_during_the_run_each_send_what_is_new(spool: SpoolDir, turners: Turners) -> None:
    """Three values, then two more, then one more, with one tracker run."""
    attempt, turner, sent = spool.attempt(), turners(), []
    for count in (3, 2, 1):
        for _ in range(count):
            attempt.log(attempt.seq, a=1)
        turner.crash()
        turner.settle()
        sent.append(len(rows_of(turner.memory)))

    assert [3, 5, 6] == sent
    assert ["proj/run"] == list(turner.memory.runs)
    assert 6 == sum(isinstance(op, Row) for op in turner.memory.runs["proj/run"].operations)


def test_a_sink_that_is_down_is_tried_again_later_and_later_and_the_first_success_is_told(
    spool: SpoolDir, turners: Turners
) -> None:
    """Back-off doubles to a cap; the tracker's own wish counts more."""
    spool.attempt().log(0, a=1)
    turner = turners()
    turner.memory.failures = [Retryable("down"), Retryable("down"), Retryable("busy", after_s=7.0), Retryable("down")]
    waits = []
    for _ in range(12):
        turner.settle()
        waits = [event.retry_in_s for event in told(turner, events.SinkFailed)]
        turner.turn(8.1)

    assert [1.0, 2.0, 7.0, 8.0] == waits
    assert [4] == [event.failures for event in told(turner, events.SinkRecovered)]
    assert {0: {"a": 1}} == rows_of(turner.memory)


def test_a_dead_sink_delays_no_other(spool: SpoolDir, turners: Turners) -> None:
    """Each sink has its own reader, position and back-off; a sink added later gets everything."""
    attempt = spool.attempt()
    for step in range(100):
        attempt.log(step, a=step)
    dead, good = MemorySink("dead"), MemorySink("good")
    dead.failures = [Retryable("down")] * 1000
    turner = turners(dead, good)
    turner.settle()
    assert 100 == len(rows_of(good))
    assert {} == rows_of(dead)

    dead.failures = []
    turner.turn(61.0)
    turner.settle()
    late = MemorySink("late")
    turner.uploader.stop()
    turners(dead, good, late).settle()

    assert rows_of(dead) == rows_of(good) == rows_of(late)


def test_a_batch_that_is_too_large_is_split_and_never_sent_again_unchanged(spool: SpoolDir, turners: Turners) -> None:
    """Halves until it fits."""
    attempt = spool.attempt()
    for step in range(64):
        attempt.log(step, a=step)
    turner, sizes = turners(), []

    def refuse_large(batch: Batch) -> None:
        sizes.append(len(batch.operations))
        if len(batch.operations) > 10:
            raise Rejected("413", too_large=True)

    turner.memory.before_write = refuse_large
    turner.settle()

    assert 64 == len(rows_of(turner.memory))
    refused = [size for size in sizes if size > 10]
    assert len(refused) == len(set(refused))


def test_a_row_that_the_tracker_will_never_take_is_kept_as_a_dead_letter_and_the_rest_goes_on(
    spool: SpoolDir, turners: Turners, tmp_path: Path
) -> None:
    """It is found by halves, told, counted, and stands in the status."""
    attempt = spool.attempt()
    for step in range(20):
        attempt.log(step, a=step)
    turner = turners()

    def refuse_seven(batch: Batch) -> None:
        if 7 in row_steps(batch):
            raise Rejected("400: poison")

    turner.memory.before_write = refuse_seven
    turner.settle()

    assert set(range(20)) - {7} == set(rows_of(turner.memory))
    (letters,) = (tmp_path / "state").rglob("dead-letters/*.jsonl")
    assert [7] == [json.loads(line)["step"] for line in letters.read_text().splitlines()]
    (run,) = read_status([spool.root], tmp_path / "state").runs
    assert {"400: poison": 1} == run.sinks[0].refused
    assert turner.uploader.found_damage


def test_a_parked_run_waits_and_says_why_and_others_go_on(spool: SpoolDir, turners: Turners) -> None:
    """A run that was deleted remotely is parked alone."""
    for name in ("a", "b"):
        attempt = spool.attempt(run_id=name)
        attempt.log(0, a=1)
        attempt.finish()
    turner = turners()

    def deleted(batch: Batch) -> None:
        if batch.run.run_id == "a":
            raise Parked("run a was deleted: start it under another id with --new-id")

    turner.memory.before_write = deleted
    turner.settle()

    assert {0: {"a": 1}} == rows_of(turner.memory, "b")
    assert ["proj/a"] == [event.run for event in told(turner, events.RunParked)]
    assert not turner.uploader.is_over()


def test_wrong_credentials_park_the_sink_and_it_goes_on_when_they_changed(spool: SpoolDir, turners: Turners) -> None:
    """One try is enough to know; the others wait for it."""
    for name in "abcdef":
        spool.attempt(run_id=name).log(0, a=1)
    turner, tries = turners(workers=1), []

    def unauthorised(batch: Batch) -> None:
        tries.append(batch.run.run_id)
        raise Parked("401: the key is wrong: log in again", whole_sink=True)

    turner.memory.before_write = unauthorised
    turner.settle()
    assert 1 == len(tries)

    turner.memory.before_write = lambda batch: None
    turner.turn(pipeline.PARKED_S + 1)
    turner.settle()

    assert 6 == len(turner.memory.runs)


def test_a_partial_yes_moves_the_position_by_so_much(spool: SpoolDir, turners: Turners) -> None:
    """After a crash the acknowledged operations of an open batch do not come again."""
    attempt = spool.attempt()
    for step in range(9):
        attempt.log(step, a=step)
    turner = turners()
    turner.memory.ack_at_most = 2
    for _ in range(4):
        turner.turn()
    turner.crash()
    turner.settle()

    applied = [op.step for op in turner.memory.runs["proj/run"].operations if isinstance(op, Row)]
    assert list(range(9)) == applied


def test_after_a_lost_answer_the_same_batch_comes_again_and_says_so(spool: SpoolDir, turners: Turners) -> None:
    """Also after a kill: the end of the batch was made durable before it was written."""
    attempt, turner, seen = spool.attempt(), turners(), []
    for step in range(5):
        attempt.log(step, a=step)
    turner.memory.before_write = lambda batch: seen.append((row_steps(batch), batch.uncertain))
    turner.memory.lost_answers = [Retryable("reset")]
    turner.settle()
    for step in range(5, 9):
        attempt.log(step, a=step)
    turner.turn(2.0)
    turner.memory.lost_answers = [Retryable("reset")]
    attempt.log(9, a=9)
    turner.settle()
    attempt.log(10, a=10)
    turner.crash()
    turner.settle()

    first, again = seen[0], seen[1]
    assert ([0, 1, 2, 3, 4], False) == first
    assert ([0, 1, 2, 3, 4], True) == again
    uncertain = [steps for steps, flag in seen if flag]
    assert all(steps in [other for other, flag in seen if not flag] for steps in uncertain)
    assert list(range(11)) == list(rows_of(turner.memory))


def test_lost_state_sends_the_whole_history_again(spool: SpoolDir, turners: Turners, tmp_path: Path) -> None:
    """Nothing is skipped for want of memory; a sink that knows its rows holds each once."""
    attempt = spool.attempt()
    for step in range(30):
        attempt.log(step, a=step)
    turner = turners()
    turner.settle()
    turner.uploader.stop()

    again = turners(turner.memory, state=tmp_path / "other")
    again.settle()

    assert {step: {"a": step} for step in range(30)} == rows_of(again.memory)


def test_a_moved_spool_goes_on_where_it_was(spool: SpoolDir, turners: Turners, tmp_path: Path) -> None:
    """Progress is keyed by attempt and segment, not by path or inode."""
    attempt = spool.attempt()
    attempt.log(0, a=0)
    first = turners()
    first.settle()
    first.uploader.stop()
    moved = tmp_path / "moved"
    spool.root.rename(moved)
    attempt.folder = moved / "proj" / "run"
    attempt.log(1, a=1)

    second = Turner(moved, tmp_path / "state", first.memory)
    second.settle()

    assert [0, 1] == [op.step for op in second.memory.runs["proj/run"].operations if isinstance(op, Row)]
    second.uploader.stop()


def test_a_copy_of_a_run_is_the_same_run(spool: SpoolDir, turners: Turners) -> None:
    """The same attempt seen twice under one root is read once."""
    attempt = spool.attempt()
    for step in range(5):
        attempt.log(step, a=step)
    copy = spool.root / "backup" / "run"
    copy.mkdir(parents=True)
    (copy / attempt.path.name).write_bytes(attempt.path.read_bytes())
    turner = turners()
    turner.settle()

    assert 5 == sum(isinstance(op, Row) for op in turner.memory.runs["proj/run"].operations)


def test_a_run_ends_as_its_spool_says(spool: SpoolDir, turners: Turners) -> None:
    """Finished, failed with its exit code; nothing else ends a run but the end of its writer."""
    for name, code in (("good", 0), ("bad", 3)):
        attempt = spool.attempt(run_id=name)
        attempt.log(0, a=1)
        attempt.finish(code)
    turner = turners()
    turner.settle()

    states = {name: run.state for name, run in turner.memory.runs.items()}
    assert {"proj/good": "finished", "proj/bad": "failed"} == {n: s.state for n, s in states.items() if s}
    assert 3 == (states["proj/bad"] or State("", 0, 0, 0)).exit_code
    assert turner.uploader.is_over()


def test_a_silent_run_has_crashed_after_the_limit_and_a_new_attempt_reopens_it(
    spool: SpoolDir, turners: Turners
) -> None:
    """Its writer is on another host: only the time tells."""
    attempt, turner = spool.attempt(), turners(crashed_after_s=300.0)
    attempt.log(0, a=1)
    turner.wall = attempt.path.stat().st_mtime + 10
    turner.settle()
    assert turner.memory.runs["proj/run"].state is None

    turner.wall += 300
    turner.turn(10.0)
    turner.settle()
    assert "crashed" == turner.memory.runs["proj/run"].state.state  # type: ignore[union-attr]

    again = spool.attempt(number=2)
    again.log(1, a=1)
    turner.wall = again.path.stat().st_mtime
    turner.settle()
    assert "running" == turner.memory.runs["proj/run"].state.state  # type: ignore[union-attr]


def test_a_rewind_that_a_tracker_cannot_express_makes_a_fresh_run_with_the_whole_history(
    spool: SpoolDir, turners: Turners
) -> None:
    """`<id>-r2`; the old one is told by what it is superseded."""
    old, turner = spool.attempt(), turners(MemorySink(rewind=False), on_rewind="new-run")
    for step in range(10):
        old.log(step, a=step)
    turner.settle()
    spool.attempt(number=2, resume_step=5).log(5, a=-5)
    turner.settle()

    assert {**{step: {"a": step} for step in range(5)}, 5: {"a": -5}} == rows_of(turner.memory, "run-r2")
    assert Superseded("run-r2") == turner.memory.runs["proj/run"].operations[-1]


def test_keep_first_refuses_what_was_rewound_and_counts_it(spool: SpoolDir, turners: Turners) -> None:
    """The tracker's rows stay; new steps follow."""
    old, turner = spool.attempt(), turners(MemorySink(rewind=False), on_rewind="keep-first")
    for step in range(6):
        old.log(step, a=step)
    turner.settle()
    new = spool.attempt(number=2, resume_step=4)
    for step in range(4, 8):
        new.log(step, a=-step)
    turner.settle()

    rows = rows_of(turner.memory)
    assert {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: -6, 7: -7} == {step: row["a"] for step, row in rows.items()}
    assert 2 == sum(event.count for event in told(turner, events.RecordsRefused))


def test_mark_tags_the_run_and_sends_what_comes(spool: SpoolDir, turners: Turners) -> None:
    """The abandoned rows stay beside the new ones; the tag says from where."""
    old, turner = spool.attempt(), turners(MemorySink(rewind=False), on_rewind="mark")
    for step in range(6):
        old.log(step, a=step)
    turner.settle()
    spool.attempt(number=2, resume_step=4).log(4, a=-4)
    turner.settle()

    assert -4 == rows_of(turner.memory)[4]["a"]
    assert ["rewound-from-step:4"] == turner.memory.runs["proj/run"].view.tags  # type: ignore[union-attr]


def test_what_a_sink_cannot_express_is_refused_by_name_and_the_rest_of_the_row_goes(
    spool: SpoolDir, turners: Turners
) -> None:
    """Per key, never per record."""
    attempt = spool.attempt()
    attempt.append("metrics", {"loss": None, "acc": 0.5, "note": "x"}, 1, marks=[[["loss"], "nan"]])
    attempt.append("table", {"key": "t", "columns": ["a"], "rows": [[1]]}, 1)
    attempt.append("media", {"key": "i", "type": "image", "items": [{"media": "../../etc/passwd"}]}, 1)
    attempt.log(None, a=1)
    turner = turners(MemorySink(non_finite=False, text=False, tables=False, media=False, unstepped=False))
    turner.settle()

    assert {1: {"acc": 0.5}} == rows_of(turner.memory)
    assert {"a value that is not finite", "text", "a table", "a payload that is missing", "a row without a step"} == {
        event.reason for event in told(turner, events.RecordsRefused)
    }


@pytest.mark.parametrize("kind", ["file", "tensorboard", "clearml"])
def test_a_value_that_no_tracker_knows_costs_itself_alone(
    spool: SpoolDir, turners: Turners, tmp_path: Path, kind: str
) -> None:
    """A dict, or a list nested beyond any encoder, in a spool that another program wrote."""
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    attempt = spool.attempt()
    attempt.log(0, a=1)
    attempt.log(1, a=2, odd={"x": {"y": 1}}, deep=deep)
    attempt.log(2, a=3)
    attempt.finish()
    memory = MemorySink()
    turner = turners(memory, make_sink(kind if kind == "memory" else f"{kind}:{tmp_path / 'out'}"))
    turner.settle()

    assert {0: {"a": 1}, 1: {"a": 2}, 2: {"a": 3}} == rows_of(memory)
    assert {} == turner.uploader.failed
    (run,) = read_status([spool.root], tmp_path / "state").runs
    assert [2] * len(turner.uploader.sinks) == [sum(sink.refused.values()) for sink in run.sinks]
    assert [3] * len(turner.uploader.sinks) == [sink.uploaded for sink in run.sinks]


def test_a_sink_with_a_bug_shows_in_status_why_nothing_moves(spool: SpoolDir, turners: Turners, tmp_path: Path) -> None:
    """The reason stays between the tries, and goes when a row went through."""
    spool.attempt().log(0, a=1)
    sink = MemorySink()
    bug = RuntimeError("a bug")
    sink.failures += [bug] * 2  # type: ignore[list-item]
    turner = turners(sink)
    turner.settle()

    def trouble() -> list[str | None]:
        (run,) = read_status([spool.root], tmp_path / "state").runs
        return [sink.trouble for sink in run.sinks]

    assert ["RuntimeError: a bug"] == trouble() == list(turner.uploader.failed.values())
    turner.turn(10.0)
    turner.settle()
    assert ["RuntimeError: a bug"] == trouble() == list(turner.uploader.failed.values())
    turner.turn(100.0)
    turner.settle()

    assert [None] == trouble()
    assert {} == turner.uploader.failed
    assert {0: {"a": 1}} == rows_of(sink)


def test_a_recovery_is_told_when_something_went_through(spool: SpoolDir, turners: Turners) -> None:
    """Not when the end of the batch to be tried again was made durable, and the tracker then fails as before."""
    other = spool.attempt(writer="eval")
    other.log(1, a=1)
    sink = MemorySink(settles_intents=True)
    turner = turners(sink)
    turner.settle()
    whole = other.path.read_bytes()
    other.path.write_bytes(whole[:-20])
    spool.attempt().log(1, b=2)
    turner.turn(1.0)
    assert ["shorter than what was read" in why for why in turner.uploader.failed.values()] == [True]
    other.path.write_bytes(whole)
    sink.failures.append(Retryable("still away"))
    turner.turn(120.0)
    turner.settle()
    assert [] == told(turner, events.SinkRecovered)
    assert ["still away"] == list(turner.uploader.failed.values())
    turner.turn(120.0)
    turner.settle()

    assert 1 == len(told(turner, events.SinkRecovered))
    assert {1: {"a": 1, "b": 2}} == rows_of(sink)


def test_damage_is_kept_counted_and_told_once_for_all_sinks(spool: SpoolDir, turners: Turners, tmp_path: Path) -> None:
    """With segment, offset and reason; the loss is counted by seq."""
    attempt = spool.attempt()
    attempt.log(0, a=0)
    attempt.raw(attempt.line("metrics", {"a": 1}, 1).replace(b'"a":1', b'"a":2'))
    attempt.log(2, a=2)
    turner = turners(MemorySink("one"), MemorySink("two"))
    turner.settle()

    (found,) = told(turner, events.DamageFound)
    assert "the crc does not match" == found.reason
    (letters,) = (tmp_path / "state").rglob("dead-letters/*.jsonl")
    assert 1 == len(letters.read_text().splitlines())
    (run,) = read_status([spool.root], tmp_path / "state").runs
    assert [(1, 1), (1, 1)] == [(sink.lost, sink.damaged) for sink in run.sinks]


def test_an_unknown_major_version_stops_that_run_alone_and_moves_no_position(
    spool: SpoolDir, turners: Turners, tmp_path: Path
) -> None:
    """One clear message; unknown kinds and fields of a known version are skipped."""
    strange = spool.attempt(run_id="strange")
    header = json.loads(strange.header_line(1))
    del header["crc"]
    strange.path.write_bytes(seal(json.dumps({**header, "v": 99}, separators=(",", ":")).encode()))
    strange.log(0, a=1)
    known = spool.attempt(run_id="known")
    known.append("foo", {"x": 1})
    known.raw(seal(b'{"seq":2,"t":1.0,"mono":1.0,"kind":"metrics","new":[1],"step":0,"data":{"a":1}}'))
    known.seq += 1
    turner = turners()
    turner.settle()

    assert {0: {"a": 1}} == rows_of(turner.memory, "known")
    assert "proj/strange" not in turner.memory.runs
    assert any("update gapless" in event.reason for event in told(turner, events.SpoolProblem))
    assert {"known"} == {key[1] for key in turner.uploader.state.progress}
    found = {run.run: run for run in read_status([spool.root], tmp_path / "state").runs}
    assert "unreadable" == found["strange"].state
    assert any("update gapless" in note for note in found["strange"].notes)


def test_an_empty_or_headless_file_is_listed_with_its_reason(spool: SpoolDir, tmp_path: Path) -> None:
    """Never skipped in silence."""
    attempt = spool.attempt()
    attempt.path.write_bytes(b"")
    attempt.index = 1
    attempt.raw(attempt.header_line(1)[:50])

    problems = read_status([spool.root], tmp_path / "state").problems

    assert 2 == sum("has no header yet" in problem for problem in problems)


def test_a_damaged_header_is_reported_and_all_its_records_arrive(spool: SpoolDir, turners: Turners) -> None:
    """The folder and the file's name say whose they are."""
    attempt = spool.attempt()
    for step in range(5):
        attempt.log(step, a=step)
    data = bytearray(attempt.path.read_bytes())
    data[20] ^= 1
    attempt.path.write_bytes(bytes(data))
    turner = turners()
    turner.settle()

    assert 5 == len(rows_of(turner.memory))
    assert told(turner, events.DamageFound) or told(turner, events.SpoolProblem)


def test_a_damaged_header_in_a_folder_whose_name_is_no_utf_8_is_uploaded(spool: SpoolDir, turners: Turners) -> None:
    """Its progress is kept under the name with its bytes written out."""
    attempt = spool.attempt()
    attempt.log(0, a=1)
    data = bytearray(attempt.path.read_bytes())
    data[20] ^= 1
    odd = spool.root / os.fsdecode(b"odd\xff") / "run"
    odd.mkdir(parents=True)
    (odd / attempt.path.name).write_bytes(bytes(data))
    attempt.path.unlink()
    turner = turners()
    turner.settle()
    turner.crash()
    turner.settle()

    assert {0: {"a": 1}} == rows_of(turner.memory, project="odd\\xff")
    assert 1 == sum(isinstance(op, Row) for op in turner.memory.runs["odd\\xff/run"].operations)


def test_a_quiet_run_holds_no_session_and_the_next_row_opens_it_again(spool: SpoolDir, turners: Turners) -> None:
    """A thousand quiet runs hold no file and no connection; a tracker that wants heartbeats keeps its own."""
    attempt = spool.attempt()
    attempt.log(0, a=0)
    plain, beating = MemorySink("plain"), MemorySink("beating", heartbeat_s=30.0)
    turner = turners(plain, beating, crashed_after_s=1e12)
    turner.settle()
    turner.turn(pipeline.REST_S + 1)
    assert [1, 0] == [sink.runs["proj/run"].closed for sink in (plain, beating)]

    attempt.log(1, a=1)
    turner.settle()

    assert 2 == plain.runs["proj/run"].opened
    assert {0: {"a": 0}, 1: {"a": 1}} == rows_of(plain) == rows_of(beating)


def test_the_summary_of_a_long_run_survives_a_restart_from_a_snapshot(
    spool: SpoolDir, turners: Turners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart only what follows the snapshot is read again, and late records still find their rows."""
    monkeypatch.setattr(pipeline, "SNAPSHOT_BYTES", 64 << 10)
    attempt, turner = spool.attempt(), turners(MemorySink(max_bytes=32 << 10))
    for step in range(6000):
        attempt.log(step, a=step, **({"once": 1} if step == 3 else {}))
    turner.settle()
    turner.crash()
    attempt.log(17, late=1.5)
    attempt.log(6000, a=6000)
    turner.settle()

    rows = rows_of(turner.memory)
    assert {"a": 17, "late": 1.5} == rows[17]
    assert {"a": 6000, "once": 1, "late": 1.5} == turner.memory.runs["proj/run"].view.summary  # type: ignore[union-attr]
    assert 6001 == len(rows)


def test_a_restart_reads_little_of_a_long_spool(
    spool: SpoolDir, turners: Turners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a sync depends on new data only."""
    monkeypatch.setattr(pipeline, "SNAPSHOT_BYTES", 1 << 20)
    attempt = spool.attempt()
    attempt.raw(b"".join(attempt.line("metrics", {"a": step, "text": "x" * 200}, step) for step in range(30_000)))
    turner = turners()
    turner.settle()
    size = attempt.path.stat().st_size
    turner.crash()
    read = 0

    def counting(self: Any, size: int, offset: int, pread: Any = SegmentFile.pread) -> bytes:
        nonlocal read
        found: bytes = pread(self, size, offset)
        read += len(found)
        return found

    monkeypatch.setattr("gapless_uploader.tail.SegmentFile.pread", counting)
    for step in range(30_000, 30_010):
        attempt.log(step, a=step)
    turner.settle()

    assert 30_010 == len(rows_of(turner.memory))
    assert read < size / 2


def test_headers_of_the_harness_are_those_of_the_contract(spool: SpoolDir) -> None:
    """The harness writes what a writer writes."""
    attempt = spool.attempt()
    header = read_header(attempt.path)
    assert header is not None
    assert T0 == header.created
    assert attempt.path.read_bytes() == encode_header(header)


def test_a_dead_run_is_not_called_crashed_before_its_end_was_read(spool: SpoolDir, turners: Turners) -> None:
    """Its finish stands behind a backlog, and behind blocks that may still arrive."""
    attempt = spool.attempt()
    for step in range(6000):
        attempt.log(step, a=step)
    attempt.raw(b"\0" * 10 + b"\n")
    attempt.finish()
    turner = turners(MemorySink(max_operations=1000, max_bytes=64 << 10))
    turner.settle()
    turner.turn(31.0)
    turner.settle()

    assert ["finished"] == [event.state for event in told(turner, events.StateChanged)]
    assert 6000 == len(rows_of(turner.memory))


@pytest.mark.parametrize("kind", ["wandb", "swanlab"])
def test_a_server_is_no_target(kind: str) -> None:
    """A key meant for a self-hosted server never goes to the public one."""
    with pytest.raises(Misconfigured, match="leave the target out"):
        make_sink(f"{kind}:http://127.0.0.1:9")


def test_a_restart_makes_nothing_for_runs_that_are_over(
    spool: SpoolDir, turners: Turners, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand finished runs cost a look each; one that goes on is followed again."""
    for run_id in ("over", "goes-on"):
        attempt = spool.attempt(run_id=run_id)
        attempt.log(0, a=1)
        attempt.finish()
    turner = turners()
    turner.settle()
    made = []

    def make(key: tuple[str, str], *given: Any, **more: Any) -> Pipeline:
        made.append(key)
        return Pipeline(key, *given, **more)

    monkeypatch.setattr(uploader, "Pipeline", make)
    turner.crash()
    turner.settle()
    assert [] == made

    spool.attempt(run_id="goes-on", number=2, created=T0 + 9, resume_step=1).log(1, a=2)
    turner.turn(120.0)
    turner.settle()

    assert [("proj", "goes-on")] == made
    assert {0: {"a": 1}, 1: {"a": 2}} == rows_of(turner.memory, "goes-on")
