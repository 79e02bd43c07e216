"""The real swanlab library works against the test server, and the server shows what the library really did."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RealClient

# One run serves all tests that only look at it, so they share a worker.
on_trained = pytest.mark.xdist_group("swanlab-trained")

TRAIN = """
import numpy as np
run = swanlab.init(project="proj", name="first", description="what it is", tags=["a", "b"], group="grp",
                   job_type="train", id=run_id, resume="allow", mode=mode, config={"lr": 0.1, "net": {"width": [1, 2]}})
for step in range(steps[0], steps[1]):
    swanlab.log({"loss": 1 / (step + 1), "acc": {"top1": step * 0.5}}, step=step)
if extras:
    swanlab.log({"odd": float("nan"), "odder": float("-inf"), "big": 2**53 + 1, "flag": True}, step=0)
    swanlab.log({"said": swanlab.Text("hello", caption="c"), "empty": swanlab.Text("")}, step=1)
    swanlab.log({"seen": [swanlab.Image(np.zeros((4, 4, 3), dtype=np.uint8), caption="black")]}, step=2)
    table = swanlab.echarts.Table()
    table.add(["name", "score"], [["x", 1.5], ["é", float("nan")]])
    swanlab.log({"table": table}, step=3)
    pathlib.Path("note.txt").write_text("saved")
    swanlab.save("note.txt")
swanlab.finish()
"""


@pytest.fixture
def server() -> Iterator[SwanLabServer]:
    with SwanLabServer() as server:
        yield server


@pytest.fixture
def client(server: SwanLabServer, tmp_path: Path) -> RealClient:
    return RealClient(tmp_path, server.url, server.api_key)


def train(
    client: RealClient, run_id: str, steps: tuple[int, int], *, mode: str = "online", extras: bool = False
) -> None:
    client.script(TRAIN, run_id=run_id, steps=steps, mode=mode, extras=extras)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SwanLabServer, RealClient, float]]:
    """A server after one online run with everything in it, the client that made it, and when that began."""
    with SwanLabServer() as server:
        client = RealClient(tmp_path_factory.mktemp("trained"), server.url, server.api_key)
        began = time.time()
        train(client, "run-1", (0, 5), extras=True)
        yield server, client, began


@on_trained
def test_an_online_run_arrives_with_every_point(trained: Any) -> None:
    """Each logged number is there once, nested keys joined, what is not finite as NaN."""
    server, _, _ = trained
    points = server.experiments["run-1"].points()

    assert points["loss"] == {step: 1 / (step + 1) for step in range(5)}
    assert points["acc/top1"] == {step: step * 0.5 for step in range(5)}
    assert points["big"] == {0: float(2**53)}
    assert points["flag"] == {0: 1.0}
    assert str(points["odd"][0]) == str(points["odder"][0]) == "nan"
    assert server.experiments["run-1"].duplicates.total == 0


@on_trained
def test_an_online_run_is_described_as_it_was_told(trained: Any) -> None:
    """Name, description, tags, group, job type, config and end state arrive under the run's own id."""
    server, _, _ = trained
    run = server.experiments["run-1"]

    assert (run.name, run.description, run.cluster, run.job) == ("first", "what it is", "grp", "train")
    assert run.labels == [{"name": "a"}, {"name": "b"}]
    assert run.config == {"lr": 0.1, "net": {"width": [1, 2]}}
    assert run.profile["metadata"] == {"_version": 2, "hardware": None, "runtime": None, "git": None, "swanlab": None}
    assert run.state == "FINISHED"
    assert [state["state"] for state in run.states] == ["FINISHED"]
    assert len(run.heartbeats) == 1
    assert run.cuid != run.slug == "run-1"


@on_trained
def test_rows_carry_the_time_at_which_they_were_logged(trained: Any) -> None:
    """`create_time` is the moment of `log`, apart from when the row came in."""
    server, _, began = trained
    run = server.experiments["run-1"]
    times = list(run.times("loss").values())

    assert times == sorted(times)
    assert all(began <= at <= time.time() for at in times)
    assert all(at <= row.ingest_time for at, row in zip(times, run.raw, strict=False))


@on_trained
def test_columns_are_made_with_the_type_of_what_was_logged(trained: Any) -> None:
    """Columns belong to the project and name the type; a key with a slash names its section."""
    server, _, _ = trained
    columns = server.projects["proj"].columns

    assert columns["acc/top1"] == {"key": "acc/top1", "type": "FLOAT", "sectionName": "acc"}
    assert columns["loss"] == {"key": "loss", "type": "FLOAT"}
    assert {key: columns[key]["type"] for key in ("said", "seen", "table")} == {
        "said": "TEXT",
        "seen": "IMAGE",
        "table": "ECHARTS",
    }
    assert server.experiments["run-1"].type_conflicts() == set()


@on_trained
def test_text_images_and_tables_arrive_as_objects(trained: Any) -> None:
    """Media bytes are put in the store before the row that names them; an empty text is an empty object."""
    server, _, _ = trained
    run = server.experiments["run-1"]
    ((text_path, text),) = run.media("said")[1]
    ((_, empty),) = run.media("empty")[1]
    ((_, image),) = run.media("seen")[2]
    ((_, table),) = run.media("table")[3]

    assert (text_path, text) == ("media/text/001-2cf24dba.txt", b"hello")
    assert empty == b""
    assert image.startswith(b"\x89PNG")
    assert json.loads(table) == {
        "_swanLab": "table",
        "colDefs": [{"field": "name"}, {"field": "score"}],
        "rowData": [{"name": "x", "score": 1.5}, {"name": "é", "score": None}],
    }
    assert [row.more for row in run.raw if row.key == "said"] == [[{"caption": "c"}]]


@on_trained
def test_saved_files_are_uploaded_and_completed(trained: Any) -> None:
    """`swanlab.save` announces, puts and completes the file."""
    server, _, _ = trained
    run = server.experiments["run-1"]

    assert run.objects["files/note.txt"] == b"saved"
    assert run.files["note.txt"].state == "UPLOADED"


READ_BACK = """
import urllib.request
run = swanlab.Api().run(f"{user}/proj/run-1")
full = run.metrics(keys=["loss", "acc/top1", "odd"], all=True)
def fetch(url):
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url).read().decode()
result = dict(
    state=run.state, name=run.name, config=run.profile["config"], group=run.group, job=run.job_type,
    labels=[label["name"] for label in run.labels], id=run.run_id,
    full={it["key"]: [[p["step"], str(p["value"]), p["timestamp"]] for p in it["metrics"]] for it in full["list"]},
    sampled=[[p["index"], p["data"]] for p in run.metrics(keys=["loss"])["list"][0]["metrics"]],
    latest=run.metrics(keys=["loss"])["list"][0]["latest"],
    scalars=sorted(run.series().json()["keys"]), media=sorted(run.series("MEDIA").json()["keys"]),
    summary=run.summary(keys=["loss"])["loss"]["value"],
    text=[fetch(item["url"]) for item in run.medias(["said"], step=1)["list"][0]["metrics"][0]["items"]],
    all_text=[m["index"] for m in run.medias(["said"], all=True)["list"][0]["metrics"]],
    runs=[each.name for each in swanlab.Api().runs(f"{user}/proj")],
    projects=[each.name for each in swanlab.Api().projects(user)],
    missing=swanlab.Api().run(f"{user}/proj/none").wrapper().ok,
)
"""


@on_trained
def test_the_api_reads_back_all_that_was_logged(trained: Any) -> None:
    """`swanlab.Api` finds every point, the config, the state, the media and the keys."""
    server, client, _ = trained
    run = server.experiments["run-1"]

    got = client.script(READ_BACK, user=server.username)

    assert (got["state"], got["name"], got["group"], got["job"]) == ("FINISHED", "first", "grp", "train")
    assert got["labels"] == ["a", "b"]
    assert got["id"] == run.cuid
    assert {key: entry["value"] for key, entry in got["config"].items()} == run.config
    times = run.times("loss")
    assert got["full"]["loss"] == [[s, str(v), round(times[s] * 1000)] for s, v in run.points("loss")["loss"].items()]
    assert [point[:2] for point in got["full"]["odd"]] == [[0, "nan"]]
    assert got["sampled"] == [[step, value] for step, value in run.points("loss")["loss"].items()]
    assert got["latest"]["data"] == got["summary"] == 0.2
    assert got["scalars"] == sorted(run.points())
    assert got["media"] == ["empty", "said", "seen", "table"]
    assert got["text"] == ["hello"]
    assert got["all_text"] == [1]
    assert got["runs"] == ["first"]
    assert got["projects"] == ["proj"]
    assert got["missing"] is False


@pytest.mark.parametrize(
    ("endpoint", "kind"), [("scalar.export", "status"), ("scalar.export", "html"), ("object.get", "cut")]
)
@on_trained
def test_a_failed_api_read_looks_like_an_empty_run(trained: Any, endpoint: str, kind: str) -> None:
    """`swanlab.Api` reports no error and no points, so it cannot tell what is missing from what it failed to read."""
    server, client, _ = trained
    server.arm(endpoint, kind, status=403, when="after")
    read = """
    run = swanlab.Api().run(f"{user}/proj/run-1")
    result = [run.metrics(keys=["loss"], all=True)["list"][0]["metrics"], run.wrapper().ok]
    """

    assert client.script(read, user=server.username) == [[], True]
    assert len(client.script(read, user=server.username)[0]) == 5


def test_resuming_by_id_goes_on_after_the_high_water_mark(server: SwanLabServer, client: RealClient) -> None:
    """A second session of the same id adds the steps that are new, and sends none twice."""
    train(client, "run-1", (0, 5))
    train(client, "run-1", (0, 8))
    run = server.experiments["run-1"]

    assert list(run.points()["loss"]) == list(range(8))
    assert run.duplicates.total == 0
    assert (run.num_posts, run.state, len(server.experiments)) == (2, "FINISHED", 1)
    assert server.count("marks") == 1


def test_a_resume_that_reads_late_high_water_marks_doubles_everything(
    server: SwanLabServer, client: RealClient
) -> None:
    """With the marks lagging behind, the library takes the run for empty and appends it all again."""
    server.settings.summary_lag_s = 3600
    train(client, "run-1", (0, 5))
    train(client, "run-1", (0, 5))
    run = server.experiments["run-1"]

    assert len(run.raw) == 20
    assert run.duplicates.total == 10
    assert run.duplicates.keys == ("loss", "acc/top1")


def test_an_offline_run_is_synced_under_the_id_it_is_given(server: SwanLabServer, client: RealClient) -> None:
    """Nothing goes out while offline; `swanlab sync --id` then brings points, config, media and state."""
    train(client, "run-1", (0, 5), mode="offline", extras=True)
    assert server.calls == []

    client.run("swanlab", "sync", "--id", "run-1", str(client.run_dirs()[-1]))
    run = server.experiments["run-1"]

    assert run.points()["loss"] == {step: 1 / (step + 1) for step in range(5)}
    assert run.config["lr"] == 0.1
    assert run.media("said")[1][0][1] == b"hello"
    assert (run.state, run.duplicates.total, run.heartbeats) == ("FINISHED", 0, [])


@pytest.mark.parametrize("kind", ["reset", "status", "cut"])
def test_a_lost_acknowledgement_makes_the_library_double_a_batch(
    server: SwanLabServer, client: RealClient, kind: str
) -> None:
    """The rows were stored and the answer was lost: the library sends them again, and the server appends."""
    server.arm("metrics", kind, when="after", contains='"type": "scalar"', status=502)
    train(client, "run-1", (0, 5))
    run = server.experiments["run-1"]

    assert len(run.raw) == 20
    assert (run.duplicates.identical, run.duplicates.conflicting) == (10, 0)
    assert list(run.points()["loss"]) == list(range(5))


@pytest.mark.parametrize(("kind", "status"), [("status", 429), ("status", 413), ("html", 200)])
def test_a_refusal_makes_the_library_lose_a_batch_and_report_success(
    server: SwanLabServer, client: RealClient, kind: str, status: int
) -> None:
    """One 4xx, or a captive portal's page, and the rows are gone; the run still ends FINISHED."""
    server.arm("metrics", kind, status=status, retry_after="1")
    train(client, "run-1", (0, 5))
    run = server.experiments["run-1"]

    assert (run.raw, run.state) == ([], "FINISHED")


def test_a_wrong_key_is_refused_and_nothing_is_made(server: SwanLabServer, client: RealClient) -> None:
    """The library says so and stops; the server made neither project nor run."""
    client.env["SWANLAB_API_KEY"] = "wrong"
    with pytest.raises(AssertionError, match="AuthenticationError"):
        train(client, "run-1", (0, 1))

    assert (server.experiments, server.projects) == ({}, {})
    assert [call.status for call in server.calls] == [401]


def test_login_keeps_host_and_key_where_later_sessions_find_them(server: SwanLabServer, client: RealClient) -> None:
    """`swanlab login` writes a netrc of its own below the home, and a session without variables uses it."""
    client.run("swanlab", "login", "--api-key", server.api_key, "--host", server.url)
    del client.env["SWANLAB_API_KEY"], client.env["SWANLAB_API_HOST"]
    train(client, "run-1", (0, 2))

    netrc = (client.home / ".swanlab" / ".netrc").read_text().split()
    assert netrc == ["machine", server.url, "login", server.url, "password", server.api_key]
    assert list(server.experiments["run-1"].points()["loss"]) == [0, 1]


def test_a_run_is_deleted_through_the_api(server: SwanLabServer, client: RealClient) -> None:
    """`Experiment.delete(commit=True)` takes the run and its rows away."""
    train(client, "run-1", (0, 2))
    client.script('result = swanlab.Api().run(f"{user}/proj/run-1").delete(commit=True)', user=server.username)

    assert server.experiments == {}
    assert server.projects["proj"].deleted == {"run-1"}


def test_what_the_library_records_of_its_host_is_seen(server: SwanLabServer, tmp_path: Path) -> None:
    """Left to itself the library uploads this machine's hardware, its packages and the terminal's lines."""
    client = RealClient(tmp_path, server.url, server.api_key, quiet=False)
    client.script("""
        swanlab.init(project="proj", id="run-1", resume="allow")
        print("a line on the terminal")
        swanlab.log({"loss": 1.0})
        swanlab.finish()
    """)
    run = server.experiments["run-1"]

    assert run.profile["metadata"]["runtime"]["cwd"] == str(client.cwd)
    assert "==" in run.profile["requirements"]
    assert "a line on the terminal" in run.logs()
