"""File events are hints: real ones wake, none or lost ones change nothing but the delay."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
from watchdog.events import DirModifiedEvent, FileCreatedEvent, FileModifiedEvent, FileMovedEvent

from gapless_uploader import events, file_events
from gapless_uploader.file_events import FileEvents, file_system
from gapless_uploader.spool import Spool
from tests.uploader.spool_made import MadeRun


class FakeObserver:
    """An observer that never fires; `error` is raised where inotify would."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.started = threading.Event()
        self.stopped = False
        self.alive = True
        self.emitters: list[FakeObserver] = []

    def schedule(self, handler: Any, path: str, recursive: bool) -> None:
        self.emitters.append(self)

    def start(self) -> None:
        self.started.set()
        if self.error is not None:
            raise self.error

    def is_alive(self) -> bool:
        return self.alive

    def unschedule_all(self) -> None:
        self.emitters.clear()

    def stop(self) -> None:
        self.stopped = True


def started(folder: Path, observer: FakeObserver, monkeypatch: pytest.MonkeyPatch) -> tuple[FileEvents, list[Any]]:
    monkeypatch.setattr(file_events, "file_system", lambda path: "ext4")
    told: list[Any] = []
    made = FileEvents(told.append, lambda: observer)
    made.start([folder])
    assert made._starter is not None
    made._starter.join(60)
    return made, told


def test_a_growing_segment_wakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real file event of a segment wakes the loop and names the segment."""
    monkeypatch.setattr(file_events, "file_system", lambda path: "ext4")
    run = MadeRun(tmp_path)
    made = FileEvents(lambda event: None)
    made.start([tmp_path])
    assert made._starter is not None
    made._starter.join(60)
    run.rows(0, 1)

    assert made.wake.wait(60)
    assert run.path in made.take()
    assert not made.wake.is_set()
    made.stop()


@pytest.mark.parametrize(
    "event",
    [
        FileModifiedEvent("/s/p/r/notes.txt"),
        FileModifiedEvent("/s/p/r/media/a.jsonl"),
        DirModifiedEvent("/s/p/r"),
    ],
)
def test_unrelated_events_do_not_wake(event: Any):
    """What is no segment and no folder of the spool, media included, wakes nobody."""
    made = FileEvents(lambda event: None)
    made.on_any_event(event)

    assert not made.wake.is_set()
    assert made.take() == set()


def test_both_ends_of_a_move_are_named():
    """A moved segment is a hint for where it was and where it is."""
    made = FileEvents(lambda event: None)
    made.on_any_event(FileMovedEvent("/s/p/a/x.jsonl", "/s/p/b/x.jsonl"))

    assert made.take() == {Path("/s/p/a/x.jsonl"), Path("/s/p/b/x.jsonl")}


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "inotify watch limit reached"), OSError(errno.EMFILE, "inotify instance limit reached")],
)
def test_limits_of_inotify_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError):
    """When inotify's limits are reached the scan goes on alone, and one message names the sysctl."""
    made, told = started(tmp_path, FakeObserver(error), monkeypatch)
    for t in range(100):
        made.compare({}, float(t))

    assert len(told) == 1
    assert isinstance(told[0], events.WatchingByScan)
    assert "fs.inotify.max_user_watches" in told[0].reason
    made.stop()


def test_an_observer_that_dies_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """When the observer's thread ends in the middle (a limit reached by a later run), that is said once."""
    observer = FakeObserver()
    made, told = started(tmp_path, observer, monkeypatch)
    made.compare({}, 1.0)
    assert told == []
    observer.alive = False
    for t in range(2, 100):
        made.compare({}, float(t))

    assert told == [events.WatchingByScan("file events stopped coming: their thread ended")]
    made.stop()


def test_events_that_stop_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An observer that lives and never fires is noticed by what the scan finds without it, and said once."""
    made, told = started(tmp_path, FakeObserver(), monkeypatch)
    for t in range(100):
        made.compare({tmp_path / "one.jsonl": t - 0.5}, float(t))

    assert told == [events.WatchingByScan("file events stopped coming: segments grew without one")]
    made.stop()


def test_many_runs_without_events_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Three segments that grew once each without an event are enough."""
    made, told = started(tmp_path, FakeObserver(), monkeypatch)
    made.compare({}, -1.0)
    made.compare({tmp_path / f"{i}.jsonl": -0.5 for i in range(3)}, 0.0)
    made.compare({}, 4.9)
    assert told == []
    made.compare({}, 5.0)

    assert len(told) == 1
    made.stop()


def told_of_growth_without_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> list[events.Event]:
    """What is told of ten runs that all grow once, without an event, after turn `at` of a hundred."""
    runs = [MadeRun(tmp_path, f"r-{i}").rows(0, 3) for i in range(10)]
    made, told = started(tmp_path, FakeObserver(), monkeypatch)
    spool = Spool([tmp_path])
    for t in range(100):
        spool.scan(float(t))
        made.compare(spool.unhinted, float(t))
        if t == at:
            for run in runs:
                run.rows(3, 1)
    made.stop()
    return told


def test_what_the_first_looks_find_was_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Quiet runs, first seen once events come, and writes since a look before that, say nothing of the events."""
    assert told_of_growth_without_events(tmp_path, monkeypatch, at=0) == []


def test_growth_since_a_look_with_events_was_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Segments that were known when events came, and grow without one, are counted."""
    told = told_of_growth_without_events(tmp_path, monkeypatch, at=10)

    assert told == [events.WatchingByScan("file events stopped coming: segments grew without one")]


def test_late_events_are_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The scan is sometimes faster than the event: when it comes after all, nothing is said."""
    made, told = started(tmp_path, FakeObserver(), monkeypatch)
    path = tmp_path / "one.jsonl"
    for t in range(100):
        made.compare({path: t - 0.5}, float(t))
        made.on_any_event(FileCreatedEvent(str(path)))
        made.take()

    assert told == []
    made.stop()


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "gpfs", "ceph", "fuse.sshfs", "9p", "overlay"])
def test_network_disks_are_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    """On disks that say nothing of other hosts' writes no observer is made, and that is said."""
    monkeypatch.setattr(file_events, "file_system", lambda path: kind)
    told: list[Any] = []
    made = FileEvents(told.append, lambda: pytest.fail("an observer was made"))
    made.start([tmp_path])

    assert [type(event) for event in told] == [events.WatchingByScan]
    assert kind in told[0].reason
    made.stop()


def test_file_system_of_proc():
    """The kind of file system comes from the longest mount point above a path."""
    assert file_system(Path("/proc/self")) == "proc"
