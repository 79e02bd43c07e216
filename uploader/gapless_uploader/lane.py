"""One sink's share of the uploader: its runs in turn, its workers, its budget, its waits.

Runs wait in two queues, those whose heartbeat is due before the others; each run gets one step a round. A run that
failed waits for its own time, and all wait while the sink is parked or its budget is spent. Only the turn touches a
lane; its workers touch only the pipelines that it lent them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from gapless_uploader import collector
from gapless_uploader.agenda import Agenda
from gapless_uploader.budget import Budget
from gapless_uploader.lease import Held
from gapless_uploader.pipeline import Pipeline
from gapless_uploader.sink import Sink, prepared
from gapless_uploader.spool import RunKey
from gapless_uploader.steps import Files, Outcome
from gapless_uploader.workers import Workers

_CRASH_CAP_S = 60.0


class Lane:
    """The runs of one sink. Not thread safe."""

    def __init__(
        self,
        sink: Sink,
        size: int,
        call_timeout_s: float,
        budget: Budget | None = None,
        executor: Executor | None = None,
        on_step_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.sink = sink
        self.name = f"{sink.kind}:{sink.target}"
        self.budget = budget
        self.workers: Workers[RunKey, Outcome] = Workers(
            size, call_timeout_s, executor=executor, name=f"sink {self.name}", on_end=on_step_end
        )
        self.pipelines: dict[RunKey, Pipeline] = {}
        self.not_before = 0.0
        """Monotonic seconds before which the whole sink rests."""
        self._queue: deque[RunKey] = deque()
        self._urgent: deque[RunKey] = deque()
        self._queued: set[RunKey] = set()
        self._waiting: Agenda[RunKey] = Agenda()
        self._budget_due: float | None = None
        self._crashes: dict[RunKey, int] = {}
        self._is_prepared = False
        self._meters_itself = budget is not None and hasattr(sink, "meter")
        if self._meters_itself and budget is not None:
            sink.meter = budget.meter  # type: ignore[attr-defined]

    def enqueue(self, key: RunKey, urgent: bool = False) -> None:
        """The run has something to do; `urgent` puts it before the others."""
        if key not in self._queued and key not in self.workers:
            self._queued.add(key)
            (self._urgent if urgent else self._queue).append(key)

    def wait(self, key: RunKey, until: float) -> None:
        """The run has nothing to do before `until`, unless it changes."""
        self._waiting.set(key, until)

    def wake(self, now: float) -> None:
        """Put runs whose wait is over into the queue."""
        while (key := self._waiting.pop(now)) is not None:
            self.enqueue(key)

    @property
    def busy(self) -> bool:
        """Whether a step is on its way, or could start at once."""
        if len(self.workers) > self.workers.stuck:
            return True
        return bool(self._queued) and self.workers.has_room and self._budget_due is None

    def next_due(self) -> float:
        """When a wait is over, monotonic seconds."""
        due = self._waiting.next_due()
        return due if self._budget_due is None or not self._queued else min(due, self._budget_due)

    def next_key(self, now: float) -> RunKey | None:
        """The run whose turn it is; None when no step may start now."""
        self._budget_due = None
        if not self._queued or not self.workers.has_room:
            return None
        if self.budget is not None:
            wait = self.budget.wait_s(now)
            if wait > 0.0:
                self._budget_due = now + wait
                return None
        key = (self._urgent or self._queue).popleft()
        self._queued.discard(key)
        return key

    def start(self, key: RunKey, files: Files, now: float, check: Callable[[], None]) -> None:
        """Run one step of the run in a worker; `check` raises there when it must not be."""
        if not self._is_prepared:
            prepared(self.sink)
            self._is_prepared = True
        if self.budget is not None:
            self.budget.reserve()
        self.workers.start(key, now, self._swept_step, self.pipelines[key], files, now, check)

    def crashed(self, key: RunKey) -> float:
        """The sink raised what no sink may: forget its pipeline, as a kill would. Seconds until the next try."""
        self.pipelines.pop(key, None)
        self._crashes[key] = self._crashes.get(key, 0) + 1
        return float(min(_CRASH_CAP_S, 2.0 ** self._crashes[key]))

    def succeeded(self, key: RunKey) -> None:
        """A step went well: a crash after it is the first again."""
        self._crashes.pop(key, None)

    def drop(self, key: RunKey) -> None:
        """Nothing of the run's pipeline is needed any more."""
        self._crashes.pop(key, None)
        self._waiting.drop(key)
        pipeline = self.pipelines.pop(key, None)
        if pipeline is not None:
            pipeline.close()

    def _swept_step(self, pipeline: Pipeline, files: Files, now: float, check: Callable[[], None]) -> Outcome:
        outcome = self._step(pipeline, files, now, check)
        if outcome.failed or outcome.parked or outcome.crashed:
            collector.sweep()
        return outcome

    def _step(self, pipeline: Pipeline, files: Files, now: float, check: Callable[[], None]) -> Outcome:
        budget = self.budget
        try:
            if budget is None:
                check()
                return pipeline.step(files, now)
            with budget.step():
                check()
                if not self._meters_itself:
                    budget.meter()
                outcome = pipeline.step(files, now)
                if not self._meters_itself:
                    budget.charge(outcome.num_bytes)
                return outcome
        except Held as error:  # the state is somebody else's now: nothing more is put into it
            return Outcome(crashed=str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a vendor raises stays with this run and sink
            why = f"{type(error).__name__}: {error}"
            return Outcome(crashed=why, progress=pipeline.troubled(why))
