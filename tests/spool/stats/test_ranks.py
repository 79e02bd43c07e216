"""Exports over real gloo ranks: who takes part, what travels, what is said when it goes wrong."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gapless import stats_tracker
from gapless._stats import reduce
from gapless.stats_tracker import DistributedStatsTracker, ExportError, ReduceType
from tests.spool.stats.ranks import NUM_RANKS, Ranks

pytestmark = pytest.mark.xdist_group("gloo")

Recordings = list[tuple[str, dict[str, Any]]]


def record(tracker: Any, recordings: Recordings) -> None:
    """Each of them a key, and for a scalar its value, for a statistic `values`, `mask` and a reduce type."""
    for key, how in recordings:
        if "scalar" in how:
            tracker.scalar(**{key: how["scalar"]})
            continue
        values = torch.tensor(how["values"])
        tracker.denominator(n=torch.tensor(how.get("mask", [True] * len(values))))
        tracker.stat("n", ReduceType[how.get("type", "AVG_MIN_MAX")], **{key: values})


def exported(group: dist.ProcessGroup, recordings: Recordings, **options: Any) -> dict[str, float]:
    tracker = DistributedStatsTracker()
    record(tracker, recordings)
    return tracker.export(reduce_group=group, **options)


class Collectives:
    """Stands in for torch.distributed's collectives, and lists the bytes that each was handed."""

    NAMES = ("all_reduce", "all_gather", "all_gather_object", "all_gather_single", "broadcast", "barrier", "gather")

    def __enter__(self) -> Collectives:
        self.sizes: list[int] = []
        self._originals = {name: getattr(dist, name) for name in self.NAMES if hasattr(dist, name)}
        for name, original in self._originals.items():
            setattr(dist, name, self._listing(original))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _listing(self, original: Any) -> Any:
        def listed(*args: Any, **kwargs: Any) -> Any:
            self.sizes.append(sum(value.nbytes for value in args if isinstance(value, torch.Tensor)))
            return original(*args, **kwargs)

        return listed


# Numbers


def test_ranks_may_record_different_keys_or_none(ranks: Ranks) -> None:
    """Every key is reduced over those that have it, and every rank sees the same rows."""
    a, b, c = ("a", {"values": [1.0, 2.0]}), ("b", {"values": [5.0]}), ("c", {"scalar": 3.0})
    results = ranks(exported, [[a, b], [("a", {"values": [6.0]}), c], []])

    of_a, of_b = {"a/avg": 3.0, "a/min": 1.0, "a/max": 6.0}, {"b/avg": 5.0, "b/min": 5.0, "b/max": 5.0}
    assert results[0] == {"n": 4.0, **of_a, **of_b, "c": 3.0, "c__count": 1}
    assert results[0] == results[1] == results[2]


def test_the_order_of_recording_does_not_matter(ranks: Ranks) -> None:
    """Ranks record the same keys in other orders, one of them only one."""
    a, b = ("a", {"scalar": 1.0}), ("b", {"scalar": 2.0})
    results = ranks(exported, [[a, b], [b, a], [b]])

    assert results == [{"a": 1.0, "a__count": 2, "b": 2.0, "b__count": 3}] * 3


def test_an_average_is_no_mean_of_means(ranks: Ranks) -> None:
    """One token of 10 and ninety-nine of 0 are 0.1 on average."""
    results = ranks(exported, [[("x", {"values": [10.0]})], [("x", {"values": [0.0] * 99})]])

    assert results == [{"n": 100.0, "x/avg": 0.1, "x/min": 0.0, "x/max": 10.0}] * 2


@pytest.mark.parametrize("counts", [[4, 1, 0, 7], [0, 0, 0, 0], [0, 0, 1, 0]])
def test_ranks_may_have_any_number_of_recordings(ranks: Ranks, counts: list[int]) -> None:
    """Micro-batches differ in number from rank to rank; nothing anywhere is no row."""
    results = ranks(exported, [[("x", {"scalar": float(at)}) for at in range(count)] for count in counts])

    everything = [at for count in counts for at in range(count)]
    expected = {"x": sum(everything) / len(everything), "x__count": len(everything)} if everything else {}
    assert results == [expected] * 4


def test_a_key_whose_mask_lets_nothing_through_anywhere_has_no_row(ranks: Ranks) -> None:
    """Nor does a rank that counts nothing disturb one that does."""
    nothing, something = {"values": [1.0], "mask": [False]}, {"values": [3.0], "mask": [True]}
    results = ranks(exported, [[("x", nothing), ("y", nothing)], [("x", nothing), ("y", something)]])

    assert results == [{"n": 1.0, "y/avg": 3.0, "y/min": 3.0, "y/max": 3.0}] * 2


@pytest.mark.parametrize("max_gathered_bytes", [0, 1 << 18])
@pytest.mark.parametrize("where", range(NUM_RANKS))
def test_a_nan_or_an_infinity_of_one_rank_shows_on_all(ranks: Ranks, where: int, max_gathered_bytes: int) -> None:
    """Wherever it was counted, by gather as well as by reduction; a masked-out one nowhere."""
    plain = [("x", {"values": [2.0, 3.0]}), ("y", {"values": [2.0]}), ("z", {"scalar": 1.0})]
    odd = [
        ("x", {"values": [math.nan, 3.0]}),
        ("y", {"values": [-math.inf, math.nan], "mask": [True, False]}),
        ("z", {"scalar": math.inf}),
    ]
    results = ranks(
        exported_with_limit,
        [odd if rank == where else plain for rank in range(NUM_RANKS)],
        max_gathered_bytes=max_gathered_bytes,
    )

    nan, inf = math.nan, math.inf
    expected = {"n": 12.0, "x/avg": nan, "x/min": nan, "x/max": nan, "z": inf, "z__count": 4}
    expected |= {"y/avg": -inf, "y/min": -inf, "y/max": 2.0}
    for result in results:
        assert result == pytest.approx(expected, nan_ok=True)


def exported_with_limit(
    group: dist.ProcessGroup, recordings: Recordings, max_gathered_bytes: int, **options: Any
) -> dict[str, float]:
    before, reduce._MAX_GATHERED_BYTES = reduce._MAX_GATHERED_BYTES, max_gathered_bytes
    try:
        return exported(group, recordings, **options)
    finally:
        reduce._MAX_GATHERED_BYTES = before


def maxima_sent(group: dist.ProcessGroup, recordings: Recordings) -> list[bool]:
    """Whether what went into each maximum held a NaN."""
    original, seen = dist.all_reduce, []

    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs["op"] == dist.ReduceOp.MAX:
            seen.append(bool(tensor.isnan().any()))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = watched
    try:
        exported_with_limit(group, recordings, 0)
    finally:
        dist.all_reduce = original
    return seen


def test_a_maximum_over_ranks_never_sees_a_nan(ranks: Ranks) -> None:
    """It would keep or lose it by the rank."""
    assert ranks(maxima_sent, [[("x", {"values": [math.nan]})], [("x", {"values": [1.0]})]]) == [[False]] * 2


def counted_large(group: dist.ProcessGroup, num_true: int) -> dict[str, float]:
    tracker = DistributedStatsTracker()
    tracker.denominator(n=torch.ones(num_true, dtype=torch.bool))
    return tracker.export(reduce_group=group)


def test_counts_of_all_ranks_are_exact(ranks: Ranks) -> None:
    """Twice 20,000,001 is 40,000,002."""
    assert ranks(counted_large, [20_000_001] * 2) == [{"n": 40_000_002.0}] * 2


# Groups


def test_subgroups_export_beside_the_world(ranks: Ranks) -> None:
    """A group of the world's ranks sees its own numbers; the world then sees all."""
    recordings: list[Recordings] = [[("x", {"scalar": float(rank)})] for rank in range(NUM_RANKS)]

    assert ranks(exported, recordings[:2]) == [{"x": 0.5, "x__count": 2}] * 2
    assert ranks(exported, recordings[:3]) == [{"x": 1.0, "x__count": 3}] * 3
    assert ranks(exported, recordings) == [{"x": 1.5, "x__count": 4}] * 4


def test_a_group_of_one_talks_to_nobody(ranks: Ranks) -> None:
    """Its numbers are its own."""
    assert ranks(collectives_of_exports, [["a"]]) == [[[], []]]


def outside(group: dist.ProcessGroup, argument: None) -> str:
    stranger = dist.new_group([1])
    tracker = DistributedStatsTracker()
    tracker.scalar(x=dist.get_rank())
    try:
        return str(tracker.export(reduce_group=stranger))
    except ValueError as error:
        return str(error)


def test_a_rank_outside_of_the_group_is_told(ranks: Ranks) -> None:
    """Instead of waiting for ever, or answering as if it had been reduced."""
    answers = ranks(outside, [None] * NUM_RANKS)

    assert answers[1] == "{'x': 1.0, 'x__count': 1}"
    assert all("this rank is not in reduce_group" in answers[rank] for rank in (0, 2, 3))


def test_without_torch_distributed_a_rank_is_alone() -> None:
    """A group from nowhere, as dist.group.WORLD is then None, gives the local numbers."""
    tracker = DistributedStatsTracker()
    tracker.scalar(x=1)

    assert not dist.is_initialized()
    assert tracker.export(reduce_group=dist.group.WORLD) == {"x": 1.0, "x__count": 1}


def everything_exported(group: dist.ProcessGroup, name: str) -> list[Any]:
    stats_tracker.scalar(shared=dist.get_rank())
    record(stats_tracker, [("y", {"values": [float(dist.get_rank())], "type": "MIN"})])
    if name:
        stats_tracker.get(name).scalar(x=dist.get_rank())
        record(stats_tracker.get(name), [("y", {"values": [float(dist.get_rank() + 5)]})])
    with Collectives() as collectives:
        rows = stats_tracker.export_all(reduce_group=group)
    return [rows, len(collectives.sizes) <= 5, stats_tracker.export_all(reduce_group=group)]


def test_export_all_joins_trackers_that_some_ranks_do_not_have(ranks: Ranks) -> None:
    """In one export for all of them."""
    results = ranks(everything_exported, ["only/b", "only/a", ""])

    rows = {"shared": 1.0, "shared__count": 3, "n": 3.0, "y": 0.0}
    for name, rank in (("only/a", 1.0), ("only/b", 0.0)):
        rows |= {f"{name}/x": rank, f"{name}/x__count": 1, f"{name}/n": 1.0}
        rows |= dict.fromkeys((f"{name}/y/avg", f"{name}/y/min", f"{name}/y/max"), rank + 5)
    assert results == [[rows, True, {}]] * 3


def one_key_exported(group: dist.ProcessGroup, keys: list[str]) -> list[dict[str, float]]:
    tracker = DistributedStatsTracker()
    record(tracker, [(key, {"values": [float(dist.get_rank())]}) for key in keys])
    return [
        tracker.export(key="a", reduce_group=group, reset=False),
        tracker.export(key="a", reduce_group=group),
        tracker.export(key="a", reduce_group=group),
        tracker.export(reduce_group=group),
    ]


def test_one_key_is_exported_over_ranks(ranks: Ranks) -> None:
    """Also by a rank that does not have it; a reset takes that key alone."""
    a = {"a/avg": 0.5, "a/min": 0.0, "a/max": 1.0}
    rest = {"n": 4.0, "b/avg": 1.0, "b/min": 0.0, "b/max": 2.0}

    assert ranks(one_key_exported, [["a", "b"], ["a"], ["b"]]) == [[a, a, {}, rest]] * 3


# Collectives


def collectives_of_exports(group: dist.ProcessGroup, *all_keys: list[str], **limit: int) -> list[list[int]]:
    """The bytes of every collective, export by export; the first list of keys is recorded for two exports."""
    before = reduce._MAX_GATHERED_BYTES
    reduce._MAX_GATHERED_BYTES = limit.get("max_gathered_bytes", before)
    tracker = DistributedStatsTracker()
    sizes = []
    for keys in (all_keys[0], all_keys[0], *all_keys[1:]):
        record(tracker, [(key, {"values": [1.0]} if at % 2 else {"scalar": 1.0}) for at, key in enumerate(keys)])
        with Collectives() as collectives:
            tracker.export(reduce_group=group)
        sizes.append(collectives.sizes)
    reduce._MAX_GATHERED_BYTES = before
    return sizes


@pytest.mark.parametrize(("max_gathered_bytes", "num_collectives"), [(0, 3), (1 << 18, 2)])
def test_an_unchanged_layout_costs_three_collectives_at_most(
    ranks: Ranks, max_gathered_bytes: int, num_collectives: int
) -> None:
    """A digest, a sum and a maximum, for 500 keys as for 5; in a small group a digest and a gather."""
    for num_keys in (5, 500):
        keys = [f"key_{at}" for at in range(num_keys)]
        for sizes in ranks(collectives_of_exports, [keys] * 3, max_gathered_bytes=max_gathered_bytes):
            assert [num_collectives, num_collectives] == [len(one) for one in sizes]


@pytest.mark.parametrize(("max_gathered_bytes", "num_collectives"), [(0, 5), (1 << 18, 4)])
def test_a_changed_layout_costs_five_collectives_at_most(
    ranks: Ranks, max_gathered_bytes: int, num_collectives: int
) -> None:
    """Then every rank has it, and the next export is a cheap one, also when another rank records the key."""
    per_rank = [[f"own_{rank}_{at}" for at in range(50)] for rank in range(3)]
    for sizes in ranks(collectives_of_exports, per_rank, max_gathered_bytes=max_gathered_bytes):
        assert [num_collectives, num_collectives - 2] == [len(one) for one in sizes]


def collectives_when_keys_move(group: dist.ProcessGroup, all_keys: list[list[str]]) -> list[int]:
    tracker = DistributedStatsTracker()
    nums = []
    for keys in all_keys:
        tracker.scalar(**dict.fromkeys(keys, 1.0))
        with Collectives() as collectives:
            tracker.export(reduce_group=group)
        nums.append(len(collectives.sizes))
    return nums


def test_a_key_that_some_rank_had_costs_nothing_elsewhere(ranks: Ranks) -> None:
    """A layout is the group's: only a key that is new to all of it is a change, and not one that all bring."""
    steps = [
        ([["a"], ["b"]], 4),  # two layouts become one
        ([["b"], ["a"]], 2),
        ([[], []], 2),
        ([["a", "c"], ["c"]], 2),  # new, but the same everywhere
        ([["d"], []], 4),
        ([[], ["d"]], 2),
    ]
    for nums in ranks(collectives_when_keys_move, [[keys[rank] for keys, _ in steps] for rank in range(2)]):
        assert nums == [num for _, num in steps]


def test_names_do_not_travel_while_the_layout_stays(ranks: Ranks) -> None:
    """Bytes depend on the number of keys, not on the length of their names: 40 for a key."""
    num_keys = 3000
    sizes = {}
    for length in (10, 1000):
        keys = [f"{at:0{length}}" for at in range(num_keys)]
        first, steady = ranks(collectives_of_exports, [keys] * 2)[0]
        assert first == steady
        sizes[length] = steady

    assert sizes[10] == sizes[1000]
    assert sum(sizes[10]) <= 8 + 40 * (num_keys + 1)


def recorded_only(group: dist.ProcessGroup, num_turns: int) -> int:
    tracker = DistributedStatsTracker()
    with Collectives() as collectives:
        for _ in range(num_turns):
            record(tracker, [("x", {"values": [1.0]}), ("y", {"scalar": 1.0})])
        tracker.export()
    return len(collectives.sizes)


def test_recording_and_a_local_export_talk_to_nobody(ranks: Ranks) -> None:
    """Not even where a world is there to talk to."""
    assert ranks(recorded_only, [200] * 2) == [0] * 2


# Disagreement


def disagreeing(group: dist.ProcessGroup, recordings: Recordings) -> list[str]:
    tracker = DistributedStatsTracker()
    record(tracker, recordings)
    answers = []
    for _ in range(2):
        try:
            answers.append(str(tracker.export(reduce_group=group)))
        except ValueError as error:
            answers.append(str(error))
    tracker.export()
    record(tracker, [("x", {"values": [1.0], "type": "SUM"})])
    answers.append(str(tracker.export(reduce_group=group)))
    return answers


def test_different_reduce_types_are_an_error_on_all_ranks(ranks: Ranks) -> None:
    """It names the key and the ranks, also on a rank without the key; what was recorded stays until a reset."""
    one, other = [("x", {"values": [1.0], "type": "SUM"})], [("x", {"values": [1.0], "type": "AVG"})]
    message = (
        "`x` was recorded as reduce type AVG on rank 2, reduce type SUM on ranks 0, 3; one key has one reduce type"
    )
    for answers in ranks(disagreeing, [one, [], other, one]):
        assert message in answers[0]
        assert answers[0] == answers[1]
        assert answers[2] == "{'n': 4.0, 'x': 4.0}"


def test_a_scalar_is_no_statistic_on_another_rank(ranks: Ranks) -> None:
    """Nor is a denominator."""
    message = "`x` was recorded as reduce type SUM on rank 0, a scalar on rank 1"
    for answers in ranks(disagreeing, [[("x", {"values": [1.0], "type": "SUM"})], [("x", {"scalar": 1.0})]]):
        assert message in answers[0]


def changing(group: dist.ProcessGroup, types: list[str | None]) -> list[dict[str, float]]:
    tracker = DistributedStatsTracker()
    results = []
    for name in types:
        record(tracker, [("x", {"values": [2.0, 4.0], "type": name})] if name else [])
        results.append(tracker.export(reduce_group=group))
    return results


def test_a_type_may_change_when_all_that_record_it_change(ranks: Ranks) -> None:
    """A rank that recorded the key as another type before the last reset is no party to it."""
    results = ranks(changing, [["SUM", None, "MIN"], ["SUM", "MAX", None]])

    assert results == [[{"n": 4.0, "x": 12.0}, {"n": 2.0, "x": 4.0}, {"n": 2.0, "x": 2.0}]] * 2


def calling(group: dist.ProcessGroup, call: str) -> str:
    tracker = DistributedStatsTracker("t") if call == "named" else DistributedStatsTracker()
    tracker.scalar(a=1, b=2)
    try:
        return str(tracker.export(key=call if call in "ab" else None, reduce_group=group))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        (["a", "b"], "(rank 0: export(key='a'); rank 1: export(key='b'))"),
        (["all", "b"], "(rank 0: export(); rank 1: export(key='b'))"),
        (["named", "all"], "(rank 1: export(); rank 0: export() of tracker 't')"),
    ],
)
def test_ranks_that_call_different_exports_are_told(ranks: Ranks, calls: list[str], message: str) -> None:
    """Though the lengths of what they have to send be the same."""
    for answer in ranks(calling, calls):
        assert message in answer


# A rank that does not come


def with_one_missing(group: dist.ProcessGroup, role: str, options: dict[str, Any], group_timeout_s: float) -> str:
    """In a group of its own, since it is of no use afterwards."""
    own = dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=group_timeout_s))
    tracker = DistributedStatsTracker()
    answer = ""
    for _ in range(2):
        tracker.scalar(x=1)
        answer = str(tracker.export(reduce_group=own))
    try:
        if role == "comes":
            answer = str(tracker.export(reduce_group=own, **options))
        elif role == "elsewhere":
            stats_tracker.export_all(reduce_group=own, **options)
    except ExportError as error:
        answer = str(error)
    return answer


@pytest.mark.parametrize(
    ("options", "group_timeout_s", "limit"),
    [
        ({"timeout": 6}, 60, "within 6 s"),
        ({"timeout": timedelta(seconds=5.5)}, 60, "within 5.5 s"),
        ({}, 6, "before the group gave up"),
    ],
)
def test_the_ranks_that_wait_say_who_is_missing(
    ranks: Ranks, options: dict[str, Any], group_timeout_s: float, limit: str
) -> None:
    """By the call's limit or by the group's own, with the number of the call and the classic mistake."""
    answers = ranks(
        with_one_missing,
        ["comes", "comes", "stays away", "comes"],
        options=options,
        group_timeout_s=group_timeout_s,
    )

    assert answers[2] == "{'x': 1.0, 'x__count': 4}"
    for rank in (0, 1, 3):
        assert answers[rank].startswith(f"export(), call 3, over 4 ranks: rank 2 did not come {limit}")
        assert "ranks 0, 1, 3 waited" in answers[rank]
        assert "not only those under `if rank == 0:`" in answers[rank]


def classic_mistake(group: dist.ProcessGroup, argument: None) -> str:
    own = dist.new_group(dist.get_process_group_ranks(group))
    tracker = DistributedStatsTracker()
    tracker.scalar(loss=1.0)
    if dist.get_rank() == 0:
        try:
            return str(tracker.export(reduce_group=own, timeout=1))
        except ExportError as error:
            return str(error)
    return "went on"


def test_an_export_under_if_rank_0_is_named(ranks: Ranks) -> None:
    """The rank that waits lists all that it waits for."""
    answers = ranks(classic_mistake, [None] * 4)

    assert answers[1:] == ["went on"] * 3
    assert "ranks 1, 2, 3 did not come within 1 s; rank 0 waited" in answers[0]


def slow(group: dist.ProcessGroup, comes_late: bool) -> dict[str, float]:
    """A rank that comes late waits until the other has lost its patience."""
    before, reduce._PATIENCE_S = reduce._PATIENCE_S, 0.05
    tracker = DistributedStatsTracker()
    tracker.scalar(x=1)
    store = dist.distributed_c10d._get_default_store()
    try:
        if comes_late:
            store.wait([f"gapless/export/{group.group_name}/0"], timedelta(seconds=60))
        return tracker.export(reduce_group=group, timeout=60)
    finally:
        reduce._PATIENCE_S = before


def test_a_rank_that_comes_late_is_waited_for(ranks: Ranks) -> None:
    """The others leave word that they wait; it is taken back when it comes."""
    assert ranks(slow, [False, True]) == [{"x": 1.0, "x__count": 2}] * 2
    assert ranks(store_word, [None, None]) == ["", ""]


def store_word(group: dist.ProcessGroup, argument: None) -> str:
    word: bytes = dist.distributed_c10d._get_default_store().get(f"gapless/export/{group.group_name}/0")
    return word.decode()


def exported_by_polling(group: dist.ProcessGroup, recordings: Recordings) -> dict[str, float]:
    """As on a device, where waiting for a collective does not hold up the host."""
    original = reduce._device
    reduce._device = lambda _: (torch.device("cpu"), False)
    try:
        return exported(group, recordings, timeout=30)
    finally:
        reduce._device = original


def test_a_group_that_does_not_block_the_host_is_asked_until_it_is_done(ranks: Ranks) -> None:
    """The rows are the same."""
    results = ranks(exported_by_polling, [[("x", {"scalar": 1.0})], [("y", {"values": [2.0], "type": "SUM"})]])

    assert results == [{"n": 1.0, "x": 1.0, "x__count": 1, "y": 2.0}] * 2


def polling_with_one_missing(group: dist.ProcessGroup, comes: bool) -> str:
    original = reduce._device
    reduce._device = lambda _: (torch.device("cpu"), False)
    try:
        return with_one_missing(group, "comes" if comes else "stays away", {"timeout": 5}, 60)
    finally:
        reduce._device = original


def test_a_missing_rank_is_named_there_too(ranks: Ranks) -> None:
    """By the same words."""
    answers = ranks(polling_with_one_missing, [False, True, True])

    assert "call 3, over 3 ranks: rank 0 did not come within 5 s; ranks 1, 2 waited" in answers[1]
    assert "call 3, over 3 ranks: rank 0 did not come within 5 s; ranks 1, 2 waited" in answers[2]


def test_a_rank_that_waits_in_another_export_is_named(ranks: Ranks) -> None:
    """Where it waits for the others in a collective that they never reach, its word says which."""
    answers = ranks(waiting_elsewhere, [0, 1])

    assert "rank 1 waits at export() of tracker 'other', call 1; rank 0 waited" in answers[0]


def waiting_elsewhere(group: dist.ProcessGroup, rank: int) -> str:
    """Rank 1 waits in the export of another tracker; its word is all that rank 0 can know of it."""
    own = dist.new_group(dist.get_process_group_ranks(group))
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set(f"gapless/export/{own.group_name}/1", "export() of tracker 'other', call 1")
        return ""
    store.wait([f"gapless/export/{own.group_name}/1"], timedelta(seconds=60))
    tracker = DistributedStatsTracker()
    tracker.scalar(x=1)
    try:
        return str(tracker.export(reduce_group=own, timeout=1))
    except ExportError as error:
        return str(error)


def without_a_store(group: dist.ProcessGroup, comes: bool) -> str:
    """The store may be gone with the rank that held it."""
    original = reduce._store
    reduce._store = _gone
    try:
        return with_one_missing(group, "comes" if comes else "stays away", {"timeout": 1}, 60)
    finally:
        reduce._store = original


def _gone() -> None:
    raise RuntimeError("connection reset by peer")


def test_a_store_that_does_not_answer_is_said(ranks: Ranks) -> None:
    """Then nobody can know who is missing, but the export ends all the same."""
    answers = ranks(without_a_store, [True, False])

    assert "not every rank came within 1 s, and the store that would tell which does not answer" in answers[0]


@pytest.mark.parametrize(
    ("config", "device", "blocks_host"),
    [
        ("cpu:gloo,cuda:gloo", torch.device("cpu"), True),
        ("cpu:gloo,cuda:nccl", torch.device("cpu"), True),
        ("cuda:nccl", torch.device("cuda", 3), False),
    ],
)
def test_the_group_decides_where_ranks_talk(
    monkeypatch: pytest.MonkeyPatch, config: str, device: torch.device, blocks_host: bool
) -> None:
    """On the host where it can; else on this rank's current device, never where a rank happened to record."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    assert reduce._device(None) == (device, blocks_host)
