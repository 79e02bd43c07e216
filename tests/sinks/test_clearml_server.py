"""The ClearML sink at a server: the package's own session against a stand-in."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from pathlib import Path

import pytest

from gapless_uploader.operations import Config, Rewind, State, Table
from gapless_uploader.sink import Parked, Rejected, Retryable, RunView
from gapless_uploader.sinks.clearml import ClearmlSink
from tests.sinks.clearml_server import ClearmlServer
from tests.sinks.harness import T0, Point, SinkHarness, amend, batch, row, view, write
from tests.sinks.outage import World, play_outage

RUN = view(config={"lr": 0.1}, notes="why")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ClearmlServer]:
    made = ClearmlServer()
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "clearml.conf"))
    monkeypatch.setenv("CLEARML_API_HOST", made.url)
    monkeypatch.setenv("CLEARML_API_ACCESS_KEY", "access")
    monkeypatch.setenv("CLEARML_API_SECRET_KEY", "secret")
    monkeypatch.setattr("clearml.backend_api.session.session.Session._offline_mode", False)
    yield made
    made.close()


def values(server: ClearmlServer) -> list[tuple[object, ...]]:
    names = ("iter", "metric", "variant", "value", "timestamp")
    return sorted(tuple(event[name] for name in names) for event in server.events.values() if "value" in event)


def test_a_run_arrives_at_the_server(server: ClearmlServer) -> None:
    """Project, task, config, points with their times, tables and the end reach the server."""
    ended = State("finished", 0, T0 + 9, 9.0)
    table = Table(["a"], [[1]])
    operations = [Config(RUN.config), row(0, **{"actor/loss": 0.5}), row(1, samples=table), ended]
    write(ClearmlSink("server"), RUN, {}, *operations)
    (task,) = server.tasks.values()

    assert values(server) == [(0, "actor", "loss", 0.5, T0 * 1000)]
    assert [event["metric"] for event in server.events.values() if event["type"] == "plot"] == ["samples"]
    assert (task["name"], task["project"], task["status"]) == ("Qwen 7B", server.projects["grpo"], "completed")
    assert (task["comment"], task["configuration"]["Hyperparameters"]["value"]) == ("why", '{\n  "lr": 0.1\n}')


def test_a_lost_answer_and_a_lost_state_double_nothing(server: ClearmlServer) -> None:
    """The events were added and the answer lost; then the whole again on an empty memo: one task, every event once."""
    sink = ClearmlSink("server")
    session = sink.open(RUN, {})
    server.failures = [(500, True)]
    with pytest.raises(Retryable):
        session.write(batch(RUN, row(0, loss=1.0)))
    session.write(batch(RUN, row(0, loss=1.0), amend(row(0, loss=1.0), loss=2.0)))
    write(ClearmlSink("server"), RUN, {}, row(0, loss=2.0), row(1, loss=3.0))

    assert len(server.tasks) == 1
    assert [one[:4] for one in values(server)] == [(0, "loss", "loss", 2.0), (1, "loss", "loss", 3.0)]


def test_ends_are_told_and_taken_back(server: ClearmlServer) -> None:
    """A failed run is failed with its exit code, a resumed one is running."""
    memo = write(ClearmlSink("server"), RUN, {}, State("failed", 3, T0, 0.0)).memo
    (task,) = server.tasks.values()

    assert (task["status"], task["status_reason"]) == ("failed", "failed, exit code 3")

    write(ClearmlSink("server"), RUN, memo, State("running", None, T0, 0.0))

    assert task["status"] == "started"


@pytest.mark.parametrize(
    ("code", "kind"), [(401, Parked), (403, Parked), (400, Rejected), (413, Rejected), (429, Retryable)]
)
def test_each_answer_says_what_happens_next(server: ClearmlServer, code: int, kind: type[Exception]) -> None:
    """A refusal parks, rejects or asks again, by its code."""
    session = ClearmlSink("server").open(RUN, {})
    server.failures = [(code, False)] * 3
    with pytest.raises(kind):
        session.write(batch(RUN, row(0)))


def test_wrong_credentials_park_the_sink(server: ClearmlServer) -> None:
    """A login that is refused parks all runs of the sink, with the names of the variables."""
    server.login_code = 401
    with pytest.raises(Parked, match="CLEARML_API_ACCESS_KEY") as raised:
        ClearmlSink("server").open(RUN, {})

    assert raised.value.whole_sink


def test_a_server_that_is_not_there_is_asked_again(server: ClearmlServer) -> None:
    """A server that is down, and one that nobody answers for: Retryable."""
    server.login_code = 503
    with pytest.raises(Retryable):
        ClearmlSink("server").open(RUN, {})
    server.close()
    with pytest.raises(Retryable):
        ClearmlSink("server").open(RUN, {})


def test_what_the_server_cannot_do_is_declared_and_counted(server: ClearmlServer) -> None:
    """A server takes nothing back and holds no NaN; both are said before and counted after."""
    sink = ClearmlSink("server")
    ack = write(sink, RUN, {}, row(0, loss=nan), Rewind(0))

    assert not sink.capabilities.rewind
    assert [(one.step, one.key) for one in ack.refused] == [(0, "loss"), (0, None)]


class ServedHarness(SinkHarness):
    """The outage suite's view of the server."""

    kind = "clearml"

    def __init__(self, folder: Path, server: ClearmlServer) -> None:
        super().__init__(folder)
        self._server = server

    def sink(self) -> ClearmlSink:
        return ClearmlSink("server")

    @contextmanager
    def outage(self) -> Iterator[None]:
        self._server.down()
        yield
        self._server.up()

    def points(self, run: RunView) -> list[Point]:
        return [
            Point(step, variant, value, timestamp / 1000)  # type: ignore[operator]
            for step, _, variant, value, timestamp in values(self._server)
        ]


def test_an_hour_without_the_server_costs_nothing(server: ClearmlServer, tmp_path: Path) -> None:
    """A server that refuses connections for an hour has every row afterwards, once."""
    world = World(tmp_path, ServedHarness(tmp_path, server))
    play_outage(world)
    world.turner.uploader.stop()
