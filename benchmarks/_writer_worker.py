"""One logger in a process of its own: `python -m benchmarks._writer_worker LOGGER TASK FOLDER [ARGUMENT...]`.

LOGGER is `gapless-thread`, `gapless-write`, `gapless-sync`, `wandb`, `swanlab` or `trackio`, all offline. `readable`
counts the rows that a logger's own reader finds afterwards.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Log = Callable[[dict[str, float], int], None]


def opened(logger: str, folder: str) -> tuple[Log, Callable[[], None]]:
    """`log(row, step)` and `finish()` of a logger that writes under `folder`."""
    if logger.startswith("gapless"):
        import gapless

        run = gapless.init("bench", dir=folder, durability=logger.partition("-")[2], is_writer=True)  # type: ignore[arg-type]
        return lambda row, step: run.log(row, step=step), run.finish
    os.environ.update(HOME=folder, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=folder, TRACKIO_DIR=folder)
    if logger == "wandb":
        import wandb

        theirs = wandb.init(project="bench", dir=folder)
        return lambda row, step: theirs.log(row, step=step), theirs.finish
    if logger == "swanlab":
        import swanlab

        swanlab.init(project="bench", mode="offline", logdir=folder)
        return lambda row, step: swanlab.log(row, step=step), swanlab.finish
    import trackio

    trackio.init(project="bench", name="r", embed=False, auto_log_gpu=False, auto_log_cpu=False)
    return lambda row, step: trackio.log(row, step=step), trackio.finish


def row_of(num_metrics: int, number: int) -> dict[str, float]:
    return {f"metric/{key}": 0.123456789 * key + number for key in range(num_metrics)}


def latency(log: Log, finish: Callable[[], None], num_metrics: str, rows: str, apart_s: str = "0.002") -> list[float]:
    """Microseconds of each `log`, `apart_s` apart."""
    took = []
    for number in range(int(rows)):
        row = row_of(int(num_metrics), number)
        begin = time.perf_counter()
        log(row, number)
        took.append((time.perf_counter() - begin) * 1e6)
        if float(apart_s):
            time.sleep(float(apart_s))
    finish()
    return took


def until_killed(log: Log, _finish: Callable[[], None], rows: str, pause_s: str) -> None:
    """Log that many rows, say so, and wait for the end."""
    for number in range(int(rows)):
        log(row_of(3, number), number)
        time.sleep(float(pause_s))
    print("logged", flush=True)
    time.sleep(600)


def for_seconds(log: Log, finish: Callable[[], None], seconds: str) -> int:
    """Log every 10 ms for so long; the number of rows."""
    print("begun", flush=True)
    number = 0
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        log(row_of(3, number), number)
        number += 1
        time.sleep(0.01)
    finish()
    return number


def stalled(log: Log, finish: Callable[[], None], num_metrics: str, rows: str) -> list[float]:
    """As `latency`, between the words `begun` and `over`, after which the disk is back."""
    log(row_of(3, 0), int(rows))
    time.sleep(1.5)
    print("begun", flush=True)
    sys.stdin.readline()
    took = latency(log, lambda: None, num_metrics, rows)
    print("over", flush=True)
    sys.stdin.readline()
    finish()
    return took


def readable(logger: str, folder: Path) -> int:
    """The rows that can be read back."""
    if logger.startswith("gapless"):
        from gapless_schemas import Damaged, decode

        steps = set()
        for path in folder.rglob("*.jsonl"):
            for line in path.read_bytes().split(b"\n")[1:-1]:
                try:
                    record = decode(line)
                except Damaged:
                    continue
                if record.kind == "metrics":
                    steps.add(record.step)
        return len(steps)
    if logger == "wandb":
        return sum(_wandb_rows(path) for path in folder.rglob("*.wandb"))
    if logger == "swanlab":
        return sum(_swanlab_rows(path) for path in folder.rglob("*.swanlab"))
    found = 0
    for path in folder.rglob("*.db"):
        with sqlite3.connect(path) as database:
            try:
                found += database.execute("select count(*) from metrics").fetchone()[0]
            except sqlite3.Error:
                continue
    return found


def _wandb_rows(path: Path) -> int:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    reader = WBDataStoreReader()
    rows = 0
    try:
        reader.open(path)
        while (data := reader.scan()) is not None:
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            rows += record.WhichOneof("record_type") == "history"
    except Exception:
        return rows  # as `wandb sync` does: what stands before the first broken record
    finally:
        reader.close()
    return rows


def _swanlab_rows(path: Path) -> int:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    reader = DataStoreReader()
    steps = set()
    try:
        reader.open(path)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "scalar":
                steps.add(record.scalar.step)
    except Exception:
        return len(steps)
    return len(steps)


TASKS: dict[str, Callable[..., Any]] = {
    "latency": latency,
    "until_killed": until_killed,
    "for_seconds": for_seconds,
    "stalled": stalled,
}


def main(logger: str, task: str, folder: str, *arguments: str) -> None:
    if task == "readable":
        print("RESULT", readable(logger, Path(folder)), flush=True)
        return
    log, finish = opened(logger, folder)
    result = TASKS[task](log, finish, *arguments)
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
