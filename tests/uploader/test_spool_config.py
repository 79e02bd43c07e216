"""`--to spool-config` in an uploader: each run goes to the sinks whose kind it asked for, and to no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gapless_uploader import events
from gapless_uploader.cli import main
from gapless_uploader.config import UploaderConfig
from gapless_uploader.sink import Sink
from gapless_uploader.sinks.file import FileSink
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.sinks.tensorboard import TensorboardSink
from tests.uploader.harness import SpoolDir, Turner


@pytest.fixture
def spool(tmp_path: Path) -> SpoolDir:
    return SpoolDir(tmp_path / "spool")


def offers(tmp_path: Path) -> tuple[Sink, ...]:
    return FileSink(str(tmp_path / "file")), TensorboardSink(str(tmp_path / "tb"))


def test_each_run_goes_where_it_asked(spool: SpoolDir, tmp_path: Path) -> None:
    """Of three runs one asks for files, one for TensorBoard, one for nothing; `--to` sinks take all three."""
    for name, sinks in (("a", ["file"]), ("b", ["tensorboard", "clearml"]), ("c", None)):
        attempt = spool.attempt(name)
        attempt.run(sinks=sinks)
        attempt.log(1, x=1)
        attempt.finish()
    turner = Turner(spool.root, tmp_path / "state", MemorySink(), offered=offers(tmp_path))
    turner.settle()

    assert [path.stem for path in (tmp_path / "file").rglob("*.json")] == ["a"]
    assert {path.parent.name for path in (tmp_path / "tb").rglob("*tfevents*")} == {"b"}
    assert sorted(turner.memory.runs) == ["proj/a", "proj/b", "proj/c"]
    assert [(e.run, e.sinks) for e in turner.events if isinstance(e, events.WishUnmet)] == [("proj/b", "clearml")]
    assert turner.uploader.is_over()


def test_a_run_that_has_not_said_yet_is_waited_for(spool: SpoolDir, tmp_path: Path) -> None:
    """A header alone is no end; once the run says so its rows go to the sink it asks for."""
    attempt = spool.attempt("a", host="elsewhere")
    turner = Turner(spool.root, tmp_path / "state", MemorySink(), offered=offers(tmp_path))
    turner.wall = attempt.path.stat().st_mtime
    turner.settle()
    assert not turner.uploader.is_over()

    attempt.run(sinks=["file"])
    attempt.log(1, x=1)
    attempt.finish()
    turner.settle()

    assert turner.uploader.is_over()
    assert [path.stem for path in (tmp_path / "file").rglob("*.json")] == ["a"]


def test_spool_config_makes_sinks_from_here(tmp_path: Path) -> None:
    """`to` names none of them: every kind is offered but those named beside it, with this configuration's options."""
    options = {"tensorboard": {"target": str(tmp_path / "tb"), "rate": "9/min"}}
    config = UploaderConfig(to=("spool-config", "file:out"), sinks=options)
    offered = {sink.kind: sink.target for sink in config.offer_sinks()}

    assert [sink.kind for sink in config.make_sinks()] == ["file"]
    assert offered["tensorboard"] == str(tmp_path / "tb")
    assert "file" not in offered
    assert "tensorboard" in config.options().budgets


def test_the_command_takes_it(spool: SpoolDir, tmp_path: Path) -> None:
    """`gapless replay SPOOL --to spool-config` needs no further option than where a kind's data goes."""
    attempt = spool.attempt("a")
    attempt.run(sinks=["file"])
    attempt.log(1, x=1)
    attempt.finish()
    toml = tmp_path / "gapless.toml"
    toml.write_text(f'state = "{tmp_path / "state"}"\n[sinks.file]\ntarget = "{tmp_path / "file"}"\n')
    done = CliRunner().invoke(main, ["replay", str(spool.root), "--to", "spool-config", "--config", str(toml)])

    assert done.exit_code == 0, done.output
    assert [path.stem for path in (tmp_path / "file").rglob("*.json")] == ["a"]
