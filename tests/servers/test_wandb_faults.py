"""Each fault of the loopback W&B server, as a raw HTTP client meets it, and what it leaves stored."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.wandb_server import Fault, WandbServer
from tests.servers.wandb_server.backend import DEFAULT_KEY

requests = pytest.importorskip("requests")


class Stream:
    """A client that posts one row at a time to run r of acme/p."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/files/acme/p/r/file_stream"
        self.session = requests.Session()
        self.session.auth = ("api", DEFAULT_KEY)
        given = '{name: "r", modelName: "p", entityName: "acme"}'
        query = f"mutation UpsertBucket {{ upsertBucket(input: {given}) {{ inserted }} }}"
        self.session.post(url + "/graphql", json={"query": query}).raise_for_status()

    def send(self, *xs: int, offset: int = 0, **how: Any) -> Any:
        content = [json.dumps({"_step": x}) for x in xs]
        post = {"files": {"wandb-history.jsonl": {"offset": offset, "content": content}}}
        return self.session.post(self.url, json=post, **how)


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with WandbServer() as running:
        yield running


@pytest.fixture
def stream(server: WandbServer) -> Iterator[Stream]:
    made = Stream(server.url)
    yield made
    made.session.close()


def stored(server: WandbServer) -> list[int]:
    return [row["_step"] for row in server.run("p", "r").rows]


@pytest.mark.parametrize("status", [401, 403, 404, 409, 413, 429, 500, 502, 503])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_status_comes_before_or_after_the_effect(server: WandbServer, stream: Stream, status: int, when: str) -> None:
    """The answer is the same, the row is stored or not, and the next request is served."""
    server.arm("file_stream", "status", status=status, when=when)
    answers = [stream.send(7).status_code]
    kept = stored(server)
    answers.append(stream.send(8, offset=1).status_code)

    assert answers == [status, 200]
    assert kept == ([7] if when == "after" else [])
    assert [(r.status, r.fault) for r in server.requests[1:]] == [(status, "status"), (200, None)]


def test_a_status_carries_headers_and_a_body(server: WandbServer, stream: Stream) -> None:
    """Such as Retry-After, absurd values included."""
    server.arm("file_stream", "status", status=429, headers={"Retry-After": "100000"}, body="slow down")
    answer = stream.send(1)

    assert (answer.status_code, answer.headers["Retry-After"], answer.text) == (429, "100000", "slow down")


@pytest.mark.parametrize(("when", "left"), [("before", []), ("after", [1])])
def test_a_reset_comes_before_or_after_the_effect(
    server: WandbServer, stream: Stream, when: str, left: list[int]
) -> None:
    """The client sees its connection reset and cannot tell which it was."""
    server.arm("file_stream", "reset", when=when)
    with pytest.raises(requests.ConnectionError):
        stream.send(1)

    assert stored(server) == left


@pytest.mark.parametrize(("when", "left"), [("before", []), ("after", [1])])
def test_a_hang_never_answers(server: WandbServer, stream: Stream, when: str, left: list[int]) -> None:
    """The client's own timeout ends it; released, the connection closes without a word and without a late effect."""
    fault = server.arm("file_stream", "hang", when=when)
    with pytest.raises(requests.Timeout):
        stream.send(1, timeout=0.2)
    fault.release()
    assert fault.played.wait(30)

    assert stream.send(9, offset=1).status_code == 200
    assert stored(server) == [*left, 9]


def test_a_hang_ends_by_itself_after_its_seconds(server: WandbServer, stream: Stream) -> None:
    """Then the connection closes, as a proxy does that gave up."""
    server.arm("file_stream", "hang", seconds=0.05)
    with pytest.raises(requests.ConnectionError):
        stream.send(1, timeout=30)

    assert stored(server) == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_delay_answers_truly_once_released(server: WandbServer, stream: Stream, when: str) -> None:
    """The client waits, and then has its answer."""
    fault = server.arm("file_stream", "delay", when=when)
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(stream.send(1).status_code))
    thread.start()
    assert fault.hit.wait(30)
    waiting = list(answers)
    fault.release()
    thread.join(30)

    assert (waiting, answers, stored(server)) == ([], [200], [1])


def test_a_request_that_was_given_up_may_still_take_effect(server: WandbServer, stream: Stream) -> None:
    """A delay before the effect: the client gave up and sent other rows, and the old request comes to life after."""
    fault = server.arm("file_stream", "delay")
    with pytest.raises(requests.Timeout):
        stream.send(1, timeout=0.2)
    assert fault.hit.wait(30)
    stream.send(2)
    before = stored(server)
    fault.release()
    assert fault.played.wait(30)

    assert (before, stored(server)) == ([2], [1])
    assert len(server.run("p", "r").conflicts) == 1


def test_a_drip_is_the_true_answer_byte_by_byte(server: WandbServer, stream: Stream) -> None:
    """No pause between bytes is long, but the whole takes its seconds, until it is released."""
    fault = server.arm("file_stream", "drip", seconds=3600)
    answer = stream.send(1, stream=True, timeout=30)
    first = next(answer.iter_content(1))
    fault.release()
    rest = b"".join(answer.iter_content(1024))

    assert json.loads(first + rest)["exitcode"] is None
    assert stored(server) == [1]


@pytest.mark.parametrize(("when", "left"), [("before", []), ("after", [1])])
def test_a_captive_portal_answers_200_with_a_page(
    server: WandbServer, stream: Stream, when: str, left: list[int]
) -> None:
    """It looks like success and is not JSON."""
    server.arm("file_stream", "html", when=when)
    answer = stream.send(1)

    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer.text.startswith("<!doctype html>")
    assert stored(server) == left


def test_truncated_json_is_a_whole_response_with_half_a_body(server: WandbServer, stream: Stream) -> None:
    """HTTP is satisfied, the parser is not; the request took effect."""
    server.arm("file_stream", "truncated")
    answer = stream.send(1)

    assert answer.status_code == 200
    with pytest.raises(requests.JSONDecodeError):
        answer.json()
    assert stored(server) == [1]


def test_a_cut_response_ends_before_its_length(server: WandbServer, stream: Stream) -> None:
    """The connection closes within the body; the request took effect."""
    server.arm("file_stream", "cut")
    with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
        stream.send(1)

    assert stored(server) == [1]


def test_half_a_batch_is_stored(server: WandbServer, stream: Stream) -> None:
    """The first lines stay and the answer is an error; the same batch again completes it."""
    server.arm("file_stream", "half", lines=2, status=500)
    answer = stream.send(1, 2, 3)
    kept = stored(server)
    stream.send(1, 2, 3)

    assert (answer.status_code, kept, stored(server)) == (500, [1, 2], [1, 2, 3])
    assert server.run("p", "r").conflicts == []


def test_a_fault_hits_the_requests_that_it_is_armed_for(server: WandbServer, stream: Stream) -> None:
    """It lets `skip` pass, hits `count`, looks at run, size and predicate, and is then over."""
    fault = server.arm(
        "file_stream", "status", skip=1, count=2, run="r", min_bytes=10, predicate=lambda r: r.method == "POST"
    )
    others = [
        server.arm("file_stream", "status", status=503, run="other"),
        server.arm("file_stream", "status", status=503, min_bytes=1 << 20),
        server.arm("UpsertBucket", "status", status=503),
        server.arm("file_stream", "status", status=503, predicate=lambda r: r.method == "PUT"),
    ]
    answers = [stream.send(1).status_code for _ in range(5)]

    assert answers == [200, 500, 500, 200, 200]
    assert (fault.hits, [other.hits for other in others]) == (2, [0, 0, 0, 0])


@pytest.mark.parametrize("endpoint", ["graphql", "UpsertBucket", "Upsert*", "*"])
def test_an_endpoint_is_named_by_kind_operation_or_pattern(server: WandbServer, endpoint: str) -> None:
    """GraphQL answers to its own name and to each operation's."""
    server.arm(endpoint, "status", status=503)
    with pytest.raises(requests.HTTPError):
        Stream(server.url)

    assert server.runs == {}


def test_uploads_are_an_endpoint_of_their_own(server: WandbServer, stream: Stream) -> None:
    """`storage` is where media and artifact bytes go."""
    server.arm("storage", "status", status=403)
    url = f"{server.url}/storage/runs/acme/p/r/a.txt"
    answers = [requests.put(url, data=b"x").status_code for _ in range(2)]

    assert answers == [403, 200]
    assert server.run("p", "r").files == {"a.txt": b"x"}


def test_a_fault_without_a_count_lasts_until_it_is_disarmed(server: WandbServer, stream: Stream) -> None:
    """None stands for always."""
    server.arm("file_stream", "status", count=None, status=502)
    answers = [stream.send(1).status_code for _ in range(4)]
    server.faults.disarm()

    assert answers == [502] * 4
    assert stream.send(1).status_code == 200


def test_closing_the_server_ends_what_hangs() -> None:
    """A test that leaves a hang behind waits for nobody."""
    server = WandbServer()
    server.up()
    stream = Stream(server.url)
    fault = server.arm("file_stream", "hang")
    failed = threading.Event()

    def send() -> None:
        with pytest.raises(requests.ConnectionError):
            stream.send(1, timeout=60)
        failed.set()

    thread = threading.Thread(target=send)
    thread.start()
    assert fault.hit.wait(30)
    server.close()
    thread.join(30)
    stream.session.close()

    assert failed.is_set()


@pytest.mark.parametrize(
    ("endpoint", "how"),
    [
        ("file_stream", {"kind": "explode"}),
        ("file_stream", {"kind": "half", "when": "after"}),
        ("graphql", {"kind": "half"}),
    ],
)
def test_a_fault_that_cannot_be_played_is_refused(endpoint: str, how: dict[str, Any]) -> None:
    """When it is armed, not when it is due."""
    with pytest.raises(ValueError, match=r"kind|half"):
        Fault(endpoint, **how)
