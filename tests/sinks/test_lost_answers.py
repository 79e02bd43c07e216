"""What the uploader owes a sink that cannot take back: rewinds, amends and lost answers reach it as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless_uploader.operations import Amend, Log, Operation, Row
from gapless_uploader.options import UploaderOptions
from gapless_uploader.sink import Batch, Parked, Retryable
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.uploader import Inline, Uploader
from tests.sinks.swanlab.world import PROJECT, RUN, SpoolWriter


class Life:
    """One uploader with a memory sink that takes nothing back."""

    def __init__(self, folder: Path, **limits: object) -> None:
        self.folder = folder
        self.sink = MemorySink(**{"rewind": False, **limits})
        self.clock = 0.0
        self.start()

    def start(self) -> None:
        self.uploader = Uploader(
            [self.folder / "spool"],
            [self.sink],
            self.folder / "state",
            UploaderOptions(crashed_after_s=1e12),
            executor=Inline(),
            jitter=lambda: 0.5,
        )
        self.uploader.start()

    def run(self, turns: int = 60) -> None:
        for _ in range(turns):
            if not self.uploader.turn(self.clock):
                self.clock += 31.0

    def kill(self) -> None:
        self.uploader.lease.release()
        self.uploader.state.close()

    def steps(self, run_id: str = RUN) -> list[int]:
        return sorted(self.sink.runs[f"{PROJECT}/{run_id}"].rows)


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    made = Life(tmp_path)
    yield made
    made.kill()


def rewound(life: Life, *failures: Exception) -> None:
    """Steps 0-9 uploaded, then a new attempt from step 5 that the sink cannot take back."""
    writer = SpoolWriter(life.folder / "spool")
    writer.begin()
    for step in range(10):
        writer.row(step, loss=float(step))
    life.run(10)
    assert life.steps() == list(range(10))
    again = SpoolWriter(life.folder / "spool", attempt=2, resume_step=5)
    again.begin()
    for step in range(5, 12):
        again.row(step, loss=-float(step))
    again.finish()
    life.sink.failures.extend(failures)
    life.run()


def test_a_rewind_sends_the_whole_corrected_history_to_a_fresh_run(life: Life) -> None:
    """A rewind that is the last thing to be read leaves no row behind: the fresh run holds all of them."""
    rewound(life)
    fresh = life.sink.runs[f"{PROJECT}/{RUN}-r2"]

    assert sorted(fresh.rows) == list(range(12))
    assert [fresh.rows[step]["loss"] for step in (4, 5, 11)] == [4.0, -5.0, -11.0]
    assert fresh.state is not None


def test_a_rewind_that_cannot_be_told_at_once_is_told_later(life: Life) -> None:
    """When the old run cannot be marked as left behind, the rewind is read again, with every row in it."""
    rewound(life, Retryable("down"), Retryable("still down"))

    assert life.steps(f"{RUN}-r2") == list(range(12))
    assert life.steps() == list(range(10))


def test_a_run_that_tries_again_is_not_parked(life: Life) -> None:
    """After a park is over, a failure that is tried again no longer counts as waiting for somebody."""
    writer = SpoolWriter(life.folder / "spool")
    writer.begin()
    writer.row(0, loss=1.0)
    life.sink.failures += [Parked("mend it"), Retryable("wait")]
    life.run(3)
    assert len(life.uploader.parked) == 1
    while life.sink.failures:
        life.uploader.turn(life.clock)
        life.clock += 31.0

    assert not life.uploader.parked
    assert list(life.uploader.failed.values()) == ["wait"]


def test_an_amend_tells_new_keys_from_changed_ones(life: Life) -> None:
    """Keys that no operation had before are `added`; those with another value are only `changed`."""
    seen: list[Operation] = []
    life.sink.before_write = lambda batch: seen.extend(batch.operations)
    writer = SpoolWriter(life.folder / "spool")
    writer.begin()
    writer.row(0, loss=1.0, lr=0.1)
    writer.row(1, loss=1.0)
    life.run(6)
    writer.row(0, loss=2.0, acc=0.5)
    writer.row(0, acc=0.75, late=1.0)
    life.run(6)
    (amend,) = (operation for operation in seen if isinstance(operation, Amend))

    assert amend.values == {"loss": 2.0, "lr": 0.1, "acc": 0.75, "late": 1.0}
    assert sorted(amend.changed) == ["acc", "late", "loss"]
    assert amend.added is not None
    assert sorted(set(amend.added)) == ["acc", "late"]


def test_a_batch_of_console_lines_is_settled_too(tmp_path: Path) -> None:
    """With `settles_intents` lines that may have arrived come again as uncertain, after a crash."""
    life = Life(tmp_path, settles_intents=True)
    writer = SpoolWriter(tmp_path / "spool")
    writer.begin()
    writer.row(0, loss=1.0)
    life.run(8)
    writer.add("log", {"stream": "stdout", "lines": ["hello"]})
    seen: list[Batch] = []
    life.sink.before_write = seen.append
    life.sink.lost_answers.append(Retryable("no answer"))
    for _ in range(8):
        life.uploader.turn(life.clock)
    life.kill()
    life.start()
    life.run(8)
    life.kill()

    assert [batch.uncertain for batch in seen] == [False, True]
    assert all(isinstance(batch.operations[0], Log) for batch in seen)
    assert not any(isinstance(operation, Row) for batch in seen for operation in batch.operations)
