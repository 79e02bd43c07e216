"""The uploader: every run under some paths to every sink, a turn at a time.

1. `turn(now)` scans where something is due, collects what workers finished, commits all their progress with one sync,
   and hands out the next steps, one run after the other.
2. A step of a pipeline (run, sink) runs in a worker of its sink's lane. A sink that is slow, dead or hanging keeps its
   own steps waiting and nobody else's.
3. A position moves only when the state has it on disk. While the state cannot be written, what was acknowledged is
   kept and committed again, and its run waits.

`turn` never sleeps and is called from one thread; the loop around it is `watch.py`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from pathlib import Path

from gapless_uploader import events
from gapless_uploader.budget import Budget, Limits, live_runs_carried
from gapless_uploader.events import Event
from gapless_uploader.lag import Lag
from gapless_uploader.lane import Lane
from gapless_uploader.lease import Held, Lease, is_alive
from gapless_uploader.ledger import Ledger, Place, name_of
from gapless_uploader.options import UploaderOptions
from gapless_uploader.pipeline import Pipeline, is_settled
from gapless_uploader.routes import Filters, Routes
from gapless_uploader.sink import Sink
from gapless_uploader.spool import RunKey, Spool, SpoolRun
from gapless_uploader.state import State
from gapless_uploader.steps import Files, Outcome, PipelineOptions

WRITERS_S = 5.0
"""How often the writers of live runs are looked at."""
_HEARTBEATS_S = 1.0
_COMMIT_AGAIN_S = 5.0
STOP_S = 5.0
_STOP_PATIENCE_S = 2.0
"""At the end a call that has not returned for so long does not keep the others from closing."""


class Inline(Executor):
    """Runs what is submitted at once: for tests, and for a replay that wants one thread."""

    def submit(  # type: ignore[override]
        self, fn: Callable[..., Outcome], /, *args: object, **kwargs: object
    ) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Uploader:
    """Follows runs. Not thread safe; its workers touch only pipelines that it lent them."""

    def __init__(
        self,
        paths: Iterable[Path],
        sinks: Iterable[Sink],
        state_folder: Path,
        options: UploaderOptions | None = None,
        listener: Callable[[Event], None] = lambda event: None,  # noqa: ARG005
        executor: Executor | None = None,
        jitter: Callable[[], float] = random.random,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        offered: Iterable[Sink] = (),
    ) -> None:
        """`clock` tells the time `turn` is called with, in seconds. `offered`: sinks for runs that ask for them."""
        self.options = options or UploaderOptions()
        self.spool = Spool(list(paths), self.options.slow_scan_s)
        by_wish = list(offered)
        self.sinks = {f"{sink.kind}:{sink.target}": sink for sink in [*sinks, *by_wish]}
        self.state = State(state_folder, self.spool.paths, lambda path, why: listener(events.StateProblem(path, why)))
        self.lease = Lease(self.state.folder, lambda why: listener(events.LeaseSlow(why)), self.spool.paths)
        self.ledger = Ledger(self.state, listener)
        self._listen = listener
        self._jitter = jitter
        self._wall = wall
        self.on_step_end: Callable[[], None] = lambda: None
        """Called from a worker's thread when a step of it has ended: the next turn has something to collect."""
        self.lanes = {name: self._lane(sink, executor, clock) for name, sink in self.sinks.items()}
        self._routes = Routes(
            self.lanes,
            [f"{sink.kind}:{sink.target}" for sink in by_wish],
            Filters(self.options.projects, self.options.runs),
            listener,
        )
        self._lag = Lag(self.spool.runs, self.state)
        self._announced_problems: dict[Path, str] = {}
        self._known: set[RunKey] = set()
        self._writers_due = 0.0
        self._heartbeats_due = 0.0
        self._uncommitted: list[tuple[Lane, RunKey, Outcome]] = []
        self._commit_not_before = 0.0
        self._too_small: dict[str, int] = {}
        self._stuck: set[str] = set()
        self._lost_lease = False
        self._stopped = False

    @property
    def rows(self) -> int:
        """Rows acknowledged since the start, all sinks together."""
        return self.ledger.rows

    @property
    def failed(self) -> dict[Place, str]:
        """(run, sink) -> why it is behind or parked."""
        return self.ledger.failed

    @property
    def parked(self) -> set[Place]:
        """Of those, the ones that wait for somebody to act."""
        return self.ledger.parked

    @property
    def found_damage(self) -> bool:
        """Whether a record was found damaged or rejected since the start."""
        return self.ledger.found_damage

    @property
    def num_runs(self) -> int:
        """Runs that were found and are wanted."""
        return len(self._known)

    def start(self) -> None:
        """Take the lease and read the state. Raises `Held` and OSError."""
        self.lease.acquire()
        self.state.load()
        self.state.open()
        self._listen(
            events.Started(", ".join(map(str, self.spool.paths)), ", ".join(self.sinks), str(self.state.folder))
        )

    def turn(self, now: float) -> bool:
        """Do what is due at `now`, monotonic seconds; whether anything is on its way. Raises `Held` and OSError."""
        try:
            self.lease.keep(now)
        except Held:
            self._lost_lease = True
            raise
        for key in sorted(self.spool.scan(now)):
            self._note(key, now)
        self._tell_problems()
        self._collect(now)
        self._wake(now)
        self._look_at_stuck(now)
        self._hand_out(now)
        if self._collect(now):
            self._hand_out(now)
        return any(lane.busy for lane in self.lanes.values())

    def next_due(self, now: float) -> float:
        """Seconds until the next turn has something to do, if no event comes."""
        due = [self.spool.next_due(), *(lane.next_due() for lane in self.lanes.values())]
        if self._uncommitted:
            due.append(self._commit_not_before)
        return max(0.0, min(due) - now)

    def behind(self) -> list[Place]:
        """Runs and sinks with something left to do, parked and failing ones included."""
        left = []
        for name, lane in self.lanes.items():
            for key, pipeline in lane.pipelines.items():
                run = self.spool.runs.get(key)
                failing = key in lane.workers or (key, name) in self.failed
                if run is not None and (failing or not pipeline.idle(self._files(run))):
                    left.append((key, name))
        return left

    def is_over(self) -> bool:
        """Whether every run that was seen has ended, and every sink knows all of it."""
        if any(not self._is_crashed(self.spool.runs[key]) for key in self._routes.undecided):
            return False
        return bool(self._known) and not any(lane.pipelines for lane in self.lanes.values())

    def lag(self) -> Mapping[Place, int]:
        """(run, sink) -> bytes of the spool that the sink has not acknowledged yet, torn tails included."""
        return self._lag.all()

    def bytes_total_and_done(self) -> tuple[int, int]:
        """Bytes of the wanted runs times sinks, and how many of them are uploaded."""
        total = sum(self.spool.runs[key].size * len(self._routes.lanes_of(key)) for key in self._known)
        return total, total - sum(self.lag().values())

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Settle and close every session, and give the lease up; never much longer than `timeout_s`.

        What hangs is left behind: its rows are offered again by the next uploader. An uploader that lost its lease
        sends and commits nothing more. May be called twice.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._lost_lease:
            self._listen(events.Stopped(self.rows))
            return
        began = time.monotonic()
        for lane in self.lanes.values():
            if lane.budget is not None:
                lane.budget.close()
        closed: set[tuple[str, RunKey]] = set()
        while (now := time.monotonic()) - began < timeout_s:
            self._collect(now, again=False)
            for lane in self.lanes.values():
                lane.workers.overdue(now, _STOP_PATIENCE_S)
                self._close_some(lane, now, closed)
            if not any(len(lane.workers) for lane in self.lanes.values()):
                break
            time.sleep(0.005)
        self._collect(time.monotonic() + _COMMIT_AGAIN_S, again=False)
        self.state.close()
        for lane in self.lanes.values():
            lane.workers.shutdown()
        self.lease.release()
        self._listen(events.Stopped(self.rows))

    # a turn's parts

    def _lane(self, sink: Sink, executor: Executor | None, clock: Callable[[], float]) -> Lane:
        limits = self.options.budgets.get(sink.kind)
        budget = Budget(limits, clock) if limits is not None and limits != Limits() else None
        return Lane(
            sink, self.options.workers, self.options.call_timeout_s, budget, executor, lambda: self.on_step_end()
        )

    def _note(self, key: RunKey, now: float) -> None:
        run = self.spool.runs[key]
        if not self._routes.is_wanted(run):
            return
        files = self._files(run)
        lanes = self._routes.choose(run, now)
        for lane in lanes:
            if key not in lane.pipelines:
                if is_settled(self.state.progress.get((*key, lane.name), {}), files):
                    continue
                self._make(lane, key)
            self._lag.changed(key, lane.name)
            if not self._drop_if_settled(lane, key, files):
                lane.enqueue(key)
        is_followed = any(key in lane.pipelines for lane in self.lanes.values())
        if not is_followed and lanes:
            self.spool.retire(key)
        if key not in self._known:
            self._known.add(key)
            if is_followed:
                self._listen(events.RunFound(name_of(key)))

    def _wake(self, now: float) -> None:
        """Steps whose wait is over, heartbeats that are due, runs whose writer went."""
        look_at_writers = now >= self._writers_due
        look_at_heartbeats = now >= self._heartbeats_due
        for lane in self.lanes.values():
            lane.wake(now)
            if look_at_heartbeats:
                for key, pipeline in lane.pipelines.items():
                    if pipeline.heartbeat_due(now):
                        lane.enqueue(key, urgent=True)
            if look_at_writers:
                self._let_rest(lane, now)
                self._look_at_writers(lane)
                self._look_at_budget(lane)
        if look_at_writers:
            self._writers_due = now + WRITERS_S
        if look_at_heartbeats:
            self._heartbeats_due = now + _HEARTBEATS_S

    def _let_rest(self, lane: Lane, now: float) -> None:
        """Quiet runs hold no handles."""
        for key, pipeline in lane.pipelines.items():
            if key not in lane.workers:
                try:
                    pipeline.rest(now)
                except Exception as error:  # noqa: BLE001 - what a vendor raises at its close concerns this run alone
                    self._listen(events.SinkFailed(name_of(key), lane.name, str(error), 0.0))

    def _look_at_writers(self, lane: Lane) -> None:
        for key in lane.pipelines:
            run = self.spool.runs.get(key)
            if run is not None and self._is_crashed(run):
                lane.enqueue(key)

    def _look_at_budget(self, lane: Lane) -> None:
        if lane.budget is None:
            return
        live = len(lane.pipelines)
        carried = live_runs_carried(lane.budget.limits, lane.sink.capabilities.heartbeat_s)
        if carried is None or live <= carried:
            self._too_small.pop(lane.name, None)
        elif live > self._too_small.get(lane.name, 0):
            self._too_small[lane.name] = live
            self._listen(events.BudgetTooSmall(lane.name, live, carried))

    def _look_at_stuck(self, now: float) -> None:
        for name, lane in self.lanes.items():
            for key in lane.workers.overdue(now):
                self.failed[(key, name)] = f"no answer for {lane.workers.call_timeout_s:.0f} s"
                self._listen(events.CallStuck(name_of(key), name, lane.workers.call_timeout_s))
            if lane.workers.parked:
                for key in lane.pipelines:
                    self.failed.setdefault((key, name), f"{lane.workers.stuck} calls of the sink have no answer")
                if name not in self._stuck:
                    self._stuck.add(name)
                    self._listen(events.SinkStuck(name, lane.workers.stuck))
            elif name in self._stuck:
                self._stuck.discard(name)
                for key in lane.pipelines:
                    if key not in lane.workers:
                        self.failed.pop((key, name), None)
                        lane.enqueue(key)

    def _hand_out(self, now: float) -> None:
        if self._uncommitted:
            return  # the state cannot be written: whatever a sink acknowledged now could come twice
        for lane in self.lanes.values():
            for _ in range(len(lane.pipelines) + 1):
                key = lane.next_key(now)
                if key is None:
                    break
                self._start_step(lane, key, now)

    def _start_step(self, lane: Lane, key: RunKey, now: float) -> None:
        run = self.spool.runs.get(key)
        if run is None:
            return
        pipeline = lane.pipelines.get(key) or self._make(lane, key)
        not_before = max(pipeline.not_before, lane.not_before)
        if now < not_before:
            lane.wait(key, not_before)
            return
        files = self._files(run)
        if self._drop_if_settled(lane, key, files) or (pipeline.idle(files) and not pipeline.heartbeat_due(now)):
            return
        lane.start(key, files, now, self.lease.check)

    def _make(self, lane: Lane, key: RunKey) -> Pipeline:
        full = (*key, lane.name)
        pipeline = Pipeline(
            key,
            lane.sink,
            self.state.progress.get(full),
            snapshot=lambda: self.state.load_snapshot(full),
            save_snapshot=lambda snapshot: self.state.save_snapshot(full, snapshot),
            options=PipelineOptions(self.options.on_rewind, self.options.grace_s),
            jitter=self._jitter,
        )
        lane.pipelines[key] = pipeline
        return pipeline

    def _collect(self, now: float, again: bool = True) -> bool:
        """Take what workers finished, commit it, tell it; `again` queues runs that have more to do."""
        for lane in self.lanes.values():
            self._uncommitted.extend((lane, key, outcome) for key, outcome in lane.workers.take())
        if not self._uncommitted or now < self._commit_not_before:
            return False
        try:
            self.state.commit(outcome.progress for *_, outcome in self._uncommitted if outcome.progress is not None)
        except OSError as error:
            self._commit_not_before = now + _COMMIT_AGAIN_S
            self._listen(events.StateProblem(str(self.state.folder), f"{error.strerror or error}: not saved yet"))
            return False
        outcomes, self._uncommitted = self._uncommitted, []
        for lane, key, outcome in outcomes:
            self._lag.changed(key, lane.name)
            self._settle(lane, key, outcome, now)
            run = self.spool.runs.get(key)
            if not again or outcome.crashed is not None or run is None:
                continue
            files = self._files(run)
            if outcome.more or outcome.new_state:
                lane.enqueue(key)
            elif not self._drop_if_settled(lane, key, files):
                waits = outcome.retry_in_s is not None or outcome.look_again_s is not None
                if not waits and not lane.pipelines[key].idle(files):
                    lane.enqueue(key)  # what the scan saw while the step ran was not there when it began
        return True

    def _drop_if_settled(self, lane: Lane, key: RunKey, files: Files) -> bool:
        """A run that is over and wholly uploaded costs nothing from then on."""
        if key in lane.workers or not lane.pipelines[key].settled(files):
            return False
        try:
            lane.drop(key)
        except Exception as error:  # noqa: BLE001 - the run is over and all of it acknowledged, whatever its close says
            self._listen(events.SinkFailed(name_of(key), lane.name, str(error), 0.0))
        self._lag.forget(key, lane.name)
        if not any(key in other.pipelines for other in self.lanes.values()):
            self.spool.retire(key)
        return True

    def _close_some(self, lane: Lane, now: float, closed: set[tuple[str, RunKey]]) -> None:
        for key, pipeline in lane.pipelines.items():
            if not lane.workers.has_room:
                return
            if key not in lane.workers and (lane.name, key) not in closed:
                closed.add((lane.name, key))
                lane.workers.start(key, now, _close, pipeline)

    def _settle(self, lane: Lane, key: RunKey, outcome: Outcome, now: float) -> None:
        """What a step's outcome means for the next one."""
        wait = outcome.retry_in_s if outcome.retry_in_s is not None else outcome.look_again_s
        if outcome.crashed is not None:
            wait = outcome.retry_in_s = lane.crashed(key)
            self._make(lane, key)
        elif outcome.failed is None and outcome.parked is None:
            lane.succeeded(key)
        if outcome.parked_sink:
            lane.not_before = now + (outcome.retry_in_s or 0.0)
        if wait is not None:
            lane.wait(key, now + wait)
        try:
            self.ledger.note(key, lane.name, outcome)
        except OSError as error:
            self._listen(
                events.StateProblem(str(self.state.folder), f"a dead letter is lost: {error.strerror or error}")
            )

    def _tell_problems(self) -> None:
        for path, reason in self.spool.problems.items():
            if self._announced_problems.get(path) != reason:
                self._announced_problems[path] = reason
                self._listen(events.SpoolProblem(str(path), reason))

    def _files(self, run: SpoolRun) -> Files:
        return Files(dict(run.attempts), run.paths(), run.sizes(), self._is_crashed(run))

    def _is_crashed(self, run: SpoolRun) -> bool:
        """No finish is known of here: whether somebody still writes the newest attempt."""
        if not run.attempts:
            return False
        header = max(run.attempts.values(), key=lambda h: (h.writer == "main", h.attempt, h.created))
        alive = is_alive(header.host, header.pid, header.boot_id)
        if alive is not None:
            return not alive
        return self._wall() - run.newest_mtime > self.options.crashed_after_s


def _close(pipeline: Pipeline) -> Outcome:
    try:
        return Outcome(progress=pipeline.close())
    except Exception as error:  # noqa: BLE001 - whatever a vendor raises at the end, the others are closed
        return Outcome(failed=f"close: {error}", retry_in_s=0.0)
