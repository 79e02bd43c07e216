"""The logger for Lightning: a real Trainer, beside Lightning's own CSV logger, its values at the trackers."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.fronts.far_end import FarEnd, upload
from tests.fronts.process import once, train
from tests.spool.oracle import records

Trained = tuple[dict[str, FarEnd], dict[tuple[int, str], float], Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The far end of each run, what the CSV logger got, and the spool."""

    def make(folder: Path) -> None:
        train("train_lightning.py", folder / "spool", folder)

    folder = once(tmp_path_factory, "lightning", make)
    (metrics,) = (folder / "csv").rglob("metrics.csv")
    with metrics.open() as file:
        held = {
            (int(row["step"]), key): float(value)
            for row in csv.DictReader(file)
            for key, value in row.items()
            if value and key != "step"
        }
    return upload(folder / "spool", tmp_path_factory.mktemp("lightning")), held, folder / "spool"


def test_every_value_of_the_trainer_arrives(trained: Trained) -> None:
    """Steps, epoch means and the test: what the CSV logger got at the same time, bit for bit, and no more."""
    runs, held, _ = trained

    assert runs["fitted"].values == held
    assert len([place for place in held if place[1] == "loss"]) == 8


def test_fit_and_test_are_one_run(trained: Trained) -> None:
    """The test's row is in the run of the fit, which finished when it was told to."""
    about = trained[0]["fitted"].about

    assert (8, "test/loss") in trained[0]["fitted"].values
    assert (about["project"], about["name"], about["state"]) == ("pl", "tiny", "finished")


def test_hyperparameters_are_the_config(trained: Trained) -> None:
    """`save_hyperparameters` arrives, its credential redacted."""
    assert trained[0]["fitted"].about["config"] == {"width": 3, "api_key": "<redacted>", "fail_at": -1}


def test_a_failed_fit_fails_its_attempt(trained: Trained) -> None:
    """The attempt ends as failed; a later row opens another of the same run, with the config and the earlier rows."""
    runs, _, root = trained
    ends = [r.data["state"] for found in records(root / "pl/failed").values() for r in found if r.kind == "finish"]

    assert ends == ["failed", "finished"]
    assert sorted(place for place in runs["failed"].values if place[1] != "epoch") == [
        (0, "loss"),
        (1, "loss"),
        (9, "after"),
    ]
    assert runs["failed"].about["config"]["fail_at"] == 2
