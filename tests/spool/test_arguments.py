"""What callers pass that is odd costs nothing but itself, and what means nothing is said at `init`."""

from __future__ import annotations

import os
import time
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gapless
from tests.spool.oracle import only, raw


@pytest.mark.parametrize("limit", [-1, nan, "x", None, True])
def test_a_finish_timeout_that_is_no_time_is_refused_at_init(tmp_path: Path, limit: Any) -> None:
    """Not at the end of the training."""
    with pytest.raises(ValueError, match="finish_timeout"):
        gapless.init("p", dir=tmp_path, finish_timeout=limit)


@pytest.mark.parametrize("limit", [inf, 1e30, "soon", nan, -5])
def test_finish_takes_any_limit(tmp_path: Path, limit: Any) -> None:
    """One that means nothing is `init`'s; the row is kept."""
    run = gapless.init("p", dir=tmp_path, finish_timeout=inf)
    run.log({"a": 1})
    assert run.flush()
    run.finish(timeout=limit)

    assert run.stats().written >= 1


def test_a_name_that_is_no_utf_8_is_written_out(tmp_path: Path) -> None:
    """A shell passes such names as lone surrogates; the run is kept under its bytes."""
    odd = os.fsdecode(b"caf\xe9")
    run = gapless.init(odd, odd, id=odd, writer=odd, group=odd, notes=odd, dir=tmp_path)
    run.log({"a": 1}, step=0)
    run.finish()

    (header, *records) = raw(run.path)
    assert "caf\\udce9" == header["project"] == header["run_id"] == header["writer"]
    assert [{"a": 1}] == [record["data"] for record in records if record["kind"] == "metrics"]


def test_after_the_largest_step_rows_go_on_without_a_step(tmp_path: Path) -> None:
    """No reader keeps a larger one exactly; it is counted."""
    run = gapless.init("p", dir=tmp_path)
    run.log({"a": 1}, step=2**53 - 1)
    run.log({"a": 2})
    run.log({"a": 3})
    run.finish()

    rows = [record for record in raw(run.path) if record["kind"] == "metrics"]
    assert [2**53 - 1, None, None] == [row.get("step") for row in rows]
    assert 2 == run.stats().bad_steps


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"is_writer": "no"}, "is_writer is True, False or None, not 'no'"),
        ({"tags": 5}, "tags"),
        ({"sinks": 5}, "sinks"),
    ],
)
def test_arguments_of_another_kind_are_refused_at_init(tmp_path: Path, given: dict[str, Any], told: str) -> None:
    """A text that is true whatever it says, a number in place of a list."""
    with pytest.raises(TypeError, match=told):
        gapless.init("p", dir=tmp_path, **given)

    assert not list(tmp_path.iterdir())


def test_the_home_folder_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config file passes it as it stands; no shell has turned it into a path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    by_argument = gapless.init("p", dir="~/spool")
    monkeypatch.setenv("GAPLESS_DIR", "~/other")
    by_environment = gapless.init("p")
    by_argument.finish()
    by_environment.finish()

    assert by_argument.path.parent == tmp_path / "spool" / "p"
    assert by_environment.path.parent == tmp_path / "other" / "p"


def test_an_unknown_mode_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`GAPLESS_MODE=offline` asks for what is always so; the run writes, and says which mode there is."""
    monkeypatch.setenv("GAPLESS_MODE", "offline")
    run = gapless.init("p", dir=tmp_path)
    run.finish()

    assert run.is_writer
    assert capsys.readouterr().err == "gapless: GAPLESS_MODE=offline changes nothing; 'disabled' is the only mode\n"


@pytest.mark.parametrize("t", [10**400, -(10**400), 1e300, -1.0, 1_764_493_000_000, 1_764_493_000_000_000_000])
def test_a_time_that_no_tool_shows_is_refused_and_the_row_kept(tmp_path: Path, t: Any) -> None:
    """Milliseconds, nanoseconds and what no float holds: the row gets the present time, and it is counted."""
    run = gapless.init("p", dir=tmp_path)
    before = time.time()
    run.log({"a": 1}, step=0, t=t)
    run.finish()

    (row,) = only(run.path, "metrics")
    assert before <= row.t <= time.time()
    assert 1 == run.stats().refused


@pytest.mark.parametrize(
    ("skip", "kept", "refused"),
    [
        ("wandb", ["wandb"], 0),
        (("wandb", "swanlab"), ["wandb", "swanlab"], 0),
        ([], [], 0),
        (5, [], 1),
        (np.array(["wandb"]), ["wandb"], 0),
        (None, [], 1),
    ],
)
def test_kinds_to_skip_are_named_by_any_collection(tmp_path: Path, skip: Any, kept: list[str], refused: int) -> None:
    """One name is one kind and no five letters; what names none is counted, and the row is for all."""
    run = gapless.init("p", dir=tmp_path)
    run.log({"a": 1}, step=0, skip_sinks=skip)
    run.finish()

    (row,) = only(run.path, "metrics")
    assert kept == list(row.skip_sinks)
    assert refused == run.stats().refused


@pytest.mark.parametrize(
    ("lines", "kept", "refused"),
    [("abc\ndef\n", ["abc", "def"], 0), (("a", 5), ["a", "5"], 0), (5, [], 1), (None, [], 1)],
)
def test_console_takes_lines_or_one_text(tmp_path: Path, lines: Any, kept: list[str], refused: int) -> None:
    """A text is its lines and not its letters; what has none is counted."""
    run = gapless.init("p", dir=tmp_path)
    run.console(lines)
    run.finish()

    assert kept == [line for record in only(run.path, "log") for line in record.data["lines"]]
    assert refused == run.stats().refused
