"""Statistics across ranks: recording and export, beside a tracker that makes one collective per quantity.

The peer keeps every tensor until the export, then reduces each quantity by a collective of its own: four for a
statistic (sum, count, minimum, maximum), two for a scalar, one for a denominator, after a gather of the key
names as objects. All parties run in the same processes, turn about; the figures are medians over the rounds
of the slowest rank. 500 bare all-reduces of one number are the floor under any tracker of the peer's kind.

    python -m benchmarks.stats
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gapless.stats_tracker import DistributedStatsTracker

NUM_VALUES = 8192
NUM_BARE = 500
NUM_ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """One configuration. Times in milliseconds; bytes are those handed to collectives by one rank per export."""

    num_ranks: int
    num_stats: int
    record_ms: float
    export_ms: float
    peer_record_ms: float
    peer_export_ms: float
    bare_ms: float
    num_collectives: int
    num_first_collectives: int
    peer_num_collectives: int
    num_bytes: int
    peer_num_bytes: int
    held_bytes: int
    peer_held_bytes: int

    @property
    def export_ratio(self) -> float:
        """How many times faster than the peer's one export is."""
        return self.peer_export_ms / self.export_ms

    @property
    def total_ratio(self) -> float:
        """The same for recording and export together."""
        return (self.peer_record_ms + self.peer_export_ms) / (self.record_ms + self.export_ms)

    @property
    def bare_ratio(self) -> float:
        """How many times faster than 500 bare all-reduces one export is."""
        return self.bare_ms / self.export_ms


class OnePerQuantity:
    """The peer: the same words, every tensor kept, one collective for every quantity of every key."""

    def __init__(self) -> None:
        self.masks: dict[str, list[torch.Tensor]] = {}
        self.values: dict[str, list[torch.Tensor]] = {}
        self.numbers: dict[str, list[float]] = {}

    def denominator(self, **masks: torch.Tensor) -> None:
        for key, mask in masks.items():
            self.masks.setdefault(key, []).append(mask.detach().clone())

    def stat(self, denominator: str, **values: torch.Tensor) -> None:
        for key, value in values.items():
            self.values.setdefault(f"{denominator}|{key}", []).append(value.detach().clone())

    def scalar(self, **numbers: float) -> None:
        for key, number in numbers.items():
            self.numbers.setdefault(key, []).append(float(number))

    def held_bytes(self) -> int:
        return sum(t.nbytes for kept in (*self.masks.values(), *self.values.values()) for t in kept)

    def export(self, group: dist.ProcessGroup) -> dict[str, float]:
        names = [*self.masks, *self.values, *self.numbers]
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, names, group=group)
        rows: dict[str, float] = {}
        for name in sorted({name for one in everyone for name in one}):
            if name in self.masks:
                rows[name] = float(_over(group, sum(m.sum() for m in self.masks[name])))
            elif name in self.numbers:
                total = _over(group, torch.tensor(sum(self.numbers[name])))
                count = _over(group, torch.tensor(float(len(self.numbers[name]))))
                rows[name], rows[name + "__count"] = float(total / count), int(count)
            else:
                rows.update(self._statistic(group, name))
        self.__init__()  # type: ignore[misc]
        return rows

    def _statistic(self, group: dist.ProcessGroup, name: str) -> dict[str, float]:
        mask_key, key = name.split("|")
        pairs = list(zip(self.masks[mask_key], self.values[name], strict=True))
        total = _over(group, sum(torch.where(m, v, 0.0).sum() for m, v in pairs))
        count = _over(group, sum(m.sum() for m, _ in pairs))
        least = _over(group, min(torch.where(m, v, torch.inf).min() for m, v in pairs), dist.ReduceOp.MIN)
        most = _over(group, max(torch.where(m, v, -torch.inf).max() for m, v in pairs), dist.ReduceOp.MAX)
        return {f"{key}/avg": float(total / count), f"{key}/min": float(least), f"{key}/max": float(most)}


def _over(group: dist.ProcessGroup, number: Any, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    dist.all_reduce(number, op=operation, group=group)
    tensor: torch.Tensor = number
    return tensor


class Counter:
    """Counts the collectives that go through `torch.distributed`, and their bytes, while it is open."""

    _NAMES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "barrier", "all_gather_into_tensor")

    def __init__(self) -> None:
        self.num_collectives = 0
        self.num_bytes = 0

    def __enter__(self) -> Counter:
        self._originals = {name: getattr(dist, name) for name in self._NAMES}
        for name, original in self._originals.items():
            setattr(dist, name, self._counting(original))
        return self

    def __exit__(self, *exc: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_collectives += 1
            self.num_bytes += sum(value.nbytes for value in args if isinstance(value, torch.Tensor))
            return original(*args, **kwargs)

        return counted


def _record(tracker: Any, num_stats: int, mask: torch.Tensor, value: torch.Tensor) -> None:
    tracker.denominator(n_tokens=mask)
    for at in range(num_stats):
        tracker.stat("n_tokens", **{f"stat_{at}": value})
    for at in range(num_stats // 4):
        tracker.scalar(**{f"scalar_{at}": 0.5})


def _ms(call: Callable[[], Any]) -> float:
    start_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start_s)


def _rank(rank: int, num_ranks: int, folder: str, all_num_stats: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=num_ranks)
    world = dist.group.WORLD
    assert world is not None
    rows = [_measured(world, num_stats) for num_stats in all_num_stats]
    if rank == 0:
        torch.save([vars(row) for row in rows], place / "rows.pt")
    dist.barrier()
    dist.destroy_process_group()


def _measured(world: dist.ProcessGroup, num_stats: int) -> Row:
    value = torch.randn(NUM_VALUES)
    mask = value > 0
    ours, peer = DistributedStatsTracker(), OnePerQuantity()
    one = torch.zeros(1)

    def bare() -> None:
        for _ in range(NUM_BARE):
            dist.all_reduce(one, group=world)

    _record(ours, num_stats, mask, value)
    held_bytes = sum(bank.matrix.nbytes for bank in ours.source.registry.banks()) + mask.nbytes
    with Counter() as first:
        ours.export(reduce_group=world)
    _record(ours, num_stats, mask, value)
    with Counter() as steady:
        rows = ours.export(reduce_group=world)
    _record(peer, num_stats, mask, value)
    peer_held_bytes = peer.held_bytes()
    with Counter() as of_peer:
        peer_rows = peer.export(world)
    assert rows.keys() == peer_rows.keys()
    times: list[tuple[float, ...]] = []
    for _ in range(NUM_ROUNDS):
        round_ms = []
        for call in (
            lambda: _record(ours, num_stats, mask, value),
            lambda: ours.export(reduce_group=world),
            lambda: _record(peer, num_stats, mask, value),
            lambda: peer.export(world),
            bare,
        ):
            dist.barrier()
            round_ms.append(_ms(call))
        slowest = torch.tensor(round_ms, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        times.append(tuple(slowest.tolist()))
    return Row(
        dist.get_world_size(world),
        num_stats,
        *(statistics.median(column) for column in zip(*times, strict=True)),
        num_collectives=steady.num_collectives,
        num_first_collectives=first.num_collectives,
        peer_num_collectives=of_peer.num_collectives,
        num_bytes=steady.num_bytes,
        peer_num_bytes=of_peer.num_bytes,
        held_bytes=held_bytes,
        peer_held_bytes=peer_held_bytes,
    )


def measure(all_num_ranks: tuple[int, ...] = (1, 2, 4), all_num_stats: tuple[int, ...] = (20, 100, 400)) -> list[Row]:
    """Measure every combination; takes a minute or two."""
    rows = []
    for num_ranks in all_num_ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(_rank, (num_ranks, folder, all_num_stats), nprocs=num_ranks, start_method="spawn")
            rows += [Row(**fields) for fields in torch.load(Path(folder) / "rows.pt")]
    return rows


def run(quick: bool) -> list[dict[str, Any]]:
    """The figures of two ranks: `figure`, `ours`, `peers`, `target`, `unit`."""
    found: list[dict[str, Any]] = []
    for row in measure((2,), (100,) if quick else (100, 400)):
        case = f"{row.num_stats} stats, {row.num_ranks} ranks"
        target = f"at most {row.peer_export_ms / (100 if row.num_stats <= 100 else 200):.3g}"
        peer = "a collective per quantity"
        found += [
            _figure(f"export(), {case}", row.export_ms, {peer: row.peer_export_ms}, target, "ms"),
            _figure(f"collectives of an export, {case}", row.num_collectives, {peer: row.peer_num_collectives}, 3, ""),
            _figure(
                f"record and export, {case}",
                row.record_ms + row.export_ms,
                {peer: row.peer_record_ms + row.peer_export_ms},
                "below the peer's",
                "ms",
            ),
            _figure(f"held until the export, {case}", row.held_bytes, {peer: row.peer_held_bytes}, "small", "bytes"),
        ]
    return found


def _figure(name: str, ours: float, peers: dict[str, float], target: Any, unit: str) -> dict[str, Any]:
    return {"figure": name, "ours": ours, "peers": peers, "target": target, "unit": unit}


def table(rows: list[Row]) -> str:
    """The figures as Markdown."""
    lines = [
        f"Statistics of {NUM_VALUES} values each, with one scalar for every four and one denominator; ms are medians.",
        "",
        "| ranks | stats | collectives (first) | peer's | KB sent | record ms | export ms | peer's record | "
        "peer's export | 500 bare | export: times peer | record + export: times peer | times 500 bare | "
        "KB held | peer's |",
        "|" + "---|" * 15,
    ]
    lines += [
        f"| {r.num_ranks} | {r.num_stats} | {r.num_collectives} ({r.num_first_collectives}) | "
        f"{r.peer_num_collectives} | {r.num_bytes / 1e3:.1f} | {r.record_ms:.1f} | {r.export_ms:.2f} | "
        f"{r.peer_record_ms:.1f} | {r.peer_export_ms:.0f} | {r.bare_ms:.0f} | {r.export_ratio:.0f} | "
        f"{r.total_ratio:.1f} | {r.bare_ratio:.0f} | {r.held_bytes / 1e3:.0f} | {r.peer_held_bytes / 1e3:.0f} |"
        for r in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(measure()))
