"""AReaL's StatsLogger: what its config becomes, what a commit writes, how a recovered run goes on."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import gapless
from gapless._fronts.stats_table import stats_table
from gapless.stats_logger import StatsLogger
from tests.fronts.shapes import SWANLAB_KEY, WANDB_KEY, FinetuneSpec, Swanlab, TensorBoard, Trackio, WandB, experiment
from tests.spool.oracle import header, only, records, segments


def identity(logger: StatsLogger) -> dict[str, Any]:
    """The `run` record's data."""
    logger.close()
    assert logger.run is not None
    return only(logger.run.path, "run")[0].data


def rows(logger: StatsLogger) -> list[tuple[int | None, dict[str, Any]]]:
    """(step, data) of all rows of all attempts, in the order they were written."""
    assert logger.run is not None
    found = records(logger.run.path).values()
    return [(r.step, r.data) for attempt in found for r in attempt if r.kind == "metrics"]


# What the config becomes


def test_names_are_areals(root: Path) -> None:
    """Without names of W&B's own the project is the experiment, the name the trial, group and id made of both."""
    logger = StatsLogger(experiment(root, wandb=WandB(mode="online")), FinetuneSpec())
    told = identity(logger)

    assert logger.run is not None
    assert logger.run.id == "gsm8k_t0_train"
    assert (told["name"], told["group"], told["sinks"]) == ("t0", "gsm8k_t0", ["wandb"])
    assert header(segments(logger.run.path)[0]).project == "gsm8k"


def test_names_given_for_wandb_are_taken(root: Path) -> None:
    """Project, name, group, job type, tags, notes and entity are recorded as the config gives them."""
    wandb = WandB("online", project="p", name="n", group="g", job_type="j", tags=["x", "y"], notes="why", entity="us")
    logger = StatsLogger(experiment(root, wandb=wandb), FinetuneSpec())
    told = identity(logger)

    assert logger.run is not None
    assert header(segments(logger.run.path)[0]).project == "p"
    assert {key: told[key] for key in ("name", "group", "job_type", "tags", "notes", "entity")} == {
        "name": "n",
        "group": "g",
        "job_type": "j",
        "tags": ["x", "y"],
        "notes": "why",
        "entity": "us",
    }


def test_a_timestamp_suffix_is_the_present_time(root: Path) -> None:
    """`id_suffix="timestamp"` makes an id per start, of date and time; None stays AReaL's text `None`."""
    stamped = StatsLogger(experiment(root, wandb=WandB("online", id_suffix="timestamp")), FinetuneSpec())
    plain = StatsLogger(experiment(root, wandb=WandB("online", id_suffix=None)), FinetuneSpec())

    assert stamped.run is not None
    assert plain.run is not None
    assert [len(part) for part in stamped.run.id.removeprefix("gsm8k_t0_").split("_")] == [4, 2, 2, 2, 2, 2]
    assert plain.run.id == "gsm8k_t0_None"


def test_every_tracker_that_is_not_disabled_is_asked_for(root: Path) -> None:
    """The kinds go into `sinks`; modes, projects and names of each are told in the config."""
    parts = {"wandb": WandB("offline"), "swanlab": Swanlab(mode="cloud"), "trackio": Trackio("local", name="tr")}
    told = identity(StatsLogger(experiment(root, **parts, tensorboard=TensorBoard("/tb")), FinetuneSpec()))
    trackers = told["config"]["gapless"]["trackers"]

    assert told["sinks"] == ["wandb", "swanlab", "trackio", "tensorboard"]
    assert trackers["swanlab"] == {"asked_for": True, "mode": "cloud", "project": "gsm8k", "name": "t0_train"}
    assert (trackers["wandb"]["mode"], trackers["trackio"]["name"]) == ("offline", "tr")


def test_the_name_is_that_of_the_first_tracker_asked_for(root: Path) -> None:
    """With SwanLab alone the run has the name that AReaL gives it there."""
    told = identity(StatsLogger(experiment(root, swanlab=Swanlab(mode="cloud")), FinetuneSpec()))

    assert (told["name"], told["sinks"]) == ("t0_train", ["swanlab"])


def test_all_disabled_asks_for_nothing_and_still_spools(root: Path) -> None:
    """A config whose trackers are all disabled, AReaL's default, records an empty list and its rows."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    logger.commit(0, 0, 0, {"loss": 1.0})

    assert identity(logger)["sinks"] == []
    assert rows(logger) == [(0, {"loss": 1.0})]


def test_no_key_reaches_the_spool(root: Path) -> None:
    """AReaL's config holds both trackers' API keys; no file of the spool holds either."""
    parts = {"wandb": WandB("online", wandb_api_key=WANDB_KEY), "swanlab": Swanlab(mode="cloud", api_key=SWANLAB_KEY)}
    logger = StatsLogger(experiment(root, **parts), FinetuneSpec())
    told = identity(logger)
    everything = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())

    assert told["config"]["stats_logger"]["wandb"]["wandb_api_key"] == "<redacted>"
    assert WANDB_KEY.encode() not in everything
    assert SWANLAB_KEY.encode() not in everything


def test_the_trackers_environment_is_left_alone(root: Path) -> None:
    """AReaL sets `WANDB_BASE_URL` and `WANDB_API_KEY` for its trackers; ours sets nothing."""
    before = dict(os.environ)
    StatsLogger(experiment(root, wandb=WandB("online", "http://host", WANDB_KEY)), FinetuneSpec()).close()

    assert dict(os.environ) == before


def test_an_omegaconf_config_is_the_same_run(root: Path) -> None:
    """A structured OmegaConf config gives the record that the dataclasses give."""
    config = experiment(root, wandb=WandB("online", tags=["x"]))
    plain = identity(StatsLogger(config, FinetuneSpec()))
    structured = StatsLogger(OmegaConf.structured(config), FinetuneSpec())
    structured.close()
    assert structured.run is not None
    second = [r.data for found in records(structured.run.path).values() for r in found if r.kind == "run"][1]

    assert second == plain


def test_an_older_config_without_a_trackers_part_has_it_disabled(root: Path) -> None:
    """A part that the config's class does not have yet counts as disabled."""
    config = OmegaConf.create({"stats_logger": {"experiment_name": "e", "trial_name": "t", "fileroot": str(root)}})

    assert identity(StatsLogger(config, FinetuneSpec()))["sinks"] == []


def test_the_part_in_place_of_the_whole_is_refused(root: Path) -> None:
    """As in AReaL, `config.stats_logger` is no config: a ValueError says so."""
    with pytest.raises(ValueError, match="whole experiment config"):
        StatsLogger(experiment(root).stats_logger, FinetuneSpec())


# Where it goes


def test_the_spool_lies_under_the_log_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `GAPLESS_DIR` the root is `gapless` in the folder where AReaL puts W&B's and SwanLab's files."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    logger = StatsLogger(experiment(tmp_path), FinetuneSpec())
    logger.close()

    assert logger.run is not None
    assert logger.run.path == tmp_path / "logs/ann/gsm8k/t0/gapless/gsm8k/gsm8k_t0_train"


def test_get_log_path_makes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the `stats_logger` part, or of three names; where one is missing it raises ValueError."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    of_part = StatsLogger.get_log_path(experiment(tmp_path).stats_logger)
    of_names = StatsLogger.get_log_path(experiment_name="e", trial_name="t", fileroot=str(tmp_path))

    assert of_part == f"{tmp_path}/logs/ann/gsm8k/t0"
    assert of_names == f"{tmp_path}/logs/ann/e/t"
    assert Path(of_part).is_dir()
    with pytest.raises(ValueError, match="fileroot"):
        StatsLogger.get_log_path(experiment_name="e", trial_name="t")


def test_a_log_path_that_cannot_be_made_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is told all the same; who writes there meets the disk's error."""
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    (tmp_path / "logs").write_text("a file")

    assert StatsLogger.get_log_path(experiment(tmp_path).stats_logger) == f"{tmp_path}/logs/ann/gsm8k/t0"


# Committing


def test_counts_are_left_out(root: Path) -> None:
    """Keys that end in `__count` are the tracker's own bookkeeping, as in AReaL."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    logger.commit(0, 0, 0, {"lr": 0.1, "lr__count": 4, "n__counts": 2})
    logger.close()

    assert rows(logger) == [(0, {"lr": 0.1, "n__counts": 2})]


def test_each_item_of_a_list_has_its_step(root: Path) -> None:
    """A list takes one step an item, and the next commit goes on after it though its global step is lower."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    logger.commit(0, 0, 5, [{"a": 1}, {"a": 2}, {"a": 3}])
    logger.commit(0, 1, 6, {"a": 4})
    logger.commit(0, 2, 20, {"a": 5})
    logger.close()

    assert [step for step, _ in rows(logger)] == [5, 6, 7, 8, 20]
    assert logger.state_dict() == {"last_commit_step": 20}


def test_a_commit_says_what_areals_says(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Epoch, step and total, then the statistics as a table, through the logger `StatsLogger`."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    with caplog.at_level(logging.INFO, logger="StatsLogger"):
        logger.commit(1, 2, 12, {"loss": 0.5})

    assert caplog.messages[0] == "Epoch 2/2 Step 3/10 Train step 13/20 done."
    assert caplog.messages[1] == "Stats (1/1):"
    assert "│ loss │ 5.0000e-01 │" in caplog.messages[2]


def test_where_rows_go_is_said_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run's folder and the trackers asked for, when the run begins."""
    with caplog.at_level(logging.INFO, logger="StatsLogger"):
        logger = StatsLogger(experiment(root, wandb=WandB("online")), FinetuneSpec())

    assert logger.run is not None
    assert caplog.messages == [f"Stats go to {logger.run.path}, for wandb."]


def test_a_log_handler_that_raises_hurts_nothing(root: Path) -> None:
    """What is said is worth less than what is recorded: the row is written."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no")

    handler = Broken(logging.INFO)
    log = logging.getLogger("StatsLogger")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        logger = StatsLogger(experiment(root), FinetuneSpec())
        logger.commit(0, 0, 0, {"a": 1})
        logger.close()
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)

    assert rows(logger) == [(0, {"a": 1})]


def test_the_table_reads_down_its_columns() -> None:
    """Five statistics in four pairs take two lines, numbers aligned to the right, the rest as text."""
    table = stats_table({"a": 1.0, "b": 2, "c": "x", "d": float("nan"), "e": 10**400})

    assert [line.count("│") for line in table.splitlines() if "│" in line] == [7, 7]
    assert table.splitlines()[1].startswith("│ a │ 1.0000e+00 │ c │ x")
    assert stats_table({}) == ""


# Recovery: AReaL saves its checkpoint in step N before it commits row N, and goes on at N + 1


def recovered(root: Path) -> StatsLogger:
    """A run that saved at step 2, went on to step 4 and died; the logger of its next start, loaded."""
    first = StatsLogger(experiment(root), FinetuneSpec())
    saved = {}
    for step in range(5):
        if step == 2:
            saved = first.state_dict()
        first.commit(0, step, step, {"loss": float(step)})
    assert first.run is not None
    first.run.finish(1)
    second = StatsLogger(experiment(root), FinetuneSpec())
    second.load_state_dict(saved)
    return second


def test_a_recovered_run_supersedes_from_its_first_step_on(root: Path) -> None:
    """Step 2's row, committed after its checkpoint was saved, stays; steps 3 and 4 are superseded."""
    logger = recovered(root)
    logger.commit(0, 3, 3, {"loss": 30.0})
    logger.close()
    assert logger.run is not None
    last = header(segments(logger.run.path)[-1])

    assert last.resume_step == 3
    assert logger.state_dict() == {"last_commit_step": 3}


def test_a_recovered_run_is_the_same_run(root: Path) -> None:
    """Same id and folder; its newest attempt is the open one, and the one before it has ended."""
    logger = recovered(root)
    logger.commit(0, 3, 3, {"loss": 30.0})
    assert logger.run is not None
    logger.run.flush()
    numbers = [header(path).attempt for path in segments(logger.run.path)]
    ended = [any(r.kind == "finish" for r in found) for found in records(logger.run.path).values()]

    assert numbers == [1, 2, 3]
    assert ended == [True, True, False]


def test_steps_after_a_recovery_go_on_after_the_saved_one(root: Path) -> None:
    """`max(global_step, last + 1)` holds over a restart: a lower global step is moved up."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    logger.load_state_dict({"last_commit_step": 9})
    logger.commit(0, 0, 4, {"a": 1})
    logger.close()

    assert rows(logger) == [(10, {"a": 1})]


# Ranks and the end


def test_other_ranks_write_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank that is not 0 every call does nothing, and the state stays that of a fresh logger."""
    monkeypatch.setenv("RANK", "1")
    logger = StatsLogger(experiment(root), FinetuneSpec())
    logger.commit(0, 0, 0, {"a": 1})
    logger.load_state_dict({"last_commit_step": 3})
    logger.commit(0, 0, 4, {"a": 1})
    logger.close()

    assert not root.exists()
    assert logger.state_dict() == {"last_commit_step": 3}


def test_close_says_how_it_ended(root: Path) -> None:
    """AReaL's trainers close their logger as an exception passes: the run failed."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    with pytest.raises(KeyError), closing(logger):
        raise KeyError("x")
    assert logger.run is not None

    assert only(logger.run.path, "finish")[0].data == {"state": "failed", "exit_code": 1}


def test_a_commit_after_close_is_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is raised; the run counts the row and says so."""
    logger = StatsLogger(experiment(root), FinetuneSpec())
    logger.close()
    logger.close()
    logger.commit(0, 0, 0, {"a": 1})

    assert logger.run is not None
    assert logger.run.stats().late == 1
    assert "has finished" in capsys.readouterr().err


def test_the_module_loads_when_it_is_asked_for() -> None:
    """`gapless.stats_logger` is reached from the package."""
    assert gapless.stats_logger.StatsLogger is StatsLogger
