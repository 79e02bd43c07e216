"""The words of the tracker, on one rank: names, scopes, errors, exports of one key."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gapless import stats_tracker
from gapless.stats_tracker import DistributedStatsTracker, ReduceType

MASK = torch.tensor([True, False, True])
VALUE = torch.tensor([1.0, 100.0, 3.0])


def recorded(tracker: DistributedStatsTracker, reduce_type: ReduceType | None = None) -> None:
    tracker.denominator(n=MASK)
    tracker.stat("n", reduce_type, x=VALUE)


# Names


@pytest.mark.parametrize(
    ("reduce_type", "rows"),
    [
        (None, {"x/avg": 2.0, "x/min": 1.0, "x/max": 3.0}),
        (ReduceType.AVG_MIN_MAX, {"x/avg": 2.0, "x/min": 1.0, "x/max": 3.0}),
        (ReduceType.AVG, {"x": 2.0}),
        (ReduceType.SUM, {"x": 4.0}),
        (ReduceType.MIN, {"x": 1.0}),
        (ReduceType.MAX, {"x": 3.0}),
    ],
)
def test_a_reduce_type_decides_the_rows_of_a_key(
    tracker: DistributedStatsTracker, reduce_type: ReduceType | None, rows: dict[str, float]
) -> None:
    """The default gives three rows, every other type one; the denominator has its sum, as a float."""
    recorded(tracker, reduce_type)

    result = tracker.export()

    assert {"n": 2.0, **rows} == result
    assert {float} == {type(value) for value in result.values()}


def test_a_scalar_is_the_mean_of_its_recordings_with_their_number(tracker: DistributedStatsTracker) -> None:
    """Everything that float() takes is a scalar; the number of recordings is an int."""
    for value in (
        1,
        2.5,
        True,
        np.float32(0.5),
        np.int64(4),
        torch.tensor(3.0),
        torch.tensor([2], dtype=torch.int32),
        "2",
    ):
        tracker.scalar(x=value)

    result = tracker.export()

    assert result == {"x": 2.0, "x__count": 8}
    assert int is type(result["x__count"])


def test_several_recordings_of_one_key_accumulate(tracker: DistributedStatsTracker) -> None:
    """Turns add up, also with other shapes, and also twice in one turn."""
    recorded(tracker)
    tracker.denominator(n=torch.ones(2, 2, dtype=torch.bool))
    tracker.stat("n", x=torch.full((2, 2), 4.0))
    tracker.stat("n", x=torch.full((2, 2), 6.0))

    assert tracker.export() == {"n": 6.0, "x/avg": 4.4, "x/min": 1.0, "x/max": 6.0}


def test_a_key_that_counted_nothing_has_no_row(tracker: DistributedStatsTracker) -> None:
    """Whatever its reduce type. The denominator itself is a true 0."""
    tracker.denominator(n=torch.zeros(3, dtype=torch.bool))
    for reduce_type in (t for t in ReduceType if t is not ReduceType.SCALAR):
        tracker.stat("n", reduce_type, **{reduce_type.name: VALUE})

    assert tracker.export() == {"n": 0.0}


def test_the_latest_reduce_type_of_a_key_holds(tracker: DistributedStatsTracker) -> None:
    """As at AReaL: nothing is lost, only the rows are others."""
    recorded(tracker, ReduceType.SUM)
    recorded(tracker, ReduceType.MAX)

    assert tracker.export() == {"n": 4.0, "x": 3.0}


def test_keys_may_be_called_like_parameters(tracker: DistributedStatsTracker) -> None:
    """`self` is an ordinary key."""
    tracker.denominator(self=MASK)
    tracker.stat("self", key=VALUE)
    tracker.scalar(self_=1)

    assert {"self", "key/avg", "key/min", "key/max", "self_", "self___count"} == tracker.export().keys()


def test_rows_come_sorted_by_key(tracker: DistributedStatsTracker) -> None:
    """So tables are the same on every rank and in every step."""
    tracker.scalar(b=1, a=1)

    assert list(tracker.export()) == ["a", "a__count", "b", "b__count"]


# Exports


def test_an_export_resets_unless_told_otherwise(tracker: DistributedStatsTracker) -> None:
    """With reset=False the same rows come again; with it the next export is empty and masks are forgotten."""
    recorded(tracker)

    assert tracker.export(reset=False) == tracker.export()
    assert tracker.export() == {}
    with pytest.raises(ValueError, match="Denominator `n` does not exist"):
        tracker.stat("n", x=VALUE)


def test_one_key_can_be_exported_by_itself(tracker: DistributedStatsTracker) -> None:
    """It leaves the others, its denominator too; inside a scope it means the scope's key."""
    with tracker.scope("a"):
        recorded(tracker)
        tracker.scalar(y=1)

        assert tracker.export(key="x", reset=False) == {"a/x/avg": 2.0, "a/x/min": 1.0, "a/x/max": 3.0}
        assert tracker.export(key="x") == {"a/x/avg": 2.0, "a/x/min": 1.0, "a/x/max": 3.0}
        assert tracker.export(key="x") == {}
        assert tracker.export(key="never") == {}
        tracker.stat("n", ReduceType.SUM, x=VALUE)

    assert tracker.export() == {"a/n": 2.0, "a/x": 4.0, "a/y": 1.0, "a/y__count": 1}


def test_a_denominator_can_be_exported_before_its_statistics(tracker: DistributedStatsTracker) -> None:
    """A statistic has counted already; it needs its denominator no more."""
    recorded(tracker, ReduceType.AVG)

    assert tracker.export(key="n") == {"n": 2.0}
    assert tracker.export() == {"x": 2.0}


def test_keys_that_come_and_go_do_not_pile_up(tracker: DistributedStatsTracker) -> None:
    """A new key every step, as with names that hold a step, leaves no memory behind."""
    for step in range(900):
        tracker.scalar(**{f"step_{step}": step})

        assert {f"step_{step}": step, f"step_{step}__count": 1} == tracker.export()

    assert len(tracker.source.registry.entries) < 300
    assert len(tracker._exporter._alone._layout) < 300


# Scopes and names


def test_scopes_nest(tracker: DistributedStatsTracker) -> None:
    """Outermost first, without the slashes at a name's ends; a denominator is looked for in its own scope."""
    scope = tracker.scope("/a/")
    with scope, tracker.scope("b"), scope:
        recorded(tracker, ReduceType.SUM)
    with scope:
        tracker.scalar(y=1)
    with pytest.raises(ValueError, match="Denominator `n` does not exist"):
        tracker.stat("n", x=VALUE)

    assert tracker.export() == {"a/b/a/n": 2.0, "a/b/a/x": 4.0, "a/y": 1.0, "a/y__count": 1}


def test_a_scope_ends_with_its_block_also_on_an_exception(tracker: DistributedStatsTracker) -> None:
    """So does what disable_scope puts aside."""

    def fail() -> None:
        with tracker.disable_scope(), tracker.scope("b"):
            tracker.scalar(x=1)
            raise RuntimeError("inside")

    with tracker.scope("a"):
        with pytest.raises(RuntimeError, match="inside"):
            fail()
        tracker.scalar(y=1)
    tracker.scalar(z=1)

    assert {"b/x", "a/y", "z"} == {name for name in tracker.export() if "__count" not in name}


def test_a_wrapped_function_keeps_its_name_and_docstring(tracker: DistributedStatsTracker) -> None:
    """And gives back what it gives back."""

    @tracker.scope_func_wrapper("a")
    def loss(x: float) -> float:
        """The loss."""
        tracker.scalar(x=x)
        return 2 * x

    assert loss(2.0) == 4.0
    assert (loss.__name__, loss.__doc__) == ("loss", "The loss.")
    assert tracker.export() == {"a/x": 2.0, "a/x__count": 1}


def test_scopes_belong_to_an_async_task(tracker: DistributedStatsTracker) -> None:
    """Wrapped coroutines that take turns do not see each other's scopes."""

    async def main() -> None:
        both_inside = asyncio.Barrier(2)

        async def record(name: str) -> None:
            """Records."""

            @tracker.scope_func_wrapper(name)
            async def inside() -> None:
                """Inside."""
                await both_inside.wait()
                tracker.scalar(x=1)
                await both_inside.wait()
                with tracker.scope("deep"):
                    await both_inside.wait()
                    tracker.scalar(x=1)

            assert (inside.__name__, inside.__doc__) == ("inside", "Inside.")
            await inside()

        with tracker.scope("outer"):
            await asyncio.gather(record("a"), record("b"))

    asyncio.run(main())

    names = {name for name in tracker.export() if "__count" not in name}
    assert {"outer/a/x", "outer/b/x", "outer/a/deep/x", "outer/b/deep/x"} == names


def test_scopes_belong_to_a_thread(tracker: DistributedStatsTracker) -> None:
    """A thread starts without the scopes of the one that started it."""
    with tracker.scope("a"):
        thread = threading.Thread(target=lambda: tracker.scalar(x=1))
        thread.start()
        thread.join()

    assert tracker.export() == {"x": 1.0, "x__count": 1}


def test_timings_are_seconds_under_timeperf(tracker: DistributedStatsTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scope, and also when the block fails."""
    clock = iter([10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr("gapless._stats.tracker.time.perf_counter", lambda: next(clock))
    with tracker.scope("a"):
        with tracker.record_timing("step"):
            pass
        with pytest.raises(RuntimeError, match="inside"), tracker.record_timing("step"):
            raise RuntimeError("inside")

    assert tracker.export() == {"timeperf/step": 3.0, "timeperf/step__count": 2}


def test_a_tracker_by_name_puts_its_name_first() -> None:
    """`get` gives the same tracker again; export_all exports all of them, the default one too."""
    stats_tracker.export_all()
    stats_tracker.get("words/").scalar(x=1)
    with stats_tracker.get("words/").disable_scope():
        stats_tracker.get("words/").scalar(free=1)
    stats_tracker.scalar(y=2)

    assert stats_tracker.get("words/") is stats_tracker.get("words/")
    assert stats_tracker.get() is stats_tracker.DEFAULT_TRACKER
    rows = stats_tracker.export_all(reset=False)
    assert {k: v for k, v in rows.items() if "__count" not in k} == {"words/x": 1.0, "free": 1.0, "y": 2.0}
    assert rows == stats_tracker.export_all()
    assert stats_tracker.export_all() == {}


def test_trackers_with_the_same_row_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """The tracker whose name sorts last wins, as at AReaL."""
    with stats_tracker.scope("twice"):
        stats_tracker.scalar(x=1)
    stats_tracker.get("twice").scalar(x=2)

    with caplog.at_level(logging.WARNING, "gapless.stats"):
        assert stats_tracker.export_all()["twice/x"] == 2.0
    assert "twice/x" in caplog.text


def test_the_module_functions_record_into_the_default_tracker() -> None:
    """All of them."""
    with stats_tracker.scope("module"), stats_tracker.record_timing("module"):
        stats_tracker.denominator(n=MASK)
        stats_tracker.stat(denominator="n", reduce_type=ReduceType.MAX, x=VALUE)
        with stats_tracker.disable_scope():
            stats_tracker.scope_func_wrapper("module")(lambda: stats_tracker.scalar(y=5))()

    rows = stats_tracker.export()
    assert rows.pop("timeperf/module") >= 0
    assert rows == {
        "module/n": 2.0,
        "module/x": 3.0,
        "module/y": 5.0,
        "module/y__count": 1,
        "timeperf/module__count": 1,
    }


# Errors


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(3), "must be a pytorch bool tensor: torch.float32"),
        ([True], "must be a pytorch bool tensor: <class 'list'>"),
        (torch.zeros(0, dtype=torch.bool), "must be non-empty"),
    ],
)
def test_a_wrong_mask_is_refused(tracker: DistributedStatsTracker, mask: object, message: str) -> None:
    """With ValueError, and none of the call's masks is recorded."""
    with pytest.raises(ValueError, match=f"`bad` {message}"):
        tracker.denominator(good=MASK, bad=mask)

    assert tracker.export() == {}


@pytest.mark.parametrize(
    ("value", "reduce_type", "error", "message"),
    [
        (torch.ones(3, dtype=torch.int64), None, ValueError, "`bad` should be a pytorch float tensor: torch.int64"),
        (1.0, None, ValueError, "`bad` should be a pytorch float tensor: <class 'float'>"),
        (torch.zeros(0), None, ValueError, "`bad` should be non-empty"),
        (torch.ones(2), None, AssertionError, r"torch.Size\(\[3\]\), torch.Size\(\[2\]\)"),
        (torch.ones(1, 3), None, AssertionError, "torch.Size"),
        (torch.ones(3, device="meta"), None, ValueError, "`bad` is on meta, `n` on cpu"),
        (VALUE, ReduceType.SCALAR, ValueError, "Cannot use the scalar reduce type for a tensor"),
        (VALUE, "avg", ValueError, "reduce_type must be a ReduceType enum"),
    ],
)
def test_a_wrong_value_is_refused(
    tracker: DistributedStatsTracker, value: Tensor, reduce_type: ReduceType, error: type[Exception], message: str
) -> None:
    """With AReaL's kind of error, and none of the call's values is recorded."""
    tracker.denominator(n=MASK)
    with pytest.raises(error, match=message):
        tracker.stat("n", reduce_type, good=VALUE, bad=value)

    assert tracker.export() == {"n": 2.0}


def test_a_denominator_must_be_one(tracker: DistributedStatsTracker) -> None:
    """An unknown key is none, and neither is a scalar."""
    tracker.scalar(lr=1)
    with pytest.raises(ValueError, match="Denominator `n` does not exist"):
        tracker.stat("n", x=VALUE)
    with pytest.raises(ValueError, match="`lr` is no denominator"):
        tracker.stat("lr", x=VALUE)


def test_a_key_cannot_be_two_things_between_two_exports(tracker: DistributedStatsTracker) -> None:
    """A scalar, a statistic and a denominator are different things; after a reset a key may be another."""
    recorded(tracker)
    tracker.scalar(y=1)
    with pytest.raises(ValueError, match="`x` was recorded as reduce type AVG_MIN_MAX and cannot be a scalar too"):
        tracker.scalar(x=1)
    with pytest.raises(ValueError, match="`y` was recorded as a scalar and cannot be a denominator too"):
        tracker.denominator(y=MASK)
    with pytest.raises(ValueError, match="`n` was recorded as a denominator and cannot be reduce type SUM too"):
        tracker.stat("n", ReduceType.SUM, n=VALUE)
    tracker.export()
    tracker.scalar(x=1)

    assert tracker.export() == {"x": 1.0, "x__count": 1}


@pytest.mark.parametrize(("value", "error"), [("one", ValueError), (None, TypeError), (torch.ones(2), ValueError)])
def test_a_scalar_that_is_no_number_is_refused(
    tracker: DistributedStatsTracker, value: object, error: type[Exception]
) -> None:
    """With what float() raises, and nothing of the call is recorded."""
    with pytest.raises(error):
        tracker.scalar(good=1, bad=value)

    assert tracker.export() == {}


def test_all_denominators_first_is_warned_about(tracker: DistributedStatsTracker) -> None:
    """A statistic counts by its denominator's latest recording, so turns that are apart cannot be told apart."""
    tracker.denominator(n=MASK)
    tracker.denominator(n=MASK)
    tracker.stat("n", x=VALUE)
    with pytest.warns(UserWarning, match="`x` was recorded twice after the latest of several of `n`") as caught:
        tracker.stat("n", x=VALUE)

    assert caught[0].filename == __file__


def test_a_turn_without_a_statistic_is_no_ones_fault(tracker: DistributedStatsTracker) -> None:
    """A statistic that skips a turn counts by the mask of the turn in which it was recorded."""
    tracker.denominator(n=MASK)
    tracker.denominator(n=~MASK)
    tracker.stat("n", ReduceType.SUM, x=VALUE)

    assert tracker.export() == {"n": 3.0, "x": 100.0}


def test_tensors_without_values_are_refused_where_they_are_recorded() -> None:
    """A meta tensor has a shape only; at the export the other ranks would wait for this one."""
    tracker = DistributedStatsTracker()
    tracker.denominator(mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="meta device"):
        tracker.scalar(x=torch.empty((), device="meta"))
    with pytest.raises(ValueError, match="meta device"):
        tracker.denominator(other=torch.empty(2, dtype=torch.bool, device="meta"))
    with pytest.raises(ValueError, match="`loss` is on meta, `mask` on cpu"):
        tracker.stat(denominator="mask", loss=torch.empty(2, device="meta"))

    assert tracker.export() == {"mask": 2.0}


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "x", True, timedelta(0)])
def test_a_timeout_that_is_none_is_refused_before_anybody_waits(timeout: Any) -> None:
    """Recorded values stay."""
    tracker = DistributedStatsTracker()
    tracker.scalar(x=1.0)
    with pytest.raises(ValueError, match="say seconds above 0"):
        tracker.export(timeout=timeout)

    assert tracker.export(timeout=5)["x"] == 1.0
