"""The training side: what `log` costs, and what is left after a kill, a full disk and a hanging one.

Next to W&B, SwanLab and trackio, each offline and in a process of its own, measured in the same run.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("wandb", "swanlab", "trackio")
SHARES = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
OURS = ("gapless-thread", "gapless-write", "gapless-sync")


def run(quick: bool) -> list[dict[str, Any]]:
    """All figures; `quick` takes a few minutes, the whole about half an hour."""
    figures = []
    for measure in (latency, stalled_disk, kills, slow_kills, full_disk, start_up):
        figures += measure(quick)
    return figures


def latency(quick: bool) -> list[dict[str, Any]]:
    """Microseconds of `log`, rows 2 ms apart, where others on the machine empty its caches, and back to back."""
    figures = []
    for num_metrics in (10, 100):
        took = {name: _latency(name, num_metrics, 500 if quick else 3000, 0.0) for name in (*OURS[:2], *PEERS)}
        for ours in OURS[:2]:
            figures.append(
                {
                    "figure": f"log(), {num_metrics} metrics, {ours.partition('-')[2]}, p50, rows back to back",
                    "ours": _at(took[ours], 0.5),
                    "peers": {peer: _at(took[peer], 0.5) for peer in PEERS},
                    "target": f"<= { ({10: 20, 100: 60}[num_metrics]) }",
                    "unit": "us",
                }
            )
    for num_metrics in (10, 100):
        took = {name: _latency(name, num_metrics, 500 if quick else 3000, 0.002) for name in (*OURS, *PEERS)}
        targets = {
            "gapless-thread": ({10: 20, 100: 60}[num_metrics], 300, None),
            "gapless-write": ({10: 20, 100: 60}[num_metrics], 500, None),
            "gapless-sync": (None, None, None),
        }
        for ours in OURS:
            for (share, label), target in zip(
                ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9")), targets[ours], strict=True
            ):
                figures.append(
                    {
                        "figure": f"log(), {num_metrics} metrics, {ours.partition('-')[2]}, {label}, rows 2 ms apart",
                        "ours": _at(took[ours], share),
                        "peers": {peer: _at(took[peer], share) for peer in PEERS},
                        "target": "" if target is None else f"<= {target}",
                        "unit": "us",
                    }
                )
    return figures


def stalled_disk(quick: bool) -> list[dict[str, Any]]:
    """`log` with `thread` while every access to the disk hangs in the kernel."""
    from tests.spool.fuse import stoppable_disk

    seconds = 3 if quick else 30
    rows = seconds * 400
    with tempfile.TemporaryDirectory() as folder:
        try:
            with stoppable_disk(Path(folder) / "slow") as disk:
                worker = _start("gapless-thread", "stalled", disk.folder, 10, rows)
                _expect(worker, "begun")
                disk.stop()
                _say(worker)
                _expect(worker, "over")
                disk.go_on()
                _say(worker)
                took = _result(worker)
                kept = _readable("gapless-thread", disk.folder)
        except OSError as why:
            return [_missing(f"log(), 10 metrics, thread, disk stalled for {seconds} s", "us", why)]
    name = f"log(), 10 metrics, thread, disk stalled for {seconds} s"
    return [
        {"figure": f"{name}, p99", "ours": _at(took, 0.99), "peers": {}, "target": "<= 300", "unit": "us"},
        {"figure": f"{name}, p99.9", "ours": _at(took, 0.999), "peers": {}, "target": "<= 5000", "unit": "us"},
        {"figure": f"{name}, worst", "ours": round(max(took), 1), "peers": {}, "target": "", "unit": "us"},
        {
            "figure": f"rows kept, disk stalled for {seconds} s",
            "ours": f"{kept} of {rows + 1}",
            "peers": {},
            "target": "all",
            "unit": "rows",
        },
    ]


def kills(quick: bool) -> list[dict[str, Any]]:
    """Rows kept when the process is killed right after it logged 50 rows, 20 ms apart (ours also without a pause)."""
    figures = []
    times = {"ours": 5 if quick else 50, "peers": 1 if quick else 5}
    for sig in (signal.SIGKILL, signal.SIGTERM):
        kept = {
            name: [_killed(name, sig, 50, 0.02) for _ in range(times["peers" if name in PEERS else "ours"])]
            for name in ("gapless-write", *PEERS)
        }
        figures.append(
            {
                "figure": f"rows kept, {sig.name} after 50 rows, write (worst of {times['ours']})",
                "ours": f"{min(kept['gapless-write'])} of 50",
                "peers": {peer: ", ".join(map(str, kept[peer])) for peer in PEERS},
                "target": "50 of 50",
                "unit": "rows",
            }
        )
    return figures


def slow_kills(quick: bool) -> list[dict[str, Any]]:
    """The same with `thread`, one row every 10 ms."""
    times = 5 if quick else 50
    kept = [_killed("gapless-thread", signal.SIGKILL, 50, 0.01) for _ in range(times)]
    return [
        {
            "figure": f"rows kept, SIGKILL after 50 rows, thread, a row every 10 ms (worst of {times})",
            "ours": f"{min(kept)} of 50",
            "peers": {},
            "target": ">= 49 of 50",
            "unit": "rows",
        }
    ]


def full_disk(quick: bool) -> list[dict[str, Any]]:
    """Rows kept when a small disk is full for 3 s of 8 and is then freed."""
    shares = {}
    for name in ("gapless-thread", "gapless-write", *PEERS):
        try:
            with tempfile.TemporaryDirectory() as folder, _tmpfs(Path(folder), 64) as disk:
                shares[name] = _filled(name, disk, 0.5 if quick else 1.0)
        except OSError as why:
            return [_missing("rows kept, disk full for 3 s", "%", why)]
    return [
        {
            "figure": f"rows kept, disk full for {1.5 if quick else 3} s, then freed, {ours.partition('-')[2]}",
            "ours": shares[ours],
            "peers": {peer: shares[peer] for peer in PEERS},
            "target": "100",
            "unit": "%",
        }
        for ours in ("gapless-thread", "gapless-write")
    ]


def start_up(quick: bool) -> list[dict[str, Any]]:
    """`init` of a run that has many segments and a long last one."""
    import gapless
    from tests.spool.test_steps import long_run

    segments, size = (2000, 1 << 30) if quick else (100_000, 10 << 30)
    with tempfile.TemporaryDirectory() as folder:
        long_run(Path(folder), segments, size)
        took = []
        for _ in range(20):
            begin = time.perf_counter()
            opened = gapless.init("p", dir=folder, id="r", is_writer=True)
            took.append((time.perf_counter() - begin) * 1e3)
            opened.log({"x": 1.0})
            opened.finish()
    return [
        {
            "figure": f"init(), {segments:,} old segments, the last of {size >> 30} GB, p50",
            "ours": _at(took, 0.5),
            "peers": {},
            "target": "<= 50",
            "unit": "ms",
        }
    ]


def _latency(name: str, num_metrics: int, rows: int, apart_s: float) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        took: list[float] = _result(_start(name, "latency", folder, num_metrics, rows, apart_s))
    return took[50:]  # the first ones load code


def _killed(name: str, sig: signal.Signals, rows: int, pause_s: float) -> int:
    with tempfile.TemporaryDirectory() as folder:
        worker = _start(name, "until_killed", folder, rows, pause_s)
        _expect(worker, "logged")
        worker.send_signal(sig)
        worker.wait(60)
        _close(worker)
        _end_helpers(worker.pid)
        return _readable(name, folder)


def _filled(name: str, disk: Path, unit_s: float) -> float:
    worker = _start(name, "for_seconds", disk, 8 * unit_s)
    _expect(worker, "begun")
    time.sleep(2 * unit_s)
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        for size in (1 << 16, 512, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    time.sleep(3 * unit_s)
    filler.unlink()
    logged = _result(worker)
    _end_helpers(worker.pid)
    return round(100 * _readable(name, disk) / logged, 1)


@contextmanager
def _tmpfs(folder: Path, size_mb: int) -> Iterator[Path]:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size_mb}m".encode()) != 0:
        raise OSError(ctypes.get_errno(), "no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), 2)


def _start(name: str, task: str, folder: str | Path, *arguments: object) -> subprocess.Popen[str]:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("GAPLESS_", "SLURM_", "WANDB_"))
    }
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / part) for part in ("", "spool", "schemas"))
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks._writer_worker", name, task, str(folder), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        text=True,
        start_new_session=True,
    )


def _expect(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.strip() == word:
            return
    raise RuntimeError(f"the worker ended before it said {word!r}")


def _say(worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()


def _result(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    result = None
    for line in worker.stdout:
        if line.startswith("RESULT "):
            result = json.loads(line.removeprefix("RESULT "))
    worker.wait(120)
    _close(worker)
    if result is None:
        raise RuntimeError("the worker ended without a result")
    return result


def _readable(name: str, folder: str | Path) -> int:
    return int(_result(_start(name, "readable", folder)))


def _close(worker: subprocess.Popen[str]) -> None:
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            pipe.close()


def _end_helpers(session: int) -> None:
    """End what a killed logger left running in its own session."""
    time.sleep(0.5)
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return


def _at(values: list[float], share: float) -> float:
    return round(sorted(values)[min(len(values) - 1, int(len(values) * share))], 1)


def _missing(figure: str, unit: str, why: OSError) -> dict[str, Any]:
    return {"figure": figure, "ours": "not measured", "peers": {}, "target": "", "unit": unit, "note": str(why)}


if __name__ == "__main__":
    for figure in run(quick="--quick" in sys.argv):
        print(figure)
