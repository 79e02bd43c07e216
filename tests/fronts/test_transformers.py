"""The callback for `transformers`: a real Trainer, its values at the trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fronts.far_end import FarEnd, upload
from tests.fronts.process import once, train

GPT2_PARAMETERS = (32 + 16) * 16 + (16 * 48 + 48) + (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 3 * 2 * 16
"""Two embeddings, four projections with bias, three layer norms."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, FarEnd], dict[str, Any], Path]:
    """The far end of each run, what the Trainer says it logged, and the spool."""

    def make(folder: Path) -> None:
        (folder / "out").mkdir()
        train("train_transformers.py", folder / "spool", folder / "out")

    folder = once(tmp_path_factory, "transformers", make)
    history = json.loads((folder / "out/history.json").read_text())
    return upload(folder / "spool", tmp_path_factory.mktemp("transformers")), history, folder / "spool"


def expected(history: dict[str, Any]) -> dict[tuple[int, str], float]:
    """(step, name) -> value: the first training up to its checkpoint at 4, then what the second one logged."""
    entries = [entry for entry in history["first"] if entry["step"] <= 4] + history["second"]
    values = {}
    for entry in entries:
        for key, value in entry.items():
            name = f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}"
            values[entry["step"], name] = value
    return {
        place: value for place, value in values.items() if place[1].endswith(("loss", "grad_norm", "epoch", "rate"))
    }


def test_every_value_of_the_trainer_arrives(trained: tuple[dict[str, FarEnd], dict[str, Any], Path]) -> None:
    """Loss, gradient norm, rate, epoch and evaluations, bit for bit, at the Trainer's own steps, under W&B's names."""
    runs, history, _ = trained
    want = {place: value for place, value in expected(history).items() if place[1] != "train/train_loss"}
    held = runs["first"].values

    assert {place: held.get(place) for place in want} == want
    assert {(2, "train/loss"), (3, "eval/loss"), (6, "train/loss"), (6, "eval/loss")} <= set(held)
    assert held[6, "train/global_step"] == 6


def test_a_resumed_training_takes_back_what_followed_its_checkpoint(
    trained: tuple[dict[str, FarEnd], dict[str, Any], Path],
) -> None:
    """Step 3 is the first training's evaluation; at step 6, where both evaluated, the second one's stands alone."""
    runs, history, _ = trained
    (evaluation,) = [entry for entry in history["second"] if "eval_runtime" in entry]
    held = runs["first"].values

    assert [entry["eval_training"] for entry in history["first"] if "eval_training" in entry] == [1, 1, 1]
    assert {place: value for place, value in held.items() if place[1] == "eval/training"} == {
        (3, "eval/training"): 1,
        (6, "eval/training"): 2,
    }
    assert held[6, "eval/runtime"] == evaluation["eval_runtime"]


def test_totals_are_the_summary(trained: tuple[dict[str, FarEnd], dict[str, Any], Path]) -> None:
    """What the Trainer says once at the end is the run's summary and no row."""
    runs, history, _ = trained
    total = history["second"][-1]

    assert runs["first"].about["summary"]["train_runtime"] == total["train_runtime"]
    assert runs["first"].about["summary"]["train_loss"] == total["train_loss"]
    assert not [place for place in runs["first"].values if "train_loss" in place[1]]


def test_the_config_is_arguments_and_model(trained: tuple[dict[str, FarEnd], dict[str, Any], Path]) -> None:
    """Arguments over the model's config with its number of parameters; no token of the arguments is kept."""
    runs, _, root = trained
    about = runs["first"].about
    everything = b"".join(path.read_bytes() for path in root.rglob("*.jsonl"))

    assert about["name"] == "tiny"
    assert (about["config"]["max_steps"], about["config"]["n_embd"]) == (6, 16)
    assert about["config"]["model/num_parameters"] == GPT2_PARAMETERS
    assert b"hf_a1B2" not in everything


def test_each_trial_is_a_run(trained: tuple[dict[str, FarEnd], dict[str, Any], Path]) -> None:
    """A hyperparameter search makes a run a trial, grouped by the arguments' name."""
    runs, _, _ = trained
    trials = [far.about for far in runs.values() if far.about["project"] == "search"]

    assert sorted((about["name"], about["group"], about["state"]) for about in trials) == [
        ("trial-0", "tiny", "finished"),
        ("trial-1", "tiny", "finished"),
    ]


def test_no_tracker_comes_with_it(trained: tuple[dict[str, FarEnd], dict[str, Any], Path]) -> None:
    """With `report_to="none"` the process has loaded no tracker."""
    assert trained[1]["imported"] == []
