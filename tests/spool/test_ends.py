"""Every way a process can end, and what is on the disk afterwards."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.spool.oracle import only, records
from tests.spool.scripts import run, start

SCRIPT = """
import ctypes, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # as on a terminal; a background job ignores it
for name in ("SIGHUP", "SIGTERM"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
import gapless
how, durability, folder = sys.argv[1:]
run = gapless.init("p", dir=folder, id="r", durability=durability)
for number in range(50):
    run.log({"n": number}, step=number)
if how == "return":
    pass
elif how == "sys.exit":
    sys.exit(3)
elif how == "sys.exit in a thread":
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()
elif how == "exception":
    raise RuntimeError("training failed")
elif how == "os._exit":
    os._exit(4)
elif how == "segfault":
    ctypes.string_at(0)
else:
    print("ready", flush=True)
    time.sleep(60)
"""


def steps(folder: Path) -> list[int | None]:
    return [record.step for record in only(folder / "p" / "r", "metrics")]


@pytest.mark.parametrize("durability", ["thread", "write"])
@pytest.mark.parametrize(
    ("how", "status", "end"),
    [
        ("return", 0, {"state": "finished", "exit_code": None}),
        ("sys.exit", 3, {"state": "finished", "exit_code": None}),
        ("sys.exit in a thread", 0, {"state": "finished", "exit_code": None}),
        ("exception", 1, {"state": "failed", "exit_code": 1}),
    ],
)
def test_an_orderly_end_without_finish_loses_nothing(
    tmp_path: Path, durability: str, how: str, status: int, end: dict[str, object]
) -> None:
    """Return, sys.exit and an unhandled exception leave all rows and a `finish` record, with the status they had."""
    done = run(SCRIPT, how, durability, tmp_path)

    assert done.returncode == status, done.stderr
    assert steps(tmp_path) == list(range(50))
    assert [record.data for record in only(tmp_path / "p" / "r", "finish")] == [end]


@pytest.mark.parametrize("durability", ["thread", "write"])
def test_keyboard_interrupt_loses_nothing(tmp_path: Path, durability: str) -> None:
    """Ctrl-C ends the process as it always does, and the run with state `failed`."""
    process = start(SCRIPT, "interrupt", durability, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)

    assert process.returncode == -signal.SIGINT
    assert steps(tmp_path) == list(range(50))
    assert only(tmp_path / "p" / "r", "finish")[0].data["state"] == "failed"


@pytest.mark.parametrize("how", ["os._exit", "segfault"])
def test_a_sudden_end_loses_nothing_that_was_written(tmp_path: Path, how: str) -> None:
    """With `write`, os._exit and a segmentation fault lose no row whose `log` returned."""
    done = run(SCRIPT, how, "write", tmp_path)

    assert done.returncode == {"os._exit": 4, "segfault": -signal.SIGSEGV}[how]
    assert steps(tmp_path) == list(range(50))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_ends_the_process_at_once_and_loses_nothing(tmp_path: Path, sig: signal.Signals) -> None:
    """No handler is installed: the signal's default action ends the process; with `write` all 50 rows are there."""
    process = start(SCRIPT, "signal", "write", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(sig)
    process.communicate(timeout=30)

    assert process.returncode == -sig
    assert steps(tmp_path) == list(range(50))


def test_a_kill_after_a_while_loses_nothing_with_thread_either(tmp_path: Path) -> None:
    """Rows that a reader has seen are written; SIGTERM then takes none of them away, and nobody called `finish`."""
    process = start(SCRIPT, "signal", "thread", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while steps(tmp_path) != list(range(50)):
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=30)

    assert process.returncode == -signal.SIGTERM
    assert steps(tmp_path) == list(range(50))
    assert only(tmp_path / "p" / "r", "finish") == []


def limited_group() -> Path | None:
    """A new control group with 64 MiB of memory, or None where none can be made."""
    root = Path("/sys/fs/cgroup")
    for parent, limit in ((root, "memory.max"), (root / "memory", "memory.limit_in_bytes")):
        group = parent / f"gapless-test-{os.getpid()}"
        if (parent / "cgroup.procs").exists():
            with suppress(OSError):
                group.mkdir()
                if (group / limit).exists():
                    (group / limit).write_text(str(64 << 20))
                    return group
                group.rmdir()
    return None


def test_an_out_of_memory_kill_loses_nothing(tmp_path: Path) -> None:
    """The kernel's kill at a memory limit loses no row that `write` acknowledged."""
    group = limited_group()
    if group is None:
        pytest.skip("no memory limit can be set here")
    greed = "sys.stdin.readline(); hold = [b'x' * (1 << 20) + bytes([n]) for n in range(250)]"
    process = start(SCRIPT.replace("time.sleep(60)", greed), "memory", "write", tmp_path)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (group / "cgroup.procs").write_text(str(process.pid))
        process.communicate("go\n", timeout=60)
    finally:
        process.kill()
        process.wait()
        group.rmdir()

    assert process.returncode == -signal.SIGKILL
    assert steps(tmp_path) == list(range(50))


def test_a_record_is_readable_before_any_other_call(tmp_path: Path) -> None:
    """One small row and then silence: a reader sees it, with no `flush`, `finish` or further `log`."""
    process = start(
        """
        import sys, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r")
        run.log({"n": 1})
        sys.stdin.readline()
        """,
        tmp_path,
    )
    run_folder = tmp_path / "p" / "r"
    while not (run_folder.exists() and [r for a in records(run_folder).values() for r in a if r.kind == "metrics"]):
        assert process.poll() is None
    process.communicate("\n", timeout=30)

    assert steps(tmp_path) == [0]


def test_no_thread_and_no_child_outlives_the_run(tmp_path: Path) -> None:
    """While a run is open it has one thread, a daemon, and no child process; after `finish` it has none."""
    done = run(
        """
        import os, signal, sys, threading, gapless
        handlers = [signal.getsignal(s) for s in signal.valid_signals()]
        run = gapless.init("p", dir=sys.argv[1])
        run.log({"n": 1})
        print(len(threading.enumerate()), [t.daemon for t in threading.enumerate()[1:]])
        print(open(f"/proc/self/task/{os.getpid()}/children").read().split())
        run.finish()
        [t.join(10) for t in threading.enumerate()[1:]]
        print(len(threading.enumerate()), handlers == [signal.getsignal(s) for s in signal.valid_signals()])
        """,
        tmp_path,
    )

    assert done.stdout.splitlines() == ["2 [True]", "[]", "1 True"], done.stderr


def test_training_opens_no_socket_and_writes_only_in_the_spool(tmp_path: Path) -> None:
    """10,000 rows, a config update and `finish`: no socket is made, and no file elsewhere is opened for writing."""
    done = run(
        """
        import os, sys
        made = []
        def audit(event, args):
            if event.startswith("socket.") and event != "socket.gethostname":
                made.append(event)
            if event == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                if args[0].startswith("/") and not args[0].startswith(sys.argv[1]):
                    made.append(args[0])
            if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "os.exec"):
                made.append(event)
        sys.dont_write_bytecode = True
        sys.addaudithook(audit)
        import gapless
        with gapless.init("p", dir=sys.argv[1]) as run:
            for number in range(10_000):
                run.log({"n": number})
            run.config["lr"] = 1
        print(made, [name for name in ("wandb", "swanlab", "mlflow", "torch", "requests") if name in sys.modules])
        """,
        tmp_path,
    )

    assert done.stdout.splitlines() == ["[] []"], done.stderr


def test_finish_on_a_dead_disk_is_bounded_and_says_what_is_left(tmp_path: Path) -> None:
    """With a spool that cannot be made, the process ends by itself and stderr tells how many records are unwritten."""
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    done = run(
        """
        import sys, gapless
        run = gapless.init("p", dir=sys.argv[1] + "/spool", finish_timeout=0.3)
        for number in range(20):
            run.log({"n": number})
        """,
        blocked,
    )

    assert done.returncode == 0
    assert "records not written" in done.stderr
    assert "Not a directory" in done.stderr


def test_a_process_whose_disk_stays_dead_ends_quietly(tmp_path: Path) -> None:
    """After `finish` gave up, the thread goes on trying; the interpreter's end is not disturbed by it."""
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    done = run(
        """
        import sys, gapless
        from gapless import journal, warn
        journal.FIRST_BACKOFF_S = journal.LAST_BACKOFF_S = 0.0
        warn.REPEAT_S = 0.0
        run = gapless.init("p", dir=sys.argv[1] + "/spool")
        run.log({"n": 1})
        run.finish(timeout=0.05)
        """,
        blocked,
    )

    assert done.returncode == 0
    assert "records not written" in done.stderr
    assert "Fatal" not in done.stderr


def test_ctrl_c_inside_finish_loses_nothing(tmp_path: Path) -> None:
    """A `finish` that is interrupted while it waits is gone on with at the process's end."""
    done = run(
        """
        import os, signal, sys, threading, time, gapless
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        run = gapless.init("p", dir=sys.argv[1], id="r")
        assert run._writer.described.wait(30)
        assert run.flush(30)
        hold = run._writer.journal.lock
        hold.acquire()
        for number in range(50):
            run.log({"n": number})
        def interrupt():
            while not run._writer._ending:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            run.finish(3, timeout=60)
        except KeyboardInterrupt:
            print("interrupted")
        hold.release()
        """,
        tmp_path,
    )

    assert done.stdout == "interrupted\n", done.stderr
    assert steps(tmp_path) == list(range(50))
    assert [record.data["exit_code"] for record in only(tmp_path / "p" / "r", "finish")] == [3]
