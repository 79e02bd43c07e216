"""Records that are not for some kinds of tracker: those get none of their values, every other one all of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gapless import Table, init
from gapless_uploader.sinks.file import FileSink
from gapless_uploader.sinks.memory import MemorySink
from tests.uploader.harness import T0, SpoolDir, Turner, read_json, rows_of


@pytest.fixture
def spool(tmp_path: Path) -> SpoolDir:
    (tmp_path / "spool").mkdir()
    return SpoolDir(tmp_path / "spool")


def test_each_tracker_gets_what_is_for_it(tmp_path: Path) -> None:
    """One row for all, one for each of two kinds, and a table: merged by step in each tracker for itself."""
    with init("proj", "e", dir=tmp_path / "spool", id="run") as run:
        run.log({"all": 1}, step=1)
        run.log({"for_file": 2.5}, step=1, skip_sinks=["memory"])
        run.log({"for_memory": 3}, step=1, skip_sinks=["file"])
        run.log({"nested": {"x": float("nan")}}, step=2, skip_sinks=["file", "wandb"])
        run.log({"samples": Table(["a"], [[1]])}, step=3, skip_sinks=["memory"])
        run.log({"last": 4}, step=4)
    memory, files = MemorySink(), FileSink(str(tmp_path / "out"))
    turner = Turner(tmp_path / "spool", tmp_path / "state", memory, files)
    turner.settle()
    turner.uploader.stop()

    held = rows_of(memory)
    assert held[1] == {"all": 1, "for_memory": 3}
    assert set(held[2]) == {"nested/x"}
    assert 3 not in held
    assert held[4] == {"last": 4}
    told = {line["step"]: line["data"] for path in (tmp_path / "out").rglob("*.jsonl") for line in read_json(path)}
    assert {step: sorted(data) for step, data in told.items()} == {1: ["all", "for_file"], 3: ["samples"], 4: ["last"]}


def test_a_skipped_row_holds_its_step_against_a_restart(tmp_path: Path, spool: SpoolDir) -> None:
    """The new attempt's first row says where the old one ends, for trackers too that do not get it."""
    first = spool.attempt()
    for step in range(10):
        first.log(step, loss=step)
    second = spool.attempt(number=2, created=T0 + 1000)
    second.append("metrics", {"other": 1}, step=5, skip_sinks=["memory"])
    second.log(7, loss=70)
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    turner.uploader.stop()

    assert {step: row["loss"] for step, row in rows_of(turner.memory).items()} == {**{n: n for n in range(6)}, 7: 70}


def test_whenever_it_is_read_the_rows_are_the_same(tmp_path: Path, spool: SpoolDir) -> None:
    """A run read whole, and one read record by record over restarts, side by side with a second writer."""
    chance = random.Random(11)
    turner = Turner(spool.root, tmp_path / "state")
    attempt, other = spool.attempt(), spool.attempt(writer="eval")
    for at in range(120):
        one = chance.choice((attempt, other))
        skip = chance.choice(([], [], ["memory"], ["wandb"]))
        one.append("metrics", {chance.choice("abc"): at}, step=chance.randint(0, 15), skip_sinks=skip)
        if chance.random() < 0.5:
            turner.turn(0.1)
        if chance.random() < 0.2:
            turner.crash()
    turner.settle()
    turner.uploader.stop()
    whole = Turner(spool.root, tmp_path / "other")
    whole.settle()
    whole.uploader.stop()

    assert rows_of(turner.memory) == rows_of(whole.memory)
    assert len(rows_of(whole.memory)) > 10
