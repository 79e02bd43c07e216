"""One uploader per spool and state: a lock where locks work, a lease record with a heartbeat everywhere.

The record tells a second uploader who holds the spool. A lock decides between processes of one host; the record decides
between hosts, and where the file system has no locks. It is taken over when its holder is a dead process of this host,
or when it has not changed for `STALE_S` of the watcher's own clock, so clocks that differ do no harm. A holder that was
paused looks at the record before its next request.

Each set of paths has a folder of its own, and so a lease. Paths that overlap (a root, and a run in it) share runs and
their progress: whoever comes second there is refused as well.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue

import orjson
from filelock import FileLock, Timeout

from gapless_uploader.state import replace_file

HEARTBEAT_S = 10.0
STALE_S = 60.0
LOOK_S = 1.0
"""How often the turn looks at the record."""
LOCK_S = 10.0
"""How long a lock may take to answer: on a network disk without its lock daemon it takes for ever."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, 524)


class Held(Exception):
    """Another uploader holds the spool; the text says who and what to do."""


@dataclass(frozen=True, slots=True)
class _Holder:
    owner: str
    host: str
    pid: int
    boot_id: str
    beat: int
    paths: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Lease:
    """The right to upload one spool with one state folder. Not thread safe, but for `check`."""

    def __init__(
        self,
        folder: Path,
        tell: Callable[[str], None] = lambda text: None,  # noqa: ARG005
        paths: Sequence[Path] = (),
    ) -> None:
        """`tell` hears why `acquire` takes its time; `paths` are what is uploaded, each a real path."""
        self._path = folder / "lease.json"
        self._lock = FileLock(folder / "lock", timeout=0, thread_local=False)
        self._tell = tell
        self._paths = tuple(paths)
        self._owner = uuid.uuid4().hex
        self._beat = 0
        self._beaten = -math.inf
        self._looked = -math.inf
        self.without_locks = False
        """The record alone decides: this file system has no locks, or does not answer."""

    def acquire(self, sleep: Callable[[float], None] = time.sleep, lock_s: float = LOCK_S) -> None:
        """Hold the lease, or raise `Held`. It may watch the record of another host's uploader for `STALE_S`.

        A lock that does not answer within `lock_s` counts as none. Raises OSError when the folder cannot be written.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        locked, error = self._try_lock(lock_s)
        if isinstance(error, Timeout):
            raise Held(_held_by(self._read()))
        if error is not None and error.errno not in _NO_LOCKS:
            raise error
        holder = self._read()
        if not locked:
            self.without_locks = True
            why = "does not answer" if error is None else f"has none ({error.strerror})"
            self._tell(f"locks: the file system of {self._path.parent} {why}; the lease record alone decides")
        # The lock proves that no process of this host is there; of other hosts it says nothing for sure.
        if holder is not None and not (locked and is_alive(holder.host, holder.pid, holder.boot_id) is not None):
            self._wait_for_stale(self._path, holder, sleep)
        self._write()
        try:
            self._refuse_overlaps(sleep)
        except BaseException:
            self.release()
            raise

    def keep(self, now: float) -> None:
        """Beat when it is time, and raise `Held` when somebody else took the lease over."""
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.check()
        if now - self._beaten >= HEARTBEAT_S:
            # A disk that is full or away is no reason to end: the record is as old as the last beat that worked.
            with suppress(OSError):
                self._write()
                self._beaten = now

    def check(self) -> None:
        """Raise `Held` when somebody else took the lease over. Any thread may call it, before each request."""
        holder = self._read()
        if holder is not None and holder.owner != self._owner:
            self._looked = -math.inf
            raise Held(_held_by(holder))

    def release(self) -> None:
        """Give the lease up. May be called twice."""
        holder = self._read()
        if holder is not None and holder.owner == self._owner:
            self._path.unlink(missing_ok=True)
        if self._lock.is_locked:
            self._lock.release()

    def _try_lock(self, lock_s: float) -> tuple[bool, OSError | None]:
        """Whether the lock is held now, and else why not; (False, None) when it did not answer."""
        answers: SimpleQueue[OSError | None] = SimpleQueue()

        def lock() -> None:
            try:
                _is_free(self._path.parent / "lock", os.O_CREAT)  # it answers, or says that it knows no locks
                self._lock.acquire()
            except OSError as error:  # Timeout is one
                answers.put(error)
            except NotImplementedError as error:
                answers.put(OSError(errno.ENOSYS, str(error)))
            else:
                answers.put(None)

        threading.Thread(target=lock, name="lease lock", daemon=True).start()
        try:
            error = answers.get(timeout=lock_s)
        except Empty:
            return False, None
        return error is None, error

    def _refuse_overlaps(self, sleep: Callable[[float], None]) -> None:
        """Raise `Held` while an uploader of the same state works on paths that share a run with these.

        Called with the own record written, so of two that begin at once at least one sees the other.
        """
        for path in sorted(self._path.parent.parent.glob("*/lease.json")) if self._paths else ():
            holder = _read(path)
            if path == self._path or holder is None or not self._overlaps(holder):
                continue
            is_locked = _is_locked(path.parent / "lock")
            if is_locked is False and is_alive(holder.host, holder.pid, holder.boot_id) is not None:
                continue  # of this host, and its lock is free: it died
            if not is_locked:
                self._wait_for_stale(path, holder, sleep)
                continue
            raise Held(
                f"{holder} uploads {', '.join(holder.paths)} already, which shares runs with this: stop it first"
            )

    def _overlaps(self, holder: _Holder) -> bool:
        theirs = [Path(path) for path in holder.paths]
        return any(a == b or a in b.parents or b in a.parents for a in self._paths for b in theirs)

    def _wait_for_stale(self, path: Path, holder: _Holder, sleep: Callable[[float], None]) -> None:
        """Return once the record's holder is surely gone; raise `Held` as soon as it beats."""
        if _is_dead(holder):
            return
        self._tell(f"lease: {holder} may upload this spool; watching its record for {STALE_S:.0f} s at most")
        waited = 0.0
        while waited < STALE_S:
            sleep(1.0)
            waited += 1.0
            seen = _read(path)
            if seen is None or _is_dead(seen):
                return
            if seen != holder:
                raise Held(_held_by(seen))

    def _read(self) -> _Holder | None:
        return _read(self._path)

    def _write(self) -> None:
        self._beat += 1
        record = {
            "owner": self._owner,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "beat": self._beat,
            "paths": [str(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace") for path in self._paths],
        }
        replace_file(self._path, orjson.dumps(record))


@cache
def boot_id() -> str:
    """This boot of this host; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_alive(host: str, pid: int, boot: str) -> bool | None:
    """Whether a process of this host and boot lives; None when it cannot be known from here."""
    if host != socket.gethostname() or not boot:
        return None
    if boot != boot_id():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> _Holder | None:
    """The holder that a record names; None where there is no sound record."""
    try:
        fields = orjson.loads(path.read_bytes())
        return _Holder(
            str(fields["owner"]),
            str(fields["host"]),
            int(fields["pid"]),
            str(fields["boot_id"]),
            int(fields["beat"]),
            tuple(str(path) for path in fields.get("paths", ())),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock; None where that cannot be known."""
    try:
        return not _is_free(path, 0)
    except FileNotFoundError:
        return False
    except OSError:
        return None


def _is_free(path: Path, flags: int) -> bool:
    """Whether nobody holds the lock. Raises the OSError of a file system that knows none; libraries differ in what they
    make of it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def _is_dead(holder: _Holder) -> bool:
    return is_alive(holder.host, holder.pid, holder.boot_id) is False


def _held_by(holder: _Holder | None) -> str:
    who = str(holder) if holder is not None else "another process"
    return f"{who} uploads this spool already: stop it first, or give this one another --state"
