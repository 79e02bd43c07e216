"""verl's loggers of tables: this step's rows, once, in the run that Tracking has open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gapless.tracking import DapoFilteredRewardTableLogger, Tracking, ValidationGenerationsLogger
from tests.spool.oracle import header, only, records, segments

KEY = "val/generations"


def tables(folder: Path) -> list[tuple[int | None, dict[str, Any]]]:
    return [(r.step, r.data) for found in records(folder).values() for r in found if r.kind == "table"]


def test_each_validation_writes_its_own_rows(root: Path) -> None:
    """Two validations of 3 samples are two tables of 3 rows, and not a table that grows."""
    tracking = Tracking("p", "e", ["console", "wandb"])
    generations = ValidationGenerationsLogger(project_name="p", experiment_name="e")
    for step in (0, 10):
        samples = [(f"in{i}", f"out{i}", np.float64(i / 2)) for i in range(3)]
        generations.log(["console", "wandb"], samples, step)
    tracking.finish()

    assert [(step, data["key"], len(data["rows"])) for step, data in tables(tracking.run.path)] == [
        (0, KEY, 3),
        (10, KEY, 3),
    ]
    last = tables(tracking.run.path)[1][1]
    assert last["columns"] == ["step", "input", "output", "score"]
    assert last["rows"][1] == [10, "in1", "out1", 0.5]


def test_samples_of_other_lengths_are_kept(root: Path) -> None:
    """A sample without a score, one with more, and one that is a bare text each have a row."""
    tracking = Tracking("p", "e", "wandb")
    ValidationGenerationsLogger("p", "e").log("wandb", [("i", "o"), ["i", "o", 1, "why"], "text"], 1)
    tracking.finish()
    ((_, table),) = tables(tracking.run.path)

    assert table["columns"] == ["step", "input", "output", "score", "value_4"]
    assert table["rows"] == [[1, "i", "o", None, None], [1, "i", "o", 1, "why"], [1, "text", None, None, None]]


@pytest.mark.parametrize(("loggers", "samples"), [([], [("i", "o", 1)]), (["wandb"], [])])
def test_nothing_is_no_table(root: Path, loggers: list[str], samples: list[Any]) -> None:
    """No backend or no sample: nothing is written."""
    tracking = Tracking("p", "e", "wandb")
    ValidationGenerationsLogger("p", "e").log(loggers, samples, 1)
    tracking.finish()

    assert tables(tracking.run.path) == []


def test_rows_go_to_the_run_of_their_names(root: Path) -> None:
    """Of two open runs each takes its own; names that no run has go to the newest."""
    runs = {name: Tracking("p", name, "wandb") for name in ("a", "b")}
    for name in ("a", "b", "c"):
        ValidationGenerationsLogger("p", name).log(["wandb"], [(name, "o", 1)], 1)
    for tracking in runs.values():
        tracking.finish()

    found = {name: [table["rows"][0][1] for _, table in tables(one.run.path)] for name, one in runs.items()}
    assert found == {"a": ["a"], "b": ["b", "c"]}


def test_without_a_tracking_the_rows_make_a_run(root: Path) -> None:
    """verl's rollout workers validate in processes of their own: one run of the same name takes all their rows."""
    generations = ValidationGenerationsLogger("p", "e")
    generations.log(["console", "wandb", "swanlab"], [("i", "o", 1)], 1)
    generations.log(["console", "wandb", "swanlab"], [("i", "o", 1)], 2)
    (folder,) = (root / "p").iterdir()
    (run,) = [r for r in written(folder) if r.kind == "run"]

    assert [step for step, _ in tables(folder)] == [1, 2]
    assert (run.data["name"], run.data["sinks"]) == ("e", ["wandb", "swanlab"])


def test_with_a_shared_id_they_join_the_trackings_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `GAPLESS_RUN_ID` the rows are another writer's, so they supersede nothing of the main one's."""
    monkeypatch.setenv("GAPLESS_RUN_ID", "shared")
    ValidationGenerationsLogger("p", "e").log(["wandb"], [("i", "o", 1)], 1)
    written(root / "p/shared")

    assert [header(path).writer for path in segments(root / "p/shared")] == ["generations"]


def test_after_a_run_ended_its_rows_are_not_lost(root: Path) -> None:
    """A validation after `finish` makes a run of its own rather than be dropped."""
    tracking = Tracking("p", "e", "wandb")
    tracking.finish()
    ValidationGenerationsLogger("p", "e").log(["wandb"], [("i", "o", 1)], 1)
    (other,) = (folder for folder in (root / "p").iterdir() if folder != tracking.run.path)
    written(other)

    assert [step for step, _ in tables(other)] == [1]


def test_dapos_counts_are_one_row_a_step(root: Path) -> None:
    """Rewards in rising order with their counts, under verl's key and columns."""
    tracking = Tracking("p", "e", "wandb")
    dapo = DapoFilteredRewardTableLogger(project_name="p", experiment_name="e")
    dapo.log(["console", "wandb"], {1.0: 3, 0.0: np.int64(5), -0.5: 1}, 4)
    dapo.log([], {1.0: 3}, 5)
    tracking.finish()
    ((step, table),) = tables(tracking.run.path)

    assert (step, table["key"]) == (4, "training/filter_groups/filtered_reward_counts")
    assert (table["columns"], table["rows"]) == (["step", "reward_counts"], [[4, "-0.5:1, 0:5, 1:3"]])


def test_a_disabled_process_writes_no_table(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GAPLESS_MODE=disabled` holds for tables too."""
    monkeypatch.setenv("GAPLESS_MODE", "disabled")
    Tracking("p", "e", "wandb")
    ValidationGenerationsLogger("p", "e").log(["wandb"], [("i", "o", 1)], 1)

    assert not root.exists()


def written(folder: Path) -> list[Any]:
    """The records of the run that was opened for tables alone, on disk."""
    from gapless._fronts import current

    for run in current._own.values():
        run.finish()
    return only(folder)
