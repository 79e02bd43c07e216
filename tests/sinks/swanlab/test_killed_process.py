"""`gapless replay` as a process of its own, killed with SIGKILL while a request is on its way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.http import Request
from tests.sinks.swanlab.world import RUN, SpoolWriter, expected, raw_points

ROWS = [(step, {"loss": 1.0 / (step + 1), "lr": 0.1}) for step in range(50)]


def replay(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "gapless.toml").write_text('to = ["swanlab"]\nstate = "state"\n[sinks.swanlab]\nsettle = 0.3\n')
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.Popen(
        [sys.executable, "-m", "gapless_uploader", "replay", "spool"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("when", ["after", "half"])
def test_a_killed_replay_goes_on_without_loss_or_doubling(server: SwanLabServer, tmp_path: Path, when: str) -> None:
    """SIGKILL between a request and its answer, whatever of it was stored; the next replay finishes the run."""
    writer = SpoolWriter(tmp_path / "spool")
    writer.begin()
    for step, values in ROWS:
        writer.row(step, **values)
    writer.finish()
    on_its_way = threading.Event()

    def seen(request: Request) -> bool:
        on_its_way.set()
        return True

    hang = server.arm("metrics", "hang", when=when, where=seen)
    first = replay(tmp_path)
    assert on_its_way.wait(60)
    while not any(call.endpoint == "metrics" for call in server.calls):
        on_its_way.wait(0.01)
    first.kill()
    first.communicate()
    hang.release()
    second = replay(tmp_path)
    told, _ = second.communicate(timeout=100)

    assert second.returncode == 0, told.decode()
    assert expected(ROWS) == raw_points(server.experiments[RUN])
    assert server.experiments[RUN].state == "FINISHED"
