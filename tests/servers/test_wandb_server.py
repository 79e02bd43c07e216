"""The loopback W&B server as a raw HTTP client sees it: offsets, states, lag, authentication, journal."""

from __future__ import annotations

import gzip
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.wandb_server import CRASHED_AFTER_S, DEFAULT_KEY, ServerProcess, Staleness, WandbServer
from tests.servers.wandb_server.artifacts import md5

requests = pytest.importorskip("requests")

UPSERT = """mutation UpsertBucket($id: String, $name: String, $project: String, $entity: String, $displayName: String,
    $notes: String, $tags: [String!], $config: JSONString, $summaryMetrics: JSONString) {
  upsertBucket(input: {id: $id, name: $name, modelName: $project, entityName: $entity, displayName: $displayName,
      notes: $notes, tags: $tags, config: $config, summaryMetrics: $summaryMetrics}) {
    bucket { id name displayName historyLineCount project { name entity { name } } } inserted } }"""
STATUS = """query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) { bucket(name: $name, missingOk: true) {
    historyLineCount eventsLineCount historyTail summaryMetrics } } }"""
LAST_STEP = """query RunHistoryKeys($project: String!, $entity: String!, $name: String!) {
  project(name: $project, entityName: $entity) { run(name: $name) { historyKeys state } } }"""
HISTORY = """query HistoryPage($project: String!, $entity: String!, $name: String!, $low: Int64!, $high: Int64!) {
  project(name: $project, entityName: $entity) { run(name: $name) {
    history(minStep: $low, maxStep: $high, samples: 1000) } } }"""


class Client:
    """The calls of the protocol, by hand, over one keep-alive connection."""

    def __init__(self, url: str, key: str = DEFAULT_KEY) -> None:
        self.url, self.session = url, requests.Session()
        self.session.auth = ("api", key)

    def graphql(self, query: str, **variables: Any) -> Any:
        return self.session.post(self.url + "/graphql", json={"query": query, "variables": variables})

    def ask(self, query: str, **variables: Any) -> Any:
        """Like `graphql` about run r of acme/p; the answer's data."""
        answer = self.graphql(query, project="p", entity="acme", name="r", **variables)
        assert answer.status_code == 200
        return answer.json()["data"]

    def upsert(self, run: str = "r", **fields: Any) -> Any:
        return self.graphql(UPSERT, project="p", entity="acme", name=run, **fields)

    def post(self, body: dict[str, Any], run: str = "r", **how: Any) -> Any:
        return self.session.post(f"{self.url}/files/acme/p/{run}/file_stream", json=body, **how)

    def rows(self, offset: int, *rows: dict[str, Any], summary: dict[str, Any] | None = None) -> Any:
        return self.post(batch(offset, *rows, summary=summary))


def batch(offset: int, *rows: dict[str, Any], summary: dict[str, Any] | None = None) -> dict[str, Any]:
    files: dict[str, Any] = {"wandb-history.jsonl": {"offset": offset, "content": [json.dumps(r) for r in rows]}}
    if summary is not None:
        files["wandb-summary.json"] = {"offset": 0, "content": [json.dumps(summary)]}
    return {"files": files}


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"_step": n, "x": n} for n in numbers]


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Iterator[WandbServer]:
    with WandbServer(clock=clock) as running:
        yield running


@pytest.fixture
def client(server: WandbServer) -> Iterator[Client]:
    made = Client(server.url)
    yield made
    made.session.close()


# --- upserts


def test_an_upsert_leaves_what_it_does_not_name(server: WandbServer, client: Client) -> None:
    """Fields that are null or absent keep their value; the second upsert of a run inserts nothing."""
    first = client.upsert(displayName="one", notes="n", tags=["a"], config='{"lr": {"value": 1}}')
    second = client.upsert(displayName="two", notes=None)
    run = server.run("p", "r")

    assert [answer.json()["data"]["upsertBucket"]["inserted"] for answer in (first, second)] == [True, False]
    assert (run.fields["displayName"], run.fields["notes"], run.fields["tags"]) == ("two", "n", ["a"])
    assert (run.config, run.num_upserts) == ({"lr": 1}, 2)


def test_an_id_of_a_deleted_run_is_burnt(server: WandbServer, client: Client) -> None:
    """Upserting it is a conflict, posting to it finds nothing, and queries do not show it."""
    storage_id = client.upsert().json()["data"]["upsertBucket"]["bucket"]["id"]
    delete = "mutation DeleteRun($id: ID!) { deleteRun(input: {id: $id}) { clientMutationId } }"
    client.graphql(delete, id=storage_id)

    assert client.upsert().status_code == 409
    assert client.rows(0, *steps(0)).status_code == 404
    assert client.ask(STATUS)["model"]["bucket"] is None
    assert server.run("p", "r").deleted


# --- lines


def test_a_line_lands_on_its_offset_and_a_repeated_batch_changes_nothing(server: WandbServer, client: Client) -> None:
    """The same request twice leaves the same lines, counted as rewrites."""
    client.upsert()
    client.rows(0, *steps(0, 1))
    client.rows(2, *steps(2, 3))
    client.rows(2, *steps(2, 3))
    run = server.run("p", "r")

    assert [row["x"] for row in run.rows] == [0, 1, 2, 3]
    assert (len(run.lines), run.rewrites, run.conflicts) == (4, 2, [])


def test_a_line_that_is_overwritten_with_other_content_is_told(server: WandbServer, client: Client) -> None:
    """An overlap replaces the lines; where they differ, line, old and new text are kept for the test to see."""
    client.upsert()
    client.rows(0, *steps(0, 1, 2))
    client.rows(1, {"_step": 1, "x": 1}, {"_step": 7, "x": 7})
    run = server.run("p", "r")

    assert run.rewrites == 1
    assert run.conflicts == [(2, json.dumps({"_step": 2, "x": 2}), json.dumps({"_step": 7, "x": 7}))]
    assert [row["x"] for row in run.rows] == [0, 1, 7]


def test_an_offset_beyond_the_end_leaves_a_hole(server: WandbServer, client: Client) -> None:
    """The lines between are missing until they are sent."""
    client.upsert()
    client.rows(3, *steps(3))
    run = server.run("p", "r")
    holes = run.holes
    client.rows(0, *steps(0, 1, 2))

    assert holes == [0, 1, 2]
    assert run.holes == []
    assert [row["x"] for row in run.rows] == [0, 1, 2, 3]


@pytest.mark.parametrize("replaces", [True, False])
def test_of_equal_steps_the_later_line_is_shown(replaces: bool) -> None:
    """Queries show one row a step, the later line's; a server that does not replace shows both, in line order."""
    with WandbServer() as server:
        server.backend.replaces_equal_steps = replaces
        client = Client(server.url)
        client.upsert()
        client.rows(0, {"_step": 5, "x": 1}, {"_step": 6, "x": 2}, {"_step": 5, "x": 3})
        shown = client.ask(HISTORY, low=0, high=100)["project"]["run"]["history"]
        client.session.close()
        run = server.run("p", "r")

    assert [json.loads(line)["x"] for line in shown] == ([3, 2] if replaces else [1, 3, 2])
    assert [json.loads(line or "")["x"] for line in run.lines] == [1, 2, 3]


def test_a_step_is_read_from_the_row_itself(server: WandbServer, client: Client) -> None:
    """A `_step` within a value, or in a text, is not the row's."""
    client.upsert()
    client.rows(0, {"a": {"_step": 9}, "_step": 1}, {"t": '"_step": 8, ', "_step": 2}, {"_step": 3.0})

    assert client.ask(LAST_STEP)["project"]["run"]["historyKeys"]["lastStep"] == 3
    assert [row["_step"] for row in server.run("p", "r").rows] == [1, 2, 3]


def test_a_compressed_body_is_read(server: WandbServer, client: Client) -> None:
    """`Content-Encoding: gzip` is undone; the request's size is what came over the wire."""
    client.upsert()
    body = gzip.compress(json.dumps(batch(0, *steps(*range(50)))).encode())
    url = f"{server.url}/files/acme/p/r/file_stream"
    client.session.post(url, data=body, headers={"Content-Encoding": "gzip"}).raise_for_status()

    assert len(server.run("p", "r").lines) == 50
    assert server.requests[-1].num_bytes == len(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"files": {"wandb-history.jsonl": {"offset": 0, "content": ["{}"',
        b'{"files": {"wandb-history.jsonl": {"offset": -1, "content": []}}}',
        b'{"files": {"wandb-history.jsonl": {"offset": 0, "content": "{}"}}}',
        b'{"files": {"wandb-history.jsonl": {"content": []}}}',
        b"[]",
    ],
)
def test_a_malformed_post_takes_no_effect(server: WandbServer, client: Client, body: bytes) -> None:
    """It is refused with 400 and nothing of it is stored."""
    client.upsert()
    before = server.run("p", "r").heartbeat_at
    answer = client.session.post(f"{server.url}/files/acme/p/r/file_stream", data=body)

    assert answer.status_code == 400
    assert (server.run("p", "r").lines, server.run("p", "r").heartbeat_at) == ([], before)


def test_events_console_lines_and_summary_are_kept_apart(server: WandbServer, client: Client) -> None:
    """Each file of a post has its own lines and counts; of the summary the last one counts."""
    client.upsert()
    client.post(
        {
            "files": {
                "wandb-events.jsonl": {"offset": 0, "content": ['{"system.cpu": 1}']},
                "output.log": {"offset": 0, "content": ["a", "b"]},
                "wandb-summary.json": {"offset": 0, "content": ['{"x": 1}']},
            }
        }
    )
    client.post({"files": {"wandb-summary.json": {"offset": 0, "content": ['{"x": 2}']}}})
    run = server.run("p", "r")

    assert (run.events, run.output, run.summary) == (['{"system.cpu": 1}'], ["a", "b"], {"x": 2})
    assert client.ask(STATUS)["model"]["bucket"]["eventsLineCount"] == 1


# --- states


def test_a_run_is_running_while_its_heartbeat_is_fresh(server: WandbServer, client: Client, clock: Clock) -> None:
    """Any post is a heartbeat, an empty one too; without one for five minutes the run reads as crashed."""

    def state() -> str:
        found: str = client.ask(LAST_STEP)["project"]["run"]["state"]
        return found

    client.upsert()
    seen = [state()]
    clock.now += CRASHED_AFTER_S + 1
    seen.append(state())
    client.post({})
    seen.append(state())

    assert seen == ["running", "crashed", "running"]


@pytest.mark.parametrize(("exit_code", "state"), [(0, "finished"), (1, "failed"), (255, "failed")])
def test_the_end_of_a_run_is_the_post_that_says_complete(
    server: WandbServer, client: Client, clock: Clock, exit_code: int, state: str
) -> None:
    """Its exit code decides the state, which does not age; a later post without `complete` is running again."""
    client.upsert()
    client.post({"complete": True, "exitcode": exit_code})
    run = server.run("p", "r")
    ended = (run.state(clock.now + 1e6), run.exit_code, run.complete)
    client.post({})

    assert ended == (state, exit_code, True)
    assert (run.state(clock.now), run.complete) == ("running", False)


def test_a_client_s_upsert_revives_an_ended_run_and_the_api_s_does_not(server: WandbServer, client: Client) -> None:
    """By name it is a client that starts; by id alone it is somebody who edits."""
    storage_id = client.upsert().json()["data"]["upsertBucket"]["bucket"]["id"]
    client.post({"complete": True, "exitcode": 0})
    run = server.run("p", "r")
    edit = """mutation UpsertBucket($id: String, $tags: [String!]) {
        upsertBucket(input: {id: $id, tags: $tags}) { bucket { id } } }"""
    client.graphql(edit, id=storage_id, tags=["z"])
    edited = run.state(server.clock())
    client.upsert()

    assert (edited, run.fields["tags"], run.state(server.clock())) == ("finished", ["z"], "running")


# --- lag


def test_counts_tails_summaries_and_history_lag_each_by_itself(
    server: WandbServer, client: Client, clock: Clock
) -> None:
    """Each answer is as old as its own setting says, in seconds or in requests; the others are fresh."""

    def answers() -> tuple[int, int, Any, int]:
        bucket = client.ask(STATUS)["model"]["bucket"]
        tail = json.loads(json.loads(bucket["historyTail"])[0])["_step"]
        keys = client.ask(LAST_STEP)["project"]["run"]["historyKeys"]
        return bucket["historyLineCount"], tail, json.loads(bucket["summaryMetrics"])["n"], keys["lastStep"]

    client.upsert()
    for n in range(4):
        clock.now += 10
        client.rows(n, *steps(n), summary={"n": n})
    seen = {"fresh": answers()}
    for kind in ("counts", "tails", "summaries", "history"):
        setattr(server.lag, kind, Staleness(seconds=15))
        seen[kind] = answers()
        setattr(server.lag, kind, Staleness(requests=3))
        seen[kind + " by requests"] = answers()
        setattr(server.lag, kind, Staleness())

    assert seen == {
        "fresh": (4, 3, 3, 3),
        "counts": (2, 3, 3, 3),
        "counts by requests": (1, 3, 3, 3),
        "tails": (4, 1, 3, 3),
        "tails by requests": (4, 0, 3, 3),
        "summaries": (4, 3, 1, 3),
        "summaries by requests": (4, 3, 0, 3),
        "history": (4, 3, 3, 1),
        "history by requests": (4, 3, 3, 0),
    }


def test_a_lag_ends_when_the_time_is_over(server: WandbServer, client: Client, clock: Clock) -> None:
    """The stale count is the true one as soon as the state is old enough."""
    client.upsert()
    clock.now += 100
    client.rows(0, *steps(0, 1))
    server.lag.counts = Staleness(seconds=5)
    counts = []
    for _ in range(2):
        counts.append(client.ask(STATUS)["model"]["bucket"]["historyLineCount"])
        clock.now += 5

    assert counts == [0, 2]


# --- authentication


def test_a_key_that_is_not_valid_gets_401_and_a_replaced_key_gets_in(server: WandbServer, client: Client) -> None:
    """The set of keys may change while the server runs; None lets in everybody."""
    other = Client(server.url, key="e" * 40)
    seen = [client.upsert().status_code, other.upsert().status_code]
    server.backend.valid_keys = {"e" * 40}
    seen += [client.rows(0, *steps(0)).status_code, other.rows(0, *steps(0)).status_code]
    server.backend.valid_keys = None
    seen.append(client.upsert().status_code)
    anonymous = requests.post(server.url + "/graphql", json={"query": "query V { viewer { id } }"})
    other.session.close()

    assert seen == [200, 401, 401, 200, 200]
    assert anonymous.status_code == 200


# --- files and artifacts


def test_a_file_is_put_where_the_server_said(server: WandbServer, client: Client) -> None:
    """`createRunFiles` names a URL for each file; what is put there is the run's file, also with odd names."""
    client.upsert()
    query = """mutation CreateRunFiles($files: [String!]!) { createRunFiles(input: {entityName: "acme",
        projectName: "p", runName: "r", files: $files}) { runID files { name uploadUrl } } }"""
    name = "media/table/a b_0_ff.table.json"
    (file,) = client.graphql(query, files=[name]).json()["data"]["createRunFiles"]["files"]
    requests.put(file["uploadUrl"], data=b"{}").raise_for_status()

    assert server.run("p", "r").files == {name: b"{}"}


def log_artifact(client: Client, data: bytes, digest: str) -> tuple[list[bool], str]:
    """The client's five calls; (whether each upload was asked for, the state that the first call answered)."""

    def call(name: str, query: str, **given: Any) -> Any:
        return client.graphql(query, **given).json()["data"][name]

    given = {
        "entityName": "acme",
        "projectName": "p",
        "runName": "r",
        "artifactTypeName": "run_table",
        "artifactCollectionName": "run-r-t",
        "digest": digest,
        "enableDigestDeduplication": True,
        "aliases": [{"artifactCollectionName": "run-r-t", "alias": "latest"}],
    }
    create = """mutation CreateArtifact($input: CreateArtifactInput!) {
        createArtifact(input: $input) { artifact { id state } } }"""
    artifact = call("createArtifact", create, input=given)["artifact"]
    if artifact["state"] == "COMMITTED":
        return [], "COMMITTED"
    manifest = json.dumps(
        {"version": 1, "contents": {"t.table.json": {"digest": md5(data), "size": len(data)}}}
    ).encode()
    make = """mutation M($id: ID!, $digest: String!) { createArtifactManifest(input: {artifactID: $id, digest: $digest,
        name: "wandb_manifest.json"}) { artifactManifest { id file { uploadUrl } } } }"""
    made = call("createArtifactManifest", make, id=artifact["id"], digest=md5(manifest))["artifactManifest"]
    files = """mutation F($input: I!) { createArtifactFiles(input: $input) { files { edges { node {
        uploadUrl } } } } }"""
    spec = {"artifactID": artifact["id"], "artifactManifestID": made["id"], "name": "t.table.json", "md5": md5(data)}
    edges = call("createArtifactFiles", files, input={"artifactFiles": [spec]})["files"]["edges"]
    asked = []
    for edge in edges:
        asked.append(edge["node"]["uploadUrl"] is not None)
        if asked[-1]:
            requests.put(edge["node"]["uploadUrl"], data=data).raise_for_status()
    requests.put(made["file"]["uploadUrl"], data=manifest).raise_for_status()
    commit = "mutation C($id: ID!) { commitArtifact(input: {artifactID: $id}) { artifact { id digest } } }"
    call("commitArtifact", commit, id=artifact["id"])
    return asked, artifact["state"]


def test_an_artifact_of_a_known_digest_is_not_a_new_version(server: WandbServer, client: Client) -> None:
    """The same digest answers the committed version; another one is the next, and takes over the alias."""
    client.upsert()
    first = log_artifact(client, b"one", "d1")
    again = log_artifact(client, b"one", "d1")
    second = log_artifact(client, b"two", "d2")
    kept = [(a["version"], a["aliases"], a["files"]) for a in server.run("p", "r").artifacts]

    assert (first, again, second) == (([True], "PENDING"), ([], "COMMITTED"), ([True], "PENDING"))
    assert kept == [(0, [], {"t.table.json": 3}), (1, ["latest"], {"t.table.json": 3})]


def test_bytes_that_the_server_has_are_not_asked_for_again(server: WandbServer, client: Client) -> None:
    """A file of known name and digest has no upload URL, in a new version too."""
    client.upsert()
    log_artifact(client, b"one", "d1")

    assert log_artifact(client, b"one", "d2") == ([False], "PENDING")


def test_a_rewind_can_be_switched_off(server: WandbServer, client: Client) -> None:
    """Then it is an error in a 200 answer, as GraphQL has it, and no line goes."""
    client.upsert()
    client.rows(0, *steps(0, 1, 2))
    server.backend.can_rewind = False
    rewind = """mutation RewindRun { rewindRun(input: {runName: "r", entityName: "acme", projectName: "p",
        metricName: "_step", metricValue: 0}) { rewoundRun { historyLineCount } } }"""
    refused = client.graphql(rewind)
    server.backend.can_rewind = True
    done = client.graphql(rewind).json()["data"]["rewindRun"]["rewoundRun"]

    assert (refused.status_code, refused.json()["data"], len(refused.json()["errors"])) == (200, None, 1)
    assert done == {"historyLineCount": 1}
    assert len(server.run("p", "r").rewound) == 2


def test_a_field_that_is_not_modelled_is_null_and_named(server: WandbServer, client: Client) -> None:
    """A client that asks for more than the server knows gets null, and the test that looks is told."""
    answer = client.graphql("query V { viewer { id shoeSize } }").json()

    assert answer["data"] == {"viewer": {"id": "VXNlcjox", "shoeSize": None}}
    assert server.backend.unanswered == {"User.shoeSize"}


# --- what a test sees, and processes


def test_every_request_is_in_the_log_of_its_run(server: WandbServer, client: Client) -> None:
    """By endpoint, with its status; requests of other runs are not among them."""
    client.upsert()
    client.upsert(run="other")
    client.rows(0, *steps(0))
    client.post({}, run="nobody")
    run = server.run("p", "r")

    assert dict(run.request_counts) == {"UpsertBucket": 1, "file_stream": 1}
    assert [(r.names[0], r.status) for r in run.requests] == [("UpsertBucket", 200), ("file_stream", 200)]
    assert [r.status for r in server.requests] == [200, 200, 200, 404]
    assert server.cpu_s > 0


def test_a_server_that_is_killed_comes_back_with_what_it_answered(tmp_path: Path) -> None:
    """With a state file, SIGKILL and a new process at the same port change nothing: lines, files, artifacts, ids."""
    with ServerProcess(tmp_path / "state") as server:
        client = Client(server.url)
        storage_id = client.upsert(config='{"a": {"value": 1}}').json()["data"]["upsertBucket"]["bucket"]["id"]
        client.rows(0, *steps(0, 1), summary={"x": 1})
        server.arm("file_stream", "half", lines=1, status=500)
        half = client.rows(2, *steps(2, 3)).status_code
        log_artifact(client, b"one", "d1")
        before = server.run("p", "r")
        url, hits = server.url, server.debug("faults")
        server.kill()
        with pytest.raises(requests.ConnectionError):
            client.rows(3, *steps(3))
        server.start()
        after, same_url = server.run("p", "r"), server.url
        client.rows(3, *steps(3))
        grown = server.run("p", "r") or {}
        bucket = client.upsert().json()["data"]["upsertBucket"]["bucket"]
        stats = server.debug("stats")
        client.session.close()

    assert before is not None
    assert after is not None
    assert hits == [{"endpoint": "file_stream", "kind": "half", "hits": 1}]
    volatile = dict.fromkeys(("request_counts",))
    assert {**after, **volatile} == {**before, **volatile}
    assert (half, len(after["lines"]), len(grown["lines"]), after["summary"]) == (500, 3, 4, {"x": 1})
    assert (same_url, bucket["id"]) == (url, storage_id)
    assert stats["process_cpu_s"] >= stats["request_cpu_s"] > 0


def test_a_server_in_another_process_is_set_up_over_its_debug_paths() -> None:
    """Lag, keys, switches and faults are those of the server in this process; an unknown switch is an error."""
    with ServerProcess() as server:
        client = Client(server.url)
        server.debug("set", {"replaces_equal_steps": False})
        client.upsert()
        server.debug("lag", {"counts": {"requests": 1}})
        client.rows(0, {"_step": 1}, {"_step": 1})
        count = client.ask(STATUS)["model"]["bucket"]["historyLineCount"]
        shown = client.ask(HISTORY, low=0, high=9)["project"]["run"]["history"]
        server.arm("file_stream", "status", status=413, min_bytes=1000, count=None)
        sizes = [client.rows(2, *steps(*range(n))).status_code for n in (2, 100)]
        server.debug("disarm")
        server.debug("set", {"valid_keys": []})
        turned_away = client.upsert().status_code
        state = server.debug("state")
        with pytest.raises(urllib.error.HTTPError):
            server.debug("set", {"no_such_switch": 1})
        client.session.close()

    assert (count, len(shown), sizes, turned_away) == (0, 2, [200, 413], 401)
    assert state == {"runs": {"acme/p/r": {"state": "running", "num_lines": 4}}, "unanswered": []}


def test_a_journal_that_ends_torn_is_read_up_to_there(tmp_path: Path) -> None:
    """A request that was being written when the server died was never answered; what comes next is kept."""
    state = tmp_path / "state"
    with WandbServer(state_file=str(state)) as server:
        client = Client(server.url)
        client.upsert()
        client.rows(0, *steps(0))
        client.session.close()
    whole = state.read_bytes()
    for cut in (1, 30, 150):
        state.write_bytes(whole + whole[:cut])
        with WandbServer(state_file=str(state)) as server:
            client = Client(server.url)
            client.rows(1, *steps(1))
            client.session.close()
        with WandbServer(state_file=str(state)) as server:
            assert [row["x"] for row in server.run("p", "r").rows] == [0, 1]


def test_a_server_that_is_down_refuses_and_comes_up_at_the_same_port(server: WandbServer, client: Client) -> None:
    """Open connections are reset, new ones refused, the state stays."""
    client.upsert()
    client.rows(0, *steps(0))
    server.down()
    with pytest.raises(requests.ConnectionError):
        client.rows(1, *steps(1))
    server.up()

    assert client.rows(1, *steps(1)).status_code == 200
    assert [row["x"] for row in server.run("p", "r").rows] == [0, 1]
