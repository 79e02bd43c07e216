"""The uploader: reading, replaying, memory, restart, a thousand quiet runs, and the way from `log()` to a sink.

Rates are per second of processor time of one process, so that a busy machine changes them little; the wall clock is
named where it is meant. Peers of reading are the plain loops that a script would use.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

from gapless_uploader import collector

ROOT = Path(__file__).resolve().parent.parent
MB = 1e6
MIB = 1 << 20
SEGMENT_BYTES = 128 << 20
LATE_EVERY = 1000
CHUNK_BYTES = 256 << 10


def run(quick: bool) -> list[dict[str, Any]]:
    """All figures of the uploader."""
    with tempfile.TemporaryDirectory(prefix="gapless-bench-") as name, collecting_as_the_uploader_does():
        folder = Path(name)
        return [
            *reading(folder, quick),
            *replaying(folder, quick),
            *large_spool(folder, quick),
            *quiet_runs(folder, quick),
            *latency(folder, quick),
        ]


@contextmanager
def collecting_as_the_uploader_does() -> Iterator[None]:
    """The garbage collector as `gapless watch` and `replay` set it, for ours and for the peers in this process."""
    before = gc.get_threshold()
    collector.calm()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


# reading


def reading(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Read, check and decode one segment."""
    from gapless_uploader.tail import SegmentFile, Tail

    size = (16 if quick else 64) * MIB
    # Steps of 256 KiB, and the quickest twentieth of them: others on the machine slow some, and nothing speeds one up.
    for name, keys, target in (("300-byte", 6, 100), ("5 kB", 165, 200)):
        path = make_spool(folder / "reading", size, keys)[0]
        num_bytes = path.stat().st_size

        def ours(path: Path = path, num_bytes: int = num_bytes) -> Iterator[None]:
            tail = Tail(0)
            with SegmentFile(path) as file:
                while True:
                    chunk = tail.read(file, 0.0)
                    if chunk.end == tail.offset:
                        break
                    tail.consume(file, chunk.end)
                    yield
            assert tail.offset == num_bytes

        def plain(path: Path = path) -> Iterator[None]:
            with path.open("rb") as file:
                while lines := file.readlines(CHUNK_BYTES):
                    for line in lines:
                        fields = json.loads(line)
                        assert fields["crc"] == f"{crc32(line[:-19]):08x}"
                    yield

        yield figure(
            f"read, check and decode, {name} records",
            CHUNK_BYTES / MB / quickest(ours),
            target,
            "MB/s a core",
            {"json.loads and crc32": CHUNK_BYTES / MB / quickest(plain)},
        )
        shutil.rmtree(folder / "reading")


# replaying


def replaying(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """A whole spool into a sink, by turns in one thread."""
    from gapless_uploader.sinks import make_sink

    size = (8 if quick else 64) * MIB
    for name, keys in (("300-byte", 6), ("5 kB", 165)):
        made = make_spool(folder / "replaying", size, keys)
        num_bytes = sum(path.stat().st_size for path in made)
        for kind in ("memory", "file"):
            target = str(folder / "out") if kind == "file" else ""

            def replay(kind: str = kind, target: str = target) -> None:
                upload(folder / "replaying", folder / "state", make_sink(f"{kind}:{target}"))
                shutil.rmtree(folder / "state")
                shutil.rmtree(folder / "out", ignore_errors=True)

            yield figure(
                f"end to end into the {kind} sink, {name} records",
                num_bytes / MB / cpu_seconds(replay, times=1 if quick else 2),
                "reported",
                "MB/s a core",
            )
        shutil.rmtree(folder / "replaying")


# a large spool


def large_spool(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """Memory while a large spool with late records is replayed, and a restart near its end, each in a new process."""
    size = 200 * MB if quick else 10_000 * MB
    free = shutil.disk_usage(folder).free
    if free < size * 1.3:
        raise RuntimeError(f"{size / 1e9:.0f} GB are to be written, and {free / 1e9:.0f} GB are free")
    paths = make_spool(folder / "large", int(size), 165, late=True)
    rows = sum(1 for path in paths for line in path.open("rb") if b'"metrics"' in line[:80])
    first = child("replay", folder / "large", folder / "state")
    name = f"{size / 1e9:.1f} GB with a late record every {LATE_EVERY} rows"
    assert first["operations"] == rows, (first, rows)
    yield figure(f"memory above the interpreter's start, {name}", first["rss_mib"], 64, "MiB")
    yield figure(f"the same replay, {name}", size / MB / first["cpu_s"], "reported", "MB/s a core")
    append(paths[-1], 200)
    second = child("replay", folder / "large", folder / "state")
    assert second["operations"] == 200, second
    yield figure(f"restart of the process until the first new row, {name}", second["first_row_s"], 1.0, "s, wall clock")
    shutil.rmtree(folder / "large")
    shutil.rmtree(folder / "state")


def child(*args: str | Path) -> dict[str, Any]:
    """What one of `CHILDREN` measured in its own process."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.uploader", *map(str, args)],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        timeout=7200,
    )
    return json.loads(done.stdout)


def child_replay(began: float, rss_mib: float, root: Path, state: Path) -> dict[str, Any]:
    """Replay into a sink that counts."""
    sink = CountingSink()
    upload(root, state, sink)
    return {
        "operations": sink.operations,
        "rss_mib": peak_mib() - rss_mib,
        "cpu_s": time.process_time(),
        "first_row_s": (sink.first or time.time()) - began,
    }


# a thousand quiet runs


def quiet_runs(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """`gapless watch` over a thousand runs that say nothing."""
    for i in range(1000):
        make_spool(folder / "quiet", 2000, 6, run_id=f"run-{i:04d}")
    settle_s, measure_s = (60.0, 20.0) if quick else (300.0, 120.0)
    watching = subprocess.Popen(
        [
            sys.executable, "-m", "gapless_uploader", "watch", str(folder / "quiet"), "--to", "memory",
            "--state", str(folder / "state"),
        ],
        env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        time.sleep(settle_s)
        before = cpu_of(watching.pid)
        time.sleep(measure_s)
        share = (cpu_of(watching.pid) - before) / measure_s * 100
        memory = rss_of(watching.pid) / MIB
        files = len(os.listdir(f"/proc/{watching.pid}/fd"))
    finally:
        watching.terminate()
        watching.wait()
    yield figure("1,000 quiet runs watched: processor", share, 2.0, "% of a core")
    yield figure("1,000 quiet runs watched: memory", memory, 150, "MiB")
    yield figure("1,000 quiet runs watched: open files", files, 64, "files")
    shutil.rmtree(folder / "quiet")
    shutil.rmtree(folder / "state")


# from log() to a sink


def latency(folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    """A training in one process, `watch` in another: how long after `log()` a sink is given the row."""
    from gapless_uploader.uploader import Uploader
    from gapless_uploader.watch import watch

    rows = 50 if quick else 300
    (folder / "live").mkdir()
    sink = CountingSink()
    uploader = Uploader([folder / "live"], [sink], folder / "state")
    uploader.start()
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(folder / "live"), str(rows)], env=environment(), cwd=ROOT
    )
    watch(uploader, lambda _event: None, lambda held, _now: held.is_over())
    training.wait()
    late = sorted(sink.latencies)
    assert len(late) == rows, (len(late), rows)
    yield figure("from log() to the sink, local disk, p50", late[len(late) // 2], 2.0, "s, wall clock")
    yield figure("from log() to the sink, local disk, worst", late[-1], 2.0, "s, wall clock")


TRAINING = """
import sys, time, gapless
run = gapless.init(project="bench", dir=sys.argv[1])
for step in range(int(sys.argv[2])):
    run.log({"sent": time.time()}, step=step)
    time.sleep(0.1)
run.finish()
"""


# parts


class CountingSink:
    """Counts rows, and keeps nothing."""

    kind, target = "counting", ""

    def __init__(self) -> None:
        from gapless_uploader.sink import Capabilities

        self.capabilities = Capabilities(exactly_once="it only counts", end_state=True)
        self.operations = 0
        self.first: float | None = None
        self.latencies: list[float] = []

    def open(self, run: Any, memo: dict[str, Any]) -> CountingSink:  # noqa: ARG002
        return self

    def write(self, batch: Any) -> Any:
        from gapless_uploader.operations import Amend, Row
        from gapless_uploader.sink import Ack

        now = time.time()
        for operation in batch.operations:
            if isinstance(operation, Row | Amend):
                self.operations += 1
                self.first = self.first or now
                if "sent" in operation.values:
                    self.latencies.append(now - operation.values["sent"])
        return Ack(len(batch.operations), {})

    def heartbeat(self, now: float) -> None:
        pass

    def flush(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def upload(root: Path, state: Path, sink: Any) -> None:
    """Everything under `root` into `sink`, in this thread."""
    from gapless_uploader.uploader import Inline, Uploader

    uploader = Uploader([root], [sink], state, executor=Inline())
    uploader.start()
    while uploader.turn(time.monotonic()):
        pass
    assert not uploader.failed, uploader.failed
    uploader.stop()


def make_spool(root: Path, size: int, keys: int, late: bool = False, run_id: str = "run") -> list[Path]:
    """One run of `size` bytes, its segments of up to 128 MiB; with `late`, a record of an earlier step now and then."""
    from gapless_schemas import Header, SegmentName, encode_header

    attempt_id = uuid.uuid4().hex
    values = {f"train/metric_{i:03d}": i + 0.123456 for i in range(keys)}
    paths: list[Path] = []
    folder = root / "bench" / run_id
    folder.mkdir(parents=True)
    seq, written = 0, 0
    while written < size:
        path = folder / str(SegmentName("main", 1, attempt_id[:8], len(paths)))
        header = Header(
            project="bench", run_id=run_id, writer="main", attempt=1, attempt_id=attempt_id, segment=len(paths),
            first_seq=seq + 1, host="elsewhere", pid=1, boot_id="b", created=1.7e9, resume_step=None,
        )  # fmt: skip
        with path.open("wb", buffering=MIB) as file:
            here = file.write(encode_header(header))
            while here < min(SEGMENT_BYTES, size - written):
                seq += 1
                if late and seq % LATE_EVERY == 0 and seq > 2 * LATE_EVERY:
                    here += file.write(line_of(seq, seq - LATE_EVERY - 1, {"eval/score": 0.5}))
                else:
                    here += file.write(line_of(seq, seq, values))
        written += here
        paths.append(path)
    return paths


def append(path: Path, count: int) -> None:
    """More rows at the end of a segment."""
    with path.open("rb+") as file:
        file.seek(-20_000, os.SEEK_END)
        last = json.loads(file.read().split(b"\n")[-2])
        file.seek(0, os.SEEK_END)
        for seq in range(last["seq"] + 1, last["seq"] + 1 + count):
            file.write(line_of(seq, seq, {"train/metric_000": 1.5}))


def line_of(seq: int, step: int, values: dict[str, float]) -> bytes:
    """A metrics record; one of the values tells it from the others."""
    import orjson

    from gapless_schemas import encode_record

    data = orjson.dumps({**values, "train/loss": 1.0 / seq})
    return encode_record(seq, 1.7e9 + seq, float(seq), "metrics", step, data)


def figure(name: str, ours: float, target: Any, unit: str, peers: dict[str, float] | None = None) -> dict[str, Any]:
    return {"figure": name, "ours": ours, "peers": peers or {}, "target": target, "unit": unit}


def cpu_seconds(call: Any, times: int = 3) -> float:
    """Processor time of the quickest of `times` calls."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def quickest(steps: Any) -> float:
    """Processor time of one step, the fifth percentile of all but the last, over three passes."""
    found = []
    for _ in range(3):
        times = [time.process_time()]
        times += [time.process_time() for _ in steps()]
        found += [after - before for before, after in pairwise(times[:-1])]
    return sorted(found)[len(found) // 20]


def environment() -> dict[str, str]:
    path = os.pathsep.join(str(ROOT / name) for name in ("spool", "uploader", "schemas"))
    return {**os.environ, "PYTHONPATH": path}


def cpu_of(pid: int) -> float:
    """Seconds of processor time that a process used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_of(pid: int) -> int:
    """Bytes of memory that a process holds."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_mib() -> float:
    """The most memory that this process held; `ru_maxrss` would count its parent's before the exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    collector.calm()
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    measured = child_replay(time.time() - (uptime - started), peak_mib(), Path(sys.argv[2]), Path(sys.argv[3]))
    print(json.dumps(measured))
