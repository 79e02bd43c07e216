"""The loop around the turns: wake-ups by file events, a clean stop by a signal.

Events are hints: each marks a folder to be looked at first, and wakes the loop. The scan alone finds everything, so
disks where no event ever comes (NFS, Lustre, GPFS, FUSE) only wait for the next scan.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver

from gapless_uploader import events
from gapless_uploader.events import Listener
from gapless_uploader.uploader import Uploader

_SCANNED = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "ceph", "cifs", "smb3", "9p", "afs", "beegfs", "overlay", "virtiofs")
)
DEBOUNCE_S = 0.05
MAX_SLEEP_S = 1.0


class Wakeups(FileSystemEventHandler):
    """File events as hints. Called from watchdog's thread."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self._paths: set[str] = set()
        self._lock = threading.Lock()

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.event_type in ("opened", "closed_no_write"):
            return
        with self._lock:
            self._paths.add(os.fsdecode(event.src_path))
        self.event.set()

    def take(self) -> set[str]:
        """The paths named since the last call."""
        with self._lock:
            taken, self._paths = self._paths, set()
        self.event.clear()
        return taken


class Stop:
    """Whether a signal asked for the end. A second one ends the process at once."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._wake: threading.Event | None = None

    @contextmanager
    def listening(self, wake: threading.Event) -> Iterator[None]:
        """SIGTERM, SIGINT and SIGHUP set the flag while inside; the handlers before are put back."""
        self._wake = wake
        before = {
            number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number).name
        if self._wake is not None:
            self._wake.set()


def watch(
    uploader: Uploader,
    listener: Listener,
    until: Callable[[Uploader, float], bool] = lambda uploader, now: False,  # noqa: ARG005
    on_turn: Callable[[float], None] = lambda now: None,  # noqa: ARG005
    use_events: bool = True,
) -> str | None:
    """Turn until a signal comes or `until` says so; the signal's name, if one came. Raises `Held` and OSError."""
    wakeups = Wakeups()
    observer = _observe(uploader.spool.paths, wakeups, listener) if use_events else None
    stop = Stop()
    try:
        with stop.listening(wakeups.event):
            while stop.signal is None:
                now = time.monotonic()
                for path in wakeups.take():
                    uploader.spool.hint(Path(path))
                busy = uploader.turn(now)
                on_turn(now)
                if not busy and until(uploader, now):
                    break
                wait = 0.005 if busy else min(uploader.next_due(now), MAX_SLEEP_S)
                if wakeups.event.wait(wait) and not busy:
                    wakeups.event.wait(DEBOUNCE_S)
                    time.sleep(DEBOUNCE_S if stop.signal is None else 0.0)
            if stop.signal is not None:
                listener(events.Stopping(stop.signal))
    finally:
        if observer is not None:
            observer.stop()
        uploader.stop()
    return stop.signal


def _observe(paths: list[Path], wakeups: Wakeups, listener: Listener) -> BaseObserver | None:
    """A running observer of `paths`, or None where events do not come or cannot be had."""
    for path in paths:
        kind = file_system(path)
        if kind in _SCANNED or kind.startswith("fuse"):
            listener(events.WatchingByScan(f"{path} is on {kind}, which tells nothing of other hosts' writes"))
            return None
    observer = Observer()
    try:
        for path in paths:
            observer.schedule(wakeups, str(path if path.is_dir() else path.parent), recursive=True)
        observer.start()
    except OSError as error:
        observer.unschedule_all()
        listener(
            events.WatchingByScan(
                f"{error.strerror or error}; sysctl fs.inotify.max_user_watches and fs.inotify.max_user_instances"
                " set how many watches there may be"
            )
        )
        return None
    return observer


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
