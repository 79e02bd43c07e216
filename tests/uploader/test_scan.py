"""The scan: it finds everything without events, and costs little while nothing happens."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from gapless_uploader import spool as spool_module
from gapless_uploader.spool import LOOKS_PER_S, Spool
from tests.uploader.spool_made import MadeRun

LONG_AGO = time.time() - 86_400


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders that the scan listed."""
    found: list[str] = []
    real = os.scandir

    def scandir(path: str | Path):
        found.append(str(path))
        return real(path)

    monkeypatch.setattr(spool_module.os, "scandir", scandir)
    return found


def settle(root: Path) -> None:
    """Make everything under `root` old, as a tree that nobody touched today."""
    for folder, _, names in os.walk(root):
        for name in names:
            os.utime(Path(folder) / name, (LONG_AGO, LONG_AGO))
        os.utime(folder, (LONG_AGO, LONG_AGO))


def pass_time(spool: Spool, start: float, seconds: float) -> int:
    """Scan whenever something is due, as the loop does; how often that was."""
    now, scans = start, 0
    while (now := max(now, spool.next_due())) < start + seconds:
        spool.scan(now)
        scans += 1
    return scans


# finding


def test_rows_are_found_without_events(tmp_path: Path):
    """A growing segment is seen within a second of scanning, though no event ever comes."""
    run = MadeRun(tmp_path).rows(0, 3)
    spool = Spool([tmp_path])
    assert spool.scan(0.0) == {run.key}
    run.rows(3, 1)

    assert spool.scan(1.1) == {run.key}
    assert spool.scan(2.2) == set()


def test_quiet_run_is_seen_to_grow_within_a_minute(tmp_path: Path):
    """A run that was silent for an hour is looked at once a minute."""
    run = MadeRun(tmp_path).rows(0, 3)
    settle(tmp_path)
    spool = Spool([tmp_path])
    pass_time(spool, 0.0, 3600.0)
    run.rows(3, 1)
    os.utime(run.folder, (LONG_AGO, LONG_AGO))
    seen = [t for t in range(3600, 3662) if run.key in spool.scan(float(t))]

    assert len(seen) == 1


def test_new_run_is_found_by_the_next_scan(tmp_path: Path):
    """However long the root was quiet, a new run is found within a second."""
    MadeRun(tmp_path, "old")
    spool = Spool([tmp_path])
    pass_time(spool, 0.0, 600.0)
    new = MadeRun(tmp_path, "new")

    assert new.key in spool.scan(601.1) | spool.scan(602.2)


def test_runs_are_found_however_fast_they_come(tmp_path: Path):
    """Three hundred runs that appear between two scans are all there after one."""
    spool = Spool([tmp_path])
    spool.scan(0.0)
    made = {MadeRun(tmp_path, f"r-{i}", project=f"p-{i % 7}").key for i in range(300)}

    assert spool.scan(1.1) == made


def test_runs_are_found_however_deep(tmp_path: Path):
    """A run ten folders below the root is found in the first scan, and one beside it later."""
    deep = tmp_path.joinpath(*"abcdefgh")
    first = MadeRun(deep, "first")
    spool = Spool([tmp_path])
    assert spool.scan(0.0) == {first.key}
    second = MadeRun(deep, "second")

    assert second.key in set().union(*(spool.scan(float(t)) for t in range(1, 4)))


def test_new_attempt_of_a_retired_run_is_found(tmp_path: Path):
    """A run that everybody was done with becomes active again when a new attempt begins."""
    run = MadeRun(tmp_path).rows(0, 3).finish()
    settle(tmp_path)
    spool = Spool([tmp_path])
    spool.scan(0.0)
    spool.retire(run.key)
    pass_time(spool, 0.0, 600.0)
    MadeRun(tmp_path, attempt=2)
    found = [t for t in range(600, 662) if run.key in spool.scan(float(t))]

    assert found
    assert len(spool.runs[run.key].attempts) == 2


def test_project_named_media(tmp_path: Path):
    """A project may be called `media`: only a run's own media folder is left out."""
    run = MadeRun(tmp_path, project="media")

    assert Spool([tmp_path]).scan(0.0) == {run.key}


def test_renamed_folder_keeps_its_segments(tmp_path: Path):
    """A run folder that is renamed between two scans is still the same run, at its new path."""
    run = MadeRun(tmp_path).rows(0, 3)
    spool = Spool([tmp_path])
    spool.scan(0.0)
    moved = run.folder.rename(tmp_path / "elsewhere")
    for t in range(1, 4):
        spool.hint(moved)
        spool.scan(float(t))
    (segments,) = spool.runs[run.key].segments.values()

    assert [segment.path.parent for segment in segments.values()] == [moved]


def test_a_lost_copy_leaves_the_other(tmp_path: Path):
    """A run copied to a second place is read from there when the first one goes."""
    run = MadeRun(tmp_path).rows(0, 3)
    copy = tmp_path / "backup" / "r-1"
    shutil.copytree(run.folder, copy)
    spool = Spool([tmp_path])
    spool.scan(0.0)
    shutil.rmtree(run.folder.parent)
    for t in range(1, 4):
        spool.scan(float(t))
    (segments,) = spool.runs[run.key].segments.values()

    assert [segment.path.parent for segment in segments.values()] == [copy]


def test_hint_is_followed_at_once(tmp_path: Path):
    """What an event names is looked at in the next scan, though it is not due."""
    run = MadeRun(tmp_path).rows(0, 3)
    settle(tmp_path)
    spool = Spool([tmp_path])
    pass_time(spool, 0.0, 3600.0)
    run.rows(3, 1)
    (folder,) = spool.runs[run.key].folders
    now = spool._agenda._due[folder] - 0.5  # the path says when within its minute a folder is due
    assert spool.scan(now) == set()
    spool.hint(run.path)

    assert spool.next_due() < now
    assert spool.scan(now) == {run.key}


def test_growth_without_a_hint_is_told(tmp_path: Path):
    """The scan tells which segments grew without an event, so that lost events are noticed."""
    run = MadeRun(tmp_path).rows(0, 3)
    spool = Spool([tmp_path])
    spool.scan(0.0)
    run.rows(3, 1)
    spool.scan(1.1)
    assert spool.unhinted == {run.path: 0.0}
    run.rows(4, 1)
    spool.hint(run.path)
    spool.scan(1.2)

    assert spool.unhinted == {}


# what it does not do


def test_media_folders_are_never_listed(tmp_path: Path, listed: list[str]):
    """A run's media folder is never listed, whatever is in it and however long the scan goes on."""
    run = MadeRun(tmp_path).rows(0, 3)
    (run.folder / "media").mkdir()
    (run.folder / "media" / ("0" * 64 + ".png")).write_bytes(b"x")
    spool = Spool([tmp_path])
    pass_time(spool, 0.0, 600.0)
    spool.hint(run.folder / "media" / "new.png")
    spool.scan(600.0)

    assert str(run.folder) in listed
    assert str(run.folder / "media") not in listed


def test_links_are_not_followed(tmp_path: Path):
    """A link to a folder or segment outside the root is not followed; the link named like a segment is told."""
    outside = MadeRun(tmp_path / "outside")
    root = tmp_path / "root"
    run = MadeRun(root)
    (root / "grpo" / "linked").symlink_to(outside.folder)
    (run.folder / outside.path.name).symlink_to(outside.path)
    spool = Spool([root])

    assert spool.scan(0.0) == {run.key}
    assert [path.name for path in spool.problems] == [outside.path.name]


@pytest.mark.parametrize("files", [20_000, pytest.param(200_000, marks=pytest.mark.torture)])
def test_unrelated_files_cost_nothing_but_the_listing(tmp_path: Path, listed: list[str], files: int):
    """Thousands of unrelated files, beside runs and inside one, are listed once in a long while and never looked at."""
    run = MadeRun(tmp_path).rows(0, 3)
    for i in range(files // 2):
        (tmp_path / f"shard-{i}.bin").touch()
        (run.folder / f"shard-{i}.bin").touch()
    settle(tmp_path)
    listed.clear()
    spool = Spool([tmp_path])
    spool.scan(0.0)
    looks = spool.num_looks
    pass_time(spool, 0.0, 90.0)

    assert set(spool.runs) == {run.key}
    assert looks <= 10
    assert (listed.count(str(tmp_path)), listed.count(str(run.folder))) == (1, 1)


# what it costs


def test_a_thousand_quiet_runs_are_rarely_looked_at(tmp_path: Path):
    """After a while a thousand quiet runs cost less than 50 looks a second, and wake the loop once a second."""
    for i in range(1000):
        MadeRun(tmp_path, f"r-{i}")
    settle(tmp_path)
    spool = Spool([tmp_path])
    pass_time(spool, 0.0, 600.0)
    looks = spool.num_looks
    scans = pass_time(spool, 600.0, 300.0)

    assert (spool.num_looks - looks) / 300.0 < 50.0
    assert scans <= 602


@pytest.mark.parametrize("runs", [2000, pytest.param(100_000, marks=pytest.mark.torture)])
def test_finished_runs_cost_a_bounded_number_of_looks(tmp_path: Path, runs: int):
    """Of thousands of runs that are over, only so many a second are looked at; a live one beside them is not late."""
    over = [MadeRun(tmp_path, f"r-{i}", project="over").finish() for i in range(runs)]
    live = MadeRun(tmp_path, "live")
    settle(tmp_path)
    spool = Spool([tmp_path])
    spool.scan(0.0)
    for run in over:
        spool.retire(run.key)
    pass_time(spool, 0.0, 200.0)
    looks = spool.num_looks
    pass_time(spool, 200.0, 400.0)
    per_look = 2
    others = 3 * 400

    assert spool.num_looks - looks <= 1.5 * LOOKS_PER_S * per_look * 400 + others
    live.rows(0, 1)
    assert live.key in set().union(*(spool.scan(float(t)) for t in range(600, 662)))


def test_bare_folders_cost_a_bounded_number_of_looks(tmp_path: Path):
    """A tree of folders that hold no spool is walked once, and then looked at so many a second."""
    for i in range(60):
        for j in range(20):
            (tmp_path / "cache" / f"{i}" / f"{j}").mkdir(parents=True)
    settle(tmp_path)
    spool = Spool([tmp_path])
    spool.scan(0.0)
    looks = spool.num_looks
    pass_time(spool, 1.0, 300.0)

    assert looks < 1300
    assert spool.num_looks - looks <= 1.5 * LOOKS_PER_S * 300 + 300


# what goes away


def test_unreadable_folder_is_listed_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that cannot be listed is told with the system's reason, and read again when it can be."""
    run = MadeRun(tmp_path).rows(0, 3)
    real = os.scandir

    def scandir(path: str | Path):
        if Path(path) == run.folder:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    spool = Spool([tmp_path])
    with monkeypatch.context() as patch:
        patch.setattr(spool_module.os, "scandir", scandir)
        assert spool.scan(0.0) == set()
        assert spool.problems == {run.folder: f"read {run.folder}: Permission denied"}
    found = set().union(*(spool.scan(float(t)) for t in range(1, 70)))

    assert found == {run.key}
    assert spool.problems == {}


def test_root_that_goes_and_comes_back(tmp_path: Path):
    """While the root is away that is told and nothing is forgotten of its runs; when it is back they are read on."""
    root = tmp_path / "spool"
    run = MadeRun(root).rows(0, 3)
    spool = Spool([root])
    spool.scan(0.0)
    away = root.rename(tmp_path / "away")
    assert pass_time(spool, 1.0, 600.0) <= 700
    assert spool.problems == {root: f"read {root}: No such file or directory"}
    assert spool.runs[run.key].attempts
    away.rename(root)

    assert run.key in spool.scan(602.0) | spool.scan(603.0)
    assert spool.problems == {}
