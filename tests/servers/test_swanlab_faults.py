"""Every fault that can be armed at the SwanLab test server, seen by a client that speaks plain HTTP."""

from __future__ import annotations

import http.client
import json

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RawClient, row

ROWS = [row("loss", step, step / 2) for step in range(6)]
STORED = {"before": 0, "half": 3, "after": 6}


def stored(server: SwanLabServer) -> int:
    return len(server.experiments["run"].raw)


def post(raw: RawClient) -> http.client.HTTPResponse:
    return raw.send("POST", "/api/house/metrics", raw.batch(ROWS))


@pytest.mark.parametrize("when", STORED)
@pytest.mark.parametrize("status", [202, 401, 403, 404, 409, 413, 429, 500, 502])
def test_a_status_is_answered_before_or_after_storing(
    server: SwanLabServer, raw: RawClient, status: int, when: str
) -> None:
    """The code that was armed comes back, over a connection that lives on, and as much is stored as was said."""
    server.arm("metrics", "status", status=status, when=when)

    assert post(raw).read()
    assert (server.calls[-1].status, server.calls[-1].fault) == (status, f"{when} status")
    assert stored(server) == STORED[when]
    assert raw.post_rows(ROWS) == (200, {"message": "ok"})


def test_a_status_can_say_when_to_come_back(server: SwanLabServer, raw: RawClient) -> None:
    """429 with Retry-After, in seconds or as a date, as it was armed."""
    server.arm("metrics", "status", status=429, retry_after="7")
    answer = post(raw)
    answer.read()

    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")


@pytest.mark.parametrize("when", STORED)
def test_a_reset_breaks_the_connection(server: SwanLabServer, raw: RawClient, when: str) -> None:
    """The client gets no answer and cannot tell how much was stored."""
    server.arm("metrics", "reset", when=when)
    with pytest.raises(ConnectionResetError):
        post(raw)

    assert stored(server) == STORED[when]


@pytest.mark.parametrize("when", STORED)
def test_a_hang_answers_nothing_until_it_is_released(server: SwanLabServer, raw: RawClient, when: str) -> None:
    """The request was read, no answer comes, and the connection closes when the test lets it go."""
    fault = server.arm("metrics", "hang", when=when)
    raw.connection.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        post(raw)
    raw.connection.sock.settimeout(30)
    fault.release()

    assert raw.connection.sock.recv(1) == b""
    assert stored(server) == STORED[when]


def test_a_hang_may_end_by_itself(server: SwanLabServer, raw: RawClient) -> None:
    """After `seconds` the connection is closed without an answer."""
    server.arm("metrics", "hang", seconds=0.0)

    with pytest.raises(http.client.RemoteDisconnected):
        post(raw)


@pytest.mark.parametrize("when", STORED)
def test_a_captive_portal_answers_200_with_a_page(server: SwanLabServer, raw: RawClient, when: str) -> None:
    """The status is a success and the body is no JSON."""
    server.arm("metrics", "html", when=when)
    answer = post(raw)

    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html")
    assert answer.read().startswith(b"<!DOCTYPE html>")
    assert stored(server) == STORED[when]


@pytest.mark.parametrize("when", STORED)
def test_truncated_json_comes_whole_by_its_length_and_does_not_parse(
    server: SwanLabServer, raw: RawClient, when: str
) -> None:
    """Nothing in the transport shows the damage, only the parser does."""
    server.arm("metrics", "truncated", when=when)
    answer = post(raw)

    assert answer.status == 200
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.read())
    assert stored(server) == STORED[when]


@pytest.mark.parametrize("when", STORED)
def test_a_cut_answer_is_shorter_than_it_promised(server: SwanLabServer, raw: RawClient, when: str) -> None:
    """The head says 200 and more bytes than come."""
    server.arm("metrics", "cut", when=when)
    answer = post(raw)

    assert answer.status == 200
    with pytest.raises(http.client.IncompleteRead):
        answer.read()
    assert stored(server) == STORED[when]


def test_a_slow_drip_sends_a_byte_at_a_time(server: SwanLabServer, raw: RawClient) -> None:
    """The first byte of the true answer comes, and the second not within the client's patience."""
    server.arm("metrics", "drip", when="after", seconds=600)
    raw.connection.request("POST", "/api/house/metrics", json.dumps(raw.batch(ROWS)), {"Cookie": f"sid={raw.sid}"})
    first = raw.connection.sock.recv(100)
    raw.connection.sock.settimeout(0.2)

    assert first == b"H"
    with pytest.raises(TimeoutError):
        raw.connection.sock.recv(100)
    assert stored(server) == 6


def test_a_drip_that_has_time_ends_in_the_true_answer(server: SwanLabServer, raw: RawClient) -> None:
    """Slow is not broken: the whole answer arrives."""
    server.arm("metrics", "drip", when="after", seconds=0.0)

    assert raw.post_rows(ROWS) == (200, {"message": "ok"})


def test_a_server_that_is_down_refuses_connections_and_keeps_its_state(server: SwanLabServer, raw: RawClient) -> None:
    """Open connections break, new ones are refused, and afterwards the same port knows what was there."""
    assert raw.post_rows(ROWS)[0] == 200
    with server.refused():
        with pytest.raises((ConnectionError, http.client.RemoteDisconnected)):
            post(raw)
        raw.connection.close()
        with pytest.raises(ConnectionRefusedError):
            raw.connection.connect()

    assert raw.post_rows(ROWS)[0] == 200
    assert stored(server) == 12


def test_a_fault_hits_as_often_as_it_was_armed_after_those_it_skips(server: SwanLabServer, raw: RawClient) -> None:
    """`skip` requests pass, `count` are hit, the rest pass again."""
    fault = server.arm("metrics", "status", status=500, count=2, skip=1)
    statuses = [raw.post_rows(ROWS)[0] for _ in range(5)]

    assert statuses == [200, 500, 500, 200, 200]
    assert fault.num_hits == 2


def test_a_fault_without_a_count_hits_until_it_is_cleared(server: SwanLabServer, raw: RawClient) -> None:
    """`count=None` lasts."""
    server.arm("metrics", "status", status=500, count=None)
    hit = [raw.post_rows(ROWS)[0] for _ in range(4)]
    server.faults.clear()

    assert hit == [500] * 4
    assert raw.post_rows(ROWS)[0] == 200


def test_a_fault_hits_only_what_its_predicates_say(server: SwanLabServer, raw: RawClient) -> None:
    """`contains` looks into the body, `where` at the whole request; both must hold."""
    server.arm("metrics", "status", contains='"acc"', where=lambda request: len(request.body) > 100, count=None)

    assert raw.post_rows([row("loss", 0, 1.0)])[0] == 200
    assert raw.post_rows([row("acc", 0, 1.0)])[0] == 500


@pytest.mark.parametrize(
    ("endpoint", "method", "path", "body"),
    [
        ("login", "POST", "/login/api_key", None),
        ("project.get", "GET", "/project/tester/proj", None),
        ("project.*", "POST", "/projects/tester", {"name": "other"}),
        ("experiment.post", "POST", "/project/tester/proj/experiment", {"name": "n", "createdAt": "2026-01-01"}),
        ("profile", "PUT", "{run}/profile", {"config": {}}),
        ("series", "POST", "/projects/tester/proj/series", {"series": [{"key": "a", "type": "FLOAT"}]}),
        ("heartbeat", "POST", "/house/experiments/{cuid}/heartbeat", {"flagId": "1"}),
        ("state", "PUT", "{run}/state", {"state": "FINISHED", "finishedAt": "2026-01-01T00:00:00Z"}),
        ("presign.put", "POST", "/resources/presigned/put", {"experimentId": "{cuid}", "paths": ["a"]}),
    ],
)
def test_every_endpoint_has_a_name_to_arm_faults_at(
    server: SwanLabServer, raw: RawClient, endpoint: str, method: str, path: str, body: object
) -> None:
    """The fault hits that call, and the same call afterwards goes through."""
    server.arm(endpoint, "status", status=503)
    places = {"{run}": raw.run_path, "{cuid}": raw.run["cuid"]}
    text = json.dumps([path, body])
    for place, name in places.items():
        text = text.replace(place, name)
    path, body = json.loads(text)

    assert raw.call(method, path, body, authorization=server.api_key)[0] == 503
    assert raw.call(method, path, body, authorization=server.api_key)[0] in (200, 201)


def test_a_fault_that_means_nothing_is_not_armed(server: SwanLabServer) -> None:
    """Unknown kinds and moments, and a drip of an answer that is not the true one, are refused at once."""
    for options in ({"kind": "fire"}, {"kind": "html", "when": "later"}, {"kind": "drip", "when": "before"}):
        with pytest.raises(ValueError, match=r"kind|when"):
            server.arm("metrics", **options)

    assert server.faults.armed == []
