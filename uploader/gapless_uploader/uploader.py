"""The uploader: every run under some paths to every sink, a turn at a time.

1. `turn(now)` scans where something is due, collects what workers finished, commits all their progress with one sync,
   and hands out the next steps, one run after the other.
2. A step of a pipeline (run, sink) runs in a bounded pool. A sink that is slow, dead or hanging keeps its own steps
   waiting and nobody else's: each sink has its own share of the workers.
3. A position moves only when the state has it on disk.

`turn` never sleeps and is called from one thread; the loop around it is `watch.py`.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gapless_uploader import events
from gapless_uploader.events import Event
from gapless_uploader.lease import Lease, is_alive
from gapless_uploader.operations import Amend, Row
from gapless_uploader.pipeline import Files, Outcome, Pipeline, PipelineOptions
from gapless_uploader.reader import RunReader
from gapless_uploader.sink import Sink
from gapless_uploader.spool import RunKey, Spool, SpoolRun
from gapless_uploader.state import State

CRASHED_AFTER_S = 300.0
WRITERS_S = 5.0
"""How often the writers of live runs are looked at."""


@dataclass(frozen=True, slots=True)
class UploaderOptions:
    """How the uploader behaves."""

    workers: int = 4
    """Steps of one sink that run at once."""
    on_rewind: str = "new-run"
    """What becomes of rows that were uploaded and rewound: new-run, keep-first or mark."""
    crashed_after_s: float = CRASHED_AFTER_S
    """A run without a finish that has not grown for so long has crashed, when its process cannot be looked at."""
    grace_s: float = 30.0
    """How long NUL bytes inside a segment may be blocks that have not arrived."""
    projects: tuple[str, ...] = ()
    """Only projects that match one of these globs; empty means all."""
    runs: tuple[str, ...] = ()
    """Only run ids or names that match one of these globs; empty means all."""
    slow_scan_s: float = 60.0
    """The longest time between two looks at a quiet run."""


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
    ) -> None:
        self.options = options or UploaderOptions()
        self.spool = Spool(list(paths), self.options.slow_scan_s)
        self.sinks = {f"{sink.kind}:{sink.target}": sink for sink in sinks}
        self.state = State(state_folder, self.spool.paths, lambda path, why: listener(events.StateProblem(path, why)))
        self.lease = Lease(self.state.folder)
        self.rows = 0
        """Rows acknowledged since the start, all sinks together."""
        self.failed: dict[tuple[RunKey, str], str] = {}
        """(run, sink) -> why it is behind or parked."""
        self.parked: set[tuple[RunKey, str]] = set()
        """Of those, the ones that wait for somebody to act."""
        self._listen = listener
        self._jitter = jitter
        self._wall = wall
        self._pools = {
            name: executor or ThreadPoolExecutor(self.options.workers, thread_name_prefix=f"sink {name}")
            for name in self.sinks
        }
        self._pipelines: dict[tuple[RunKey, str], Pipeline] = {}
        self._queues: dict[str, deque[RunKey]] = {name: deque() for name in self.sinks}
        self._queued: set[tuple[RunKey, str]] = set()
        self._busy: dict[tuple[RunKey, str], Future[Outcome]] = {}
        self._waiting: dict[tuple[RunKey, str], float] = {}
        self._sink_not_before: dict[str, float] = {}
        self._announced_problems: dict[Path, str] = {}
        self._known: set[RunKey] = set()
        self._writers_due = 0.0
        self._rejected = 0
        self._incomplete = 0
        self._letters: set[tuple[str, int, int]] = set()

    @property
    def found_damage(self) -> bool:
        """Whether a record was found damaged, rejected, or missing at the tracker since the start."""
        return bool(self._letters) or self._rejected > 0 or self._incomplete > 0

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
        self.lease.keep(now)
        for key in self.spool.scan(now):
            self._note(key)
        self._tell_problems()
        self._collect(now)
        self._wake(now)
        self._hand_out(now)
        if self._collect(now):
            self._hand_out(now)
        return bool(self._busy) or any(self._queues.values())

    def next_due(self, now: float) -> float:
        """Seconds until the next turn has something to do, if no event comes."""
        due = [self.spool.next_due(), *self._waiting.values()]
        return max(0.0, min(due) - now)

    def behind(self) -> list[tuple[RunKey, str]]:
        """Runs and sinks with something left to do, parked and failing ones included."""
        left = []
        for (key, name), pipeline in self._pipelines.items():
            run = self.spool.runs.get(key)
            failing = (key, name) in self._busy or (key, name) in self.failed
            if run is not None and (failing or not pipeline.idle(self._files(run))):
                left.append((key, name))
        return left

    def is_over(self) -> bool:
        """Whether every run that was seen has ended, and every sink knows all of it."""
        return bool(self._known) and not self._pipelines

    def bytes_total_and_done(self) -> tuple[int, int]:
        """Bytes of the wanted runs times sinks, and how many of them are uploaded."""
        total = left = 0
        for key in self._known:
            run = self.spool.runs[key]
            sizes = run.sizes()
            for name in self.sinks:
                cursor = self.state.progress.get((*key, name), {}).get("cursor", {})
                reader = RunReader(cursor)
                reader.meet({n: h for n, h in run.attempts.items() if n in cursor})
                total += sum(size for found in sizes.values() for size in found.values())
                left += reader.behind(sizes)
        return total, total - left

    def stop(self, timeout_s: float = 10.0) -> None:
        """Wait for steps on their way, settle and close every session. Never longer than `timeout_s` or so."""
        deadline = time.monotonic() + timeout_s
        while self._busy and time.monotonic() < deadline:
            self._collect(time.monotonic())
            time.sleep(0.01)
        progress = []
        for place, pipeline in self._pipelines.items():
            if place in self._busy:
                continue
            try:
                saved = pipeline.close()
            except Exception as error:  # noqa: BLE001 - whatever a vendor raises at the end, the others are closed
                self._listen(events.SinkFailed(_name(place[0]), place[1], str(error), 0.0))
            else:
                if saved is not None:
                    progress.append(saved)
        self.state.commit(progress)
        self.state.close()
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        self.lease.release()
        self._listen(events.Stopped(self.rows))

    # a turn's parts

    def _note(self, key: RunKey) -> None:
        run = self.spool.runs[key]
        if not self._wanted(run):
            return
        if key not in self._known:
            self._known.add(key)
            self._listen(events.RunFound(_name(key)))
        for name in self.sinks:
            self._enqueue(key, name)

    def _wanted(self, run: SpoolRun) -> bool:
        project, run_id = run.key
        options = self.options
        return (
            run.unsupported is None
            and (not options.projects or any(fnmatchcase(project, glob) for glob in options.projects))
            and (not options.runs or any(fnmatchcase(run_id, glob) for glob in options.runs))
        )

    def _enqueue(self, key: RunKey, name: str) -> None:
        if (key, name) not in self._queued and (key, name) not in self._busy:
            self._queued.add((key, name))
            self._queues[name].append(key)

    def _wake(self, now: float) -> None:
        """Steps whose back-off is over, heartbeats that are due, runs whose writer went."""
        for place, due in list(self._waiting.items()):
            if now >= due:
                del self._waiting[place]
                self._enqueue(*place)
        look_at_writers = now >= self._writers_due
        if look_at_writers:
            self._writers_due = now + WRITERS_S
        for (key, name), pipeline in self._pipelines.items():
            if pipeline.heartbeat_due(now):
                self._enqueue(key, name)
            elif look_at_writers:
                run = self.spool.runs.get(key)
                if run is not None and self._is_crashed(run):
                    self._enqueue(key, name)

    def _hand_out(self, now: float) -> None:
        for name, queue in self._queues.items():
            running = sum(1 for _, busy in self._busy if busy == name)
            for _ in range(len(queue)):
                if running >= self.options.workers:
                    break
                key = queue.popleft()
                self._queued.discard((key, name))
                running += self._start_step(key, name, now)

    def _start_step(self, key: RunKey, name: str, now: float) -> bool:
        place = (key, name)
        run = self.spool.runs.get(key)
        if run is None or place in self._busy:
            return False
        pipeline = self._pipelines.get(place) or self._make(key, name)
        not_before = max(pipeline.not_before, self._sink_not_before.get(name, 0.0))
        if now < not_before:
            self._waiting[place] = not_before
            return False
        files = self._files(run)
        if pipeline.settled(files):
            pipeline.close()
            del self._pipelines[place]
            return False
        if pipeline.idle(files) and not pipeline.heartbeat_due(now):
            return False
        self._busy[place] = self._pools[name].submit(pipeline.step, files, now)
        return True

    def _make(self, key: RunKey, name: str) -> Pipeline:
        full = (*key, name)
        pipeline = Pipeline(
            key,
            self.sinks[name],
            self.state.progress.get(full),
            snapshot=lambda: self.state.load_snapshot(full),
            save_snapshot=lambda snapshot: self.state.save_snapshot(full, snapshot),
            options=PipelineOptions(self.options.on_rewind, self.options.grace_s),
            jitter=self._jitter,
        )
        self._pipelines[(key, name)] = pipeline
        return pipeline

    def _collect(self, now: float) -> bool:
        finished = [(place, future) for place, future in self._busy.items() if future.done()]
        if not finished:
            return False
        outcomes = [(place, future.result()) for place, future in finished]
        self.state.commit(outcome.progress for _, outcome in outcomes if outcome.progress is not None)
        for place, outcome in outcomes:
            del self._busy[place]
            self._tell(place, outcome, now)
            if outcome.more or outcome.new_state:
                self._enqueue(*place)
        return True

    def _tell(self, place: tuple[RunKey, str], outcome: Outcome, now: float) -> None:
        key, sink = place
        run = _name(key)
        self._letter(key, outcome)
        if outcome.rows:
            self.rows += outcome.rows
            step = outcome.progress.get("top") if outcome.progress else None
            self._listen(events.Uploaded(run, sink, outcome.rows, step))
        if outcome.new_state:
            self._listen(events.StateChanged(run, sink, outcome.new_state))
        reasons: dict[str, int] = {}
        for refusal in outcome.refused:
            reasons[refusal.reason] = reasons.get(refusal.reason, 0) + 1
        for reason, count in reasons.items():
            self._listen(events.RecordsRefused(run, sink, count, reason))
        if outcome.check is not None:
            self._incomplete += not outcome.check["ok"]
            self._listen(events.RunChecked(run, sink, outcome.check["ok"], outcome.check["text"]))
        if outcome.failed is not None:
            self.failed[place] = outcome.failed
            self.parked.discard(place)
            self._listen(events.SinkFailed(run, sink, outcome.failed, round(outcome.retry_in_s or 0.0, 2)))
        elif outcome.parked is not None:
            self.failed[place] = outcome.parked
            self.parked.add(place)
            if outcome.parked_sink:
                self._sink_not_before[sink] = now + (outcome.retry_in_s or 0.0)
            self._listen(events.RunParked(run, sink, outcome.parked))
        else:
            self.failed.pop(place, None)
            self.parked.discard(place)
            if outcome.recovered_after:
                self._listen(events.SinkRecovered(run, sink, outcome.recovered_after))
        wait = outcome.retry_in_s if outcome.retry_in_s is not None else outcome.look_again_s
        if wait is not None:
            self._waiting[place] = now + wait

    def _letter(self, key: RunKey, outcome: Outcome) -> None:
        for attempt_id, damage in outcome.damage:
            at = (attempt_id, damage.segment, damage.offset)
            if at in self._letters:
                continue  # another sink read it too
            self._letters.add(at)
            self.state.dead_letter(
                key,
                {
                    "attempt_id": attempt_id,
                    "segment": damage.segment,
                    "offset": damage.offset,
                    "length": damage.length,
                    "reason": damage.reason,
                    "bytes": damage.sample.decode("utf-8", "backslashreplace"),
                },
            )
            segment = f"{attempt_id[:8]}-{damage.segment:06d}"
            self._listen(events.DamageFound(_name(key), segment, damage.offset, damage.length, damage.reason))
        self._rejected += len(outcome.dead)
        for operation, reason in outcome.dead:
            line: dict[str, object] = {"reason": reason, "operation": type(operation).__name__}
            if isinstance(operation, Row | Amend):
                line["step"], line["keys"] = operation.step, list(operation.values)
            self.state.dead_letter(key, line)

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


def _name(key: RunKey) -> str:
    return f"{key[0]}/{key[1]}"


def default_state_folder() -> Path:
    """`$XDG_STATE_HOME/gapless`, else `~/.local/state/gapless`."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "gapless"
