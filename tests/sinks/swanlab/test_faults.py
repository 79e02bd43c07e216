"""Every fault, before and after the server stored, counted raw: 0 points lost, 0 doubled."""

from typing import Any

import pytest

from gapless_uploader.events import RunChecked, RunParked, SinkFailed, StateChanged
from tests.servers.swanlab.http import Request
from tests.sinks.swanlab.world import World, expected, raw_points

ROWS = [(step, {"loss": 1.0 / (step + 1), "lr": 0.1, "odd": float("nan"), "up": float("inf")}) for step in range(40)]


def write_run(world: World) -> None:
    writer = world.writer()
    writer.begin()
    for step, values in ROWS:
        writer.row(step, **values)
    writer.finish()


def assert_each_point_once(world: World) -> None:
    assert expected(ROWS) == raw_points(world.experiment)
    assert world.experiment.duplicates.total == 0
    assert world.experiment.state == "FINISHED"
    assert [event.complete for event in world.told(RunChecked)] == [True]  # type: ignore[attr-defined]


def is_scalar(request: Request) -> bool:
    return b'"scalar"' in request.body[:200]


LOST = [
    ("status", {"status": 500}),
    pytest.param("status", {"status": 502}, marks=pytest.mark.torture),
    ("status", {"status": 503, "retry_after": "2"}),
    pytest.param("status", {"status": 504}, marks=pytest.mark.torture),
    ("status", {"status": 408}),
    ("status", {"status": 202}),
    ("status", {"status": 302}),
    ("reset", {}),
    ("hang", {}),
    ("html", {}),
    ("truncated", {}),
    ("cut", {}),
]


@pytest.mark.parametrize("when", ["before", "after", "half"])
@pytest.mark.parametrize(("kind", "options"), LOST, ids=lambda value: str(value))
def test_a_lost_answer_loses_and_doubles_nothing(world: World, kind: str, options: dict[str, Any], when: str) -> None:
    """Whatever the server stored before its answer got lost, each point is there once in the end."""
    write_run(world)
    if kind == "hang":
        world.timeout_s = 0.5
    world.server.arm("metrics", kind, when=when, where=is_scalar, **options)
    began = world.clock
    world.run()

    assert_each_point_once(world)
    assert world.clock - began >= world.settle_s


@pytest.mark.parametrize(("kind", "when"), [("status", "before"), ("status", "after"), ("html", "after")])
@pytest.mark.parametrize(
    "endpoint", ["login", "project.get", "project.create", "experiment.post", "profile", "series", "state"]
)
def test_calls_that_may_be_repeated_are(world: World, endpoint: str, kind: str, when: str) -> None:
    """A fault at any other call is followed by the same call again: no settle time, and every point once.

    An experiment whose POST was answered to nobody is found to be there, and may be anybody's: its rows are waited for.
    """
    write_run(world)
    world.server.arm(endpoint, kind, when=when)
    began = world.clock
    while not world.told(StateChanged) or world.told(StateChanged)[-1].state != "finished":  # type: ignore[attr-defined]
        if not world.turn():
            world.pass_time(1.0)
    found = (endpoint, when) == ("experiment.post", "after")
    assert (world.clock - began < world.settle_s) != found
    world.run()

    assert_each_point_once(world)


@pytest.mark.parametrize("endpoint", ["scalar.export", "presign.file", "object.get"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("status", {"status": 403}), ("html", {}), ("cut", {}), ("truncated", {})],
    ids=lambda value: str(value),
)
def test_a_failed_reading_decides_nothing(world: World, endpoint: str, kind: str, options: dict[str, Any]) -> None:
    """A read-back that fails, or answers something else, is done again; it never passes for "nothing is there"."""
    write_run(world)
    world.server.arm("metrics", "reset", when="after", where=is_scalar)
    world.server.arm(endpoint, kind, when="before", **options)
    for _ in range(3):
        world.run()
        world.pass_time(400)

    assert_each_point_once(world)


def test_a_refused_connection_waits_for_nothing(world: World) -> None:
    """With no connection nothing was stored: the batch goes out again without the settle time."""
    write_run(world)
    world.settle_s = 500.0
    with world.server.refused():
        for _ in range(20):
            world.turn()
            world.clock += 1.0
        assert world.told(SinkFailed)
    began = world.clock
    while not raw_points(world.experiment) if world.server.experiments else True:
        world.turn()
        world.pass_time(1.0)

    assert world.clock - began < 70
    world.run()
    assert_each_point_once(world)


def test_429_is_obeyed_to_the_second(world: World) -> None:
    """A 429 costs its Retry-After and no settle time; nothing was stored."""
    write_run(world)
    world.server.arm("metrics", "status", status=429, retry_after="7", where=is_scalar)
    world.run()
    waits = [event.retry_in_s for event in world.told(SinkFailed) if "429" in event.reason]  # type: ignore[attr-defined]

    assert waits == [7.0]
    assert_each_point_once(world)


def test_an_expired_session_is_replaced(world: World) -> None:
    """A 401 in the middle is answered by one new login; nothing waits, nothing is lost."""
    write_run(world)
    world.server.arm("metrics", "status", status=401, where=is_scalar)
    world.run()

    assert world.server.count("login") == 2
    assert not [event for event in world.told(SinkFailed) if "401" in event.reason]  # type: ignore[attr-defined]
    assert_each_point_once(world)


def test_403_parks_the_run_and_keeps_the_data(world: World) -> None:
    """A run that may not be written is parked with a way out, and goes on when somebody mended it."""
    write_run(world)
    fault = world.server.arm("metrics", "status", status=403, count=None)
    world.run()
    (parked,) = {event.reason for event in world.told(RunParked)}  # type: ignore[attr-defined]

    assert "403" in parked
    assert "start the uploader again" in parked
    assert raw_points(world.experiment) == []

    world.server.faults.clear()
    assert fault.num_hits >= 1
    world.pass_time(400)
    world.run()
    assert_each_point_once(world)


def test_a_wrong_key_is_told_from_a_dead_network(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong key parks the whole sink at the first answer; a dead network is tried again and says no word of keys."""
    write_run(world)
    with world.server.refused():
        for _ in range(4):
            world.turn()
    (dead,) = {event.reason for event in world.told(SinkFailed)}  # type: ignore[attr-defined]
    world.kill()
    monkeypatch.setenv("SWANLAB_API_KEY", "wrong-key-1234567890")
    world.run()
    (wrong,) = {event.reason for event in world.told(RunParked)}  # type: ignore[attr-defined]

    assert "no connection" in dead
    assert "API key" not in dead
    assert "does not take the API key" in wrong
    assert "swanlab login" in wrong
    assert world.server.count("login") == 1


def test_413_is_answered_with_smaller_requests(world: World) -> None:
    """A request that is too large is halved until it passes, and later ones are no larger."""
    write_run(world)
    world.server.settings.max_rows = 30
    world.run()

    assert_each_point_once(world)
    sizes = [rows for kind, rows, _ in world.experiment.batch_sizes if kind == "scalar"]
    assert max(sizes) <= 30
    assert len(sizes) <= 2 * len(expected(ROWS)) / 30
    assert world.server.count("metrics") <= len(sizes) + 4


@pytest.mark.parametrize("when", ["before", "after", "half"])
def test_a_lost_answer_among_halves(world: World, when: str) -> None:
    """An answer lost in the middle of a divided request is settled like any other."""
    write_run(world)
    world.server.settings.max_rows = 30
    world.server.arm("metrics", "reset", when=when, skip=4)
    world.run()

    assert_each_point_once(world)


def test_429_among_halves(world: World) -> None:
    """A 429 behind a part that was stored leaves that part in doubt; it is read back, not sent again."""
    write_run(world)
    world.server.settings.max_rows = 30
    world.server.arm("metrics", "status", status=429, retry_after="1", skip=6)
    world.run()

    assert_each_point_once(world)


def test_a_refused_row_costs_that_row(world: World) -> None:
    """A row that the tracker answers 400 for is refused and counted by reason; all others arrive."""
    write_run(world)
    world.server.arm("metrics", "status", status=400, count=None, contains='"index":7,"data":0.125')
    world.run()
    lost = (7, "loss", repr(0.125))

    assert [point for point in expected(ROWS) if point != lost] == raw_points(world.experiment)
    assert world.progress()["refused"]["SwanLab refuses the row: HTTP 400 FAULT_400"] == 1
    assert [event.complete for event in world.told(RunChecked)] == [True]  # type: ignore[attr-defined]


def test_a_refused_key_costs_that_key(world: World) -> None:
    """When the tracker takes no more keys, the others keep their points and the end still goes through."""
    write_run(world)
    world.server.arm("series", "status", status=400, count=None, contains='"odd"')
    world.run()

    assert [point for point in expected(ROWS) if point[1] != "odd"] == raw_points(world.experiment)
    assert world.progress()["refused"]["SwanLab refuses the key: HTTP 400 FAULT_400"] == len(ROWS)
    assert world.experiment.state == "FINISHED"


def test_a_run_of_which_no_row_is_taken_is_parked(world: World) -> None:
    """When every row is refused it is not the rows: the run is parked and its data stays."""
    write_run(world)
    world.server.arm("metrics", "status", status=400, count=None)
    world.run()

    assert "takes no row" in world.told(RunParked)[0].reason  # type: ignore[attr-defined]
    world.server.faults.clear()
    world.pass_time(400)
    world.run()
    assert_each_point_once(world)


def test_rows_that_show_late_are_waited_for(world: World) -> None:
    """Reads that lag by less than the settle time double nothing."""
    write_run(world)
    world.server.settings.update({"read_lag_s": 50.0, "summary_lag_s": 50.0})
    world.server.arm("metrics", "reset", when="after", where=is_scalar)
    world.run()

    assert_each_point_once(world)


def test_two_readings_have_to_agree(world: World) -> None:
    """Rows that become readable between two readings are not sent again, although the settle time was too short."""
    write_run(world)
    world.server.settings.read_lag_s = 70.0
    world.server.arm("metrics", "reset", when="after", where=is_scalar)
    world.run()

    assert world.experiment.duplicates.total == 0
    assert expected(ROWS) == raw_points(world.experiment)


@pytest.mark.parametrize(
    ("endpoint", "kind", "status"),
    [("presign.put", "status", 500), ("object.put", "status", 403), ("object.put", "reset", 0)],
)
def test_media_files_are_put_again(world: World, endpoint: str, kind: str, status: int) -> None:
    """A file that did not get through is put again with a fresh link; its row follows once, with no settle time."""
    writer = world.writer()
    writer.begin()
    for step in range(3):
        writer.add("text", {"key": "note", "text": f"text {step}"}, step)
    world.server.arm(endpoint, kind, status=status, when="after", count=2)
    began = world.clock
    while not world.server.experiments or not world.experiment.raw:
        if not world.turn():
            world.pass_time(1.0)

    assert [row.step for row in world.experiment.raw] == [0, 1, 2]
    assert [world.experiment.media("note")[step][0][1] for step in range(3)] == [b"text 0", b"text 1", b"text 2"]
    assert world.clock - began < world.settle_s


def test_a_body_that_drips_holds_nobody(world: World) -> None:
    """An answer that comes a byte at a time is given up and settled."""
    write_run(world)
    world.timeout_s = 0.5
    world.server.arm("metrics", "drip", when="after", seconds=0.01, where=is_scalar)
    began = world.clock
    world.run()

    assert_each_point_once(world)
    assert world.clock - began >= world.settle_s
