"""Two gloo ranks in the shape of AReaL's and verl's trainings, killed and started again; values at the trackers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fronts.far_end import FarEnd, upload
from tests.fronts.process import Trained
from tests.fronts.shapes import SWANLAB_KEY, WANDB_KEY
from tests.spool.oracle import header, records, segments

Loop = tuple[FarEnd, Path, list[str]]
"""The far end of the loop's only run, its folder in the spool, and what the second start's ranks printed."""


def far_end(trained: Trained, folder: Path) -> Loop:
    ((run_id, far),) = upload(trained.root, folder).items()
    return far, next(trained.root.glob(f"*/{run_id}")), trained.printed


@pytest.fixture(scope="module")
def areal(areal_trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return far_end(areal_trained, tmp_path_factory.mktemp("areal"))


@pytest.fixture(scope="module")
def verl(verl_trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    return far_end(verl_trained, tmp_path_factory.mktemp("verl"))


def logged_at(folder: Path) -> dict[int, float]:
    """Step -> the wall clock of its last record, which is its row's time; a later attempt's goes before."""
    attempts = sorted((header(path).attempt, header(path).attempt_id) for path in segments(folder))
    found = records(folder)
    return {r.step: r.t for _, attempt in attempts for r in found[attempt] if r.step is not None}


# AReaL


def test_areals_statistics_arrive(areal: Loop) -> None:
    """Means over both ranks' masks, minima, maxima, counts and scalars in their scopes, for all seven steps."""
    far, _, _ = areal
    want = {}
    for step in range(7):
        # 2 valid tokens of rank 0 hold `step`, 4 of rank 1 hold `step + 4`; after the recovery at step 3 a half more.
        low = step + (0.5 if step >= 3 else 0.0)
        scope = "ppo_actor"
        want |= {
            (step, f"{scope}/advantages/avg"): (2 * low + 4 * (low + 4)) / 6,
            (step, f"{scope}/advantages/min"): low,
            (step, f"{scope}/advantages/max"): low + 4,
            (step, f"{scope}/task_reward/avg"): (4 * step + 1) / 4,
            (step, f"{scope}/n_valid_tokens"): 6,
            (step, f"{scope}/n_seqs"): 4,
            (step, f"{scope}/eps_clip"): 0.25,
            (step, f"{scope}/use_dual_clip"): 0.5,
            (step, f"{scope}/update/lr"): 2.0**-step,
        }
    held = {place: far.values.get(place) for place in want}

    assert held == pytest.approx(want, rel=1e-12)


def test_a_row_committed_after_its_checkpoint_survives_the_recovery(areal: Loop) -> None:
    """Step 2's checkpoint was saved before its row was committed: the recovery starts at 3 and leaves it there."""
    far, folder, _ = areal
    last = header(segments(folder)[-1])

    assert last.resume_step == 3
    assert far.values[2, "ppo_actor/advantages/max"] == 6.0


def test_only_rank_0_of_areal_writes(areal: Loop) -> None:
    """One run, whose attempts never overlap: the killed one, the opened one, the recovered one."""
    _, folder, _ = areal
    ended = {header(path).attempt: False for path in segments(folder)}
    for path in segments(folder):
        found = records(folder)[header(path).attempt_id]
        ended[header(path).attempt] = found[-1].kind == "finish"

    assert ended == {1: False, 2: True, 3: True}


def test_areals_run_says_what_it_asked_for(areal: Loop, areal_trained: Trained) -> None:
    """Names, group, tags, trackers and end; neither key is in the spool or at the trackers."""
    far, _, _ = areal
    about = far.about
    everything = b"".join(path.read_bytes() for path in areal_trained.root.rglob("*") if path.is_file())
    told = json.dumps(about)

    assert (about["project"], about["id"], about["name"]) == ("gsm8k", "gsm8k_t0_train", "t0")
    assert (about["tags"], about["group"], about["state"]) == (["rl"], "gsm8k_t0", "finished")
    assert about["config"]["gapless"]["trackers"]["swanlab"]["name"] == "t0_train"
    for key in (WANDB_KEY, SWANLAB_KEY):
        assert key.encode() not in everything
        assert key not in told


# verl


def test_verls_metrics_arrive(verl: Loop) -> None:
    """The validation before training at step 0, training from 1, and after the restart the second start's values."""
    far, _, _ = verl
    want: dict[tuple[int, str], float] = {}
    for step in range(1, 7):
        want[step, "actor/pg_loss"] = step + 0.5 + (0.25 if step > 3 else 0.0)
        want[step, "timing_s/gen"] = step / 3
        want[step, "training/global_step"] = step
    for step in (0, 3, 6):
        want[step, "val-core/gsm8k/acc/mean@1"] = step / 8

    assert far.values == want


def test_the_rank_that_logs_writes_and_ends_the_run(verl: Loop) -> None:
    """Rank 1 logs, as with pipeline stages; a `fit` that just returns ends the run as finished."""
    far, folder, printed = verl
    attempts = [header(path) for path in segments(folder)]

    assert [one.attempt for one in attempts] == [1, 2]
    assert far.about["state"] == "finished"
    assert printed[0] == ""
    assert printed[1].splitlines()[0] == "step:3 - val-core/gsm8k/acc/mean@1:0.375"


def test_samples_arrive_as_rows(verl: Loop) -> None:
    """Each validation's four samples are a table of its own at its step, at both trackers."""
    far, _, _ = verl
    tables = {step: value for (step, key), value in far.rows.items() if key == "val/generations"}

    assert sorted(tables) == [0, 3, 6]
    assert tables[6]["columns"] == ["step", "input", "output", "score"]
    assert tables[6]["rows"] == [[6, f"q{i}", f"a{i} at 6", float(i)] for i in range(4)]
    assert "a3 at 6" in far.texts[6, "val/generations"]
    assert "a3 at 3" not in far.texts[6, "val/generations"]


def test_filtered_rewards_arrive_a_row_a_step(verl: Loop) -> None:
    """DAPO's counts are held for every step of the training."""
    far, _, _ = verl
    key = "training/filter_groups/filtered_reward_counts"

    assert {step: far.rows[step, key]["rows"] for step in range(1, 7)} == {
        step: [[step, f"0:{step}, 1:2"]] for step in range(1, 7)
    }


# Both


@pytest.mark.parametrize("which", ["areal", "verl"])
def test_rows_keep_their_time(which: str, request: pytest.FixtureRequest) -> None:
    """The tracker shows when the training logged a value, to the last bit, and not when it was uploaded."""
    far, folder, _ = request.getfixturevalue(which)
    logged = logged_at(folder)
    if which == "verl":
        del logged[3]  # a row that both attempts had a part in
    held = {(step, t) for (step, _), (_, t) in far.scalars.items() if step in logged}

    assert held == set(logged.items())
