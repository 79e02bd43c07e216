"""The lease: one uploader per spool and state, on one host or two, with locks or without."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from gapless_uploader import lease as lease_module
from gapless_uploader.lease import STALE_S, Held, Lease, boot_id
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.uploader import Inline, Uploader
from tests.uploader.spool_made import MadeRun


def no_sleep(seconds: float) -> None:
    raise AssertionError("nothing to wait for")


class Sleeps:
    """Counts the seconds slept; `during` is called with each."""

    def __init__(self, during: Any = lambda: None) -> None:
        self.seconds = 0.0
        self._during = during

    def __call__(self, seconds: float) -> None:
        self.seconds += seconds
        self._during()


def record(folder: Path, **changes: Any) -> dict[str, Any]:
    """Write a lease record of somebody else."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"owner": "o", "host": "login-2", "pid": 7, "boot_id": "b", "beat": 3, **changes}
    (folder / "lease.json").write_bytes(orjson.dumps(fields))
    return fields


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture(params=[errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, 524])
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A file system whose flock raises this."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)
    return request.param


# with locks


def test_the_second_says_who_holds_it(tmp_path: Path):
    """A second uploader of one spool and state is told host and pid of the first, and what to do."""
    first, second = Lease(tmp_path), Lease(tmp_path)
    first.acquire(no_sleep)
    with pytest.raises(Held, match=rf"pid {os.getpid()} on {socket.gethostname()}.*stop it first.*--state"):
        second.acquire(no_sleep)
    first.release()
    second.acquire(no_sleep)
    second.release()


def test_kill_9_is_taken_over_at_once(tmp_path: Path):
    """The lease of an uploader that was killed with -9 on this host is taken over without waiting."""
    program = (
        "import sys, time; from pathlib import Path; from gapless_uploader.lease import Lease\n"
        "lease = Lease(Path(sys.argv[1])); lease.acquire(); print('held', flush=True); time.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, env={"PYTHONPATH": "uploader:schemas"}
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(Held, match=f"pid {child.pid}"):
            Lease(tmp_path).acquire(no_sleep)
        child.send_signal(signal.SIGKILL)
    lease = Lease(tmp_path)
    lease.acquire(no_sleep)

    lease.keep(0.0)
    lease.release()


def test_release_twice_and_clean_folder(tmp_path: Path):
    """A released lease leaves no record, and may be released again."""
    lease = Lease(tmp_path)
    lease.acquire(no_sleep)
    assert (tmp_path / "lease.json").exists()
    lease.release()
    lease.release()

    assert not (tmp_path / "lease.json").exists()


# another host


def test_a_live_holder_on_another_host_is_seen(tmp_path: Path):
    """A lock that only this host sees does not count against another host's record that still beats."""
    record(tmp_path)
    told: list[str] = []
    with pytest.raises(Held, match="pid 7 on login-2"):
        Lease(tmp_path, told.append).acquire(Sleeps(lambda: record(tmp_path, beat=4)))

    assert "pid 7 on login-2" in told[0]


def test_a_dead_host_is_taken_over_after_the_lease_time(tmp_path: Path):
    """Another host's record that no longer beats is taken over after the lease time, not before."""
    record(tmp_path)
    lease, sleeps = Lease(tmp_path), Sleeps()
    lease.acquire(sleeps)

    assert sleeps.seconds == STALE_S
    lease.keep(0.0)
    lease.release()


@pytest.mark.parametrize("age_s", [3600.0, -600.0])
def test_the_clocks_of_others_do_no_harm(tmp_path: Path, age_s: float):
    """A record an hour old, or ten minutes in the future, is taken over within the same lease time."""
    record(tmp_path)
    when = time.time() - age_s
    os.utime(tmp_path / "lease.json", (when, when))
    lease, sleeps = Lease(tmp_path), Sleeps()
    lease.acquire(sleeps)

    assert sleeps.seconds == STALE_S
    lease.release()


@pytest.mark.parametrize("bytes_", [b"", b"\0" * 2048, b'{"owner": "o"', b"[]", b'{"owner": 1}'])
def test_a_damaged_record_holds_nothing(tmp_path: Path, bytes_: bytes):
    """A record that cannot be read is nobody's."""
    (tmp_path / "lease.json").write_bytes(bytes_)
    lease = Lease(tmp_path)
    lease.acquire(no_sleep)
    lease.release()


# no locks


def test_without_locks_the_record_decides(tmp_path: Path, no_locks: int):
    """Where flock is not implemented the lease is had at once when there is no record, and that is said."""
    told: list[str] = []
    lease = Lease(tmp_path, told.append)
    lease.acquire(no_sleep)

    assert lease.without_locks
    assert os.strerror(no_locks) in told[0]
    lease.release()


def test_without_locks_a_live_holder_is_seen(tmp_path: Path, no_locks: int):
    """A second uploader without locks sees the first one's heartbeat."""
    first = Lease(tmp_path)
    first.acquire(no_sleep)
    now = iter(range(0, 1000, 10))
    with pytest.raises(Held, match=f"pid {os.getpid()}"):
        Lease(tmp_path).acquire(Sleeps(lambda: first.keep(float(next(now)))))
    first.release()


def test_without_locks_a_dead_holder_of_this_host_is_taken_over_at_once(tmp_path: Path, no_locks: int):
    """A record of a process of this host and boot that is gone does not block."""
    record(tmp_path, host=socket.gethostname(), pid=dead_pid(), boot_id=boot_id())
    Lease(tmp_path).acquire(no_sleep)


def test_a_record_of_an_earlier_boot_does_not_block(tmp_path: Path, no_locks: int):
    """A record that this host wrote before it was booted again is nobody's."""
    record(tmp_path, host=socket.gethostname(), pid=os.getpid(), boot_id="an earlier one")
    Lease(tmp_path).acquire(no_sleep)


def test_a_lock_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A flock that blocks for ever counts as none after its time, and that is said."""
    never = threading.Event()
    monkeypatch.setattr(fcntl, "flock", lambda fd, operation: never.wait())
    told: list[str] = []
    lease = Lease(tmp_path, told.append)
    lease.acquire(no_sleep, lock_s=0.05)
    never.set()

    assert lease.without_locks
    assert "does not answer" in told[0]


def test_another_error_of_the_lock_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An error that says nothing about locks is not taken for a file system without them."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="Input/output"):
        Lease(tmp_path).acquire(no_sleep)


# a holder that was paused


def test_a_paused_holder_notices_at_its_next_turn(tmp_path: Path, no_locks: int):
    """A holder that was taken over while it was paused learns it when it wakes."""
    first = Lease(tmp_path)
    first.acquire(no_sleep)
    record(tmp_path, owner="the next one", host="login-3")

    with pytest.raises(Held, match="login-3"):
        first.keep(1e6)


def test_a_paused_holder_sends_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An uploader that was taken over between a turn and its request does not make the request, and commits nothing."""
    run = MadeRun(tmp_path / "spool").rows(0, 3)
    sink = MemorySink(settles_intents=False)
    uploader = Uploader([tmp_path / "spool"], [sink], tmp_path / "state", executor=Inline())
    uploader.start()
    now = time.monotonic()
    while uploader.turn(now):
        pass
    written = len(sink.runs["grpo/r-1"].operations)
    journal = (uploader.state.folder / "journal.jsonl").read_bytes()
    run.rows(3, 3)
    uploader.spool.hint(run.path)
    monkeypatch.setattr(uploader.lease, "keep", lambda now: record(uploader.state.folder, owner="the next one"))
    uploader.turn(now)
    monkeypatch.undo()
    with pytest.raises(Held):
        uploader.turn(now)
    uploader.stop()

    assert len(sink.runs["grpo/r-1"].operations) == written
    assert (uploader.state.folder / "journal.jsonl").read_bytes() == journal
    assert orjson.loads((uploader.state.folder / "lease.json").read_bytes())["owner"] == "the next one"


@pytest.mark.parametrize(("first", "second"), [("", "grpo"), ("grpo", ""), ("grpo", "grpo/r-1"), ("", "")])
def test_paths_that_share_runs_are_held_by_one(tmp_path: Path, first: str, second: str):
    """A root, and a project or a run in it: both would append to the same targets."""
    MadeRun(tmp_path / "spool").rows(0, 3)
    one = Uploader([tmp_path / "spool" / first], [MemorySink()], tmp_path / "state", executor=Inline())
    one.start()
    other = Uploader([tmp_path / "spool" / second], [MemorySink()], tmp_path / "state", executor=Inline())
    with pytest.raises(Held, match=f"pid {os.getpid()} .*stop it first"):
        other.start()
    one.turn(time.monotonic())
    one.stop()
    again = Uploader([tmp_path / "spool" / second], [MemorySink()], tmp_path / "state", executor=Inline())
    again.start()
    again.stop()


def test_paths_apart_are_held_apart(tmp_path: Path):
    """Two spools side by side, of names that begin alike, and one state."""
    made = []
    for name in ("spool", "spool-2"):
        MadeRun(tmp_path / name).rows(0, 1)
        made.append(Uploader([tmp_path / name], [MemorySink()], tmp_path / "state", executor=Inline()))
        made[-1].start()
    for uploader in made:
        uploader.stop()


@pytest.mark.parametrize("host", [socket.gethostname(), "login-2"])
def test_a_dead_holder_of_paths_that_share_runs_is_passed(tmp_path: Path, host: str):
    """Its lock is free; of another host its record is watched first."""
    record(tmp_path / "state" / "other", host=host, pid=os.getpid(), boot_id=boot_id(), paths=[str(tmp_path / "spool")])
    sleeps = Sleeps()
    lease = Lease(tmp_path / "state" / "mine", paths=[tmp_path / "spool" / "grpo"])
    lease.acquire(sleeps)
    lease.release()

    assert sleeps.seconds == (0.0 if host == socket.gethostname() else STALE_S)


def test_a_full_disk_does_not_end_the_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A heartbeat that cannot be written is tried again at the next turn; it is no reason to end."""
    lease = Lease(tmp_path)
    lease.acquire(no_sleep)
    beat = orjson.loads((tmp_path / "lease.json").read_bytes())["beat"]

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lease_module, "replace_file", full)
        lease.keep(100.0)
    lease.keep(101.0)

    assert orjson.loads((tmp_path / "lease.json").read_bytes())["beat"] > beat
    lease.release()
