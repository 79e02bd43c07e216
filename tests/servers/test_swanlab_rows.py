"""Which rows the SwanLab test server keeps, which it refuses, and when it shows them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RawClient, row
from tests.servers.swanlab.clock import iso

# Rows.


def test_repeats_are_appended_and_counted_by_what_they_say(server: SwanLabServer, raw: RawClient) -> None:
    """The same row again is identical, another value or time for its (key, step) conflicts; the first stands."""
    raw.post_rows([row("a", 0, 1.0), row("a", 1, 2.0), row("b", 0, 3.0)])
    raw.post_rows([row("a", 0, 1.0)])
    raw.post_rows([row("a", 1, 9.0), row("b", 0, 3.0, t=1_700_000_001.0)])
    run = server.experiments["run"]

    assert len(run.raw) == 6
    assert (run.duplicates.identical, run.duplicates.conflicting, run.duplicates.keys) == (1, 2, ("a", "b"))
    assert run.points() == {"a": {0: 1.0, 1: 2.0}, "b": {0: 3.0}}
    assert [each.batch for each in run.raw] == [1, 1, 1, 2, 3, 3]
    assert raw.read("a") == {"a": [[0, 1.0], [0, 1.0], [1, 2.0], [1, 9.0]]}


def test_a_body_whose_rows_come_first_is_stored_like_any(server: SwanLabServer, raw: RawClient) -> None:
    """The order of the envelope's fields means nothing."""
    body = dict(reversed(raw.batch([row("a", 0, 1.0)]).items()))

    assert raw.call("POST", "/house/metrics", body)[0] == 200
    assert server.experiments["run"].points() == {"a": {0: 1.0}}


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("scalar", {"data": "inf"}),
        ("scalar", {"data": None}),
        ("scalar", {"data": True}),
        ("scalar", {"data": float("nan")}),
        ("scalar", {"data": float("inf")}),
        ("scalar", {"data": 10**400}),
        ("scalar", {"index": -1}),
        ("scalar", {"index": 1.0}),
        ("scalar", {"index": 2**48 + 1}),
        ("scalar", {"key": ""}),
        ("scalar", {"key": "k" * 513}),
        ("scalar", {"key": "a\nb"}),
        ("scalar", {"create_time": "yesterday"}),
        ("media", {"data": []}),
        ("media", {"data": "media/text/a.txt"}),
        ("log", {}),
        ("picture", {}),
    ],
)
def test_a_row_that_the_library_would_not_send_is_refused(
    server: SwanLabServer, raw: RawClient, kind: str, change: dict[str, Any]
) -> None:
    """400 for the whole request, and nothing of it is stored."""
    status, answer = raw.post_rows([row("a", 0, 1.0 if kind == "scalar" else ["p"]) | change], kind)

    assert (status, answer["code"]) == (400, "Validation_Error")
    assert server.experiments["run"].raw == []


def test_what_is_no_metrics_request_is_refused(server: SwanLabServer, raw: RawClient) -> None:
    """Broken JSON, a list, no rows, no ids; 404 for an experiment of another project or none at all."""
    good = raw.batch([row("a", 0, 1.0)])
    for body in (b"{", b"[]", b'{"type": "scalar"}', json.dumps(good).encode()[:-1]):
        assert raw.call("POST", "/house/metrics", body)[0] == 400
    assert raw.call("POST", "/house/metrics", good | {"metrics": []})[0] == 400
    assert raw.call("POST", "/house/metrics", good | {"projectId": "other"})[0] == 404
    assert raw.call("POST", "/house/metrics", good | {"experimentId": "other"})[0] == 404

    assert server.experiments["run"].raw == []


def test_limits_are_answered_413_when_they_are_set(server: SwanLabServer, raw: RawClient) -> None:
    """By rows or by bytes; nothing is stored."""
    rows = [row("a", step, 1.0) for step in range(3)]
    server.settings.max_rows = 2
    assert raw.post_rows(rows)[0] == 413
    server.settings.max_rows, server.settings.max_body_bytes = None, 100
    assert raw.post_rows(rows)[0] == 413
    server.settings.max_body_bytes = None
    assert raw.post_rows(rows)[0] == 200

    assert [size[:2] for size in server.experiments["run"].batch_sizes] == [("scalar", 3)]


def test_writers_at_the_same_time_lose_nothing(server: SwanLabServer, raw: RawClient) -> None:
    """Every request of every connection is stored, and their numbers are distinct."""

    def write(writer: int) -> None:
        with RawClient(server.url, server.api_key) as other:
            other.open_run()
            for step in range(25):
                assert other.post_rows([row(f"w{writer}", step, 1.0)])[0] == 200

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    run = server.experiments["run"]

    assert {key: len(points) for key, points in run.points().items()} == {f"w{writer}": 25 for writer in range(4)}
    assert sorted(each.batch for each in run.raw) == list(range(1, 101))


# Reads.


def test_reads_and_marks_lag_as_they_are_set(server: SwanLabServer, raw: RawClient) -> None:
    """A row is missing from reads and exports until `read_lag_s` is over, from the marks until `summary_lag_s` is."""
    server.settings.read_lag_s, server.settings.summary_lag_s = 60, 600
    raw.post_rows([row("a", 7, 1.0)])
    marks = f"/house/metrics/summaries/{raw.project['cuid']}/{raw.run['cuid']}?all=True&createdAt=1"

    assert (raw.read("a"), export(raw, "a")) == ({"a": []}, [])
    server.advance(61)
    assert raw.read("a") == {"a": [[7, 1.0]]}
    assert [line.split(",")[:2] for line in export(raw, "a")] == [["7", "1.0"]]
    assert raw.call("GET", marks)[1]["scalar"] == []
    server.advance(600)
    assert raw.call("GET", marks)[1] == {"scalar": [{"key": "a", "step": 7}], "media": [], "log": []}


def export(raw: RawClient, *keys: str) -> list[str]:
    """The lines of an export, without its head."""
    refs = [{"experimentName": "n", "experimentId": raw.run["cuid"], "key": key, "createdAt": 1} for key in keys]
    _, answer = raw.call("POST", "/house/metrics/scalar/export", {"projectId": raw.project["cuid"], "columns": refs})
    _, links = raw.call("POST", "/files/presigned/get", {"paths": [answer["cosKey"]]})
    text = raw.send("GET", links["urls"][0].removeprefix(f"http://{raw.netloc}")).read().decode()
    return text.splitlines()[1:]


def test_an_export_has_a_line_a_step_and_hides_repeats(raw: RawClient) -> None:
    """Value and time in milliseconds of each key, empty where a step lacks one, the last row of a repeat."""
    raw.post_rows([row("a", 1, 1.5, t=1_700_000_000.25), row("b", 0, "nan"), row("a", 1, 2.5, t=1_700_000_001.0)])

    assert export(raw, "a", "b") == ["0,,,nan,1700000000000", "1,2.5,1700000001000,,"]


def test_more_than_sixteen_columns_are_not_exported(raw: RawClient) -> None:
    """The limit that the library keeps to."""
    refs = [{"experimentName": "n", "experimentId": raw.run["cuid"], "key": str(n), "createdAt": 1} for n in range(17)]

    assert (
        raw.call("POST", "/house/metrics/scalar/export", {"projectId": raw.project["cuid"], "columns": refs})[0] == 400
    )


def test_rows_outside_the_ingestion_window_are_hidden_until_the_run_goes_on(
    server: SwanLabServer, raw: RawClient
) -> None:
    """What came in after the stop that was reported, or before the query's lower bound, is there and not shown."""
    raw.post_rows([row("a", 0, 1.0)])
    raw.call("PUT", raw.run_path + "/state", {"state": "FINISHED", "finishedAt": iso(time.time())})
    server.advance(10)
    raw.post_rows([row("a", 1, 2.0)])

    assert raw.read("a") == {"a": [[0, 1.0]]}
    assert raw.open_run() == 200
    assert raw.read("a") == {"a": [[0, 1.0], [1, 2.0]]}
    assert raw.read("a", created_at=int(time.time()) + 5) == {"a": [[1, 2.0]]}


def test_keys_come_in_pages(server: SwanLabServer, raw: RawClient) -> None:
    """The cursor of one page begins the next."""
    raw.post_rows([row(key, 0, 1.0) for key in "cab"])
    refs = [{"projectId": raw.project["cuid"], "experimentId": raw.run["cuid"], "createdAt": 1}]
    path = "/house/metrics/scalar/keys"
    _, first = raw.call("POST", path, {"experiments": refs, "limit": 2, "cursor": ""})
    _, second = raw.call("POST", path, {"experiments": refs, "limit": 2, "cursor": first["nextCursor"]})

    assert first == {"keys": ["a", "b"], "hasMore": True, "nextCursor": "b"}
    assert second == {"keys": ["c"], "hasMore": False, "nextCursor": ""}
