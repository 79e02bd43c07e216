"""A spool, the real uploader with a clock of the test's own, a sink in trouble, and a second sink beside it."""

from pathlib import Path

from gapless_uploader.events import Event, RunParked, SinkFailed, SinkRecovered
from gapless_uploader.operations import Row
from gapless_uploader.pipeline import BACKOFF_CAP_S, PARKED_S
from gapless_uploader.sink import RunView
from gapless_uploader.sinks.memory import MemorySink
from tests.sinks.harness import T0, SinkHarness, row, view
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


def play_outage(world: World) -> None:
    """The tracker is away for an hour, in which the uploader is started again: every row arrives, once and in order."""
    training = world.train()
    training.log(5)
    world.turner.settle()
    world.forget()
    with world.harness.outage():
        training.log()
        world.turner.settle()

        assert bool(world.told(SinkFailed, RunParked)) == world.harness.open_sessions_notice

        world.pass_time(HOUR_S / 2, training)
        world.restart()
        world.pass_time(HOUR_S / 2, training)
        tries = world.told(SinkFailed, RunParked)

        assert HOUR_S / 2 / PARKED_S - 1 <= len(tries) <= HOUR_S / BACKOFF_CAP_S + 2 * FIRST_TRIES
        assert [place for place in world.turner.uploader.failed if place[1] == world.sink]
    world.pass_time(PARKED_S + 60, training)

    assert world.told(SinkRecovered)

    world.end(training)
    world.check(training)
    assert [event for event in world.turner.events if isinstance(event, SinkFailed) and event.sink != world.sink] == []
