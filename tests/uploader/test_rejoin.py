"""A place by seqs: found again in the files, and a pipeline that stands where its tracker says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.pipeline import Pipeline
from gapless_uploader.reader import RunReader
from gapless_uploader.rejoin import cursor_at
from gapless_uploader.sink import Batch, Memo, Place, Resume, Retryable, RunView
from gapless_uploader.sinks.memory import MemorySession, MemorySink
from tests.wandb_spool import Attempt, files_of

KEY = ("grpo", "r-1")


class RememberingSink(MemorySink):
    """A tracker that keeps the place beside the rows, and insists on it when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, max_operations=7, rewind=False)
        self.place: Place | None = None
        self.asks = False

    def open(self, run: RunView, memo: Memo) -> MemorySession:
        if self.asks and self.place is not None:
            self.asks = False
            raise Resume("it is held here", run.generation, self.place, {"unstepped": 0, "there": True})
        return _Remembering(self, super().open(run, memo or {"begun": True})._run)


class _Remembering(MemorySession):
    def write(self, batch: Batch) -> Any:
        ack = super().write(batch)
        self._sink.place = replace(batch.place, done=batch.place.done + ack.done)
        return ack


def written(attempt: Attempt, first: int, last: int) -> None:
    attempt.add_rows([(step, {"loss": float(step)}) for step in range(first, last)])


@pytest.mark.parametrize("seed", range(12))
def test_a_cursor_is_found_again_from_its_seqs(tmp_path: Path, seed: int) -> None:
    """A reader that stopped anywhere, in one attempt or two, is the reader that starts from the seqs it had read."""
    chance = random.Random(seed)
    attempts = [Attempt(tmp_path), Attempt(tmp_path, writer="eval")]
    for attempt in attempts:
        written(attempt, 0, chance.randint(1, 400))
    files = files_of(tmp_path)
    reader = RunReader()
    reader.meet(files.headers)
    for _ in range(chance.randint(0, 3)):
        next(iter(reader.read(files.paths, files.sizes, 0.0, 1)), None)
    cursor = reader.cursor()
    found = cursor_at(files.paths, {name: place["seen"] for name, place in cursor.items()}, 0.0)
    for attempt in attempts:
        written(attempt, 400, 410)
    files = files_of(tmp_path)

    assert rest(RunReader(found), files) == rest(RunReader(cursor), files)


def rest(reader: RunReader, files: Any) -> list[tuple[str, int]]:
    reader.meet(files.headers)
    return [(name, r.seq) for name, taken in reader.read(files.paths, files.sizes, 0.0, 1 << 40) for r in taken.records]


def test_a_damaged_or_cut_segment_is_passed_as_it_was(tmp_path: Path) -> None:
    """Damage inside what was read stays behind the place; a torn end stays before it."""
    attempt = Attempt(tmp_path)
    written(attempt, 0, 5)
    with attempt.path.open("ab") as file:
        file.write(b"no record\n")
    written(attempt, 5, 9)
    with attempt.path.open("ab") as file:
        file.write(attempt.line("metrics", {"loss": 9.0}, 9)[:-20])
    files = files_of(tmp_path)
    cursor = cursor_at(files.paths, {attempt.attempt_id: [[1, 7]]}, 0.0)

    assert rest(RunReader(cursor), files) == [(attempt.attempt_id, 8), (attempt.attempt_id, 9)]


@pytest.mark.parametrize("killed_after", range(1, 9))
def test_a_pipeline_without_state_goes_on_where_the_tracker_stands(tmp_path: Path, killed_after: int) -> None:
    """State lost at any step: the operations that the tracker applied do not come again, the others do, in order."""
    attempt = Attempt(tmp_path)
    written(attempt, 0, 40)
    attempt.add_rows([(3, {"acc": 0.5}), (40, {"loss": 40.0})])
    sink = RememberingSink()
    pipeline = Pipeline(KEY, sink)
    for turn in range(killed_after):
        pipeline.step(files_of(tmp_path), float(turn))
    sink.asks = True
    sent = list(sink.runs["grpo/r-1"].operations) if sink.runs else []
    again = Pipeline(KEY, sink)
    for turn in range(40):
        again.step(files_of(tmp_path), float(turn))
    run = sink.runs["grpo/r-1"]
    steps = [operation.step for operation in run.operations if hasattr(operation, "step")]

    assert run.operations[: len(sent)] == sent
    assert steps == [*range(40), 3, 40]
    assert again.idle(files_of(tmp_path))


def test_a_place_in_the_middle_of_a_batch_is_met_exactly(tmp_path: Path) -> None:
    """The tracker took three operations of a batch of seven: the fourth is the next, whatever came since."""
    attempt = Attempt(tmp_path)
    written(attempt, 0, 7)
    sink = RememberingSink()
    sink.ack_at_most = 3
    first = Pipeline(KEY, sink)
    while not sink.runs:
        first.step(files_of(tmp_path), 0.0)
    attempt.add_rows([(6, {"acc": 0.25})])
    written(attempt, 7, 9)
    sink.ack_at_most, sink.asks = None, True
    pipeline = Pipeline(KEY, sink)
    for turn in range(20):
        pipeline.step(files_of(tmp_path), float(turn))
    run = sink.runs["grpo/r-1"]

    assert [op.step for op in run.operations if hasattr(op, "step")] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8]
    assert run.rows[6] == {"loss": 6.0, "acc": 0.25}


def test_a_batch_that_was_applied_whole_is_behind(tmp_path: Path) -> None:
    """The tracker took the whole batch, and trouble comes before the next: what is committed then stands behind it."""
    attempt = Attempt(tmp_path)
    written(attempt, 0, 7)
    sink = RememberingSink()
    first = Pipeline(KEY, sink)
    while not sink.runs:
        first.step(files_of(tmp_path), 0.0)
    written(attempt, 7, 9)
    sink.asks = True
    second = Pipeline(KEY, sink)
    sink.failures = [Retryable("away")] * 9
    outcomes = [second.step(files_of(tmp_path), float(turn)) for turn in range(9)]
    saved = next(outcome.progress for outcome in outcomes if outcome.failed)
    assert saved is not None
    sink.failures.clear()
    third = Pipeline(KEY, sink, json.loads(json.dumps(saved)))
    for turn in range(5):
        third.step(files_of(tmp_path), 2.0 + turn)

    assert saved["trouble"] == "away"
    assert [op.step for op in sink.runs["grpo/r-1"].operations if hasattr(op, "step")] == list(range(9))


def test_nothing_is_committed_that_would_skip_a_record(tmp_path: Path) -> None:
    """Killed between the tracker's word and the next yes, the pipeline asks the tracker again."""
    attempt = Attempt(tmp_path)
    written(attempt, 0, 30)
    sink = RememberingSink()
    first = Pipeline(KEY, sink)
    for turn in range(3):
        first.step(files_of(tmp_path), float(turn))
    sink.asks = True
    second = Pipeline(KEY, sink)
    outcomes = [second.step(files_of(tmp_path), 0.0)]
    sink.failures = [OSError(5, "disk")]
    outcomes.append(second.step(files_of(tmp_path), 1.0))
    saved = [outcome.progress for outcome in outcomes if outcome.progress]
    sink.asks = not saved or not saved[-1]["cursor"]
    third = Pipeline(KEY, sink, json.loads(json.dumps(saved[-1])) if saved else None)
    for turn in range(20):
        third.step(files_of(tmp_path), 10.0 + turn)

    assert [op.step for op in sink.runs["grpo/r-1"].operations if hasattr(op, "step")] == list(range(30))


@pytest.mark.parametrize("state", ["saved", "lost"])
@pytest.mark.parametrize("killed_after", range(1, 16))
def test_a_kill_within_an_old_attempt_sends_nothing_that_a_newer_one_supersedes(
    tmp_path: Path, killed_after: int, state: str
) -> None:
    """Both are there from the beginning: the newer one's first step is known before anything of it is read, and stays
    known. Else superseded rows go out, and a tracker that takes nothing back gets a fresh run for no reason."""
    written(Attempt(tmp_path), 0, 60)
    second = Attempt(tmp_path, 2)
    second.add_rows([(step, {"loss": float(-step)}) for step in range(20, 80)])
    second.add("finish", {"state": "finished", "exit_code": 0})
    sink, files = RememberingSink(), files_of(tmp_path)
    pipeline, saved = Pipeline(KEY, sink), None
    for turn in range(killed_after):
        saved = pipeline.step(files, float(turn)).progress or saved
    sent = list(sink.runs["grpo/r-1"].operations) if sink.runs else []
    sink.asks = state == "lost"
    pipeline = Pipeline(KEY, sink, json.loads(json.dumps(saved)) if state == "saved" else None)
    for turn in range(60):
        pipeline.step(files, float(turn))
    (run,) = sink.runs.values()

    assert run.operations[: len(sent)] == sent
    assert {step: row["loss"] for step, row in run.rows.items()} == {
        step: float(step if step < 20 else -step) for step in range(80)
    }
    assert pipeline.idle(files)


def test_rows_of_an_attempt_that_had_none_are_seen_before_the_old_one_is_sent_on(tmp_path: Path) -> None:
    """The newer attempt had only begun when the old one's backlog was met: its first step counts once it is there."""
    written(Attempt(tmp_path), 0, 6_000)
    second = Attempt(tmp_path, 2)
    second.add("run", {"name": "second"})
    sink = RememberingSink()
    sink.capabilities = replace(sink.capabilities, max_operations=500, max_bytes=1)
    pipeline = Pipeline(KEY, sink)
    for turn in range(3):
        pipeline.step(files_of(tmp_path), float(turn))
    assert 0 < len(sink.runs["grpo/r-1"].rows) < 3_000
    second.add_rows([(step, {"loss": float(-step)}) for step in range(5_000, 5_010)])
    for turn in range(60):
        pipeline.step(files_of(tmp_path), 3.0 + turn)
    (run,) = sink.runs.values()

    assert len(run.rows) == 5_010
    assert run.rows[5_005] == {"loss": -5_005.0}
