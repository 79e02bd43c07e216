"""A tracker that is away for an hour, and one that refuses for good, played over every kind of sink there is.

The real uploader runs with a clock of the test's own and a second sink beside the one in trouble. Each harness takes
its own tracker away: a server stops listening, a folder or a database is moved away, a port is taken.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless_uploader.events import RunParked, SinkFailed, SinkRecovered
from gapless_uploader.pipeline import PARKED_S
from tests.sinks.harness import SinkHarness, harness_kinds, load_harness
from tests.sinks.outage import World, play_outage


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
    play_outage(world)


@pytest.mark.timeout(120)
def test_a_refusal_parks_until_its_cause_is_gone(world: World) -> None:
    """A tracker that refuses is asked seldom, the message names the way out; once mended, every row arrives once."""
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
