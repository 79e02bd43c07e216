"""A ring that overflows says exactly what is missing."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

import gapless
from gapless import journal
from gapless_schemas import Record
from tests.spool.children import row
from tests.spool.disk import Disk
from tests.spool.oracle import only


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that retries at once."""
    monkeypatch.setattr(journal, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(journal, "LAST_BACKOFF_S", 0.004)


def overflow(folder: Path, durability: str, holes: int, **limits: int) -> tuple[gapless.Run, list[Record]]:
    """Log 100 rows over a dead disk, then 10 over a sound one, `holes` times."""
    disk = Disk(folder)
    with disk.in_place():
        run = gapless.init("p", dir=folder, durability=durability, **limits)  # type: ignore[arg-type]
        assert run._writer.described.wait(10)
        assert run.flush(10)
        number = 0
        for _ in range(holes):
            disk.fail(errno.ENOSPC, lambda call: True)
            for _ in range(100):
                run.log(row(number), step=1000 + number)
                number += 1
            disk.before = lambda call: None
            assert run.flush(10)
            for _ in range(10):
                run.log(row(number), step=1000 + number)
                number += 1
                assert run.flush(10)
        run.finish()
    return run, only(run.path)


def check(run: gapless.Run, found: list[Record], holes: int) -> None:
    """Rows and gaps together are everything that was logged, and each gap says its rows, seqs and steps."""
    kept = {record.seq: record for record in found}
    missing: list[int] = []
    for gap in (record for record in found if record.kind == "gap"):
        ((first, last),) = gap.data["ranges"]
        assert gap.data["rows"] == last - first + 1
        assert gap.seq == last + 1
        missing += range(first, last + 1)
        low, high = gap.data["steps"]
        before = max(record.step for record in found if record.seq < first and record.step is not None)
        assert (low, high) == (before + 1, before + gap.data["rows"])
    assert sorted([*kept, *missing]) == list(range(1, len(kept) + len(missing) + 1))
    assert not set(kept) & set(missing)
    assert run.stats().dropped == len(missing) > 0
    assert len([record for record in found if record.kind == "metrics"]) + len(missing) == 110 * holes
    assert found[-1].kind == "finish"


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
@pytest.mark.parametrize("limits", [{"ring_rows": 30}, {"ring_bytes": 5000}], ids=["rows", "bytes"])
def test_one_gap_record_a_hole(tmp_path: Path, durability: str, limits: dict[str, int]) -> None:
    """The oldest rows are kept, the newest dropped, and where the hole ends one record names rows, seqs and steps."""
    run, found = overflow(tmp_path, durability, 1, **limits)

    check(run, found, 1)
    assert len([record for record in found if record.kind == "gap"]) == 1


def test_each_hole_has_its_own_gap_record(tmp_path: Path) -> None:
    """A disk that dies three times leaves three gap records."""
    run, found = overflow(tmp_path, "thread", 3, ring_rows=30)

    check(run, found, 3)
    assert len([record for record in found if record.kind == "gap"]) == 3


def test_memory_stays_within_the_ring(tmp_path: Path) -> None:
    """Over a dead disk the ring holds no more than its rows and bytes, however much is logged."""
    disk = Disk(tmp_path)
    disk.fail(errno.EIO, lambda call: True)
    with disk.in_place():
        run = gapless.init("p", dir=tmp_path, ring_rows=1000, ring_bytes=50_000, finish_timeout=0.01)
        for number in range(20_000):
            run.log(row(number))
            assert run._ring.size_bytes <= 50_000 + 200
        held = len(run._ring.inbox) + len(run._writer.journal._kept)
        run.finish()

    assert held <= 1000
    assert run.stats().dropped > 15_000


def test_a_payload_larger_than_the_ring_passes_when_nothing_waits(tmp_path: Path) -> None:
    """One row that alone exceeds the ring is written, not dropped, while the disk keeps up."""
    run = gapless.init("p", dir=tmp_path, ring_bytes=10_000)
    assert run._writer.described.wait(60)
    assert run.flush()
    while run.stats().synced < run._ring.last.number or run._ring.size_bytes:
        run.flush()
    run.log({"text": gapless.Text("x" * 2_000_000)})
    run.finish()

    (text,) = only(run.path, "text")
    assert (run.path / "media" / text.data["media"]).stat().st_size == 2_000_000
    assert run.stats().dropped == 0


def test_written_rows_make_room_for_new_ones(tmp_path: Path) -> None:
    """Rows that only wait for a sync that hangs are let go before a new row is dropped."""
    hang = threading.Event()
    stuck = threading.Event()
    disk = Disk(tmp_path)

    def before(call: object) -> None:
        if getattr(call, "name", "") == "fdatasync" and not hang.is_set():
            stuck.set()
            hang.wait(30)

    disk.before = before
    with disk.in_place():
        run = gapless.init("p", dir=tmp_path, durability="write", ring_rows=50)
        assert run._writer.described.wait(10)
        run._writer.sync()
        assert stuck.wait(10)
        for number in range(500):
            run.log(row(number), step=number)
        hang.set()
        run.finish()

    assert [record.step for record in only(run.path, "metrics")] == list(range(500))
    assert run.stats().dropped == 0


def test_rows_let_go_before_a_sync_failed_are_named(tmp_path: Path) -> None:
    """When that sync then fails, a gap record names the rows that may be lost; rows that are there stay."""
    go = threading.Event()
    stuck = threading.Event()
    disk = Disk(tmp_path)

    def before(call: object) -> None:
        if getattr(call, "name", "") == "fdatasync" and not go.is_set():
            stuck.set()
            go.wait(30)
            raise OSError(errno.EIO, "lost")

    disk.before = before
    with disk.in_place():
        run = gapless.init("p", dir=tmp_path, durability="write", ring_rows=50)
        assert run._writer.described.wait(10)
        run._writer.sync()
        assert stuck.wait(10)
        for number in range(120):
            run.log(row(number), step=number)
        go.set()
        run.finish()
    found = only(run.path)
    (gap,) = (record for record in found if record.kind == "gap")

    assert gap.data["rows"] == run.stats().dropped >= 60
    assert gap.data["ranges"][0][0] == 1
    assert gap.data["reason"] == "a sync failed"
    assert [record.step for record in found if record.kind == "metrics"] == list(range(120))
