"""Faults that people met with SwanLab's own tools, and what happens here."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.events import RunParked, SinkFailed
from gapless_uploader.sinks.swanlab import SwanlabSink
from tests.sinks.swanlab.world import RUN, World, expected, raw_points


def test_a_run_without_an_end_and_with_a_torn_line_is_a_normal_case(world: World) -> None:
    """Ten rows, never finished, the last line torn: nine arrive, the run is running; the tenth follows once whole."""
    writer = world.writer()
    writer.begin()
    for step in range(10):
        writer.row(step, loss=float(step))
    whole = writer._path.read_bytes()
    writer._path.write_bytes(whole[:-7])
    for _ in range(8):
        world.turn()

    assert list(world.experiment.points()["loss"]) == list(range(9))
    assert world.experiment.state == "RUNNING"

    writer._path.write_bytes(whole)
    world.pass_time(70)
    for _ in range(8):
        world.turn()
    assert expected((step, {"loss": float(step)}) for step in range(10)) == raw_points(world.experiment)


def test_an_outage_is_filled_the_next_day(world: World) -> None:
    """Steps 0-40 live, an outage, the uploader killed in it: a day later 41-100 are added and 0-40 not repeated."""
    writer = world.writer()
    writer.begin()
    for step in range(41):
        writer.row(step, loss=float(step))
    for _ in range(8):
        world.turn()
    with world.server.refused():
        for step in range(41, 101):
            writer.row(step, loss=float(step))
            world.turn()
            world.clock += 1.0
        world.kill()
    world.pass_time(86_400)
    writer.finish()
    world.run()

    assert expected((step, {"loss": float(step)}) for step in range(101)) == raw_points(world.experiment)
    assert world.experiment.state == "FINISHED"


def test_attempts_of_an_air_gapped_node_are_one_experiment(world: World) -> None:
    """Two attempts that never saw a network, uploaded once elsewhere: one experiment with continuous steps."""
    for attempt, steps in ((1, range(50)), (2, range(50, 80))):
        writer = world.writer(attempt)
        writer.begin()
        for step in steps:
            writer.row(step, loss=float(step))
    writer.finish()
    world.run()

    assert list(world.server.experiments) == [RUN]
    assert list(world.experiment.points()["loss"]) == list(range(80))


def test_a_second_replay_sends_nothing(world: World) -> None:
    """What is uploaded is not sent again, by the same uploader or the next one."""
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    writer.finish()
    world.run()
    before = len(world.server.calls)
    world.kill()
    world.run()

    assert len(world.server.calls) == before


def test_a_name_that_is_not_found_twice_is_no_reason_to_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two failures of DNS at login, then it works: the run arrives, without a settle time."""
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    real, fails = socket.getaddrinfo, [True, True]

    def lookup(*args: Any, **kwargs: Any) -> Any:
        if fails:
            fails.pop()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real(*args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    began = world.clock
    while not world.server.experiments or not world.experiment.raw:
        world.turn()
        world.clock += 0.5
    failed = [event.reason for event in world.told(SinkFailed)]  # type: ignore[attr-defined]

    assert len(failed) == 2
    assert all("no connection" in reason for reason in failed)
    assert world.clock - began < world.settle_s


def test_a_wrong_key_makes_no_storm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many runs and a wrong key there is one login in five minutes, not one for each run."""
    for number in range(8):
        writer = world.writer(1, run=f"run-{number}")
        writer.begin()
        writer.row(0, loss=1.0)
    monkeypatch.setenv("SWANLAB_API_KEY", "wrong")
    for _ in range(20):
        world.turn()
        world.clock += 1.0

    assert world.server.count("login") == 1
    assert world.told(RunParked)


def test_a_new_login_is_found_without_a_restart(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A key that was refused is read again from where it came: `swanlab login` mends a running uploader."""
    monkeypatch.delenv("SWANLAB_API_KEY")
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path))
    login = f"machine {world.server.url}\n\tlogin {world.server.url}\n\tpassword "
    (tmp_path / ".netrc").write_text(f"{login}expired\n")
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    for _ in range(5):
        world.turn()
    assert world.told(RunParked)

    (tmp_path / ".netrc").write_text(f"{login}{world.server.api_key}\n")
    world.pass_time(301)
    for _ in range(5):
        world.turn()
    assert raw_points(world.experiment) == [(0, "loss", "1.0")]


def test_the_docs_name_every_option_and_fault() -> None:
    """The page about SwanLab has each option of the sink, with its default."""
    page = (Path(__file__).parents[3] / "docs" / "swanlab.md").read_text()
    named = dict(re.findall(r"^(\w+) = (\S+)", page.partition("[sinks.swanlab]")[2].partition("```")[0], re.MULTILINE))
    parameters = SwanlabSink.__init__.__kwdefaults__ or {}

    assert set(named) == set(parameters) - {"now"}
    assert float(named["settle"]) == parameters["settle"]
    assert float(named["timeout"]) == parameters["timeout"]
