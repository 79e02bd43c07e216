"""Processes that a test may kill: a server that forks one for each job, so that thousands are cheap.

Started as `python -m tests.spool.children`; a job is one of the functions in JOBS. `Children` is the test's side.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class Counter:
    """A number that outlives its process: 8 bytes of a mapped file."""

    def __init__(self, path: str | Path) -> None:
        Path(path).touch()
        os.truncate(path, 8)
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    @property
    def value(self) -> int:
        return int.from_bytes(self._map[:8], "little")

    @value.setter
    def value(self, number: int) -> None:
        self._map[:8] = number.to_bytes(8, "little")


def row(number: int) -> dict[str, float]:
    """The row that every job logs as its `number`-th, from 0."""
    return {"loss": 1.0 / (number + 1), "n": float(number), "lr": 0.1 * number}


def log_rows(
    folder: str, acks: str, durability: str, rows: int = 10**9, pause_s: float = 0.0, run_id: str = "r"
) -> None:
    """Log rows and count those whose `log` returned."""
    import gapless

    counter = Counter(acks)
    run = gapless.init("p", dir=folder, id=run_id, durability=durability, is_writer=True)  # type: ignore[arg-type]
    for number in range(rows):
        run.log(row(number), step=number)
        counter.value = number + 1
        if pause_s:
            time.sleep(pause_s)
    run.finish()


def die_at(folder: str, acks: str, durability: str, call: int, how: str) -> None:
    """Run the script of `scripted` and end the process before, after or in the middle of the disk call `call`."""
    from tests.spool.disk import Call, Disk

    disk = Disk(folder)

    def die(this: Call) -> None:
        if this.number == call:
            os.kill(os.getpid(), signal.SIGKILL)

    if how == "before":
        disk.before = die
    elif how == "after":
        disk.after = die
    else:
        disk.short = lambda this, size: max(1, size // 2) if this.number == call else size
        disk.after = die
    with disk.in_place():
        scripted(folder, Counter(acks), durability)


def scripted(folder: str, counter: Counter, durability: str) -> None:
    """A run with everything in it that touches the disk: a job's id, rows, a payload, rotation, syncs, an end."""
    import gapless
    from gapless import journal

    journal.SEGMENT_BYTES = 2000  # type: ignore[misc]
    os.environ["SLURM_JOB_ID"] = "77"
    run = gapless.init("p", dir=folder, resume="auto", durability=durability, is_writer=True)  # type: ignore[arg-type]
    for number in range(4):
        run.log(row(number), step=number)
        counter.value = number + 1
    run.log({"text": gapless.Text("x" * 300_000)}, step=4)
    run.flush()
    for number in range(4, 12):
        run.log(row(number), step=number)
        counter.value = number + 1
    run.finish()
    counter.value = 100


JOBS: dict[str, Callable[..., None]] = {"log_rows": log_rows, "die_at": die_at}


class Children:
    """The server, started and stopped with the `with` block."""

    def __enter__(self) -> Self:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("GAPLESS_", "SLURM_", "TORCHELASTIC"))
        }
        environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "spool", "schemas"))
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.spool.children"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._server.stdout.close()

    def run(self, job: str, *, kill_after_s: float | None = None, sig: int = signal.SIGKILL, **arguments: Any) -> int:
        """The job's exit status as `os.waitstatus_to_exitcode` has it: negative for a signal."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        order = {"job": job, "kill_after_s": kill_after_s, "signal": int(sig), "arguments": arguments}
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def serve() -> None:
    import gapless  # noqa: F401  # loaded once, not in every child

    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            devnull = os.open(os.devnull, os.O_RDWR)
            os.dup2(devnull, 0)
            os.dup2(devnull, 1)
            try:
                JOBS[order["job"]](**order["arguments"])
            except BaseException as error:  # the parent sees the status only
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
                os._exit(1)
            os._exit(0)
        if order["kill_after_s"] is not None:
            time.sleep(order["kill_after_s"])
            os.kill(child, order["signal"])
        status = os.waitpid(child, 0)[1]
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
