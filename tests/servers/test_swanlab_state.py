"""What the SwanLab test server keeps, what it refuses, and when it shows what it keeps."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RawClient, row
from tests.servers.swanlab.clock import iso
from tests.servers.swanlab_server import SwanLabServerProcess


@pytest.fixture
def server() -> Iterator[SwanLabServer]:
    with SwanLabServer() as server:
        yield server


@pytest.fixture
def raw(server: SwanLabServer) -> Iterator[RawClient]:
    with RawClient(server.url, server.api_key) as raw:
        raw.open_run()
        yield raw


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


# Sessions, runs, columns, documents.


def test_a_session_is_needed_and_runs_out(server: SwanLabServer, raw: RawClient) -> None:
    """401 without a cookie, with an unknown one, and with one that expired; a new login helps."""
    server.settings.session_s = 3600
    raw.login()
    good = raw.sid
    for sid in ("", "unknown"):
        raw.sid = sid
        assert raw.call("GET", "/project/tester/proj")[0] == 401
    raw.sid = good
    assert raw.call("GET", "/project/tester/proj")[0] == 200
    server.advance(3601)
    assert raw.call("GET", "/project/tester/proj")[0] == 401
    raw.login()
    assert raw.call("GET", "/project/tester/proj")[0] == 200
    server.expire_sessions()
    assert raw.call("GET", "/project/tester/proj")[0] == 401


def test_another_users_space_is_forbidden(server: SwanLabServer, raw: RawClient) -> None:
    """403 for projects and for experiments, by path and by id."""
    server.state.add_user("other", "other-key")
    with RawClient(server.url, "other-key") as other:
        other.login()
        assert other.call("POST", "/projects/tester", {"name": "x"})[0] == 403
        assert other.call("GET", "/project/tester/proj")[0] == 403
        assert other.call("POST", "/house/metrics", raw.batch([row("a", 0, 1.0)]))[0] == 403

    assert server.experiments["run"].raw == []


def test_a_repeated_experiment_post_takes_the_run_up_again(server: SwanLabServer, raw: RawClient) -> None:
    """201 the first time, 200 then; RUNNING again; what was told first stands unless the server is set otherwise."""
    raw.call("PUT", raw.run_path + "/state", {"state": "ABORTED", "finishedAt": "2026-01-01T00:00:00Z"})
    cuid = raw.run["cuid"]
    assert server.experiments["run"].state == "ABORTED"

    assert raw.open_run(name="renamed") == 200
    assert (raw.run["cuid"], raw.run["name"], raw.run["state"]) == (cuid, "run", "RUNNING")
    server.settings.resume_renames = True
    raw.open_run(name="renamed")
    assert server.experiments["run"].name == "renamed"
    assert raw.open_run("another") == 201


def test_a_run_that_falls_silent_is_closed_and_a_heartbeat_keeps_it(server: SwanLabServer, raw: RawClient) -> None:
    """Rows and heartbeats are signs of life; without any for `silence_s` the run counts as crashed."""
    server.settings.silence_s = 1800
    for _ in range(3):
        server.advance(1700)
        raw.call("POST", f"/house/experiments/{raw.run['cuid']}/heartbeat", {"flagId": "1"})
    assert (server.experiments["run"].state, len(server.experiments["run"].heartbeats)) == ("RUNNING", 3)

    server.advance(1801)
    assert server.experiments["run"].state == "CRASHED"
    assert server.experiments["run"].closed_by_silence


def test_the_first_definition_of_a_column_stands(server: SwanLabServer, raw: RawClient) -> None:
    """Columns are the project's; later ones are kept aside, unknown types refused."""
    path = "/projects/tester/proj/series"
    raw.call("POST", path, {"series": [{"key": "a", "type": "FLOAT", "xAxis": "epoch"}]})
    raw.call("POST", path, {"series": [{"key": "a", "type": "TEXT"}]})
    raw.post_rows([row("a", 0, ["p"])], "media")

    assert raw.call("POST", path, {"series": [{"key": "b", "type": "NUMBER"}]})[0] == 400
    assert server.projects["proj"].columns == {"a": {"key": "a", "type": "FLOAT", "xAxis": "epoch"}}
    assert server.projects["proj"].ignored_columns == [{"key": "a", "type": "TEXT"}]
    assert server.experiments["run"].type_conflicts() == {"a"}


def test_a_profile_document_is_overwritten_whole(server: SwanLabServer, raw: RawClient) -> None:
    """A second config erases the first; the other documents stay; every PUT is kept to look at."""
    first, second = ({name: {"value": 1, "sort": 0, "desc": ""}} for name in "ab")
    for document in ({"config": first}, {"requirements": "torch==2"}, {"config": second}):
        raw.call("PUT", raw.run_path + "/profile", document)
    run = server.experiments["run"]

    assert run.config == {"b": 1}
    assert run.profile["requirements"] == "torch==2"
    assert run.profile_puts == [("config", first), ("requirements", "torch==2"), ("config", second)]
    assert raw.call("PUT", raw.run_path + "/profile", {"summary": {}})[0] == 400


def test_a_deleted_run_takes_no_rows_and_its_id_is_free_or_burned(server: SwanLabServer, raw: RawClient) -> None:
    """404 `Disabled_Resource` for what is sent to it; whether its id may be used again is a setting."""
    raw.call("DELETE", raw.run_path)
    status, answer = raw.post_rows([row("a", 0, 1.0)])

    assert (status, answer["code"]) == (404, "Disabled_Resource")
    server.settings.burn_deleted_ids = True
    assert raw.open_run() == 404
    server.settings.burn_deleted_ids = False
    assert raw.open_run() == 201


# Objects and files.


def test_objects_are_put_and_got_by_signed_links_only(server: SwanLabServer, raw: RawClient) -> None:
    """What was put is got; a link that was tampered with is refused 403."""
    _, links = raw.call(
        "POST", "/resources/presigned/put", {"experimentId": raw.run["cuid"], "paths": ["media/a b.txt"]}
    )
    path = links["urls"][0].removeprefix(server.url)
    assert raw.send("PUT", path, b"bytes").read() == b""
    prefix = f"{raw.project['cuid']}/{raw.run['cuid']}"
    _, links = raw.call("POST", "/resources/presigned/get", {"prefix": prefix, "paths": ["media/a b.txt"]})

    assert raw.send("GET", links["urls"][0].removeprefix(server.url)).read() == b"bytes"
    forged = raw.send("PUT", path.replace("a%20b", "c"), b"bytes")
    forged.read()
    assert forged.status == 403
    assert server.experiments["run"].objects == {"media/a b.txt": b"bytes"}


def test_a_file_in_parts_is_joined_and_compared_with_its_digest(server: SwanLabServer, raw: RawClient) -> None:
    """Parts may come in any order; a missing one is refused, as is content that was not announced."""
    content = b"first second"
    entry = {"path": "m.bin", "size": 12, "md5": hashlib.md5(content).hexdigest(), "mimeType": "x/y", "count": 2}  # noqa: S324
    base = f"/experiment/{raw.run['cuid']}/files"
    _, answer = raw.call("POST", f"{base}/prepare-multipart", {"files": [entry]})
    upload = answer["files"][0]
    parts = [{"partNumber": number, "etag": "x"} for number in (1, 2)]
    done = {"files": [{"path": "m.bin", "parts": parts, "uploadId": upload["uploadId"]}]}
    for part, piece in zip(reversed(upload["parts"]), (b"second", b"first "), strict=True):
        assert raw.call("POST", f"{base}/complete-multipart", done)[0] == 400
        raw.send("PUT", part["url"].removeprefix(server.url), piece).read()

    assert raw.call("POST", f"{base}/complete-multipart", done)[0] == 201
    assert server.experiments["run"].objects["files/m.bin"] == content
    assert server.experiments["run"].files["m.bin"].state == "UPLOADED"
    assert raw.call("POST", f"{base}/complete", {"files": [{"path": "none", "state": "UPLOADED"}]})[0] == 404


# The server itself.


def test_a_connection_is_kept_and_unknown_paths_are_404(server: SwanLabServer, raw: RawClient) -> None:
    """Requests of any outcome go over one connection."""
    port = raw.connection.sock.getsockname()
    for path in ("/nothing", "/project/tester/none", "/house/metrics/log"):
        raw.call("GET", path)

    assert [call.status for call in server.calls[-3:]] == [404, 404, 400]
    assert raw.connection.sock.getsockname() == port


def test_a_server_process_is_looked_at_and_turned_from_outside() -> None:
    """State, rows, faults, settings and clock over `/_debug`; at the end it tells its CPU time."""
    with SwanLabServerProcess("--trust-rows", "--set", "read_lag_s=60") as server:
        with RawClient(server.url, "loopback-key-000000000") as raw:
            raw.open_run()
            server.arm("metrics", "status", status=502, when="half", contains="loss")
            assert raw.post_rows([row("loss", 0, 1.0), row("loss", 1, "nan")])[0] == 502
            raw.post_rows([row("loss", 0, 1.0)])
            assert raw.read("loss") == {"loss": []}
            server.debug("advance", {"seconds": 61})
            assert raw.read("loss") == {"loss": [[0, 1.0], [0, 1.0]]}
            server.debug("settings", {"max_rows": 1})
            assert raw.post_rows([row("a", 0, 1.0), row("a", 1, 1.0)])[0] == 413
        state = server.state(points=True)
        rows = server.debug("raw?run=run")
        faults = [call[3] for call in server.debug("calls") if call[0] == "metrics"]
        report = server.stop()

    assert state["experiments"]["run"]["rows"]["scalar"] == {
        "raw": 2,
        "distinct": 1,
        "identical": 1,
        "conflicting": 0,
    }
    assert state["experiments"]["run"]["points"] == {"loss": [[0, 1.0, iso(1_700_000_000.0)]]}
    assert [each[:4] for each in rows] == [["scalar", "loss", 0, 1.0]] * 2
    assert faults == ["half status", None, None]
    assert 0 < state["cpu_s"] <= report["cpu_s"]
