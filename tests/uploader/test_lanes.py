"""The uploader's lanes: trouble of one sink, run or disk stays there."""

from __future__ import annotations

import errno
import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gapless_uploader import collector, events
from gapless_uploader import uploader as uploader_module
from gapless_uploader.operations import Row
from gapless_uploader.options import UploaderOptions
from gapless_uploader.sink import Batch, Retryable
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.uploader import Inline, Uploader
from tests.uploader.spool_made import MadeRun, alive_here


class Bench:
    """An uploader over `folder/spool` into memory sinks, on a clock of its own."""

    def __init__(self, folder: Path, *sinks: MemorySink, inline: bool = True, **options: Any) -> None:
        self.root, self.now = folder / "spool", 1000.0
        self.root.mkdir(exist_ok=True)
        self.sinks = sinks or (MemorySink(settles_intents=False),)
        self.events: list[events.Event] = []
        self.uploader = Uploader(
            [self.root],
            self.sinks,
            folder / "state",
            UploaderOptions(**options),
            self.events.append,
            Inline() if inline else None,
            jitter=lambda: 1.0,
            clock=lambda: self.now,
        )
        self.uploader.start()

    def turn(self, seconds: float = 0.0) -> bool:
        """One turn, so many seconds later."""
        self.now += seconds
        return self.uploader.turn(self.now)

    def settle(self) -> None:
        """Turn until nothing is on its way."""
        for _ in range(10_000):
            if not self.turn():
                return
        raise AssertionError("it never settles")

    def turn_until(self, true: Callable[[], bool]) -> None:
        """Turn, without moving the clock, until something in a thread has happened."""
        deadline = time.monotonic() + 60.0
        while not true():
            assert time.monotonic() < deadline, "it never happened"
            self.turn()

    def told(self, kind: type[events.Event]) -> list[events.Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def steps(self, run: str = "grpo/r-1", sink: int = 0) -> list[int | None]:
        """The step of every row operation that the sink was given, repeats included."""
        held = self.sinks[sink].runs.get(run)
        return [] if held is None else [op.step for op in held.operations if isinstance(op, Row)]


class Hang:
    """Blocks the writes of some runs until it is opened."""

    def __init__(self, *runs: str) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self._runs = runs

    def __call__(self, batch: Batch) -> None:
        if not self._runs or batch.run.run_id in self._runs:
            self.entered.release()
            assert self.gate.wait(120.0)


# calls that hang


def test_a_hanging_sink_delays_no_other(tmp_path: Path):
    """While every call of one sink hangs, another sink gets all rows of all runs."""
    hung, good = MemorySink("hung", settles_intents=False), MemorySink("good", settles_intents=False)
    hang = hung.before_write = Hang()
    for i in range(6):
        MadeRun(tmp_path / "spool", f"r-{i}").rows(0, 20)
    bench = Bench(tmp_path, hung, good, inline=False)
    bench.turn_until(lambda: all(len(bench.steps(f"grpo/r-{i}", 1)) == 20 for i in range(6)))

    assert not any(run.rows for run in hung.runs.values())
    hang.gate.set()
    bench.turn_until(lambda: all(len(bench.steps(f"grpo/r-{i}", 0)) == 20 for i in range(6)))
    bench.uploader.stop()


def test_a_hanging_run_gives_its_worker_back(tmp_path: Path):
    """A call that runs over its limit is told, and its sink's only worker goes on with the other runs."""
    sink = MemorySink(settles_intents=False)
    hang = sink.before_write = Hang("a")
    MadeRun(tmp_path / "spool", "a").rows(0, 5)
    bench = Bench(tmp_path, sink, inline=False, workers=1, call_timeout_s=300.0)
    bench.turn()
    assert hang.entered.acquire(timeout=60)
    MadeRun(tmp_path / "spool", "b").rows(0, 5)
    bench.turn(299.0)
    assert bench.steps("grpo/b") == []
    bench.turn(1.0)
    bench.turn_until(lambda: bench.steps("grpo/b") == [0, 1, 2, 3, 4])

    assert bench.told(events.CallStuck) == [events.CallStuck("grpo/a", "memory:", 300.0)]
    assert list(bench.uploader.failed.values()) == ["no answer for 300 s"]
    hang.gate.set()
    bench.turn_until(lambda: bench.steps("grpo/a") == [0, 1, 2, 3, 4])
    bench.turn_until(lambda: not bench.uploader.failed)
    bench.uploader.stop()


def test_stuck_calls_park_the_sink(tmp_path: Path):
    """When four calls of a sink are stuck it gets no more; that is told once, and one answer lets it go on."""
    sink = MemorySink(settles_intents=False)
    hang = sink.before_write = Hang()
    for i in range(9):
        MadeRun(tmp_path / "spool", f"r-{i}").rows(0, 2)
    bench = Bench(tmp_path, sink, inline=False, workers=2, call_timeout_s=10.0)
    for _ in range(8):
        bench.turn(10.0)
    told = bench.told(events.SinkStuck)

    assert told == [events.SinkStuck("memory:", 4)]
    assert len(bench.uploader.failed) == 9
    assert not bench.turn(), "nothing can be done: the loop may rest"
    hang.gate.set()
    bench.turn_until(lambda: all(bench.steps(f"grpo/r-{i}") == [0, 1] for i in range(9)))
    bench.turn_until(lambda: not bench.uploader.failed)
    bench.uploader.stop()


def test_stop_does_not_wait_for_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`stop` closes every session but those that hang, and comes back after `STOP_S`; the lease is free."""
    sink = MemorySink(settles_intents=False)
    hang = sink.before_write = Hang("hung")
    MadeRun(tmp_path / "spool", "hung", **alive_here()).rows(0, 5)
    MadeRun(tmp_path / "spool", "good", **alive_here()).rows(0, 5)
    bench = Bench(tmp_path, sink, inline=False)
    bench.turn_until(lambda: len(bench.steps("grpo/good")) == 5)
    bench.turn_until(lambda: len(bench.uploader.lanes["memory:"].workers) == 1)

    def sleep(seconds: float) -> None:
        give_up = time.monotonic() + 60.0
        while not sink.runs["grpo/good"].closed:
            assert time.monotonic() < give_up, "it is never closed"
        bench.now += seconds

    monkeypatch.setattr(uploader_module, "time", SimpleNamespace(monotonic=lambda: bench.now, sleep=sleep))
    began = bench.now
    bench.uploader.stop()

    assert bench.now - began == pytest.approx(uploader_module.STOP_S, abs=0.01)
    assert sink.runs["grpo/good"].closed == 1
    assert not (bench.uploader.state.folder / "lease.json").exists()
    hang.gate.set()


# what a sink must not raise


def test_a_bug_in_a_sink_stays_with_its_run(tmp_path: Path):
    """A sink that raises KeyError for one run fails that run alone; it is tried again, with no row lost or doubled."""
    sink = MemorySink(settles_intents=False)
    broken = True

    def bug(batch: Batch) -> None:
        if broken and batch.run.run_id == "a":
            raise KeyError("vendor")

    sink.before_write = bug
    MadeRun(tmp_path / "spool", "a").rows(0, 3)
    MadeRun(tmp_path / "spool", "b").rows(0, 3)
    bench = Bench(tmp_path, sink)
    bench.settle()

    assert bench.steps("grpo/b") == [0, 1, 2]
    assert list(bench.uploader.failed.values()) == ["KeyError: 'vendor'"]
    assert bench.told(events.SinkFailed) == [events.SinkFailed("grpo/a", "memory:", "KeyError: 'vendor'", 2.0)]
    broken = False
    bench.turn(2.1)
    bench.settle()
    assert bench.steps("grpo/a") == [0, 1, 2]
    assert not bench.uploader.failed
    bench.uploader.stop()


def test_a_sink_that_exits_does_not_end_the_uploader(tmp_path: Path):
    """A vendor that calls sys.exit costs a failure of its run."""
    sink = MemorySink(settles_intents=False)

    def leave(batch: Batch) -> None:
        raise SystemExit(3)

    sink.before_write = leave
    MadeRun(tmp_path / "spool").rows(0, 3)
    bench = Bench(tmp_path, sink)
    bench.settle()

    assert list(bench.uploader.failed.values()) == ["SystemExit: 3"]
    bench.uploader.stop()


# disks that go away


def test_rows_that_cannot_be_committed_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """While the state's disk is full nothing more is sent; then all goes on, and no row was sent twice."""
    run = MadeRun(tmp_path / "spool", **alive_here()).rows(0, 3)
    bench = Bench(tmp_path)
    bench.settle()
    run.rows(3, 3)

    def full(entries: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bench.uploader.state, "commit", full)
        bench.turn(1.1)
        run.rows(6, 3)
        for _ in range(10):
            bench.turn(1.1)
    assert bench.steps() == [0, 1, 2, 3, 4, 5]
    assert "No space left on device" in bench.told(events.StateProblem)[0].reason
    bench.turn(6.0)
    bench.settle()
    bench.turn(2.0)
    bench.settle()

    assert bench.steps() == list(range(9))
    bench.uploader.stop()


def test_a_root_that_is_away_for_ten_minutes(tmp_path: Path):
    """The spool's disk is away for ten minutes and comes back with more rows: each row arrives once."""
    runs = [MadeRun(tmp_path / "spool", f"r-{i}", **alive_here()).rows(0, 5) for i in range(3)]
    bench = Bench(tmp_path)
    bench.settle()
    away = bench.root.rename(tmp_path / "away")
    for _ in range(600):
        bench.turn(1.0)
    assert bench.told(events.SpoolProblem)
    away.rename(bench.root)
    for run in runs:
        run.rows(5, 5)
    for _ in range(5):
        bench.turn(1.0)
        bench.settle()

    assert [bench.steps(f"grpo/r-{i}") for i in range(3)] == [list(range(10))] * 3
    assert not bench.uploader.failed
    bench.uploader.stop()


def test_an_outage_in_the_middle_of_reading(tmp_path: Path):
    """The disk goes away while rows are still to be read: that is a failure to be tried again, and nothing is lost."""
    sink = MemorySink(settles_intents=False, max_operations=1000, max_bytes=500)
    MadeRun(tmp_path / "spool", **alive_here()).rows(0, 8000)
    bench = Bench(tmp_path, sink)
    bench.turn()
    away = bench.root.rename(tmp_path / "away")
    for _ in range(600):
        bench.turn(1.0)
    before = len(bench.steps())
    away.rename(bench.root)
    for _ in range(90):
        bench.turn(1.0)
        bench.settle()

    assert before < 8000
    assert bench.steps() == list(range(8000))
    bench.uploader.stop()


# runs that are over


def test_a_run_that_was_over_before_is_silent(tmp_path: Path):
    """A restart says nothing of runs that are over and wholly uploaded, and keeps no pipeline for them."""
    MadeRun(tmp_path / "spool").rows(0, 3).finish()
    first = Bench(tmp_path)
    first.settle()
    first.uploader.stop()
    second = Bench(tmp_path, *first.sinks)
    second.settle()

    assert not second.told(events.RunFound)
    assert second.uploader.is_over()
    assert not second.uploader.lanes["memory:"].pipelines
    second.uploader.stop()


def test_lag_is_what_is_left(tmp_path: Path):
    """The lag of a run that a sink has wholly is 0, and its bytes while the sink fails."""
    good, bad = MemorySink("good", settles_intents=False), MemorySink("bad", settles_intents=False)
    bad.open_failures = [OSError(errno.ECONNREFUSED, "refused")] * 99
    run = MadeRun(tmp_path / "spool", **alive_here()).rows(0, 50)
    bench = Bench(tmp_path, good, bad)
    bench.settle()

    size = run.path.stat().st_size
    assert dict(bench.uploader.lag()) == {(run.key, "memory:good"): 0, (run.key, "memory:bad"): size}
    assert bench.uploader.bytes_total_and_done() == (2 * size, size)
    bench.uploader.stop()


def test_names_choose_runs(tmp_path: Path):
    """`runs` takes globs of ids and of names; what matches neither is not uploaded."""
    for run_id, name in [("r-1", "qwen 7b"), ("r-2", "llama"), ("x-3", None)]:
        MadeRun(tmp_path / "spool", run_id, name=name).rows(0, 1)
    bench = Bench(tmp_path, runs=("qwen*", "x-*"))
    bench.settle()

    assert set(bench.sinks[0].runs) == {"grpo/r-1", "grpo/x-3"}
    bench.uploader.stop()


# memory


class Rows:
    """Stands for a batch's rows and its request."""


def test_what_a_failure_leaves_in_a_cycle_is_freed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """HTTP libraries keep an error in the frame that its traceback keeps: a hundred objects, and megabytes of rows."""
    kept: list[weakref.ref[Rows]] = []

    def fail(batch: Batch) -> None:
        rows = Rows()
        kept.append(weakref.ref(rows))
        try:
            raise ConnectionRefusedError
        except ConnectionRefusedError as error:
            itself = error
            raise Retryable("the tracker is away") from itself

    monkeypatch.setattr(collector._Sweeps, "wanted", True)
    monkeypatch.setattr(collector._Sweeps, "took", 0.0)
    bench = Bench(tmp_path)
    MadeRun(bench.root, "r-1").rows(0, 5)
    bench.sinks[0].before_write = fail
    gc.disable()
    try:
        bench.settle()
        for _ in range(3):
            bench.turn(100.0)
            monkeypatch.setattr(collector._Sweeps, "took", 0.0)
        assert len(kept) >= 3
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()


def test_sweeps_take_a_twentieth_of_the_time_at_most(monkeypatch: pytest.MonkeyPatch):
    now, swept = [100.0], []

    def collect() -> None:
        swept.append(now[0])
        now[0] += 0.01

    monkeypatch.setattr(collector, "gc", SimpleNamespace(collect=collect))
    monkeypatch.setattr(collector, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for name, value in (("wanted", True), ("ended", 0.0), ("took", 0.0)):
        monkeypatch.setattr(collector._Sweeps, name, value)
    for _ in range(1000):
        collector.sweep()
        now[0] += 0.001
    spent = 0.01 * len(swept)
    assert 0.0 < spent <= (now[0] - 100.0) / 20 + 0.01
    monkeypatch.setattr(collector._Sweeps, "wanted", False)
    now[0] += 100.0
    before = len(swept)
    collector.sweep()
    assert len(swept) == before
