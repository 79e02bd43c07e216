"""Sets of integers that stay small when the integers come in order: seqs read, steps seen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator


class Intervals:
    """A set of integers as sorted, disjoint, closed intervals. Not thread safe."""

    __slots__ = ("_firsts", "_lasts")

    def __init__(self, pairs: list[list[int]] | None = None) -> None:
        self._firsts = [first for first, _ in pairs or []]
        self._lasts = [last for _, last in pairs or []]

    def __contains__(self, value: int) -> bool:
        at = bisect_right(self._firsts, value) - 1
        return at >= 0 and value <= self._lasts[at]

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def add(self, value: int) -> bool:
        """Put `value` in; whether it was new."""
        lasts = self._lasts
        if lasts and value == lasts[-1] + 1:
            lasts[-1] = value
            return True
        at = bisect_right(self._firsts, value) - 1
        if at >= 0 and value <= lasts[at]:
            return False
        joins_left = at >= 0 and lasts[at] + 1 == value
        joins_right = at + 1 < len(lasts) and self._firsts[at + 1] == value + 1
        if joins_left and joins_right:
            lasts[at] = lasts.pop(at + 1)
            self._firsts.pop(at + 1)
        elif joins_left:
            lasts[at] = value
        elif joins_right:
            self._firsts[at + 1] = value
        else:
            self._firsts.insert(at + 1, value)
            lasts.insert(at + 1, value)
        return True

    def follow_on(self, values: list[int]) -> bool:
        """Put all `values` in if they are the integers behind the largest member, in order; whether they were."""
        lasts = self._lasts
        if not lasts or not values or values != list(range(lasts[-1] + 1, lasts[-1] + 1 + len(values))):
            return False
        lasts[-1] = values[-1]
        return True

    @property
    def last(self) -> int:
        """The largest member; 0 when empty."""
        return self._lasts[-1] if self._lasts else 0

    @property
    def complete_to(self) -> int:
        """The largest n such that 1..n are all members."""
        return self._lasts[0] if self._firsts and self._firsts[0] == 1 else 0

    def holes(self) -> list[tuple[int, int]]:
        """The closed intervals missing between 1 and `last`."""
        found = []
        expected = 1
        for first, last in zip(self._firsts, self._lasts, strict=True):
            if first > expected:
                found.append((expected, first - 1))
            expected = last + 1
        return found

    def to_json(self) -> list[list[int]]:
        """Pairs that the constructor takes."""
        return [[first, last] for first, last in zip(self._firsts, self._lasts, strict=True)]


class StepSet:
    """A set of steps as sorted runs of one stride: every 10th step is one run. Not thread safe."""

    __slots__ = ("_firsts", "_runs")

    def __init__(self, runs: list[list[int]] | None = None) -> None:
        self._runs = [list(run) for run in runs or []]
        """[first, last, stride], disjoint in range and sorted."""
        self._firsts = [run[0] for run in self._runs]

    def __contains__(self, step: int) -> bool:
        at = bisect_right(self._firsts, step) - 1
        if at < 0:
            return False
        first, last, stride = self._runs[at]
        return step <= last and (step - first) % stride == 0

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def first(self) -> int:
        """The smallest step; -1 when empty."""
        return self._firsts[0] if self._firsts else -1

    @property
    def last(self) -> int:
        """The largest step; -1 when empty."""
        return self._runs[-1][1] if self._runs else -1

    def add(self, step: int) -> None:
        """Put `step` in."""
        if self._runs:
            tail = self._runs[-1]
            if step > tail[1]:
                if tail[0] == tail[1]:
                    tail[1], tail[2] = step, step - tail[0]
                elif step - tail[1] == tail[2]:
                    tail[1] = step
                else:
                    self._insert(len(self._runs), [step, step, 1])
                return
        at = bisect_right(self._firsts, step) - 1
        if at < 0:
            self._insert(0, [step, step, 1])
            return
        first, last, stride = self._runs[at]
        if step > last:
            if step - last == stride and first != last:
                self._runs[at][1] = step
            else:
                self._insert(at + 1, [step, step, 1])
        elif (step - first) % stride:
            below = first + (step - first) // stride * stride
            self._runs[at][1] = below
            self._insert(at + 1, [step, step, 1])
            self._insert(at + 2, [below + stride, last, stride])

    def add_rising(self, steps: list[int]) -> None:
        """Put `steps` in, at least one, which rise and are all above the largest member."""
        rest = steps[2:]
        for step in steps[:2]:
            self.add(step)
        if rest:
            tail = self._runs[-1]
            even = range(tail[1] + tail[2], rest[-1] + 1, tail[2])
            if len(even) == len(rest) and rest == list(even):
                tail[1] = rest[-1]
                return
        for step in rest:
            self.add(step)

    def drop_above(self, limit: int) -> int | None:
        """Take out every step above `limit`; the smallest one taken out."""
        smallest = None
        while self._runs and self._runs[-1][1] > limit:
            first, _, stride = self._runs[-1]
            if first > limit:
                smallest = first
                self._runs.pop()
                self._firsts.pop()
                continue
            kept = first + (limit - first) // stride * stride
            smallest = kept + stride
            self._runs[-1][1] = kept
        return smallest

    def from_step(self, step: int) -> Iterator[int]:
        """The members at `step` and above, rising."""
        for first, last, stride in self._runs:
            if last >= step:
                start = first if first >= step else first + -(-(step - first) // stride) * stride
                yield from range(start, last + 1, stride)

    @property
    def num_runs(self) -> int:
        """How many runs of one stride it is kept as."""
        return len(self._runs)

    def to_json(self) -> list[list[int]]:
        """Runs that the constructor takes."""
        return [list(run) for run in self._runs]

    def _insert(self, at: int, run: list[int]) -> None:
        self._runs.insert(at, run)
        self._firsts.insert(at, run[0])
