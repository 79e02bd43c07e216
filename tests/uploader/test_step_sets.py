"""Steps put in many at once are kept as when they come one by one, and cost as little."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from gapless_uploader.intervals import StepSet

GAPS = st.integers(1, 3) | st.just(10) | st.integers(1, 1 << 40)


@given(st.lists(st.integers(0, 30)), st.lists(st.tuples(GAPS, st.integers(1, 5)), min_size=1, max_size=6))
def test_rising_steps_at_once_are_kept_as_one_by_one(before: list[int], gaps: list[tuple[int, int]]) -> None:
    at_once, one_by_one = StepSet(), StepSet()
    for step in before:
        at_once.add(step)
        one_by_one.add(step)
    distances = [gap for gap, times in gaps for _ in range(times)]
    steps = list(accumulate(distances, initial=at_once.last))[1:]
    at_once.add_rising(steps)
    for step in steps:
        one_by_one.add(step)
    assert at_once.to_json() == one_by_one.to_json()
    assert all(step in at_once for step in (*before, *steps))


def test_a_jump_between_even_steps_takes_no_memory() -> None:
    steps = StepSet()
    steps.add_rising([0, 1, 1 << 52, (1 << 52) + 1])
    assert steps.to_json() == [[0, 1, 1], [1 << 52, (1 << 52) + 1, 1]]
