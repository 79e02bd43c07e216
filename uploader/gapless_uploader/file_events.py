"""File events as hints: which segments and folders to look at first.

Nothing depends on them. Where they cannot be had (network disks, limits of inotify) or stop coming, that is said once
and the scan goes on alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from gapless_uploader import events
from gapless_uploader.events import Listener
from gapless_uploader.wake import Wake

_SCANNED = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "smb3", "9p", "afs", "beegfs", "overlay", "virtiofs")
)
_LATE_S = 5.0
"""An event that comes so long after the scan saw what it tells of does not count as coming."""
_FORGET_S = 60.0
_LOST = 3
"""So many segments that grew without an event, or one so many times: events do not come."""


class FileEvents(FileSystemEventHandler):
    """Paths that events named, and an event that is set with the first of them. Called from watchdog's threads."""

    def __init__(
        self, listener: Listener, make_observer: Callable[[], Any] = Observer, wake: Wake | None = None
    ) -> None:
        self.wake = wake or Wake()
        self._listen = listener
        self._make_observer = make_observer
        self._observer: Any = None
        self._starter: threading.Thread | None = None
        self._problem: str | None = None
        self._lock = threading.Lock()
        self._paths: set[Path] = set()
        self._missed: dict[Path, list[float]] = {}
        """Segments that grew without an event so far, and when."""
        self._live = False
        self._live_since: float | None = None
        """The turn, by its monotonic seconds, after which every write has an event."""

    def start(self, paths: Iterable[Path]) -> None:
        """Ask for events under `paths`, in the background: a large tree takes its time, and the scan runs already."""
        folders = sorted({path if path.is_dir() else path.parent for path in paths})
        for path in folders:
            kind = file_system(path)
            if not tells_events(kind):
                self._listen(events.WatchingByScan(f"{path} is on {kind}, which tells nothing of other hosts' writes"))
                return
        self._starter = threading.Thread(target=self._start, args=(folders,), name="file events", daemon=True)
        self._starter.start()

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Keep what a segment or a folder was named for; everything else under the root is none of ours."""
        if event.event_type in ("opened", "closed", "closed_no_write"):
            return
        if event.is_directory and event.event_type == "modified":
            return  # what changed in it has an event of its own
        named = {Path(os.fsdecode(path)) for path in (event.src_path, event.dest_path) if path}
        named = {p for p in named if p.parent.name != "media" and (event.is_directory or p.suffix == ".jsonl")}
        if named:
            with self._lock:
                self._paths |= named
            self.wake.set()

    def take(self) -> set[Path]:
        """The paths named since the last call."""
        self.wake.clear()
        with self._lock:
            taken, self._paths = self._paths, set()
        for path in taken:
            self._missed.pop(path, None)
        return taken

    def compare(self, unhinted: Mapping[Path, float], now: float) -> None:
        """Say so when events stopped.

        `unhinted`: segments that the scan at `now` saw grow without an event, and when they had not grown yet;
        monotonic seconds. Growth since a look from before the events came is none that they missed.
        """
        if self._problem is not None:
            problem, self._problem = self._problem, None
            self._give_up(problem)
        if not self._live:
            return
        if not all(emitter.is_alive() for emitter in self._observer.emitters) or not self._observer.is_alive():
            self._give_up("file events stopped coming: their thread ended")
            return
        if self._live_since is None:
            self._live_since = now  # the scan at `now` may have been before
        for path, looked in unhinted.items():
            if looked > self._live_since:
                self._missed.setdefault(path, []).append(now)
        self._missed = {path: times for path, times in self._missed.items() if now - times[-1] < _FORGET_S}
        late = [len(times) for times in self._missed.values() if now - times[0] >= _LATE_S]
        if len(late) >= _LOST or max(late, default=0) >= _LOST:
            self._give_up("file events stopped coming: segments grew without one")

    def stop(self) -> None:
        """Ask for no more events. Waits for nobody."""
        self._live = False
        if self._observer is not None and (self._starter is None or not self._starter.is_alive()):
            self._observer.stop()

    def _start(self, folders: list[Path]) -> None:
        observer = self._make_observer()
        self._observer = observer
        try:
            for folder in folders:
                observer.schedule(self, str(folder), recursive=True)
            observer.start()
        except OSError as error:
            observer.unschedule_all()
            self._problem = (
                f"{error.strerror or error}; sysctl fs.inotify.max_user_watches and fs.inotify.max_user_instances"
                " set how many watches there may be"
            )
            self.wake.set()
        else:
            self._live = True

    def _give_up(self, reason: str) -> None:
        self._listen(events.WatchingByScan(reason))
        self.stop()


def tells_events(kind: str) -> bool:
    """Whether a file system of this kind tells of every write; others only of this host's, or of none."""
    return kind not in _SCANNED and not kind.startswith("fuse")


def file_system(path: Path) -> str:
    """The kind of file system that `path` lies on, from /proc/mounts; empty where that is not there."""
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        point = fields[1].replace("\\040", " ").replace("\\134", "\\")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), fields[2]
    return kind
