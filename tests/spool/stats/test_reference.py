"""Random recordings against a plain reference in Python floats, on one rank and on two, three and four."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless._stats import reduce
from gapless.stats_tracker import DistributedStatsTracker, ReduceType
from tests.spool.stats.ranks import Ranks

pytestmark = pytest.mark.xdist_group("gloo")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (2, 1, 3)]
# One kind to a key, on every rank.
TYPES = {
    "a": ReduceType.AVG_MIN_MAX,
    "b": ReduceType.AVG,
    "c": ReduceType.SUM,
    "d": ReduceType.MIN,
    "e": ReduceType.MAX,
}
SCALARS = ["s", "t"]

odd = st.sampled_from([math.nan, math.inf, -math.inf])
# What bf16 and fp16 can hold too, so that the reference sees what was recorded.
tame = st.integers(-256, 256).map(lambda number: number / 4)
wild = st.floats(-(2.0**100), 2.0**100, width=32)


@dataclass
class MicroBatch:
    """One turn of one rank: a mask, statistics that count by it, and scalars."""

    shape: tuple[int, ...]
    mask: list[bool]
    values: dict[str, tuple[torch.dtype, list[float]]] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


@st.composite
def micro_batches(draw: st.DrawFn, odds: bool) -> MicroBatch:
    shape = draw(st.sampled_from(SHAPES))
    size = math.prod(shape)
    batch = MicroBatch(shape, draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    for key in draw(st.lists(st.sampled_from(sorted(TYPES)), unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        number = tame if dtype in (torch.bfloat16, torch.float16) else wild
        number = st.one_of(number, odd) if odds else number
        batch.values[key] = (dtype, draw(st.lists(number, min_size=size, max_size=size)))
    for key in draw(st.lists(st.sampled_from(SCALARS), unique=True)):
        batch.scalars[key] = draw(st.one_of(wild, odd) if odds else wild)
    return batch


def recordings(num_ranks: int) -> st.SearchStrategy[list[list[MicroBatch]]]:
    return st.booleans().flatmap(
        lambda odds: st.lists(st.lists(micro_batches(odds), max_size=4), min_size=num_ranks, max_size=num_ranks)
    )


def record(tracker: DistributedStatsTracker, batches: list[MicroBatch]) -> None:
    for batch in batches:
        tracker.denominator(n=torch.tensor(batch.mask).view(batch.shape))
        for key, (dtype, values) in batch.values.items():
            tracker.stat("n", TYPES[key], **{key: torch.tensor(values, dtype=dtype).view(batch.shape)})
        tracker.scalar(**batch.scalars)


def exported(group: dist.ProcessGroup, batches: list[MicroBatch], max_gathered_bytes: int) -> dict[str, float]:
    before, reduce._MAX_GATHERED_BYTES = reduce._MAX_GATHERED_BYTES, max_gathered_bytes
    tracker = DistributedStatsTracker()
    record(tracker, batches)
    try:
        return tracker.export(reduce_group=group)
    finally:
        reduce._MAX_GATHERED_BYTES = before


def total(values: list[float]) -> float:
    """The exact sum, by the rules of arithmetic with infinities."""
    odd = [value for value in values if not math.isfinite(value)]
    return sum(odd) if odd else math.fsum(values)


def expected_rows(batches: list[MicroBatch]) -> tuple[dict[str, float], dict[str, float]]:
    """The rows of all recordings of all ranks, and how far float64 sums may be from them."""
    rows: dict[str, float] = {}
    slack: dict[str, float] = {}
    if batches:
        rows["n"] = float(sum(sum(batch.mask) for batch in batches))
    for key, kind in TYPES.items():
        kept = [
            value
            for batch in batches
            for value, is_counted in zip(batch.values.get(key, (None, []))[1], batch.mask, strict=False)
            if is_counted
        ]
        if not kept:
            continue
        is_nan = any(map(math.isnan, kept))
        least, most = (math.nan, math.nan) if is_nan else (min(kept), max(kept))
        average = total(kept) / len(kept)
        rows |= {
            ReduceType.AVG_MIN_MAX: {f"{key}/avg": average, f"{key}/min": least, f"{key}/max": most},
            ReduceType.AVG: {key: average},
            ReduceType.SUM: {key: total(kept)},
            ReduceType.MIN: {key: least},
            ReduceType.MAX: {key: most},
        }[kind]
        slack |= dict.fromkeys((key, f"{key}/avg"), _slack(kept))
    for key in SCALARS:
        numbers = [batch.scalars[key] for batch in batches if key in batch.scalars]
        if numbers:
            rows |= {key: total(numbers) / len(numbers), f"{key}__count": len(numbers)}
            slack[key] = _slack(numbers)
    return rows, slack


def _slack(values: list[float]) -> float:
    return 1e-15 * len(values) * sum(abs(value) for value in values if math.isfinite(value))


def assert_same(result: dict[str, float], batches: list[MicroBatch]) -> None:
    rows, slack = expected_rows(batches)
    assert result.keys() == rows.keys()
    for name, value in rows.items():
        assert result[name] == pytest.approx(value, rel=1e-14, abs=slack.get(name, 0.0), nan_ok=True), name


@given(per_rank=recordings(1))
@settings(max_examples=150)
def test_one_rank_agrees_with_the_reference(per_rank: list[list[MicroBatch]]) -> None:
    """Any masks, shapes, types and numbers of recordings, twice in a row from one tracker."""
    tracker = DistributedStatsTracker()
    for _ in range(2):
        record(tracker, per_rank[0])
        assert_same(tracker.export(), per_rank[0])


def assert_ranks_agree(ranks: Ranks, num_ranks: int, num_examples: int) -> None:
    @given(per_rank=recordings(num_ranks), max_gathered_bytes=st.sampled_from([0, 1 << 18]))
    @settings(max_examples=num_examples)
    def agree(per_rank: list[list[MicroBatch]], max_gathered_bytes: int) -> None:
        results = ranks(exported, per_rank, max_gathered_bytes=max_gathered_bytes)

        for result in results:
            assert result == pytest.approx(results[0], rel=0, abs=0, nan_ok=True)
        assert_same(results[0], [batch for batches in per_rank for batch in batches])

    agree()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_agree_with_the_reference_and_with_each_other(ranks: Ranks, num_ranks: int) -> None:
    """By gather and by reduction, whatever keys each rank has."""
    assert_ranks_agree(ranks, num_ranks, num_examples=40)


@pytest.mark.torture
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_agree_over_many_more_examples(ranks: Ranks, num_ranks: int) -> None:
    """The same, at length."""
    assert_ranks_agree(ranks, num_ranks, num_examples=1500)


@given(per_rank=recordings(1), data=st.data())
@settings(max_examples=60)
def test_the_order_of_recordings_does_not_matter(per_rank: list[list[MicroBatch]], data: Any) -> None:
    """The same micro-batches in another order are the same rows."""
    batches = data.draw(st.permutations(per_rank[0]))
    tracker = DistributedStatsTracker()
    record(tracker, batches)

    assert_same(tracker.export(), per_rank[0])


def test_the_order_of_ranks_does_not_matter(ranks: Ranks) -> None:
    """The same parts on other ranks are the same rows."""

    @given(per_rank=recordings(3), data=st.data())
    @settings(max_examples=20)
    def agree(per_rank: list[list[MicroBatch]], data: Any) -> None:
        shuffled = data.draw(st.permutations(per_rank))
        results = ranks(exported, shuffled, max_gathered_bytes=0)

        assert_same(results[2], [batch for batches in per_rank for batch in batches])

    agree()
