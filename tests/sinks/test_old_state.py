"""A state that was restored from an old copy, at sinks that cut a file of their own back to what the state says."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sinks.harness import T0, SinkHarness, load_harness, row, view
from tests.uploader.harness import SpoolDir, Turner

RUN = view()


class Copies:
    """One run, its uploader, and copies of the uploader's state."""

    def __init__(self, folder: Path, harness: SinkHarness) -> None:
        self.state = folder / "state"
        self.harness = harness
        self.spool = SpoolDir(folder / "spool")
        self.spool.root.mkdir()
        self.turner = Turner(self.spool.root, self.state, harness.uploading())
        self.rows = {step: row(step) for step in range(12)}
        first = self.spool.attempt(RUN.run_id, project=RUN.project, created=RUN.created)
        for one in self.rows.values():
            first.log(one.step, one.t, **one.values)
        self.turner.settle()
        self.between(lambda: shutil.copytree(self.state, folder / "copy"))
        self.copy = folder / "copy"

    def between(self, change: Callable[[], object]) -> None:
        """Change the state while no uploader works on it, then upload."""
        self.turner.uploader.stop()
        change()
        self.turner.start()
        self.turner.settle()

    def rewind(self) -> None:
        """A new attempt from step 5 on, with values as long as the old ones and times of its own."""
        second = self.spool.attempt(RUN.run_id, number=2, project=RUN.project, created=RUN.created + 500, resume_step=5)
        self.rows = {step: one for step, one in self.rows.items() if step < 5}
        for step in range(5, 9):
            self.rows[step] = row(step, t=T0 + 1000 + step, loss=-9.5 - step, lr=0.2)
            second.log(step, self.rows[step].t, **self.rows[step].values)
        self.turner.settle()

    def lose(self) -> None:
        shutil.rmtree(self.state)

    def put_back(self) -> None:
        self.lose()
        shutil.copytree(self.copy, self.state)

    def check(self) -> None:
        assert self.harness.expect(self.rows.values()) == self.harness.actual(RUN)
        assert {} == self.turner.uploader.failed


@pytest.fixture(params=["file", "tensorboard", "clearml"])
def copies(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Copies]:
    (tmp_path / "tracker").mkdir()
    harness = load_harness(request.param)(tmp_path / "tracker")
    made = Copies(tmp_path, harness)
    yield made
    made.turner.uploader.stop()
    harness.close()


def test_an_old_copy_of_the_state_takes_nothing_back(copies: Copies) -> None:
    """Rows were added since: they are offered again and stand once."""
    third = copies.spool.attempt(RUN.run_id, number=2, project=RUN.project, created=RUN.created + 500)
    for step in range(12, 20):
        copies.rows[step] = row(step)
        third.log(step, copies.rows[step].t, **copies.rows[step].values)
    copies.turner.settle()
    copies.between(copies.put_back)

    copies.check()


def test_an_old_copy_from_before_a_rewind_cuts_nothing_in_half(copies: Copies) -> None:
    """The file was made anew since, by a rewind: what the copy says of its length is of another file."""
    copies.rewind()
    copies.between(copies.put_back)

    copies.check()


def test_an_old_copy_after_a_lost_state_cuts_nothing_in_half(copies: Copies) -> None:
    """The state was lost, the run rewound and uploaded anew, then a backup of the state came back."""
    copies.turner.uploader.stop()
    copies.lose()
    copies.turner.start()
    copies.rewind()
    copies.between(copies.put_back)
    copies.check()

    copies.between(copies.lose)
    copies.check()
