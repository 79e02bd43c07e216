"""Runs without data and paths without runs are named by `replay`, `status` and `doctor`; an empty spool is not."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from gapless_schemas import CLAIMS
from gapless_uploader.cli import main
from tests.uploader.spool_made import MadeRun

MEDIA = f"{'a' * 64}.png"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A spool of two runs, one over and one not."""
    MadeRun(tmp_path / "spool", "r-1").rows(0, 3).finish()
    MadeRun(tmp_path / "spool", "r-2").rows(0, 2)
    return tmp_path / "spool"


def gapless(command: str, path: Path, root: Path, *more: str) -> Result:
    args = [command, str(path), "--state", str(root.parent / "state"), *more]
    return CliRunner().invoke(main, args, env={"COLUMNS": "200"})


def replay(path: Path, root: Path, *more: str) -> Result:
    return gapless("replay", path, root, "--to", f"file:{root.parent / 'out'}", "--patience", "0", *more)


def lose_data(folder: Path) -> Path:
    """Delete the segments of a run, a long time ago."""
    for segment in folder.glob("*.jsonl"):
        segment.unlink()
    return aged(folder)


def aged(folder: Path) -> Path:
    """Make it look old."""
    os.utime(folder, (0, 0))
    return folder


def said(result: Result) -> list[str]:
    """The problems that it named, without time and path."""
    return re.findall(r"spool-problem path=\S+ reason=(.*)", result.stderr)


# a run folder without a segment


def test_an_empty_run_folder_beside_another_run_is_named(root: Path) -> None:
    """The other run is uploaded; the exit status is 1."""
    folder = lose_data(root / "grpo" / "r-2")
    result = replay(root, root)

    assert result.exit_code == 1
    assert said(result) == [f"grpo/r-2: no segment lies in {folder}: put its .jsonl files there, or remove it"]
    assert re.match(r"3 rows uploaded in \d+\.\d s; 1 without data\n", result.stdout)


@pytest.mark.parametrize("below", ["", "grpo", "grpo/r-2"])
def test_the_only_run_without_its_data_is_named(root: Path, below: str) -> None:
    """By its claims, at whatever level the path points."""
    shutil.rmtree(root / "grpo" / "r-1")
    (lose_data(root / "grpo" / "r-2") / CLAIMS).mkdir()
    aged(root / "grpo" / "r-2" / CLAIMS)
    result = replay(root / below, root)

    assert result.exit_code == 1
    assert [reason.split(":")[0] for reason in said(result)] == ["grpo/r-2"]
    assert result.stdout == "nothing was uploaded; 1 without data\n"


def test_an_empty_folder_away_from_runs_is_none_of_ours(root: Path) -> None:
    """Neither as deep as run folders lie, nor in a project without runs."""
    for below in ("ckpt/step1", "other/r-9"):
        (root / below).mkdir(parents=True)
        aged(root / below)

    assert replay(root, root).exit_code == 0
    assert gapless("status", root, root).exit_code == 0


def test_an_empty_folder_beside_claims_is_a_run(root: Path) -> None:
    """The run beside it begins, and has no segment yet."""
    (lose_data(root / "grpo" / "r-1") / CLAIMS).mkdir()
    lose_data(root / "grpo" / "r-2")

    assert [reason.split(":")[0] for reason in said(replay(root, root))] == ["grpo/r-2"]


def test_a_folder_made_a_moment_ago_is_no_problem(root: Path) -> None:
    """Beside runs, found there or given by itself: its first attempt is about to be claimed."""
    (root / "grpo" / "r-3").mkdir()

    assert replay(root, root).exit_code == 0
    assert replay(root / "grpo" / "r-3", root).exit_code == 0


def test_payloads_make_a_run(root: Path) -> None:
    """Payloads alone are a run without its data, and its `media` no run of its own."""
    media = lose_data(root / "grpo" / "r-2") / "media"
    media.mkdir()
    (media / MEDIA).touch()

    assert [reason.split(":")[0] for reason in said(replay(root, root))] == ["grpo/r-2"]


def test_the_state_tells_what_was_uploaded_of_it(root: Path) -> None:
    """A run that was not over: what is missing may be any number of rows."""
    replay(root, root)
    folder = lose_data(root / "grpo" / "r-2")
    (folder / "notes.txt").touch()
    result = replay(folder, root)
    sink = f"file:{root.parent / 'out'}"

    assert result.exit_code == 1
    assert f"no segment lies in {folder}; 2 rows of it were uploaded to {sink}: put its" in said(result)[0]


def test_a_run_removed_after_its_end_was_uploaded_is_no_problem(root: Path) -> None:
    """Not at the sinks that have it; at another one it is."""
    shutil.rmtree(root / "grpo" / "r-2")
    replay(root, root)
    lose_data(root / "grpo" / "r-1")
    again, elsewhere = replay(root, root), replay(root, root, "--to", "console")

    assert (again.exit_code, again.stdout) == (0, "up to date: nothing to upload\n")
    assert (elsewhere.exit_code, len(said(elsewhere))) == (1, 1)


def test_a_run_that_begins_is_no_problem(root: Path) -> None:
    """An attempt claims its number before it has a segment; other files may lie there."""
    folder = lose_data(root / "grpo" / "r-2")
    (folder / CLAIMS).mkdir()
    (folder / "notes.txt").touch()

    assert replay(root, root).exit_code == 0
    assert replay(folder, root).exit_code == 0


def test_a_run_whose_data_lies_elsewhere_is_no_problem(root: Path) -> None:
    """Its old folder may stay behind when it is moved."""
    shutil.copytree(root / "grpo" / "r-2", root / "old" / "r-2")
    lose_data(root / "grpo" / "r-2")

    assert replay(root, root).exit_code == 0


def test_a_filter_leaves_it_out(root: Path) -> None:
    """Who asks for other runs hears nothing of it, also when no run is asked for."""
    lose_data(root / "grpo" / "r-2")
    one, none = replay(root, root, "--run", "r-1"), replay(root, root, "--run", "other")

    assert (one.exit_code, said(one)) == (0, [])
    assert (none.exit_code, none.stdout) == (0, "no run was found there that is asked for\n")
    assert replay(root, root, "--run", "r-*").exit_code == 1


def test_json_has_it_as_an_event_and_at_the_end(root: Path) -> None:
    """`--json` names path and reason twice: when it is found, and with the totals."""
    folder = lose_data(root / "grpo" / "r-2")
    told = [orjson.loads(line) for line in replay(root, root, "--json").stdout.splitlines()]

    assert [line["path"] for line in told if line["event"] == "spool-problem"] == [str(folder)]
    assert [one["path"] for one in told[-1]["absent"]] == [str(folder)]


def test_watch_ends_with_it(root: Path) -> None:
    """`watch --exit-when-done` names it and exits 1, as it does for what cannot be read."""
    lose_data(root / "grpo" / "r-2")
    result = gapless("watch", root, root, "--to", f"file:{root.parent / 'out'}", "--exit-when-done", "--no-events")

    assert (result.exit_code, len(said(result))) == (1, 1)


def test_status_shows_it_with_its_sinks(root: Path) -> None:
    """The run is in the table with what was uploaded, and its reason among the problems; the exit status is 1."""
    replay(root, root)
    lose_data(root / "grpo" / "r-2")
    result = gapless("status", root, root, "--json")
    found = orjson.loads(result.stdout)
    run = next(run for run in found["runs"] if run["run"] == "r-2")

    assert result.exit_code == 1
    assert (run["state"], run["records"], [sink["uploaded"] for sink in run["sinks"]]) == ("empty", 0, [2])
    assert [problem.split(":")[0] for problem in found["problems"]] == ["grpo/r-2"]


def test_status_says_that_all_of_it_was_uploaded(root: Path) -> None:
    """A run that was removed after its end has a note and is no problem."""
    replay(root, root)
    folder = lose_data(root / "grpo" / "r-1")
    result = gapless("status", root, root, "--json")
    found = orjson.loads(result.stdout)

    assert (result.exit_code, found["problems"]) == (0, [])
    assert found["runs"][0]["notes"] == [f"{folder} holds no segment any more; all of it was uploaded"]


def test_doctor_and_dry_run_name_it(root: Path) -> None:
    """As a problem of the spool."""
    lose_data(root / "grpo" / "r-2")

    assert "bad   spool: grpo/r-2: no segment lies in" in gapless("doctor", root, root).stdout
    assert "grpo/r-2: no segment lies in" in replay(root, root, "--dry-run").stderr


# a path without a run


@pytest.mark.parametrize("inner", ["media", CLAIMS, "media/deeper"])
def test_a_path_inside_a_run_is_an_error(root: Path, inner: str) -> None:
    """It names the run's folder."""
    run = root / "grpo" / "r-1"
    (run / inner).mkdir(parents=True)
    result = replay(run / inner, root)

    assert (result.exit_code, result.stdout) == (1, "nothing was uploaded; 1 without data\n")
    assert said(result) == [f"{run / inner} lies inside a run: give the run's folder, {run}"]


def test_a_path_with_nothing_of_ours_is_an_error(root: Path) -> None:
    """Also beside one that holds runs."""
    other = root.parent / "elsewhere"
    (other / "src").mkdir(parents=True)
    (other / "src" / "train.py").touch()
    alone, beside = replay(other, root), replay(other, root, str(root))
    wanted = [f"no run lies in {other}: give the folder of a spool, a project or a run, or a segment"]

    assert (alone.exit_code, said(alone)) == (1, wanted)
    assert (beside.exit_code, said(beside)) == (1, wanted)
    assert gapless("status", other, root).exit_code == 1


@pytest.mark.parametrize("made", [".", "grpo", "grpo/.jobs"])
def test_an_empty_spool_is_no_error(tmp_path: Path, made: str) -> None:
    """Nothing is in it but folders of projects: no run has begun."""
    root = tmp_path / "spool"
    (root / made).mkdir(parents=True)
    result = replay(root, root)

    assert (result.exit_code, result.stdout, said(result)) == (0, "no run is there yet\n", [])
    assert gapless("status", root, root).exit_code == 0


def test_an_empty_folder_beside_runs_is_a_run(root: Path) -> None:
    """Though it was given by itself, or by name beside them."""
    folder = lose_data(root / "grpo" / "r-2")

    assert replay(folder, root).exit_code == 1
    assert replay(folder, root, str(root / "grpo" / "r-1")).exit_code == 1


def test_an_empty_spool_beside_a_link_to_a_run_is_no_error(root: Path) -> None:
    """The run lies elsewhere: links are not followed."""
    spool = root.parent / "w1" / "spool"
    spool.mkdir(parents=True)
    (spool.parent / "latest").symlink_to(root / "grpo" / "r-1")
    result = replay(aged(spool), root)

    assert (result.exit_code, result.stdout) == (0, "no run is there yet\n")
