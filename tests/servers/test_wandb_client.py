"""The real wandb client works against the loopback server: that makes the server a description of the protocol."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.wandb_server import CRASHED_AFTER_S, Run, WandbServer
from tests.servers.wandb_server.client import run_client, start_client

pytest.importorskip("wandb")

NUM_ROWS = 1_300
"""More than one page of `scan_history`, which reads 1,000 steps at a time."""

ONLINE = f"""
run = wandb.init(
    project="p", id="online", name="Run one", group="g", job_type="train", notes="n", tags=["a"],
    config={{"lr": 0.1, "net": {{"depth": 3}}}}, settings=settings(),
)
run.define_metric("epoch")
run.define_metric("val/*", step_metric="epoch")
run.define_metric("low", summary="min")
run.define_metric("both", summary="min,max,mean")
run.define_metric("gone", hidden=True)
for i in range({NUM_ROWS}):
    run.log({{"loss": 1 / (i + 1), "low": abs(5 - i), "both": i % 3, "epoch": i // 10, "gone": i}}, step=2 * i)
run.log({{"nan": math.nan, "inf": math.inf, "ninf": -math.inf, "big": 2**63 - 1}}, step=2 * {NUM_ROWS})
run.summary["by_hand"] = "x"
run.finish()

api = wandb.Api()
back = api.run("acme/p/online")
rows = list(back.scan_history())
report(
    summary=dict(back.summary), config=back.config, state=back.state, tags=back.tags, name=back.name,
    last_step=back.lastHistoryStep, num_rows=len(rows), steps=[r["_step"] for r in rows], last=rows[-1],
    some=[r["_step"] for r in back.scan_history(min_step=10, max_step=15)],
    sampled=len(back.history(keys=["loss"], samples=50, pandas=False)),
    runs=[r.id for r in api.runs("acme/p")],
)
"""


@pytest.fixture(scope="module")
def online(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WandbServer, dict[str, Any]]]:
    with WandbServer() as server:
        yield server, run_client(server.url, tmp_path_factory.mktemp("online"), ONLINE)


online_group = pytest.mark.xdist_group("wandb-client-online")


def rows_of(run: Run) -> list[dict[str, Any]]:
    """The raw lines, parsed."""
    return [json.loads(line) for line in run.lines if line is not None]


@online_group
def test_a_run_that_was_logged_online_arrives_whole(online: tuple[WandbServer, dict[str, Any]]) -> None:
    """Every row is a line at its offset, sent once, and the run has its end, its config and its names."""
    server, _ = online
    run = server.run("p", "online")

    assert [row["_step"] for row in rows_of(run)] == [2 * i for i in range(NUM_ROWS + 1)]
    assert (run.holes, run.conflicts, run.rewrites) == ([], [], 0)
    assert run.config == {"lr": 0.1, "net": {"depth": 3}}
    assert (run.fields["displayName"], run.group, run.fields["jobType"]) == ("Run one", "g", "train")
    assert (run.fields["notes"], run.fields["tags"]) == ("n", ["a"])
    assert (run.fields["host"], run.fields["jobProgram"]) == ("train-7", "train.py")
    assert (run.state(server.clock()), run.exit_code, run.complete) == ("finished", 0, True)


@online_group
def test_numbers_that_json_lacks_arrive_as_bare_literals(online: tuple[WandbServer, dict[str, Any]]) -> None:
    """NaN and the infinities are literals in the line, and a 63-bit integer keeps its digits."""
    server, _ = online
    line = server.run("p", "online").lines[-1] or ""
    row = json.loads(line)

    assert math.isnan(row["nan"])
    assert (row["inf"], row["ninf"], row["big"]) == (math.inf, -math.inf, 2**63 - 1)
    assert '"nan":NaN' in line


@online_group
def test_metric_definitions_travel_in_the_config(online: tuple[WandbServer, dict[str, Any]]) -> None:
    """`_wandb.m` holds name or glob, the step metric's place, options and summary rules, each by number."""
    server, _ = online
    given = server.run("p", "online").wandb_config["m"]
    by_name = {entry.get("1") or entry["2"]: entry for entry in given}
    place_of_epoch = 1 + given.index(by_name["epoch"])

    assert by_name["val/*"] == {"2": "val/*", "5": place_of_epoch, "6": [1], "7": []}
    assert by_name["low"] == {"1": "low", "6": [3], "7": [1]}
    assert by_name["both"] == {"1": "both", "6": [3], "7": [1, 2, 3]}
    assert by_name["gone"] == {"1": "gone", "6": [3, 2], "7": []}


@online_group
def test_the_summary_follows_the_rules_of_the_definitions(online: tuple[WandbServer, dict[str, Any]]) -> None:
    """A rule makes its key an object of results; a key without one has its last value."""
    server, _ = online
    summary = server.run("p", "online").summary

    assert summary["low"] == {"min": 0}
    assert summary["both"] == {
        "min": 0,
        "max": 2,
        "mean": pytest.approx(sum(i % 3 for i in range(NUM_ROWS)) / NUM_ROWS),
    }
    assert (summary["loss"], summary["by_hand"]) == (1 / NUM_ROWS, "x")


@online_group
def test_a_finished_run_reads_back_through_the_public_api(online: tuple[WandbServer, dict[str, Any]]) -> None:
    """`wandb.Api` gives summary, config, state, tags, last step and, over several pages, every row."""
    server, back = online
    run = server.run("p", "online")

    assert back["steps"] == [2 * i for i in range(NUM_ROWS + 1)]
    assert back["last_step"] == 2 * NUM_ROWS
    assert math.isnan(back["last"]["nan"])
    assert (back["last"]["inf"], back["last"]["ninf"]) == (math.inf, -math.inf)
    assert back["config"] == run.config
    assert back["summary"]["loss"] == run.summary["loss"]
    assert (back["state"], back["tags"], back["name"]) == ("finished", ["a"], "Run one")
    assert (back["some"], back["sampled"], back["runs"]) == ([10, 12, 14], 50, ["online"])
    assert run.request_counts["HistoryPage"] >= 3


@online_group
def test_the_server_leaves_no_question_of_the_client_unanswered(
    online: tuple[WandbServer, dict[str, Any]],
) -> None:
    """Every GraphQL field that the client asked for is one that the server models; nothing was made up as null."""
    server, _ = online

    assert server.backend.unanswered == set()
    assert {request.status for request in server.requests} == {200}


MEDIA = """
import numpy as np
run = wandb.init(project="p", id="media", settings=settings())
run.log({"val/t": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]])}, step=0)
run.log({"val/t": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]])}, step=1)
run.log({"val/t": wandb.Table(columns=["a", "b"], data=[[3, "z"]])}, step=2)
run.log({"h": wandb.Histogram(np_histogram=([1, 2], [0.0, 1.0, 2.0]))}, step=3)
run.log({"im": wandb.Image(np.zeros((4, 6, 3), np.uint8), caption="c")}, step=4)
run.finish()

api = wandb.Api()
back = api.run("acme/p/media")
rows = list(back.scan_history())
logged = [[a.name, a.type, a.aliases] for a in back.logged_artifacts()]
artifact = api.artifact("acme/p/" + logged[0][0])
table = artifact.get("val/t")
path = next(r["im"]["path"] for r in rows if "im" in r)
with back.file(path).download(root="down") as f:
    name = f.name
report(
    rows=rows, artifacts=logged, columns=table.columns, data=table.data,
    image=open(name, "rb").read(4).hex(), files=sorted(f.name for f in back.files()),
)
"""


def test_tables_images_and_histograms_arrive_and_read_back(tmp_path: Path) -> None:
    """A table is a media file and an artifact version, one for equal content; an image is a file; a histogram is a
    value."""
    with WandbServer() as server:
        back = run_client(server.url, tmp_path, MEDIA)
        run, unanswered = server.run("p", "media"), server.backend.unanswered

    rows = {row["_step"]: row for row in rows_of(run)}
    table, image = rows[0]["val/t"], rows[4]["im"]
    assert (table["_type"], table["ncols"], table["nrows"], table["log_mode"]) == ("table-file", 2, 2, "IMMUTABLE")
    assert json.loads(run.files[table["path"]]) == {"columns": ["a", "b"], "data": [[1, "x"], [2, "y"]]}
    assert table["artifact_path"].startswith("wandb-client-artifact://")
    assert rows[3]["h"] == {"_type": "histogram", "values": [1, 2], "bins": [0, 1, 2]}
    assert (image["_type"], image["width"], image["height"], image["caption"]) == ("image-file", 6, 4, "c")
    assert run.files[image["path"]].startswith(b"\x89PNG")

    assert [(a["type"], a["version"], a["state"]) for a in run.artifacts] == [
        ("run_table", 0, "COMMITTED"),
        ("run_table", 1, "COMMITTED"),
    ]
    assert [name for name, _, _ in back["artifacts"]] == [f"{run.artifacts[0]['name']}:v{n}" for n in (0, 1)]
    assert [aliases for _, _, aliases in back["artifacts"]] == [[], ["latest"]]
    assert (back["columns"], back["data"]) == (["a", "b"], [[1, "x"], [2, "y"]])
    assert back["image"] == b"\x89PNG".hex()
    assert sorted(run.files) == back["files"]
    assert unanswered == set()


RESUME = """
run = wandb.init(project="p", id="r", config={"a": 1}, tags=["t"], settings=settings())
for i in range(5):
    run.log({"x": i}, step=10 * i)
run.finish(exit_code=3)
report(after_failure=wandb.Api().run("acme/p/r").state)

run = wandb.init(project="p", id="r", resume="must", settings=settings())
report(starting_step=run.starting_step, resumed=run.resumed, config=dict(run.config))
run.log({"x": 5}, step=50)
run.finish()

run = wandb.init(project="p", resume_from="r?_step=19", settings=settings())
run.log({"x": 100}, step=20)
run.finish()

api = wandb.Api()
back = api.run("acme/p/r")
back.tags.append("later")
back.config["more"] = 2
back.update()
back.summary.update({"s": 7})
again = wandb.Api().run("acme/p/r")
report(
    rows=[[r["_step"], r["x"]] for r in again.scan_history()], tags=again.tags, config_later=again.config,
    summary=dict(again.summary), state=again.state,
)
again.delete()
try:
    wandb.Api().run("acme/p/r")
except wandb.errors.CommError as error:
    report(deleted=str(error))
"""


def test_a_run_is_resumed_rewound_changed_and_deleted(tmp_path: Path) -> None:
    """A resumed run goes on at the line count, a rewound one from its step; changes through `wandb.Api` leave the end
    state; a deleted run is not found."""
    with WandbServer() as server:
        back = run_client(server.url, tmp_path, RESUME)
        run, unanswered = server.run("p", "r"), server.backend.unanswered
        state = run.state(server.clock())

    assert (back["after_failure"], back["starting_step"], back["resumed"]) == ("failed", 41, True)
    assert back["config"] == {"a": 1}
    assert [json.loads(line)["_step"] for line in run.rewound] == [20, 30, 40, 50]
    assert back["rows"] == [[0, 0], [10, 1], [20, 100]]
    assert (run.conflicts, run.holes) == ([], [])
    assert (back["tags"], back["config_later"]) == (["t", "later"], {"a": 1, "more": 2})
    assert (back["summary"]["s"], back["state"], state) == (7, "finished", "finished")
    assert "Could not find run" in back["deleted"]
    assert run.deleted
    assert unanswered == set()


def test_a_client_that_is_killed_leaves_a_run_that_reads_as_crashed(tmp_path: Path) -> None:
    """After SIGKILL the run is running until its last heartbeat is five minutes old, and crashed from then on."""
    script = """
    run = wandb.init(project="p", id="k", settings=settings(x_file_stream_transmit_interval=1))
    for i in range(3):
        run.log({"x": i}, step=i, commit=True)
    time.sleep(120)
    """
    with WandbServer() as server:
        arrived = server.arm("file_stream", "delay", seconds=0.0, predicate=lambda r: b"wandb-history" in r.body)
        with start_client(server.url, tmp_path, script) as process:
            assert arrived.hit.wait(60)
            process.send_signal(signal.SIGKILL)
            process.communicate()
        run = server.run("p", "k")

    assert run.state(run.heartbeat_at + CRASHED_AFTER_S) == "running"
    assert run.state(run.heartbeat_at + CRASHED_AFTER_S + 1) == "crashed"
    assert not run.complete


OFFLINE = """
import subprocess
run = wandb.init(project="p", id="off", mode="offline", config={"a": 1}, settings=settings())
for i in range(40):
    run.log({"x": i, "_timestamp": 1.6e9 + i}, step=i)
run.finish()
(folder,) = glob.glob(os.environ["WANDB_DIR"] + "/wandb/offline-run-*")
for again in ([], ["--include-synced"]):
    done = subprocess.run([sys.executable, "-m", "wandb", "sync", *again, folder], capture_output=True, text=True)
    report(**{"again" if again else "first": done.returncode})
back = wandb.Api().run("acme/p/off")
report(state=back.state, times=[r["_timestamp"] for r in back.scan_history()])
"""


def test_an_offline_folder_is_synced(tmp_path: Path) -> None:
    """`wandb sync` sends the rows with their times and ends the run; a second sync appends lines, which the view by
    step does not show."""
    with WandbServer() as server:
        back = run_client(server.url, tmp_path, OFFLINE)
        run, unanswered = server.run("p", "off"), server.backend.unanswered

    assert (back["first"], back["again"], back["state"]) == (0, 0, "finished")
    assert back["times"] == [1.6e9 + i for i in range(40)]
    assert [row["x"] for row in run.rows] == list(range(40))
    assert [row["x"] for row in rows_of(run)] == [*range(40), *range(40)]
    assert unanswered == set()


def test_a_client_with_a_key_that_is_not_valid_is_turned_away(tmp_path: Path) -> None:
    """`wandb.init` fails at once, and no run is made."""
    script = """
    try:
        wandb.init(project="p", id="x", settings=settings(init_timeout=20))
    except (wandb.errors.CommError, wandb.errors.AuthenticationError) as error:
        report(error=type(error).__name__)
    """
    with WandbServer() as server:
        back = run_client(server.url, tmp_path, script, WANDB_API_KEY="f" * 40)

        assert back["error"] in ("CommError", "AuthenticationError")
        assert server.runs == {}


def test_a_client_rides_out_faults_and_rewrites_what_was_stored(tmp_path: Path) -> None:
    """The client's own retries rest on line offsets: a batch whose acknowledgement was lost comes again, unchanged."""
    script = """
    run = wandb.init(project="p", id="f", settings=settings())
    for i in range(20):
        run.log({"x": i}, step=i)
    run.finish()
    """
    with WandbServer() as server:
        lost = server.arm("file_stream", "reset", when="after", predicate=lambda r: b"wandb-history" in r.body)
        run_client(server.url, tmp_path, script)
        run = server.run("p", "f")

    assert lost.hits == 1
    assert [row["x"] for row in rows_of(run)] == list(range(20))
    assert (run.rewrites, run.conflicts) == (20, [])
    assert run.complete
