"""A killed process loses no row whose `log` returned, at whatever moment and call it dies."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless_schemas import Record
from tests.spool.children import Children, Counter, row
from tests.spool.oracle import records


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children() as server:
        yield server


def rows_in(folder: Path) -> list[Record]:
    """The metrics rows of the only run's only attempt; none where its header was not written yet."""
    runs = sorted((folder / "p").glob("[!.]*")) if (folder / "p").exists() else []
    found = [record for run in runs for attempt in records(run).values() for record in attempt]
    assert [record.seq for record in found] == list(range(1, len(found) + 1))
    return [record for record in found if record.kind == "metrics"]


def kill_at_random(children: Children, folder: Path, durability: str, times: int, seed: int) -> None:
    chance = random.Random(seed)
    acks = folder / "acks"
    for _ in range(times):
        counter = Counter(acks)
        counter.value = 0
        spool = folder / "spool"
        status = children.run(
            "log_rows",
            kill_after_s=chance.uniform(0.0, 0.05),
            folder=str(spool),
            acks=str(acks),
            durability=durability,
        )
        assert status == -9
        found = rows_in(spool)
        assert [record.data for record in found] == [row(number) for number in range(len(found))]
        assert [record.step for record in found] == list(range(len(found)))
        if durability != "thread":
            assert counter.value <= len(found) <= counter.value + 1
        shutil.rmtree(spool, ignore_errors=True)


@pytest.mark.parametrize("durability", ["write", "sync", "thread"])
def test_sigkill_at_a_random_moment_leaves_an_exact_prefix(children: Children, tmp_path: Path, durability: str) -> None:
    """What is read back is the rows in order from the first; with `write` and `sync`, all whose `log` returned."""
    kill_at_random(children, tmp_path, durability, 60, seed=1)


@pytest.mark.torture
def test_ten_thousand_sigkills(children: Children, tmp_path: Path) -> None:
    """10,000 random SIGKILLs of a writer with `write`: no acknowledged row is missing, no row is wrong."""
    kill_at_random(children, tmp_path, "write", 10_000, seed=2)


@pytest.mark.parametrize("how", ["before", "after", "within"])
@pytest.mark.parametrize("durability", ["write", "sync", "thread"])
def test_death_at_every_single_call(children: Children, tmp_path: Path, durability: str, how: str) -> None:
    """The process dies before, after and within each call that changes the disk; the rows read back are a prefix.

    With `write` and `sync` it holds every row whose `log` returned. The next attempt then writes its rows after them.
    """
    acks = tmp_path / "acks"
    call = 0
    while True:
        call += 1
        counter = Counter(acks)
        counter.value = 0
        spool = tmp_path / f"{call}"
        job = {"folder": str(spool), "acks": str(acks), "durability": durability, "how": how}
        status = children.run("die_at", call=call, **job)
        found = rows_in(spool) if spool.exists() else []
        assert [record.data for record in found] == [row(number) for number in range(len(found))]
        if durability != "thread":
            assert len(found) >= min(counter.value, 12)
        if status == 0:
            break
        assert status == -9
        if call % 7 == 0:
            assert children.run("die_at", call=0, **job) == 0
            (run,) = (spool / "p").glob("[!.]*")
            attempts = list(records(run).values())
            assert [r.data for r in attempts[-1] if r.kind == "metrics"] == [row(number) for number in range(12)]
    assert call > 30
    assert counter.value == 100
    assert len(found) == 12
