"""The ClearML sink's own promises."""

import json
from dataclasses import replace
from itertools import product
from math import inf, nan
from pathlib import Path

from gapless_uploader.operations import Config, State, System, Table, Text
from gapless_uploader.sinks.clearml import split
from tests.sinks.harness import T0, row, view, write
from tests.sinks.harness_clearml import Harness, check

RUN = view(config={"lr": 0.1, "nan": nan}, tags=["a"], notes="why")


def test_clearmls_import_sends_the_rows_with_their_times(tmp_path: Path) -> None:
    """ClearML's own import reads the session and sends each value at its iteration and original time."""
    harness = Harness(tmp_path)
    write(harness.sink(), RUN, {}, row(3, t=T0 + 0.25, **{"actor/loss": 0.5}))
    (event,) = harness.events(RUN)

    assert (event["task"], event["iter"], event["metric"], event["variant"]) == ("imported", 3, "actor", "loss")
    assert (event["value"], event["timestamp"]) == (0.5, (T0 + 0.25) * 1000)


def test_title_and_series_are_verls_and_never_meet() -> None:
    """A key splits at its first slash; one without is a series of its own; no two keys become the same."""
    keys = ["".join(parts) for size in range(1, 6) for parts in product("a/", repeat=size)]

    assert split("actor/loss/mean") == ("actor", "loss/mean")
    assert split("loss") == ("loss", "loss")
    assert len({split(key) for key in keys}) == len(keys)
    assert all(check(key) for key in keys)


def test_the_task_says_what_the_run_is(tmp_path: Path) -> None:
    """Name, project, config, tags, git commit and an end that ClearML's import would hide are in `task.json`."""
    harness = Harness(tmp_path)
    run = replace(RUN, system={"git": {"remote": "git@host:a.git", "commit": "abc"}, "command": "train.py"})
    write(harness.sink(), run, {}, Config(run.config), System(run.system), State("failed", 1, T0, 0.0))
    task = json.loads((harness.session(run) / "task.json").read_text())

    assert (task["name"], task["project_name"], task["tags"]) == ("Qwen 7B", "grpo", ["a"])
    assert json.loads(task["configuration"]["Hyperparameters"]["value"]) == {"lr": 0.1, "nan": "NaN"}
    assert task["comment"] == "why\nfailed, exit code 1"
    assert task["script"]["version_num"] == "abc"


def test_tables_are_clearmls_own_plots(tmp_path: Path) -> None:
    """A table is a plotly table: a header a column and its cells, short rows filled up."""
    harness = Harness(tmp_path)
    write(harness.sink(), RUN, {}, row(3, samples=Table(["a", "b"], [[1, "x"], [2]])))
    drawn = json.loads(harness.texts(RUN)[3, "samples"])["data"][0]

    assert drawn["header"]["values"] == [["a"], ["b"]]
    assert drawn["cells"]["values"] == [[1, 2], ["x", None]]


def test_what_clearml_would_falsify_is_counted(tmp_path: Path) -> None:
    """NaN and infinity, which its client turns into 0, and texts are refused; the row's other values arrive."""
    harness = Harness(tmp_path)
    ack = write(harness.sink(), RUN, {}, row(3, a=nan, b=inf, c=Text("t"), loss=0.5))

    assert [one.key for one in ack.refused] == ["a", "b", "c"]
    assert harness.expect([row(3, loss=0.5)]) == harness.actual(RUN)
