"""The two-rank trainings at the trackers' test servers: uploaded by the sinks, read back by the trackers' own means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.sink import RunView
from gapless_uploader.uploader import Inline, Uploader
from tests.fronts.far_end import upload
from tests.fronts.process import Trained
from tests.sinks.harness import Point, SinkHarness, load_harness


@pytest.fixture(params=["wandb", "swanlab"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkHarness]:
    """A server of its own, and the sink that uploads to it."""
    made = load_harness(request.param)(tmp_path / "tracker")
    yield made
    made.close()


@pytest.fixture(params=["areal_trained", "verl_trained"])
def trained(request: pytest.FixtureRequest) -> Trained:
    found: Trained = request.getfixturevalue(request.param)
    return found


def upload_to(tracker: SinkHarness, root: Path, folder: Path) -> None:
    """Everything under `root`, by an uploader of its own, until the tracker knows all of it."""
    uploader = Uploader([root], [tracker.sink()], folder / "state", executor=Inline(), jitter=lambda: 0.0)
    uploader.start()
    for turn in range(2000):
        uploader.turn(100.0 * turn)
        if uploader.is_over():
            break
    assert uploader.is_over(), uploader.failed
    uploader.stop()


def test_every_value_is_at_the_tracker_once(tracker: SinkHarness, trained: Trained, tmp_path: Path) -> None:
    """What the tracker holds is what TensorBoard's files hold, whose values `test_loops.py` derives; no point twice."""
    ((run_id, far),) = upload(trained.root, tmp_path / "files").items()
    upload_to(tracker, trained.root, tmp_path)
    run = RunView(far.about["project"], run_id, created=0.0, host="")
    held = tracker.points(run)
    want = {(step, tracker.key(key)): tracker.held(value) for (step, key), value in far.values.items()}

    assert sorted((point.step, point.key) for point in held) == sorted(want)
    assert {(point.step, point.key): point.value for point in held} == pytest.approx(want, rel=1e-12)
    assert tracker.state(run) == "finished"
    assert times(held) == pytest.approx(far_times(far.scalars), rel=0, abs=0.0011)


def test_samples_are_at_the_tracker(tracker: SinkHarness, verl_trained: Trained, tmp_path: Path) -> None:
    """Each validation's samples are there at its step, and not those of the one before."""
    upload_to(tracker, verl_trained.root, tmp_path)
    (folder,) = verl_trained.root.glob("math/*")
    texts = tracker.texts(RunView("math", folder.name, created=0.0, host=""))
    tables = {step: text for (step, key), text in texts.items() if key == tracker.key("val/generations")}

    assert sorted(tables) == [0, 3, 6]
    assert all(f"a{sample} at {step}" in tables[step] for step in tables for sample in range(4))
    assert "at 3" not in tables[6]


def times(held: list[Point]) -> dict[int, Any]:
    """Step -> when it was logged; trackers keep microseconds or milliseconds."""
    return {point.step: point.t for point in held}


def far_times(scalars: dict[tuple[int, str], tuple[float, float]]) -> dict[int, float]:
    return {step: t for (step, _), (_, t) in scalars.items()}
