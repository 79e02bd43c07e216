"""W&B: a finished run until everything is acknowledged, beside `wandb sync` of the same run and `wandb.log` online.

Every party is a process of its own, started from nothing: seconds are wall-clock from the interpreter's start to its
end, imports and W&B's own service included. Each speaks to the test server, `tests.servers.wandb_server`, in a process
of its own whose CPU time is reported too. Ours is measured alone and with its child, in which the `wandb` package reads
back; of W&B's the memory is that of its largest process, its service. Ours and `wandb sync` run three times in turns,
and the middle one of each counts.

- ours: `gapless replay` of a spool, read-back through `wandb.Api` included;
- `wandb sync` of the offline folder that the library wrote of the same rows;
- `wandb.log` online, from `init` until `finish` returns.

    python -m benchmarks.wandb [--quick]
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from gapless_schemas import Header, SegmentName, encode_header, encode_record
from tests.servers.wandb_server import ServerProcess
from tests.servers.wandb_server.client import PREAMBLE, client_env

SEED = 7
SIZES = [(10_000, 10), (10_000, 100), (100_000, 10), (100_000, 100)]
QUICK = [(10_000, 10)]
REPEATS = 3
"""Of ours and of `wandb sync`, of which the middle one counts: a run of two seconds is at the mercy of the machine."""
TARGETS = {100_000: {10: 5.0, 100: 3.0}, 10_000: {10: 1.5, 100: 1.5}}
"""Rows -> metrics -> how many times as fast as `wandb sync`."""
CPU_TARGETS = {10: (14_000, "<= 10"), 100: (4_900, "<= 40")}
"""Metrics -> the rows/s that `wandb sync` made where the target was set, and own CPU, us a row."""

OURS = """
import json, resource, sys
from pathlib import Path
from gapless_uploader.command import main
sys.argv = ["gapless", "replay", sys.argv[1], "--to", "wandb", "--state", sys.argv[2]]
try:
    main()
except SystemExit as end:
    code = end.code
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss counts the parent's
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
told = {"cpu_s": used.ru_utime + used.ru_stime, "mb": peak, "code": code}
print(json.dumps(told))
"""

LIVE = """
import json, os, sys
from pathlib import Path
from gapless_uploader.operations import Row
from gapless_uploader.sink import Batch, RunView
from gapless_uploader.sinks.wandb import WandbSink
sink = WandbSink(settle_s=0.0)
sessions = []
for place in range(200):
    run = RunView("bench", f"live-{place}", 1.7e9, "train-7")
    session = sink.open(run, {})
    session.write(Batch([Row(step, 1.7e9 + step, 1.0 * step, {"loss": 0.5}) for step in range(20)], run))
    sessions.append(session)
for session in sessions:
    session.heartbeat(0.0)
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps({"mb": peak, "fds": len(os.listdir("/proc/self/fd"))}))
"""

LAUNCH = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(json.dumps({"child_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)}))
sys.exit(code)
"""
"""A small parent: a process's peak counts its parent's before the exec, and one figure is kept for all children."""

ROWS = """
import random
chance = random.Random(seed)
def rows():
    for step in range(num_rows):
        yield step, {f"train/metric_{key:03d}": chance.random() for key in range(num_keys)}
def play(run):
    for step, values in rows():
        run.log({**values, "_timestamp": 1.7e9 + step}, step=step, commit=True)
    run.finish()
"""


def run(quick: bool) -> list[dict[str, Any]]:
    """One row a figure: `figure`, `ours`, `peers`, `target`, `unit`. Rows a second are the higher the better."""
    found: list[dict[str, Any]] = []
    for num_rows, num_keys in QUICK if quick else SIZES:
        with tempfile.TemporaryDirectory() as folder:
            found += compared(Path(folder), num_rows, num_keys)
    with tempfile.TemporaryDirectory() as folder, ServerProcess(any_key=True) as server:
        told = measured([sys.executable, "-c", LIVE], our_env(server.url, Path(folder)), server)
    found.append(figure("200 live runs, memory", told["mb"], {}, "< 200", "MB"))
    found.append(figure("200 live runs, file handles", told["fds"], {}, "< 300", ""))
    return found


def compared(folder: Path, num_rows: int, num_keys: int) -> list[dict[str, Any]]:
    """The figures of one size."""
    name = f"{num_rows:,} rows of {num_keys} metrics"
    numbers = f"num_rows, num_keys, seed = {num_rows}, {num_keys}, {SEED}\n"
    write_spool(folder / "spool", num_rows, num_keys)
    script = PREAMBLE + numbers + ROWS
    with ServerProcess(any_key=True) as server:
        offline = client_env(server.url, folder / "client", WANDB_MODE="offline")
        made = 'play(wandb.init(project="bench", id="synced", settings=settings()))'
        subprocess.run([sys.executable, "-c", script + made], env=offline, cwd=folder, check=True, capture_output=True)
        made = 'play(wandb.init(project="bench", id="online", settings=settings()))'
        online = measured([sys.executable, "-c", script + made], client_env(server.url, folder / "client"), server)
    # In turns, so that what else the machine does meets both.
    both = [(replayed(folder, num_rows), synced(folder, num_rows)) for _ in range(REPEATS)]
    ours, sync = (sorted(party, key=lambda told: told["s"])[REPEATS // 2] for party in zip(*both, strict=True))

    def rate(party: dict[str, Any]) -> float:
        return round(num_rows / party["s"])

    peers = {"wandb sync": rate(sync), "wandb.log online": rate(online)}
    target = f">= {TARGETS[num_rows][num_keys] * rate(sync):.0f} ({TARGETS[num_rows][num_keys]} x wandb sync)"
    set_at, cpu_target = CPU_TARGETS[num_keys] if num_rows == 100_000 else (0, "")  # fewer pay for the start alone
    per_row = 1e6 / num_rows
    own_cpu = round(per_row * ours["cpu_s"], 1)
    all_cpu = {name: per_row * party["all_cpu_s"] for name, party in (("wandb sync", sync), ("wandb.log", online))}
    server_cpu = {"wandb sync": per_row * sync["server_cpu_s"]}
    server_own = round(per_row * ours["server_cpu_s"], 1)
    scaled = figure(
        f"{name}, own CPU, were wandb sync at {set_at:,} rows/s",
        round(own_cpu * rate(sync) / (set_at or 1), 1),
        {},
        cpu_target,
        "us/row",
    )
    return [
        figure(f"{name}, until acknowledged", rate(ours), peers, target, "rows/s"),
        figure(f"{name}, own CPU", own_cpu, rounded(all_cpu), cpu_target, "us/row"),
        *([scaled] if set_at else []),
        figure(f"{name}, CPU with its child", round(per_row * ours["all_cpu_s"], 1), rounded(all_cpu), "", "us/row"),
        figure(f"{name}, peak memory", ours["mb"], {"wandb sync": sync["child_mb"]}, "< 100", "MB"),
        figure(f"{name}, the server's own CPU", server_own, rounded(server_cpu), "", "us/row"),
    ]


def replayed(folder: Path, num_rows: int) -> dict[str, Any]:
    """`gapless replay` of the spool, to a server that knows nothing yet."""
    with tempfile.TemporaryDirectory() as state, ServerProcess(any_key=True) as server:
        command = [sys.executable, "-c", OURS, str(folder / "spool"), state]
        told = measured(command, our_env(server.url, folder / "ours"), server)
        held = server.run("bench", "run")
        assert held is not None
        assert len(held["lines"]) == num_rows, (len(held["lines"]), told)
    return told


def synced(folder: Path, num_rows: int) -> dict[str, Any]:
    """`wandb sync` of the offline folder, likewise."""
    (run,) = (folder / "client" / "runs" / "wandb").glob("offline-run-*")
    for mark in run.glob("*.synced"):
        mark.unlink()
    wandb = str(Path(sys.executable).with_name("wandb"))
    with ServerProcess(any_key=True) as server:
        told = measured([wandb, "sync", str(run)], client_env(server.url, folder / "client"), server)
        held = server.run("bench", "synced")
        assert held is not None
        assert len(held["lines"]) == num_rows, len(held["lines"])
    return told


def measured(command: list[str], env: dict[str, str], server: ServerProcess) -> dict[str, Any]:
    """Wall-clock and CPU seconds of a party and all its children, the server's CPU, and what the party printed last."""
    before = server.debug("stats")["process_cpu_s"]
    used_before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    launched = [sys.executable, "-S", "-c", LAUNCH, *command]
    process = subprocess.Popen(launched, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = process.communicate()
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode != 0:
        raise RuntimeError(f"{command[:3]}: {err[-2000:]}{out[-2000:]}")
    told: dict[str, Any] = {}
    for line in out.splitlines():
        told |= json.loads(line) if line.startswith("{") else {}
    told["s"] = seconds
    told["all_cpu_s"] = used.ru_utime + used.ru_stime - used_before.ru_utime - used_before.ru_stime
    told["server_cpu_s"] = server.debug("stats")["process_cpu_s"] - before
    if "mb" in told:
        told["mb"] = round(told["mb"])
    assert told.get("code", 0) == 0, (told, err)
    return told


def our_env(url: str, folder: Path) -> dict[str, str]:
    """The environment of our own process: the client's, and our packages."""
    here = Path(__file__).resolve().parents[1]
    paths = os.pathsep.join(str(here / name) for name in ("spool", "uploader", "schemas"))
    return {**client_env(url, folder), "PYTHONPATH": paths}


def write_spool(root: Path, num_rows: int, num_keys: int) -> None:
    """A finished run of rows of random numbers, as the training side would have written it."""
    chance = random.Random(SEED)
    header = Header(
        project="bench", run_id="run", writer="main", attempt=1, attempt_id="ab" * 16, segment=0, first_seq=1,
        host="train-7", pid=1, boot_id="b", created=1.7e9, resume_step=None,
    )  # fmt: skip
    path = root / "bench" / "run" / str(SegmentName("main", 1, "abababab", 0))
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.write(encode_header(header))
        for step in range(num_rows):
            values = {f"train/metric_{key:03d}": chance.random() for key in range(num_keys)}
            t = 1.7e9 + step
            file.write(encode_record(step + 1, t, float(step), "metrics", step, orjson.dumps(values)))
        finish = b'{"state":"finished","exit_code":0}'
        file.write(encode_record(num_rows + 1, 1.7e9 + num_rows, float(num_rows), "finish", None, finish))


def figure(name: str, ours: float, peers: dict[str, float], target: str, unit: str) -> dict[str, Any]:
    return {"figure": f"W&B: {name}", "ours": ours, "peers": peers, "target": target, "unit": unit}


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}


if __name__ == "__main__":
    for row in run("--quick" in sys.argv):
        print(json.dumps(row))
