"""A disk that fails: at each call in turn, with each errno, once, for a while and for good."""

from __future__ import annotations

import errno
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep

import orjson
import pytest

import gapless
from gapless import journal
from tests.spool.children import row
from tests.spool.disk import ERRNOS, Call, Disk
from tests.spool.oracle import records, segments


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that retries at once and rotates early."""
    monkeypatch.setattr(journal, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(journal, "LAST_BACKOFF_S", 0.004)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 2000)


def log_script(folder: Path, durability: str, heal: Callable[[], None] = lambda: None) -> gapless.Run:
    """Rows, a payload, a flush, rotation; `heal` is called before the end."""
    run = gapless.init("p", dir=folder, id="r", durability=durability)
    for number in range(4):
        run.log(row(number), step=number)
    run.log({"text": gapless.Text("x" * 300_000)}, step=4)
    run.flush(0.002)
    for number in range(4, 12):
        run.log(row(number), step=number)
    heal()
    return run


def check_whole(run: gapless.Run) -> None:
    """Every row once, in order, the payload in place, nothing named as lost."""
    (found,) = records(run.path).values()
    assert [record.seq for record in found] == list(range(1, len(found) + 1))
    assert [record.data for record in found if record.kind == "metrics"] == [row(number) for number in range(12)]
    (text,) = (record for record in found if record.kind == "text")
    assert (run.path / "media" / text.data["media"]).read_bytes() == b"x" * 300_000
    assert found[-1].kind == "finish"
    assert not [record for record in found if record.kind == "gap"]
    stats = run.stats()
    assert (stats.dropped, stats.queued, stats.failing) == (0, 0, False)


def each_call(folder: Path, durability: str, set_up: Callable[[Disk, int], Callable[[], None]]) -> int:
    """Run the script once for each of its calls, until one run makes fewer calls; how many runs there were."""
    number = 0
    while True:
        number += 1
        spool = folder / str(number)
        disk = Disk(spool)
        heal = set_up(disk, number)
        with disk.in_place():
            run = log_script(spool, durability, heal)
            run.finish(timeout=20)
        check_whole(run)
        shutil.rmtree(spool)
        if disk.calls < number:
            return number


def once(code: int) -> Callable[[Disk, int], Callable[[], None]]:
    def set_up(disk: Disk, number: int) -> Callable[[], None]:
        disk.fail(code, lambda call: call.number == number)
        return lambda: None

    return set_up


def until_healed(code: int) -> Callable[[Disk, int], Callable[[], None]]:
    def set_up(disk: Disk, number: int) -> Callable[[], None]:
        disk.fail(code, lambda call: call.number >= number and call.name != "close")

        def heal() -> None:
            disk.before = lambda call: None

        return heal

    return set_up


def short(disk: Disk, number: int) -> Callable[[], None]:
    disk.short = lambda call, size: max(1, size // 3) if call.number >= number else size
    return lambda: None


def torn(disk: Disk, number: int) -> Callable[[], None]:
    """A write that takes a part, and then a full disk for the rest of it."""
    disk.short = lambda call, size: max(1, size // 3) if call.number == number else size
    disk.fail(errno.ENOSPC, lambda call: call.number == number + 1 and call.name == "write")
    return lambda: None


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_one_failing_call_loses_nothing(tmp_path: Path, durability: str, code: int) -> None:
    """Whichever call fails once, all rows and the payload are there at the end, and no call has raised."""
    assert each_call(tmp_path, durability, once(code)) > 30


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
def test_a_disk_that_fails_for_a_while_loses_nothing(tmp_path: Path, durability: str) -> None:
    """Every call from the n-th on fails until the rows are logged; then all of them are written."""
    assert each_call(tmp_path, durability, until_healed(errno.ENOSPC)) > 15


@pytest.mark.parametrize("durability", ["thread", "write"])
@pytest.mark.parametrize("set_up", [short, torn], ids=["short", "torn"])
def test_short_writes_are_completed_or_left_behind(
    tmp_path: Path, durability: str, set_up: Callable[[Disk, int], Callable[[], None]]
) -> None:
    """A write that takes a part only is completed; where its rest fails, the segment is left for a new one."""
    assert each_call(tmp_path, durability, set_up) > 30


@pytest.mark.torture
@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("set_up", [once, until_healed])
def test_every_errno_at_every_call(
    tmp_path: Path, durability: str, code: int, set_up: Callable[[int], Callable[[Disk, int], Callable[[], None]]]
) -> None:
    """ENOSPC, EDQUOT, EIO, EINTR, EAGAIN, ESTALE and EROFS, at each call, once and for a while: 100 % of the rows."""
    assert each_call(tmp_path, durability, set_up(code)) > 15


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
def test_a_disk_that_fails_for_good_stops_nobody(
    tmp_path: Path, durability: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """From some call on nothing works: no call raises, `finish` returns in time and says how much is unwritten.

    A disk that comes back after all, while the process lives, gets every row.
    """
    for number in (1, 2, 9, 14, 20, 27):
        spool = tmp_path / str(number)
        disk = Disk(spool)
        disk.fail(code, lambda call, number=number: call.number >= number)
        with disk.in_place():
            run = log_script(spool, durability)
            run.finish(timeout=0.01)
            if disk.calls >= number:
                assert "ended with" in capfd.readouterr().err
                assert run.stats().queued + run.stats().written - run.stats().synced > 0
        found = [record for attempt in records(run.path).values() for record in attempt] if run.path.exists() else []
        rows = [record.data for record in found if record.kind == "metrics"]
        assert rows == [row(n) for n in range(len(rows))]
        assert run._writer.done.wait(30)
        check_whole(run)


def test_a_failed_sync_is_never_trusted_again(tmp_path: Path) -> None:
    """After fdatasync failed on a file it is not synced again: the rows since the last good sync go to a new one."""
    disk = Disk(tmp_path)
    failed: list[str] = []

    def before(call: Call) -> None:
        if call.name == "fdatasync" and call.path.endswith("jsonl"):
            assert call.path not in failed
            if len(failed) < 2:
                failed.append(call.path)
                raise OSError(errno.EIO, "gone")

    disk.before = before
    with disk.in_place():
        run = log_script(tmp_path, "thread")
        run.finish()
    check_whole(run)
    trusted = [path for path in segments(run.path) if str(path) not in failed]
    seqs = {orjson.loads(line).get("seq") for path in trusted for line in path.read_bytes().split(b"\n")[1:-1]}

    assert len(failed) == 2
    assert seqs == {record.seq for found in records(run.path).values() for record in found}


def test_the_warning_comes_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """While the disk fails, one line on stderr tells; when it is back, one line tells that too."""
    disk = Disk(tmp_path)
    disk.fail(errno.ENOSPC, lambda call: True)
    with disk.in_place():
        run = gapless.init("p", dir=tmp_path)
        for number in range(200):
            run.log(row(number))
        assert not run.flush(0.1)
        disk.before = lambda call: None
        run.finish()

    # A run of an earlier test whose disk never came back may tell now that it did.
    told = [line for line in capfd.readouterr().err.splitlines() if str(run.path) in line]
    assert [line for line in told if "No space left" in line] == told[:1]
    assert "takes rows again" in told[1]
    assert len(told) == 2


def random_trouble(folder: Path, durability: str, seed: int) -> None:
    """Four threads log over a disk that fails, tears and dawdles at random; then it is sound again."""
    chance = random.Random(seed)
    disk = Disk(folder)
    rate = chance.choice([0.02, 0.1, 0.4])

    def before(call: Call) -> None:
        if call.name in ("fdatasync", "write") and chance.random() < 0.2:
            sleep(chance.random() / 500)
        if call.name != "close" and chance.random() < rate:
            raise OSError(chance.choice(ERRNOS), "injected", call.path)

    disk.before = before
    disk.short = lambda call, size: chance.randint(1, size) if chance.random() < rate else size
    with disk.in_place():
        run = gapless.init("p", dir=folder, id="r", durability=durability)

        def work(worker: int) -> None:
            for number in range(60):
                run.log({"worker": worker, "n": number})
                if number % 20 == worker:
                    run.flush(0.01)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        disk.before = lambda call: None
        run.finish(timeout=20)
    (found,) = records(run.path).values()
    rows = [record for record in found if record.kind == "metrics"]

    assert [record.seq for record in found] == list(range(1, len(found) + 1))
    assert [record.step for record in rows] == list(range(240))
    for worker in range(4):
        assert [r.data["n"] for r in rows if r.data["worker"] == worker] == list(range(60))
    assert run.stats().dropped == 0


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
def test_random_trouble_with_many_threads_loses_nothing(tmp_path: Path, durability: str) -> None:
    """Whatever fails while four threads log and a sync is under way: every row is there once."""
    for seed in range(10):
        random_trouble(tmp_path / str(seed), durability, seed)


@pytest.mark.torture
@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
def test_five_hundred_seeds_of_random_trouble(tmp_path: Path, durability: str) -> None:
    """The same, 500 times."""
    for seed in range(100, 600):
        random_trouble(tmp_path / str(seed), durability, seed)
        shutil.rmtree(tmp_path / str(seed))
