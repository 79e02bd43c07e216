"""Either side is killed, again and again, and every row arrives once with its own time."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util

from gapless_uploader.replay import merged_run
from gapless_uploader.spool import Spool
from tests.e2e.programs import gapless, trainer

ROWS = 2000
KILLS = 50


def test_fifty_kills_of_the_uploader_double_no_row_and_lose_none(tmp_path: Path) -> None:
    """TensorBoard's own loader and the file sink's lines hold every row once, with its original time."""
    spool, events, lines = tmp_path / "spool", tmp_path / "tb", tmp_path / "lines"
    arguments = ["--to", f"tensorboard:{events}", "--to", f"file:{lines}", "--state", tmp_path / "state"]
    spool.mkdir()
    rng = random.Random(7)
    training = trainer(spool, 0, ROWS, pause=0.02, durability="thread")
    assert training.stdout is not None
    training.stdout.readline()
    kills = 0
    while kills < KILLS:
        uploader = gapless("watch", spool, *arguments)
        assert uploader.stderr is not None
        assert "started" in uploader.stderr.readline()
        time.sleep(rng.random() * 0.5)
        uploader.send_signal(signal.SIGKILL)
        uploader.communicate()
        kills += 1
    training.communicate()

    replayed = gapless("replay", spool, *arguments)
    output = replayed.communicate(timeout=120)

    assert replayed.returncode == 0, output
    found = Spool([spool])
    found.scan(0.0)
    rows = merged_run(found.runs[("proj", "run")]).rows
    assert list(range(ROWS)) == sorted(rows)
    assert {(step, row.t): 1 for step, row in rows.items()} == Counter(scalars(events, "loss"))
    assert list(range(ROWS)) == sorted(file_steps(lines))


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, wall time) of every event of `tag`, undeduplicated."""
    found = []
    for path in sorted(folder.rglob("*tfevents*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == tag:
                    assert np.float32(event.step / 7) == tensor_util.make_ndarray(value.tensor)
                    found.append((event.step, event.wall_time))
    return found


def file_steps(folder: Path) -> list[int]:
    (path,) = folder.rglob("*.jsonl")
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_fifty_kills_of_the_trainer_lose_no_row_whose_log_returned(tmp_path: Path) -> None:
    """With `durability="write"`; the next attempt's rows follow, and a torn last line harms nothing."""
    rng = random.Random(11)
    acknowledged: set[int] = set()
    first = 0
    for kill in range(50):
        training = trainer(tmp_path / "spool", first, 10**6, pause=rng.choice([0.0, 0.001]))
        assert training.stdout is not None
        training.stdout.readline()
        time.sleep(rng.random() * 0.1)
        training.send_signal(signal.SIGKILL)
        rest = training.communicate()[0].split()
        last = int(rest[-1]) if rest and rest[-1].isdigit() else first
        acknowledged.update(range(first, last + 1))
        if kill % 5 == 0:
            newest = max((tmp_path / "spool" / "proj" / "run").glob("*.jsonl"))
            with open(newest, "ab") as file:
                file.write(b'{"seq":9999999,"t":17')
        first = last + 1

    found = Spool([tmp_path / "spool"])
    found.scan(0.0)
    merged = merged_run(found.runs[("proj", "run")])

    assert acknowledged <= set(merged.rows)
    assert 50 == len(found.runs[("proj", "run")].attempts)
    assert 0 == merged.lost
    assert all(row.values["loss"] == step / 7 for step, row in merged.rows.items())
