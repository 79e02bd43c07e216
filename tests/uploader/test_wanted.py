"""`--to spool-config`: which sinks a run asked for, and that the spool chooses kinds and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless_uploader.sink import Misconfigured
from gapless_uploader.spool import Spool, SpoolRun
from gapless_uploader.wanted import Wanted, Wishes, asked_for, offered_sinks, wanted_sinks
from tests.uploader.harness import SpoolDir

KINDS = ("wandb", "swanlab", "tensorboard")


def scanned(root: Path) -> SpoolRun:
    """The only run under `root`, as a scan finds it."""
    spool = Spool([root])
    spool.scan(0.0)
    (run,) = spool.runs.values()
    return run


def test_a_wish_is_met_by_its_kind() -> None:
    """Kinds in the run's order, each once; what is not available is named."""
    wanted = wanted_sinks(["tensorboard", "clearml", "wandb", "wandb"], KINDS)

    assert wanted == Wanted(("tensorboard", "wandb"), ("clearml",))


@pytest.mark.parametrize(
    "wish", ["tensorboard:/etc", "wandb:https://evil.example", "file:../..", "", "WANDB", " wandb"]
)
def test_a_wish_chooses_no_target(wish: str) -> None:
    """A name with a target, or that is not exactly a kind, is met by no sink."""
    assert wanted_sinks([wish], (*KINDS, "file")) == Wanted((), (wish,))


def test_a_run_that_says_nothing_goes_nowhere() -> None:
    """Neither None nor an empty list asks for a sink."""
    assert wanted_sinks(None, KINDS) == wanted_sinks([], KINDS) == Wanted((), ())


def test_the_run_record_says_what_is_asked_for(tmp_path: Path) -> None:
    """The `sinks` of the run's first record; what is no text in it is passed over."""
    SpoolDir(tmp_path).attempt().run(sinks=["wandb", 3, "swanlab"])

    assert asked_for(scanned(tmp_path), 0.0) == ["wandb", "swanlab"]


@pytest.mark.parametrize("sinks", [None, "wandb", {"wandb": 1}])
def test_sinks_of_another_shape_ask_for_nothing(tmp_path: Path, sinks: object) -> None:
    """Only a list asks for something."""
    SpoolDir(tmp_path).attempt().run(sinks=sinks)

    assert asked_for(scanned(tmp_path), 0.0) == []


def test_a_long_config_before_it_is_read_through(tmp_path: Path) -> None:
    """A `run` record near the largest line is read whole."""
    SpoolDir(tmp_path).attempt().run({"text": "x" * 900_000}, sinks=["wandb"])

    assert asked_for(scanned(tmp_path), 0.0) == ["wandb"]


def test_before_the_run_record_is_there_nothing_is_known(tmp_path: Path) -> None:
    """A header alone, or half a `run` record, is no answer."""
    attempt = SpoolDir(tmp_path).attempt()
    assert asked_for(scanned(tmp_path), 0.0) is None

    attempt.raw(attempt.line("run", {"sinks": ["wandb"]})[:40])
    assert asked_for(scanned(tmp_path), 0.0) is None


def test_the_newest_attempt_of_main_decides(tmp_path: Path) -> None:
    """A restart may ask for other sinks; an evaluation's writer decides only where there is no main."""
    spool = SpoolDir(tmp_path)
    spool.attempt(writer="eval", number=5).run(sinks=["tensorboard"])
    assert asked_for(scanned(tmp_path), 0.0) == ["tensorboard"]

    spool.attempt(number=1).run(sinks=["wandb"])
    spool.attempt(number=2).run(sinks=["swanlab"])
    assert asked_for(scanned(tmp_path), 0.0) == ["swanlab"]


def test_an_attempt_that_has_said_nothing_yet_leaves_the_one_before(tmp_path: Path) -> None:
    """Between a restart's header and its `run` record the older attempt's wishes hold."""
    spool = SpoolDir(tmp_path)
    spool.attempt(number=1).run(sinks=["wandb"])
    spool.attempt(number=2)

    assert asked_for(scanned(tmp_path), 0.0) == ["wandb"]


def test_wishes_are_asked_anew_for_a_new_attempt(tmp_path: Path) -> None:
    """One reading an attempt: a run that only grows is not read again, one that restarts is."""
    spool = SpoolDir(tmp_path)
    first = spool.attempt(number=1)
    wishes = Wishes(KINDS)
    assert wishes.of(scanned(tmp_path), 0.0) is None

    first.run(sinks=["wandb"])
    assert wishes.of(scanned(tmp_path), 1.0) == Wanted(("wandb",), ())

    first.path.write_bytes(first.header_line(1))
    assert wishes.of(scanned(tmp_path), 2.0) == Wanted(("wandb",), ())

    second = spool.attempt(number=2)
    assert wishes.of(scanned(tmp_path), 3.0) == Wanted(("wandb",), ())

    second.run(sinks=["swanlab", "mlflow"])
    assert wishes.of(scanned(tmp_path), 4.0) == Wanted(("swanlab",), ("mlflow",))


def test_every_kind_is_offered_with_its_own_options(tmp_path: Path) -> None:
    """Kinds of this installation, targets and options of this configuration; not what `--to` names already."""
    options = {"tensorboard": {"target": str(tmp_path / "tb"), "precision": "single"}}
    offered = {sink.kind: sink for sink in offered_sinks(options, besides=["file"])}

    assert offered["tensorboard"].target == str(tmp_path / "tb")
    assert "console" in offered
    assert not {"memory", "file"} & set(offered)


def test_wrong_options_are_said() -> None:
    """Options that were given and cannot be used stop the uploader before it starts."""
    with pytest.raises(Misconfigured, match="precision"):
        offered_sinks({"tensorboard": {"precision": "half"}})
