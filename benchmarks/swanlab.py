"""SwanLab: a finished run until everything is acknowledged, beside the library's own two ways, on the same rows.

Each party is a process of its own and speaks to the same kind of server, `tests.servers.swanlab`, which here stores
rows without looking at them, so that its own work (reported) is small. Seconds are wall-clock of the upload alone,
start-up and imports apart; memory is the peak of the party's process.

- ours: `gapless` from a spool, in durable batches, until the run's end is acknowledged;
- `swanlab.sync`: the library's offline folder, until it returns;
- `swanlab.log`: the online library, from the first `log` until `finish` returns.

    python -m benchmarks.swanlab [--quick]
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gapless_schemas import Header, SegmentName, encode_header, encode_record
from tests.servers.swanlab import API_KEY, SwanLabServerProcess
from tests.servers.swanlab.client import RealClient

NUM_KEYS = 100
SEED = 7

OURS = """
import json, os, sys, time
from pathlib import Path
from gapless_uploader.sinks.swanlab import SwanlabSink
from gapless_uploader.uploader import Uploader
spool, state = map(Path, sys.argv[1:])
uploader = Uploader([spool], [SwanlabSink(audit=False)], state)
cpu, began = time.process_time(), time.perf_counter()
uploader.start()
while uploader.turn(time.monotonic()) or uploader.behind():
    time.sleep(0.001)
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
uploader.stop()
# ru_maxrss counts the parent's
peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
print(json.dumps({"s": seconds, "cpu_s": cpu, "mb": peak, "failed": list(uploader.failed.values())}))
"""

ROWS = """
import random, time
from pathlib import Path
chance = random.Random(seed)
def rows():
    for step in range(num_rows):
        yield step, {f"train/metric_{key:03d}": chance.random() for key in range(num_keys)}
def told(seconds, cpu):
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024
    return {"s": seconds, "cpu_s": time.process_time() - cpu, "mb": peak}
"""

ONLINE = """
made = list(rows())
swanlab.init(project="bench", id="online", resume="allow")
cpu, began = time.process_time(), time.perf_counter()
for step, values in made:
    swanlab.log(values, step=step)
swanlab.finish()
result = told(time.perf_counter() - began, cpu)
"""

OFFLINE = """
swanlab.init(project="bench", id="offline", resume="allow", mode="offline")
for step, values in rows():
    swanlab.log(values, step=step)
swanlab.finish()
"""

SYNC = """
cpu, began = time.process_time(), time.perf_counter()
swanlab.sync(folder)
result = told(time.perf_counter() - began, cpu)
"""


class _PatientClient(RealClient):
    def run(self, *command: str, timeout_s: float = 900, check: bool = True) -> str:
        """As its parent, with the time that a million points take the library on a busy machine."""
        return super().run(*command, timeout_s=timeout_s, check=check)


def run(quick: bool) -> list[dict[str, Any]]:
    """The figures: `figure`, `ours`, `peers`, `target`, `unit`. About 20 s when quick, 2 minutes else."""
    num_rows = 1_000 if quick else 10_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parties = {
            "ours": _measured(lambda server: _ours(folder / "ours", server, num_rows), num_rows),
            "swanlab.sync": _measured(lambda server: _sync(folder / "sync", server, num_rows), num_rows),
            "swanlab.log": _measured(lambda server: _log(folder / "log", server, num_rows), num_rows),
        }
    points = num_rows * NUM_KEYS
    case = f"{num_rows:,} rows x {NUM_KEYS} metrics"
    rates = {party: round(points / told["s"]) for party, told in parties.items()}
    memory = {party: round(told["mb"]) for party, told in parties.items()}
    cpu = {party: round(told["cpu_s"] / points * 1e6, 2) for party, told in parties.items()}
    servers = {party: round(told["server_cpu_s"] / points * 1e6, 2) for party, told in parties.items()}
    ratio = round(rates["ours"] / rates["swanlab.sync"], 1)
    return [
        _figure(f"SwanLab upload until acknowledged, {case}", rates, 80_000, "points/s"),
        {
            "figure": f"SwanLab upload beside swanlab.sync, {case}",
            "ours": ratio,
            "peers": {"swanlab.sync": 1.0, "swanlab.log": round(rates["swanlab.log"] / rates["swanlab.sync"], 1)},
            "target": 2,
            "unit": "times swanlab.sync",
        },
        _figure(f"SwanLab upload, peak memory of the process, {case}", memory, 100, "MB"),
        _figure(f"SwanLab upload, CPU of the process, {case}", cpu, None, "us/point"),
        _figure(f"SwanLab upload, CPU of the test server beside it, {case}", servers, None, "us/point"),
    ]


def _figure(name: str, values: dict[str, Any], target: float | None, unit: str) -> dict[str, Any]:
    peers = {party: value for party, value in values.items() if party != "ours"}
    return {"figure": name, "ours": values["ours"], "peers": peers, "target": target, "unit": unit}


def _measured(party: Any, num_rows: int) -> dict[str, Any]:
    """What `party` reports of itself, after a look at the server that every point is there once."""
    with SwanLabServerProcess("--trust-rows") as server:
        told: dict[str, Any] = party(server)
        cpu_s = server.state()["cpu_s"]
        (held,) = server.state()["experiments"].values()
        counts = held["rows"]["scalar"]
        assert counts["raw"] == counts["distinct"] == num_rows * NUM_KEYS, counts
    return {**told, "server_cpu_s": cpu_s}


def _ours(folder: Path, server: SwanLabServerProcess, num_rows: int) -> dict[str, Any]:
    spool = folder / "spool"
    write_spool(spool, num_rows)
    done = subprocess.run(
        [sys.executable, "-c", OURS, str(spool), str(folder / "state")],
        env={
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(folder),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "NO_PROXY": "*",
            "SWANLAB_API_HOST": server.url,
            "SWANLAB_API_KEY": API_KEY,
        },
        stdout=subprocess.PIPE,
        check=True,
        timeout=600,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["failed"] == [], told
    return told


def _sync(folder: Path, server: SwanLabServerProcess, num_rows: int) -> dict[str, Any]:
    client = _PatientClient(folder, server.url, API_KEY)
    arguments = {"seed": SEED, "num_rows": num_rows, "num_keys": NUM_KEYS}
    client.script(ROWS + OFFLINE, **arguments)
    told: dict[str, Any] = client.script(ROWS + SYNC, folder=str(client.run_dirs()[-1]), **arguments)
    return told


def _log(folder: Path, server: SwanLabServerProcess, num_rows: int) -> dict[str, Any]:
    client = _PatientClient(folder, server.url, API_KEY)
    told: dict[str, Any] = client.script(ROWS + ONLINE, seed=SEED, num_rows=num_rows, num_keys=NUM_KEYS)
    return told


def write_spool(root: Path, num_rows: int) -> None:
    """The rows as a finished run's spool, a second apart."""
    folder = root / "bench" / "r-1"
    folder.mkdir(parents=True)
    attempt_id, began, chance = "0" * 32, 1_700_000_000.0, random.Random(SEED)
    header = Header("bench", "r-1", "main", 1, attempt_id, 1, 1, "node", 1, "boot", began, None)
    with open(folder / str(SegmentName("main", 1, attempt_id[:8], 1)), "wb") as file:
        file.write(encode_header(header))
        file.write(encode_record(1, began, 0.0, "run", None, b'{"name":"bench","config":{"lr":0.1}}'))
        for step in range(num_rows):
            data = json.dumps({f"train/metric_{key:03d}": chance.random() for key in range(NUM_KEYS)}).encode()
            file.write(encode_record(step + 2, began + step, float(step), "metrics", step, data))
        end = b'{"state":"finished","exit_code":0}'
        file.write(encode_record(num_rows + 2, began + num_rows, float(num_rows), "finish", None, end))


if __name__ == "__main__":
    for figure in run("--quick" in sys.argv):
        print(json.dumps(figure))
