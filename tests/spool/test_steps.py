"""Steps: given, counted on, resumed from, and refused."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import orjson
import pytest
import torch

import gapless
from gapless import place
from tests.spool.oracle import header, only, records, segments


def steps(folder: Path) -> list[list[int | None]]:
    return [[r.step for r in found if r.kind == "metrics"] for found in records(folder).values()]


def test_without_a_step_a_row_follows_the_largest_one(tmp_path: Path) -> None:
    """First 0, then one more than the largest so far; a lower step is a late record and moves nothing."""
    with gapless.init("p", dir=tmp_path) as run:
        for step in (None, None, 10, None, 3, None):
            run.log({"x": 1}, step=step)

    assert steps(run.path) == [[0, 1, 10, 11, 3, 12]]


def test_explicit_steps_are_never_moved(tmp_path: Path) -> None:
    """Rows without a step among rows with one leave these at the steps that the caller gave."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({"x": 1}, step=10)
        for _ in range(100):
            run.log({"y": 1})
        run.log({"x": 1}, step=11)
        run.log({"x": 1}, step=10**9)
        run.log({"x": 1}, step=12)

    assert [r.step for r in only(run.path, "metrics") if "x" in r.data] == [10, 11, 10**9, 12]


def test_a_new_attempt_goes_on_after_its_predecessor(tmp_path: Path) -> None:
    """Also over attempts that logged nothing, and over a torn last line."""
    folder = tmp_path / "p" / "r"
    for last in (7, None, None):
        with gapless.init("p", dir=tmp_path, id="r") as run:
            if last is not None:
                run.log({"x": 1}, step=last)
    with open(segments(folder)[0], "ab") as file:
        file.write(b'{"seq":99,"t":1.0,"mono":1.0,"kind":"metrics","step":500,"da')
    with gapless.init("p", dir=tmp_path, id="r") as run:
        run.log({"x": 1})

    assert steps(folder)[-1] == [8]


def test_another_writer_counts_for_itself(tmp_path: Path) -> None:
    """An evaluation job's steps do not continue those of the training."""
    with gapless.init("p", dir=tmp_path, id="r") as run:
        run.log({"x": 1}, step=7)
    with gapless.init("p", dir=tmp_path, id="r", writer="eval") as run:
        run.log({"x": 1})

    assert [(header(path).writer, header(path).attempt) for path in segments(run.path)] == [("eval", 1), ("main", 1)]
    assert steps(run.path) == [[0], [7]]


@pytest.mark.parametrize(("resume_step", "first"), [(5, 5), (0, 0), (False, 8), (None, 8), (np.int64(3), 3)])
def test_resume_step_says_where_to_go_on(tmp_path: Path, resume_step: Any, first: int) -> None:
    """With a step the rows go on from it; False and None go on after the last one. The header keeps what was said."""
    with gapless.init("p", dir=tmp_path, id="r") as run:
        run.log({"x": 1}, step=7)
    with gapless.init("p", dir=tmp_path, id="r", resume_step=resume_step) as run:
        run.log({"x": 1})
        run.log({"x": 1})

    assert steps(run.path)[1] == [first, first + 1]
    assert header(segments(run.path)[1]).resume_step == resume_step


def test_after_a_rewind_rows_follow_the_new_steps(tmp_path: Path) -> None:
    """A new attempt whose first step lies below its predecessor's last one goes on from there."""
    with gapless.init("p", dir=tmp_path, id="r") as run:
        run.log({"x": 1}, step=100)
    with gapless.init("p", dir=tmp_path, id="r") as run:
        run.log({"x": 1}, step=50)
        run.log({"x": 1})

    assert steps(run.path)[1] == [50, 51]


@pytest.mark.parametrize("step", [7, np.int64(7), np.uint8(7), torch.tensor(7), torch.tensor([7]), 7.0, np.float32(7)])
def test_whole_numbers_of_every_make_are_steps(tmp_path: Path, step: Any) -> None:
    """Integer-like steps are stored as integers."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({"x": 1}, step=step)

    assert steps(run.path) == [[7]]


@pytest.mark.parametrize(
    "step", [True, np.bool_(True), -1, 7.5, float("nan"), float("inf"), 2**53, 2**70, "7", [7], torch.ones(2)]
)
def test_other_steps_are_told_and_their_rows_kept(tmp_path: Path, step: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A bool, a negative, broken or too large step: one warning, a count, the row without a step, nothing moved."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({"x": 1}, step=step)
        run.log({"x": 2}, step=step)
        run.log({"x": 3})

    assert steps(run.path) == [[None, None, 0]]
    assert [record.data["x"] for record in only(run.path, "metrics")] == [1, 2, 3]
    assert run.stats().bad_steps == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_log_after_finish_is_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A finished run takes nothing more, says so once, and a second `finish` changes nothing."""
    run = gapless.init("p", dir=tmp_path)
    run.finish()
    before = [path.read_bytes() for path in segments(run.path)]
    run.log({"x": 1})
    run.config["x"] = 1
    run.finish(1)

    assert run.stats().late == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert [path.read_bytes() for path in segments(run.path)] == before


def long_run(folder: Path, num_segments: int, last_bytes: int) -> Path:
    """A run of one attempt with that many segments, the last one that long, its last row at step 70; its folder."""
    with gapless.init("p", dir=folder, id="r") as run:
        run.log({"x": 1}, step=70)
    (first,) = segments(run.path)
    content = first.read_bytes()
    row = next(line for line in content.split(b"\n") if b'"metrics"' in line)
    for index in range(1, num_segments):
        Path(str(first).replace("-000000.jsonl", f"-{index:06d}.jsonl")).write_bytes(content[:400])
    with open(str(first).replace("-000000.jsonl", f"-{num_segments - 1:06d}.jsonl"), "ab") as file:
        file.truncate(last_bytes)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + row + b"\n")
        file.write(b'{"kind":"alive"}\n' * 5000)
    return run.path


def newest_steps(folder: Path) -> list[int]:
    (newest,) = folder.glob("main-0002-*")
    return [orjson.loads(line)["step"] for line in newest.read_bytes().split(b"\n") if b'"metrics"' in line]


def test_starting_looks_at_little_however_long_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,000 old segments and a last one of 1 GB, a new attempt lists no folder and reads 1 MiB at most."""
    folder = long_run(tmp_path, 1000, 1 << 30)
    looked: list[str] = []
    read: list[int] = []
    real_lstat, real_pread = os.lstat, os.pread
    monkeypatch.setattr(os, "lstat", lambda path, **more: (looked.append(str(path)), real_lstat(path, **more))[1])
    monkeypatch.setattr(os, "pread", lambda fd, size, at: (read.append(size), real_pread(fd, size, at))[1])
    monkeypatch.setattr(os, "scandir", lambda path: pytest.fail(f"listed {path}"))
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail(f"listed {path}"))
    run = gapless.init("p", dir=tmp_path, id="r")
    run.log({"x": 1})
    run.finish()
    monkeypatch.undo()

    assert newest_steps(folder) == [71]
    assert 10 < len(looked) < 60
    assert 0 < sum(read) <= 1 << 20


@pytest.mark.torture
def test_starting_a_run_of_100_000_segments_takes_50_ms(tmp_path: Path) -> None:
    """100,000 old segments, the last one of 10 GB: `init` returns within 50 ms (the best of five)."""
    folder = long_run(tmp_path, 100_000, 10 << 30)
    took = []
    for _ in range(5):
        begin = perf_counter()
        run = gapless.init("p", dir=tmp_path, id="r")
        took.append(perf_counter() - begin)
        run.log({"x": 1})
        run.finish()

    assert newest_steps(folder) == [71]
    assert min(took) < 0.05


def test_a_copied_run_without_claims_goes_on(tmp_path: Path) -> None:
    """A run copied without its dot folders: the next attempts get fresh numbers and go on after the last step."""
    for _ in range(3):
        with gapless.init("p", dir=tmp_path, id="r") as run:
            run.log({"x": 1})
    for path in (run.path / place.CLAIMS).iterdir():
        path.unlink()
    (run.path / place.CLAIMS).rmdir()
    for _ in range(2):
        with gapless.init("p", dir=tmp_path, id="r") as run:
            run.log({"x": 1})

    assert [header(path).attempt for path in segments(run.path)] == [1, 2, 3, 4, 5]
    assert steps(run.path) == [[0], [1], [2], [3], [4]]
