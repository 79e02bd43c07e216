"""The numbers of one rank: what counts, how exactly, at what cost."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless._stats.layout import Layout
from gapless._stats.pack import Agreement
from gapless.stats_tracker import DistributedStatsTracker, ReduceType

NAN, INF = math.nan, math.inf
_WAITS = ("item", "tolist", "cpu", "numpy", "to", "nonzero", "__bool__", "__float__", "__int__", "__index__")
_VIEWS = {"aten.detach", "aten.split_with_sizes", "aten.slice", "aten.view", "aten.reshape", "aten.select"}


class Kernels(TorchDispatchMode):
    """Lists the operations that would be a kernel on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if name not in _VIEWS:
            self.names.append(name)
        return func(*args, **kwargs or {})


@contextmanager
def no_synchronisation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, everything that would wait for a device raises."""
    with monkeypatch.context() as patch:
        for name in (
            "item",
            "tolist",
            "cpu",
            "numpy",
            "__bool__",
            "__float__",
            "__int__",
            "__index__",
            "nonzero",
            "to",
        ):
            patch.setattr(torch.Tensor, name, _refuse(name))
        yield


def _refuse(name: str) -> Any:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError(f"{name} waits for the device")

    return refuse


def rows(values: list[float], mask: list[bool], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.tensor(mask))
    tracker.stat("n", x=torch.tensor(values, dtype=dtype))
    tracker.stat("n", ReduceType.SUM, s=torch.tensor(values, dtype=dtype))
    return tracker.export()


# What counts


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
def test_a_masked_out_value_has_no_effect(odd: float) -> None:
    """Whatever it is."""
    assert rows([odd, 2.0, -3.0], [False, True, True]) == {
        "n": 2.0,
        "x/avg": -0.5,
        "x/min": -3.0,
        "x/max": 2.0,
        "s": -1.0,
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([NAN, 2.0], {"x/avg": NAN, "x/min": NAN, "x/max": NAN, "s": NAN}),
        ([NAN, INF], {"x/avg": NAN, "x/min": NAN, "x/max": NAN, "s": NAN}),
        ([INF, 2.0], {"x/avg": INF, "x/min": 2.0, "x/max": INF, "s": INF}),
        ([-INF, 2.0], {"x/avg": -INF, "x/min": -INF, "x/max": 2.0, "s": -INF}),
        ([-INF, INF], {"x/avg": NAN, "x/min": -INF, "x/max": INF, "s": NAN}),
        ([INF, INF], {"x/avg": INF, "x/min": INF, "x/max": INF, "s": INF}),
    ],
)
def test_a_counted_value_shows(values: list[float], expected: dict[str, float]) -> None:
    """NaN shows in every row, an infinity where arithmetic says, and a row is never left out for it."""
    result = rows([*values, 7.0], [True, True, False])

    assert result.pop("n") == 2.0
    assert result == pytest.approx(expected, nan_ok=True)


def test_a_nan_stays_through_later_recordings(tracker: DistributedStatsTracker) -> None:
    """Until the reset; the next export does not know of it."""
    for value in (1.0, NAN, 3.0):
        tracker.denominator(n=torch.tensor([True]))
        tracker.stat("n", ReduceType.MAX, x=torch.tensor([value]))

    assert math.isnan(tracker.export()["x"])
    tracker.denominator(n=torch.tensor([True]))
    tracker.stat("n", ReduceType.MAX, x=torch.tensor([2.0]))
    assert tracker.export() == {"n": 1.0, "x": 2.0}


def test_shapes_of_all_kinds_count(tracker: DistributedStatsTracker) -> None:
    """No dimension, several, a transposed view, a stride."""
    base = torch.arange(24.0).view(2, 3, 4)
    for value in (torch.tensor(24.0), base, base.transpose(0, 2), base[:, ::2, ::3]):
        tracker.denominator(n=value > 2)
        tracker.stat("n", x=value)

    kept = [24.0, *range(3, 24), *range(3, 24), 3, 8, 11, 12, 15, 20, 23]
    assert tracker.export() == {
        "n": len(kept),
        "x/avg": pytest.approx(sum(kept) / len(kept)),
        "x/min": 3.0,
        "x/max": 24.0,
    }


def test_a_mask_is_copied(tracker: DistributedStatsTracker) -> None:
    """What the program does with its mask afterwards changes nothing."""
    mask = torch.tensor([True, False])
    tracker.denominator(n=mask)
    mask.fill_(False)
    tracker.stat("n", ReduceType.SUM, x=torch.tensor([1.0, 2.0]))

    assert tracker.export() == {"n": 1.0, "x": 1.0}


def test_many_keys_are_kept_apart(tracker: DistributedStatsTracker) -> None:
    """Also when the state has to grow, in the middle of a turn."""
    tracker.denominator(n=torch.tensor([True]))
    for at in range(300):
        tracker.stat("n", ReduceType.MIN, **{f"x{at}": torch.tensor([float(at)])})
        tracker.scalar(**{f"y{at}": at, f"z{at}": torch.tensor(float(at))})

    for at in range(300):
        tracker.stat("n", ReduceType.MIN, **{f"x{at}": torch.tensor([at - 0.5 if at % 2 else at + 0.5])})

    result = tracker.export()
    assert [result[f"x{at}"] for at in range(300)] == [at - 0.5 if at % 2 else at for at in range(300)]
    assert [result[f"y{at}"] for at in range(300)] == list(range(300))
    assert [result[f"z{at}"] for at in range(300)] == list(range(300))


def test_a_scalar_may_be_a_number_and_a_tensor(tracker: DistributedStatsTracker) -> None:
    """Both count for the same key."""
    tracker.scalar(x=1.0)
    tracker.scalar(x=torch.tensor(4.0, requires_grad=True))

    assert tracker.export() == {"x": 2.5, "x__count": 2}


# How exactly


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_type_is_widened_before_it_is_added(tracker: DistributedStatsTracker, dtype: torch.dtype) -> None:
    """A million ones are a million, though bf16 ends at 256."""
    ones = torch.ones(1_000_000, dtype=dtype)
    tracker.denominator(n=ones > 0)
    tracker.stat("n", ReduceType.SUM, total=ones)
    tracker.stat("n", x=ones)
    for _ in range(1000):
        tracker.scalar(y=torch.tensor(1.0, dtype=dtype))

    assert tracker.export() == {
        "n": 1e6, "total": 1e6, "x/avg": 1.0, "x/min": 1.0, "x/max": 1.0, "y": 1.0, "y__count": 1000
    }  # fmt: skip


def test_sums_beyond_the_reach_of_float32_are_exact(tracker: DistributedStatsTracker) -> None:
    """1e8 and a thousand ones, and float64 values, keep all their digits."""
    for value in [1e8] + [1.0] * 1000:
        tracker.denominator(n=torch.tensor([True]))
        tracker.stat("n", ReduceType.SUM, x=torch.tensor([value]))
        tracker.scalar(y=value)
    tracker.stat("n", ReduceType.MAX, z=torch.tensor([1.0 + 2**-50], dtype=torch.float64))

    result = tracker.export()
    assert (result["x"], result["n"], result["y"]) == (100001000.0, 1001.0, 100001000.0 / 1001)
    assert result["z"] == 1.0 + 2**-50


def test_counts_beyond_2_to_the_24_are_exact(tracker: DistributedStatsTracker) -> None:
    """A count goes on where float32 would stand still."""
    tracker.denominator(n=torch.ones(2**24, dtype=torch.bool))
    for _ in range(3):
        tracker.denominator(n=torch.tensor([True]))

    assert tracker.export() == {"n": 2.0**24 + 3}


# At what cost


def test_a_statistic_costs_at_most_six_kernels_and_no_wait(
    tracker: DistributedStatsTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one of them, after the first too, whatever its type."""
    mask = torch.rand(4, 5) > 0.5
    values = [torch.rand(4, 5, requires_grad=True), torch.rand(4, 5).bfloat16(), torch.rand(4, 5).double()]
    number = torch.tensor(1.0)
    tracker.denominator(n=mask)
    with no_synchronisation(monkeypatch):
        for value in values * 10:
            for reduce_type in (None, ReduceType.SUM, ReduceType.MIN):
                name = "default" if reduce_type is None else reduce_type.name
                tracker.stat("n", reduce_type, **{name: value})
                with Kernels() as kernels:
                    tracker.stat("n", reduce_type, **{name: value})
                assert len(kernels.names) <= 6, kernels.names
        with Kernels() as kernels:
            tracker.denominator(n=mask)
            tracker.scalar(lr=number)
            tracker.scalar(lr=number)
        assert len(kernels.names) <= 12, kernels.names
    tracker.scalar(plain=1.0)
    with Kernels() as kernels:
        tracker.scalar(plain=1.0)
    assert kernels.names == []


def test_an_export_costs_the_same_number_of_kernels_for_any_number_of_keys() -> None:
    """Packing is a gather per bank, not a loop over keys."""
    costs = []
    for num_keys in (5, 50):
        tracker = DistributedStatsTracker()
        for _ in range(2):
            tracker.denominator(n=torch.tensor([True]))
            tracker.stat("n", **{f"x{at}": torch.ones(1) for at in range(num_keys)})
            tracker.scalar(**{f"y{at}": 1 for at in range(num_keys)})
            with Kernels() as kernels:
                tracker.export()
        costs.append(len(kernels.names))

    assert costs[0] == costs[1]
    assert costs[0] < 30


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_does_not_grow_with_what_is_recorded(tracker: DistributedStatsTracker) -> None:
    """300 MB recorded with gradients and new masks: nothing of it is kept but the latest mask."""
    dead = []
    before = 0
    for turn in range(300):
        value = torch.full((262_144,), 1.0, requires_grad=True) * 1.0
        mask = value > 0
        dead += [weakref.ref(value), weakref.ref(mask)]
        tracker.denominator(n=mask)
        tracker.stat("n", ReduceType.SUM, x=value)
        del value, mask
        if turn == 20:
            before = _resident_bytes()

    assert _resident_bytes() - before < 20_000_000
    assert not any(reference() is not None for reference in dead)
    assert tracker.export() == {"n": 300 * 262_144.0, "x": 300 * 262_144.0}


def test_recording_works_in_any_mode_of_torch(tracker: DistributedStatsTracker) -> None:
    """Inference mode, no_grad, another default device: state made in one is used in the others."""
    for mode in (
        torch.inference_mode(),
        torch.no_grad(),
        torch.enable_grad(),
        torch.device("meta"),
        torch.inference_mode(),
    ):
        value = torch.ones(3, requires_grad=True)
        with mode:
            tracker.denominator(n=value > 0)
            tracker.stat("n", ReduceType.SUM, x=value * 2)
            tracker.scalar(y=1.0, z=value[0])
            rows = tracker.export(reset=False)
        tracker.denominator(n=value > 0)
        tracker.stat("n", ReduceType.SUM, x=value)

    assert rows == {"n": 27.0, "x": 42.0, "y": 1.0, "y__count": 5, "z": 1.0, "z__count": 5}
    assert tracker.export()["x"] == 45.0


def test_several_threads_record_and_export_without_loss(tracker: DistributedStatsTracker) -> None:
    """Four threads record, known keys and new ones, while a fifth exports: every recording is in one export."""
    num_threads, num_turns = 4, 150
    one = torch.ones(3)
    exported: list[dict[str, float]] = []
    is_over = threading.Event()

    def record(number: int) -> None:
        with tracker.scope(f"thread_{number}"):
            for turn in range(num_turns):
                # An export between denominator and statistic would forget the mask, as it should: hence the lock.
                with tracker.scope(f"new_{turn % 20}"), lock:
                    tracker.denominator(n=one > 0)
                    tracker.stat("n", ReduceType.SUM, x=one)
                with tracker.disable_scope():
                    tracker.scalar(y=1.0)

    def export() -> None:
        while not is_over.is_set():
            with lock:
                exported.append(tracker.export())
            exported.append(tracker.export(key="y"))

    lock = threading.Lock()
    threads = [threading.Thread(target=record, args=(number,)) for number in range(num_threads)]
    exporter = threading.Thread(target=export)
    for thread in (exporter, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    is_over.set()
    exporter.join()
    exported.append(tracker.export())

    assert sum(row.get("y__count", 0) for row in exported) == num_threads * num_turns
    assert sum(v for row in exported for k, v in row.items() if k.endswith("/x")) == 3 * num_threads * num_turns
    assert sum(v for row in exported for k, v in row.items() if k.endswith("/n")) == 3 * num_threads * num_turns


def test_a_key_that_is_new_in_the_middle_of_an_export_comes_in_the_next(
    tracker: DistributedStatsTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ranks agreed on is exported and reset; the new key is kept, whole."""
    original = Agreement._matrix

    def matrix_while_another_thread_records(self: Agreement, layout: Layout) -> torch.Tensor:
        tracker.scalar(late=7.0, early=5.0)
        return original(self, layout)

    tracker.scalar(early=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Agreement, "_matrix", matrix_while_another_thread_records)
        assert tracker.export() == {"early": 3.0, "early__count": 2}

    assert tracker.export() == {"late": 7.0, "late__count": 1}
