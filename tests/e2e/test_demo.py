"""`gapless demo`: two real ranks, their spool, a live upload, and what a person sees at the end."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gapless_uploader.replay import merged_run
from gapless_uploader.spool import Spool
from tests.e2e.programs import gapless

STEPS = 26


def test_the_demo_trains_spools_uploads_and_shows(tmp_path: Path) -> None:
    """Both ranks' statistics are in the spool, and TensorBoard's files hold every step of them."""
    program = gapless("demo", "--dir", "demo", "--steps", str(STEPS), cwd=tmp_path)
    output, errors = program.communicate(timeout=250)

    assert program.returncode == 0, output + errors
    for expected in ("train/loss", "eval/perplexity", "demo/spool/", "tensorboard --logdir demo/tensorboard", "▁"):
        assert expected in output
    found = Spool([tmp_path / "demo" / "spool"])
    found.scan(0.0)
    (run,) = found.runs.values()
    rows = merged_run(run).rows
    assert list(range(STEPS)) == sorted(rows)
    assert 2 * 16 * 64 == rows[0].values["train/n_tokens"], "both ranks' tokens are counted"
    (events,) = {path.parent for path in (tmp_path / "demo" / "tensorboard").rglob("*tfevents*")}
    scalars = EventAccumulator(str(events)).Reload().Scalars("train/loss")
    assert [(step, rows[step].t) for step in range(STEPS)] == [(event.step, event.wall_time) for event in scalars]
