"""Budgets: never exceeded in any window, shared fairly, heartbeats first."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless_uploader import events
from gapless_uploader.budget import (
    Bucket,
    Budget,
    Limits,
    Rate,
    live_runs_carried,
    parse_bandwidth,
    parse_rate,
)
from gapless_uploader.options import UploaderOptions
from gapless_uploader.sink import Misconfigured, Retryable
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.uploader import Inline, Uploader
from tests.uploader.spool_made import MadeRun, alive_here


class Clock:
    """A clock that moves when told, or when somebody waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def most_in_a_window(times: list[float], window_s: float) -> int:
    """The largest number of `times`, which rise, in a window that ends with one of them, its begin left out."""
    most, first = 0, 0
    for last, t in enumerate(times):
        while times[first] <= t - window_s:
            first += 1
        most = max(most, last - first + 1)
    return most


def jain(shares: list[int]) -> float:
    """Jain's fairness index: 1 when all are equal."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


@pytest.mark.parametrize(
    ("text", "rate"),
    [("200/min", Rate(200, 60)), (" 5 / s", Rate(5, 1)), ("1000/h", Rate(1000, 3600)), ("1.5/sec", Rate(1.5, 1))],
)
def test_rate_is_read(text: str, rate: Rate):
    """A rate is a number and a time."""
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["200", "200/fortnight", "0/min", "-5/s", "fast", "0.5/s", ""])
def test_odd_rate_is_refused(text: str):
    """Anything else is refused with an example."""
    with pytest.raises(Misconfigured, match="200/min"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1MB/s", Rate(1e6, 1)), ("512KiB/s", Rate(524288, 1)), ("2gb/h", Rate(2e9, 3600)), ("100 B/s", Rate(100, 1))],
)
def test_bandwidth_is_read(text: str, rate: Rate):
    """A bandwidth is an amount of bytes and a time; 1 kB is 1000 bytes, 1 KiB 1024."""
    assert parse_bandwidth(text) == rate


@pytest.mark.parametrize("text", ["1MB", "1Mb/fortnight", "0MB/s", "MB/s", "1 m/s"])
def test_odd_bandwidth_is_refused(text: str):
    """Anything else is refused with an example."""
    with pytest.raises(Misconfigured, match="1MB/s"):
        parse_bandwidth(text)


@given(
    amount=st.integers(1, 300),
    period=st.sampled_from([1.0, 60.0, 3600.0]),
    idles=st.lists(st.floats(0, 2), min_size=1, max_size=8),
)
def test_no_window_sees_more_than_the_rate(amount: int, period: float, idles: list[float]):
    """However requests and idle times come, no window of the period holds more than the amount."""
    bucket, now, times = Bucket(Rate(amount, period)), 0.0, []
    for idle in idles:
        now += idle * period
        for _ in range(amount // 2 + 3):
            now += bucket.wait_s(now)
            bucket.take(now)
            times.append(now)

    assert most_in_a_window(times, period) <= amount


def test_rate_is_used():
    """Somebody always busy gets at least nine tenths of the rate."""
    bucket, now, count = Bucket(Rate(200, 60)), 0.0, 0
    while now < 600.0:
        now += bucket.wait_s(now)
        bucket.take(now)
        count += 1

    assert count >= 0.9 * 2000


def test_bandwidth_is_kept():
    """Requests of any size leave the mean at the bandwidth, within a tenth."""
    clock = Clock()
    budget = Budget(Limits(bandwidth=Rate(1e6, 1)), clock, clock.pause)
    began, sent = clock.now, 0
    for size in [10, 300_000, 4_000_000, 50_000] * 25:
        budget.meter(size)
        sent += size

    assert sent / (clock.now - began) == pytest.approx(1e6, rel=0.1)


def test_meter_waits_for_its_turn():
    """A sink that counts its own requests is held back before each of them."""
    clock, times = Clock(), []
    budget = Budget(Limits(Rate(3, 60)), clock, clock.pause)
    for _ in range(12):
        budget.meter()
        times.append(clock.now)

    assert most_in_a_window(times, 60.0) <= 3


def test_a_reserved_step_is_served_before_others():
    """The request that an admitted step holds in reserve is not given to another step's second request."""
    clock = Clock()
    budget = Budget(Limits(Rate(1, 60)), clock, clock.pause)
    assert budget.wait_s(clock.now) == 0.0
    budget.reserve()

    assert budget.wait_s(clock.now) > 0.0
    with budget.step():
        budget.meter()
    assert clock.now == 1000.0, "the reserve was there"


def test_unused_reserve_comes_back():
    """A step that sends nothing leaves its request to the next one."""
    clock = Clock()
    budget = Budget(Limits(Rate(1, 60)), clock, clock.pause)
    for _ in range(5):
        assert budget.wait_s(clock.now) == 0.0
        budget.reserve()
        with budget.step():
            pass


def test_closing_wakes_a_waiting_request():
    """When the uploader stops, a request that waits for its budget is given up as retryable."""
    budget = Budget(Limits(Rate(1, 3600)))
    budget.meter()
    caught: list[BaseException] = []

    def second() -> None:
        try:
            budget.meter()
        except Retryable as error:
            caught.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    budget.close()
    thread.join(timeout=30)

    assert len(caught) == 1


def test_live_runs_that_a_budget_carries():
    """200 requests a minute carry the heartbeats of 100 runs that beat every 30 s."""
    assert live_runs_carried(Limits(Rate(200, 60)), 30.0) == 100
    assert live_runs_carried(Limits(Rate(200, 60)), None) is None
    assert live_runs_carried(Limits(), 30.0) is None


class Times:
    """An uploader of many runs into a memory sink, and when each run was written."""

    def __init__(self, folder: Path, runs: int, rows: int, limits: Limits, **can: object) -> None:
        self.clock = Clock()
        self.events: list[events.Event] = []
        self.made = [MadeRun(folder / "spool", f"r-{i:03d}", **alive_here()).rows(0, rows) for i in range(runs)]
        self.sink = MemorySink(**{"settles_intents": False, **can})
        self.requests: list[tuple[float, str]] = []
        self.sink.before_write = lambda batch: self.requests.append((self.clock.now, batch.run.run_id))
        self.uploader = Uploader(
            [folder / "spool"],
            [self.sink],
            folder / "state",
            UploaderOptions(budgets={"memory": limits}, slow_scan_s=3600.0),
            self.events.append,
            Inline(),
            clock=self.clock,
        )
        self.uploader.start()

    def run_for(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            busy = self.uploader.turn(self.clock.now)
            self.clock.now += 1e-6 if busy else max(1e-6, min(self.uploader.next_due(self.clock.now), 1.0))


def test_runs_share_a_budget_fairly(tmp_path: Path):
    """40 runs under 200 requests a minute: never more in any minute, and Jain's index of their shares above 0.9."""
    times = Times(tmp_path, runs=40, rows=60, limits=Limits(Rate(200, 60)), max_operations=1, max_bytes=64)
    times.run_for(150.0)
    shares = [sum(run == made.key[1] for _, run in times.requests) for made in times.made]

    assert most_in_a_window([t for t, _ in times.requests], 60.0) <= 200
    assert len(times.requests) >= 0.85 * 200 * 150 / 60
    assert jain(shares) >= 0.9
    times.uploader.stop()


def test_heartbeats_go_first(tmp_path: Path):
    """While runs have far more rows than the budget takes, every live run's heartbeat still comes in time."""
    times = Times(
        tmp_path, runs=4, rows=4000, limits=Limits(Rate(60, 60)), max_operations=1, max_bytes=64, heartbeat_s=20.0
    )
    quiet = MadeRun(tmp_path / "spool", "quiet", **alive_here()).rows(0, 1)
    times.run_for(200.0)
    beats = times.sink.runs["grpo/quiet"].heartbeats

    assert len(beats) >= 6
    assert max(later - earlier for earlier, later in pairwise(beats)) <= 30.0
    assert quiet.seq == 2
    times.uploader.stop()


def test_too_small_a_budget_is_said(tmp_path: Path):
    """When the live runs' heartbeats alone exceed the budget, that is said once, with the number it carries."""
    times = Times(tmp_path, runs=12, rows=1, limits=Limits(Rate(10, 60)), heartbeat_s=30.0)
    times.run_for(60.0)
    told = [event for event in times.events if isinstance(event, events.BudgetTooSmall)]

    assert told == [events.BudgetTooSmall("memory:", 12, 5)]
    times.uploader.stop()


def test_a_step_without_a_meter_counts_its_bytes(tmp_path: Path):
    """Under a bandwidth, a sink that does not count itself is charged the bytes of spool that its steps read."""
    limits = Limits(bandwidth=Rate(10_000, 1))
    times = Times(tmp_path, runs=3, rows=400, limits=limits, max_operations=20, max_bytes=2000)
    size = sum(made.path.stat().st_size for made in times.made)
    began = times.clock.now
    while len({run for run, held in times.sink.runs.items() if len(held.rows) == 400}) < 3:
        times.run_for(0.5)

    assert size / 10_000 * 0.8 <= times.clock.now - began <= size / 10_000 * 1.5 + 1.0
    times.uploader.stop()


def test_a_sink_with_a_meter_is_given_the_budget(tmp_path: Path):
    """A sink that has `meter` calls it itself; its steps are not counted besides."""

    class Counting(MemorySink):
        meter = staticmethod(lambda num_bytes=0: None)

    MadeRun(tmp_path / "spool", **alive_here()).rows(0, 3)
    sink, clock = Counting(), Clock()
    metered: list[float] = []
    uploader = Uploader(
        [tmp_path / "spool"],
        [sink],
        tmp_path / "state",
        UploaderOptions(budgets={"memory": Limits(Rate(2, 3600))}),
        executor=Inline(),
        clock=clock,
    )
    sink.before_write = lambda batch: (sink.meter(), metered.append(clock.now))
    uploader.start()
    uploader.turn(clock.now)

    assert metered == [1000.0]
    assert uploader.lanes["memory:"].budget is not None
    assert uploader.lanes["memory:"].budget.wait_s(clock.now) > 0.0
    uploader.stop()
