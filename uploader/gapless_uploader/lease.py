"""One uploader per spool and state: a lock where locks work, a lease record with a heartbeat everywhere.

The record tells a second uploader who holds the spool. Where the file system has no locks, the record alone decides: it
is taken over when its holder is a dead process of this host and boot, or when it has not changed for `STALE_S` of the
watcher's own clock, so clocks that differ do no harm. A holder that was paused looks at the record before it goes on.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock, Timeout

from gapless_uploader.state import replace_file

HEARTBEAT_S = 10.0
STALE_S = 60.0
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

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Lease:
    """The right to upload one spool with one state folder. Not thread safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lease.json"
        self._lock = FileLock(folder / "lock", timeout=0)
        self._owner = uuid.uuid4().hex
        self._beat = 0
        self._beaten = 0.0
        self.without_locks = False

    def acquire(self, sleep: Any = time.sleep) -> None:
        """Hold the lease, or raise `Held`. Without locks it may watch another's record for `STALE_S`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except Timeout:
            holder = self._read()
            raise Held(_held_by(holder)) from None
        except (OSError, NotImplementedError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
                raise
            self.without_locks = True
            self._wait_for_stale(sleep)
        self._write()

    def keep(self, now: float) -> None:
        """Beat when it is time, and raise `Held` when somebody else took the lease over."""
        holder = self._read()
        if holder is not None and holder.owner != self._owner:
            raise Held(_held_by(holder))
        if now - self._beaten >= HEARTBEAT_S:
            self._beaten = now
            self._write()

    def release(self) -> None:
        """Give the lease up. May be called twice."""
        holder = self._read()
        if holder is not None and holder.owner == self._owner:
            self._path.unlink(missing_ok=True)
        if self._lock.is_locked:
            self._lock.release()

    def _wait_for_stale(self, sleep: Any) -> None:
        holder = self._read()
        waited = 0.0
        while holder is not None and not _is_dead(holder):
            if waited >= STALE_S:
                return
            sleep(1.0)
            waited += 1.0
            seen, holder = holder, self._read()
            if holder is not None and holder != seen:
                raise Held(_held_by(holder))

    def _read(self) -> _Holder | None:
        try:
            fields = orjson.loads(self._path.read_bytes())
            return _Holder(
                str(fields["owner"]),
                str(fields["host"]),
                int(fields["pid"]),
                str(fields["boot_id"]),
                int(fields["beat"]),
            )
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _write(self) -> None:
        self._beat += 1
        record = {
            "owner": self._owner,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "boot_id": boot_id(),
            "beat": self._beat,
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


def _is_dead(holder: _Holder) -> bool:
    return is_alive(holder.host, holder.pid, holder.boot_id) is False


def _held_by(holder: _Holder | None) -> str:
    who = str(holder) if holder is not None else "another process"
    return f"{who} uploads this spool already: stop it first, or give this one another --state"
