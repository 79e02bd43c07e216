"""The public names as a user's type checker sees them. Checked by pyright, never run."""

from pathlib import Path
from typing import assert_type

import gapless
from gapless import Run, Stats, Table, Text, stats_tracker
from gapless.stats_logger import StatsLogger
from gapless.tracking import Tracking
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, RunView, Session, Sink


def train() -> None:
    run = gapless.init("project", "name", config={"lr": 1e-3}, durability="write", resume_step=7)
    assert_type(run, Run)
    run.log({"loss": 0.5, "nested": {"a": 1}, "note": Text("x"), "rows": Table(["a"], [[1]])}, step=1)
    run.define_axis("val/*", "val/step", summary="max")
    assert_type(run.id, str)
    assert_type(run.path, Path)
    assert_type(run.stats(), Stats)
    assert_type(run.flush(1.0), bool)
    run.finish(exit_code=1)
    with gapless.init("project") as other:
        assert_type(other, Run)


def statistics() -> None:
    with stats_tracker.scope("train"):
        stats_tracker.scalar(lr=0.1)
    assert_type(stats_tracker.export(), dict[str, float])


def fronts() -> tuple[type[StatsLogger], type[Tracking]]:
    return StatsLogger, Tracking


class MySink:
    """A third party's sink, by the Protocol alone."""

    kind = "mine"
    target = ""
    capabilities = Capabilities(exactly_once="a key of run, step and name")

    def open(self, run: RunView, memo: Memo) -> "MySession":
        return MySession()


class MySession:
    def write(self, batch: Batch) -> Ack:
        return Ack(len(batch.operations), {})

    def heartbeat(self, now: float) -> None: ...

    def flush(self) -> Memo:
        return {}

    def close(self) -> None: ...


def is_a_sink() -> tuple[Sink, Session]:
    return MySink(), MySession()
