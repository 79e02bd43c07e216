"""A tracker that is away for an hour, and one that refuses for good, played over every kind of sink there is.

The real uploader runs with a clock of the test's own and a second sink beside the one in trouble. Each harness takes its
own tracker away: a server stops listening, a disk is unmounted, a database is moved, a port is taken.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless_uploader.events import Event, RunParked, SinkFailed, SinkRecovered
from gapless_uploader.operations import Row
from gapless_uploader.pipeline import BACKOFF_CAP_S, PARKED_S
from gapless_uploader.sink import RunView
from gapless_uploader.sinks.memory import MemorySink
from tests.sinks.harness import T0, SinkHarness, harness_kinds, load_harness, row, view
from tests.uploader.harness import SpoolDir, Turner

HOUR_S = 3600.0
TURN_S = 30.0
FIRST_TRIES = 8
"""Tries before the back-off reaches its cap, and some more for a step that does two things."""


class Training:
    """One run that goes on, and what it wrote."""

    def __init__(self, folder: Path, run: RunView) -> None:
        self.run = run
        self._attempt = SpoolDir(folder).attempt(run.run_id, project=run.project, created=run.created, host=run.host)
        self._attempt.run(run.config, name=run.name)
        self.rows: list[Row] = []

    def log(self, count: int = 1) -> None:
        """Rows a minute apart."""
        for _ in range(count):
            step = len(self.rows)
            self.rows.append(row(step, t=T0 + 60 * step + 0.25))
            self._attempt.log(step, self.rows[-1].t, **self.rows[-1].values)

    def finish(self) -> None:
        """The end."""
        self._attempt.finish()


class World:
    """A spool with trainings, an uploader, the sink in trouble and one beside it."""

    def __init__(self, folder: Path, harness: SinkHarness) -> None:
        self.harness = harness
        self.spool = folder / "spool"
        self.spool.mkdir()
        self.memory = MemorySink()
        self.turner = Turner(self.spool, folder / "state", harness.uploading(), self.memory)
        self.sink = f"{self.turner.sinks[0].kind}:{self.turner.sinks[0].target}"

    def train(self, **changes: object) -> Training:
        return Training(self.spool, view(config={"lr": 0.1}, **changes))

    def pass_time(self, seconds: float, *trainings: Training) -> None:
        """Each training logs a row a minute; the uploader turns all the time. The other sink has each row at once."""
        for minute in range(int(seconds // 60)):
            for training in trainings:
                training.log()
            for _ in range(int(60 // TURN_S)):
                self.turner.turn(TURN_S)
                self.turner.turn(0.1)
            assert [self.beside(one) for one in trainings] == [len(one.rows) for one in trainings], f"minute {minute}"

    def beside(self, training: Training) -> int:
        """How many rows of the run the other sink has."""
        return len(self.memory.runs[f"{training.run.project}/{training.run.run_id}"].rows)

    def told(self, *kinds: type[Event]) -> list[Event]:
        """What was said of the sink in trouble."""
        return [event for event in self.turner.events if isinstance(event, kinds) and event.sink == self.sink]

    def restart(self) -> None:
        """Stop the uploader, with the tracker as it is, and start another."""
        self.turner.uploader.stop()
        self.turner.start()

    def forget(self) -> None:
        self.turner.events.clear()

    def end(self, *trainings: Training) -> None:
        """The trainings end, and everything settles."""
        for training in trainings:
            training.finish()
        for _ in range(60):
            self.turner.turn(TURN_S)

        assert self.turner.uploader.is_over()
        assert self.turner.uploader.failed == {}

    def check(self, training: Training) -> None:
        """Every row is at both, once, in order, with its own time."""
        held = self.memory.runs[f"{training.run.project}/{training.run.run_id}"]
        steps: dict[str, list[int]] = {}
        for point in self.harness.points(training.run):
            steps.setdefault(self.harness.key(point.key), []).append(point.step)

        assert self.harness.expect(training.rows) == self.harness.actual(training.run)
        assert all(found == sorted(found) for found in steps.values())
        assert {one.step: one.values for one in training.rows} == held.rows
        assert all(held.times[one.step, key] == one.t for one in training.rows for key in one.values)


@pytest.fixture
def world(any_harness: SinkHarness, tmp_path: Path) -> Iterator[World]:
    if any_harness.never_away is not None:
        pytest.skip(f"{any_harness.kind} is never away: {any_harness.never_away}")
    made = World(tmp_path, any_harness)
    yield made
    made.turner.uploader.stop()


@pytest.mark.timeout(120)
def test_an_hour_without_the_tracker_costs_nothing(world: World) -> None:
    """The tracker is away for an hour, in which the uploader is started again: every row arrives, once and in order."""
    training = world.train()
    training.log(5)
    world.turner.settle()
    world.forget()
    with world.harness.outage():
        world.pass_time(HOUR_S / 2, training)
        world.restart()
        world.pass_time(HOUR_S / 2, training)
        tries = world.told(SinkFailed, RunParked)

        assert tries
        assert len(tries) <= HOUR_S / BACKOFF_CAP_S + 2 * FIRST_TRIES
        assert [place for place, _ in world.turner.uploader.failed.items() if place[1] == world.sink]
    world.pass_time(PARKED_S + 60, training)

    assert world.told(SinkRecovered)

    world.end(training)
    world.check(training)
    assert [event for event in world.turner.events if isinstance(event, SinkFailed) and event.sink != world.sink] == []


@pytest.mark.timeout(120)
def test_a_refusal_parks_until_its_cause_is_gone(world: World) -> None:
    """A tracker that refuses is asked seldom, and the message names the way out; once mended, every row arrives once."""
    harness = world.harness
    refused, other = world.train(), world.train(project="other", run_id="r-2", name="another")
    for training in (refused, other):
        training.log(3)
    world.turner.settle()
    world.forget()
    with harness.refusal(refused.run):
        world.pass_time(PARKED_S + 60, refused, other)
        world.restart()
        world.pass_time(PARKED_S + 60, refused, other)
        told = world.told(RunParked)

        assert told
        assert all(harness.way_out in event.reason for event in told)
        assert len([event for event in told if event.run == "grpo/r-1"]) <= 2 * 2
        if not harness.refusal_is_for_all:
            assert {event.run for event in world.told(RunParked, SinkFailed)} == {"grpo/r-1"}
            world.check(other)
    world.pass_time(PARKED_S + 60, refused, other)

    assert "grpo/r-1" in {event.run for event in world.told(SinkRecovered)}

    world.end(refused, other)
    world.check(refused)
    world.check(other)


def test_only_what_is_in_the_process_is_never_away() -> None:
    """Every kind but the two that have no tracker outside the process plays both tests."""
    assert {"console", "memory"} == {kind for kind in harness_kinds() if load_harness(kind).never_away is not None}
