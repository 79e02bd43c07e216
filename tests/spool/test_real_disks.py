"""Real disks in real trouble: a full tmpfs, and a file system that hangs in the kernel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from time import monotonic, perf_counter, sleep

import pytest

import gapless
from gapless import run as run_module
from tests.spool.fuse import Stoppable, stoppable_disk
from tests.spool.oracle import only, records, segments

libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=2m") != 0:
        pytest.skip("no tmpfs can be mounted here")
    yield folder
    libc.umount2(os.fsencode(folder), 2)


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[Stoppable]:
    try:
        with stoppable_disk(tmp_path / "slow") as disk:
            yield disk
    except OSError as why:
        pytest.skip(str(why))


def fill(folder: Path) -> Path:
    """Take all the space there is."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def full_for(folder: Path, rows: int, durability: str) -> None:
    """Log `rows` rows, fill the disk, log until that fails and `rows` more, free the disk and log as many again."""
    run = gapless.init("p", dir=folder / "spool", durability=durability)
    numbers = count()

    def log(num_rows: int) -> None:
        for number in islice(numbers, num_rows):
            run.log({"n": number}, step=number)
            sleep(0.005)  # so that the writer has many turns

    assert run._writer.opened.wait(60)
    log(rows)
    filler = fill(folder)
    give_up = monotonic() + 60
    while not run.stats().failing:
        assert monotonic() < give_up
        log(1)
    log(rows)
    filler.unlink()
    log(rows)
    run.finish()
    num_logged = next(numbers)

    assert [record.data["n"] for record in only(run.path, "metrics")] == list(range(num_logged))
    assert run.stats().dropped == 0
    assert len(segments(run.path)) > 1


@pytest.mark.parametrize("durability", ["thread", "write"])
def test_a_full_disk_loses_nothing(small_disk: Path, durability: str) -> None:
    """A tmpfs that is full for a while and is then freed: all rows are there."""
    full_for(small_disk, 100, durability)


@pytest.mark.torture
@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
def test_a_disk_full_for_three_seconds_loses_nothing(small_disk: Path, durability: str) -> None:
    """The same for 600 rows, which take 3 s, of 1,800."""
    full_for(small_disk, 600, durability)


def test_a_full_disk_at_the_start_loses_nothing(small_disk: Path) -> None:
    """Opened while there is no space: training goes on, and when space is there the header and all rows are."""
    filler = fill(small_disk)
    run = gapless.init("p", dir=small_disk)
    for number in range(100):
        run.log({"n": number})
    assert run.stats().written == 0
    filler.unlink()
    run.finish()

    assert [record.step for record in only(run.path, "metrics")] == list(range(100))


def test_a_disk_that_turns_read_only_loses_nothing(slow_disk: Stoppable) -> None:
    """Rows logged while every change is refused with EROFS are written when the disk takes them again."""
    run = gapless.init("p", dir=slow_disk.folder)
    run.log({"n": 0})
    assert run.flush()
    slow_disk.toggle_read_only()
    for number in range(1, 100):
        run.log({"n": number})
    while not run.stats().failing:
        pass
    slow_disk.toggle_read_only()
    run.finish()

    assert [record.data["n"] for record in only(run.path, "metrics")] == list(range(100))


def test_a_removed_folder_costs_only_what_was_in_it(tmp_path: Path) -> None:
    """The run's folder is deleted under the writer: unsynced rows and all further ones are in a new one."""
    run = gapless.init("p", dir=tmp_path)
    run.log({"n": 0})
    assert run.flush()
    for folder, _, files in os.walk(run.path, topdown=False):
        for name in files:
            os.unlink(f"{folder}/{name}")
        os.rmdir(folder)
    for number in range(1, 50):
        run.log({"n": number})
    run.finish()

    assert [record.data["n"] for record in only(run.path, "metrics")] == list(range(1, 50))
    again = gapless.init("p", dir=tmp_path, id=run.id)
    again.log({"n": 50})
    again.finish()
    assert [[r.step for r in found if r.kind == "metrics"] for found in records(run.path).values()] == [
        list(range(1, 50)),
        [50],
    ]


def test_a_hanging_disk_holds_nobody(slow_disk: Stoppable) -> None:
    """While every access hangs, 2,000 calls of `log` return; when the disk is back, all rows are there."""
    run = gapless.init("p", dir=slow_disk.folder)
    run.log({"n": 0})
    assert run.flush()
    slow_disk.stop()
    for number in range(1, 2001):
        run.log({"n": number})
    assert run.stats().synced < 100
    assert not run.flush(0.05)
    slow_disk.go_on()
    run.finish()

    assert [record.data["n"] for record in only(run.path, "metrics")] == list(range(2001))


def test_a_disk_that_hangs_at_the_start_holds_init_for_two_seconds(
    slow_disk: Stoppable, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`init` goes on without an answer; steps without a number still follow those of the attempt before."""
    monkeypatch.setattr(run_module, "OPEN_TIMEOUT_S", 0.1)
    with gapless.init("p", dir=slow_disk.folder, id="r") as before:
        before.log({"n": 0}, step=41)
    slow_disk.stop()
    run = gapless.init("p", dir=slow_disk.folder, id="r")
    assert "did not answer" in capfd.readouterr().err
    run.log({"n": 1})
    run.log({"text": gapless.Text("a"), **{f"k{n}": "x" * 2000 for n in range(1000)}})
    run.log({"n": 2}, step=50)
    run.log({"n": 3})
    slow_disk.go_on()
    run.finish()
    second = list(records(run.path).values())[1]

    assert [(r.kind, r.step) for r in second if r.kind in ("metrics", "text")] == [
        ("metrics", 42),
        ("metrics", 43),
        ("metrics", 43),
        ("text", 43),
        ("metrics", 50),
        ("metrics", 51),
    ]


def test_finish_on_a_hanging_disk_is_bounded(slow_disk: Stoppable, capfd: pytest.CaptureFixture[str]) -> None:
    """`finish` returns after its timeout, says what is unwritten, and what waits is written when the disk is back."""
    run = gapless.init("p", dir=slow_disk.folder)
    assert run._writer.described.wait(10)
    assert run.flush()
    slow_disk.stop()
    run.log({"n": 1})
    run.finish(timeout=0.1)
    assert "2 records not written" in capfd.readouterr().err
    slow_disk.go_on()
    run._writer.done.wait(10)

    assert [record.kind for record in only(run.path)][-2:] == ["metrics", "finish"]


@pytest.mark.torture
def test_a_disk_that_hangs_for_30_seconds(slow_disk: Stoppable) -> None:
    """30 s without a disk at 500 rows a second: nothing is lost and no call takes as long as a disk would."""
    run = gapless.init("p", dir=slow_disk.folder)
    assert run.flush()
    slow_disk.stop()
    begin = monotonic()
    took: list[float] = []
    while monotonic() - begin < 30:
        start = perf_counter()
        run.log({f"metric/{key}": float(len(took)) for key in range(10)})
        took.append(perf_counter() - start)
        sleep(0.002)
    slow_disk.go_on()
    run.finish()

    assert [record.step for record in only(run.path, "metrics")] == list(range(len(took)))
    assert max(took) < 1.0
