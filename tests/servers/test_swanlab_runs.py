"""Sessions, runs, documents and objects of the SwanLab test server, and the server as a process."""

from __future__ import annotations

import hashlib

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RawClient, row
from tests.servers.swanlab.clock import iso
from tests.servers.swanlab_server import SwanLabServerProcess

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
