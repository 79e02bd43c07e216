"""The MLflow sink against a real `mlflow server`, with faults between them."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from shutil import copyfile
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from gapless_uploader.operations import Config, Identity, Rewind, Row, State, System, Table, Text
from gapless_uploader.sink import Misconfigured, Parked, Rejected, Retryable, RunView
from gapless_uploader.sinks._mlflow_names import TAG, Names, allowed, params_of
from gapless_uploader.sinks.mlflow import MlflowSink
from tests.sinks.harness import T0, Point, amend, batch, free_port, row, view, write
from tests.sinks.harness_mlflow import Harness, empty_database, mlflow
from tests.sinks.outage import World, play_outage
from tests.sinks.proxy import Fault, FaultProxy

RUN = view(config={"lr": 0.1, "layers": [1, 2]})
pytestmark = pytest.mark.xdist_group("sink-mlflow")
LOG_BATCH = "/runs/log-batch"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A real MLflow server's port, and its database."""
    folder = tmp_path_factory.mktemp("mlflow")
    copyfile(empty_database(), folder / "mlflow.db")
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder / 'mlflow.db'}",
        "--artifacts-destination",
        str(folder / "a"),
    ]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "PYTHONWARNINGS": "ignore"}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                    break
            except (URLError, TimeoutError, ConnectionError):
                time.sleep(0.2)
        yield port, folder / "mlflow.db"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


class Served(Harness):
    """The contract suite's harness, over the server and a proxy before it."""

    def __init__(self, folder: Path, port: int, database: Path) -> None:
        super().__init__(folder)
        self._database = database
        self.proxy = FaultProxy("127.0.0.1", port)
        self.uri = self.proxy.url
        self.view = view(project=folder.name, config=RUN.config)

    def points(self, run: RunView) -> list[Point]:
        """From the server's own table, since it answers for one key at a time."""
        held = self.run(run)
        names = {tag[len(TAG) :]: name for tag, name in held.data.tags.items() if tag.startswith(TAG)}
        query = (
            "select step, key, case is_nan when 1 then null else value end, timestamp from metrics where run_uuid = ?"
        )
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as database:
            rows = database.execute(query, [held.info.run_id]).fetchall()
        return [
            Point(step, names.get(key, key), nan if value is None else value, t / 1000) for step, key, value, t in rows
        ]

    def artifact(self, path: str) -> Any:
        held = self.run(self.view).info
        return json.loads(Path(mlflow.artifacts.download_artifacts(
            run_id=held.run_id, artifact_path=path, tracking_uri=self.uri, dst_path=str(self.folder)
        )).read_text())  # fmt: skip

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.proxy.down()
        yield
        self.proxy.up()

    def close(self) -> None:
        self.proxy.close()


@pytest.fixture
def served(server: tuple[int, Path], tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path, *server)
    yield made
    made.close()


def test_a_whole_run_arrives_at_a_real_server(served: Served) -> None:
    """Points with their times, parameters, tags, environment, artifacts and the end reach a real server."""
    run = replace(
        served.view, notes="why", tags=["a"], system={"user": "me", "git": {"commit": "abc"}, "host": "train-7"}
    )
    table = Table(["input", "score"], [["two", 0.5]])
    rows = [row(0, loss=0.5, nan=nan), row(5, t=T0 + 60.125, **{"val/mean@1": 0.25})]
    identity = Identity("Qwen 7B", None, None, ["a"], "why", None, None)
    operations = [identity, Config(run.config), System(run.system), *rows]
    operations += [row(7, samples=table, note=Text("hello")), State("finished", 0, T0 + 99, 99.0)]
    write(served.sink(), run, {}, *operations)
    held = served.run(run)

    assert served.expect(rows) == served.actual(run)
    assert held.data.metrics.keys() == {"loss", "nan", "val/mean_at_1"}
    assert held.data.params == {"lr": "0.1", "layers/list_len": "2", "layers/0": "1", "layers/1": "2"}
    assert (held.info.run_name, held.info.start_time, held.info.end_time) == ("Qwen 7B", T0 * 1000, (T0 + 99) * 1000)
    assert held.info.status == "FINISHED"
    expected = {"mlflow.note.content": "why", "mlflow.user": "me", "mlflow.source.git.commit": "abc"}
    assert expected.items() <= held.data.tags.items()
    assert served.artifact("tables/samples/7.json") == {"columns": ["input", "score"], "data": [["two", 0.5]]}
    assert served.artifact("config.json") == run.config


def test_tables_are_found_by_mlflows_own_reader(served: Served) -> None:
    """MLflow's `load_table` reads a table back."""
    write(served.sink(), served.view, {}, row(7, samples=Table(["a", "b"], [[1, "x"], [2, "y"]])))
    held = served.run(served.view).info
    mlflow.set_tracking_uri(served.uri)
    try:
        frame = served.client().load_table(held.experiment_id, "tables/samples/7.json", [held.run_id])
    finally:
        mlflow.set_tracking_uri(None)

    assert frame.to_dict("list") == {"a": [1, 2], "b": ["x", "y"]}


def test_a_wide_row_is_split_and_a_lost_answer_doubles_nothing(served: Served) -> None:
    """2,500 metrics go in requests of 1,000; one is stored and its answer lost; then each point is there once.

    What may be there already goes in requests of 100 points: servers before 3.10 refuse larger ones that repeat some.
    """
    wide = row(3, **{f"metric-{place:04}": place / 7 for place in range(2500)})
    session = served.sink().open(served.view, {})
    served.proxy.faults = [Fault(LOG_BATCH, 500, after=True), Fault(LOG_BATCH)]
    for _ in range(2):
        with pytest.raises(Retryable):
            session.write(batch(served.view, wide))
    sizes = [len(json.loads(body)["metrics"]) for _, path, body in served.proxy.requests if path.endswith(LOG_BATCH)]
    served.proxy.requests.clear()
    session.write(batch(served.view, wide))

    assert sizes == [1000, 100]
    assert served.proxy.count(LOG_BATCH) == 25
    assert served.expect([wide]) == served.actual(served.view)


def test_seven_hundred_steps_are_one_request(served: Served) -> None:
    """Many steps of few metrics go together."""
    rows = [row(step, loss=step / 3) for step in range(700)]
    write(served.sink(), served.view, {}, *rows)

    assert served.proxy.count(LOG_BATCH) == 1
    assert served.expect(rows) == served.actual(served.view)


def test_a_server_that_asks_to_wait_is_heard(served: Served) -> None:
    """429 with Retry-After: the wait is handed on, no request is made in between."""
    session = served.sink().open(served.view, {})
    served.proxy.faults = [Fault(LOG_BATCH, 429, headers={"Retry-After": "7"})]
    with pytest.raises(Retryable) as raised:
        session.write(batch(served.view, row(0)))

    assert raised.value.after_s == 7.0
    assert served.proxy.count(LOG_BATCH) == 1


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (401, "UNAUTHENTICATED", Parked, "MLFLOW_TRACKING_TOKEN"),
        (403, "PERMISSION_DENIED", Parked, "MLFLOW_TRACKING_TOKEN"),
        (404, "RESOURCE_DOES_NOT_EXIST", Parked, "mlflow runs restore"),
        (400, "INVALID_PARAMETER_VALUE", Rejected, "MLflow"),
        (413, "BAD_REQUEST", Rejected, "too large"),
        (503, "TEMPORARILY_UNAVAILABLE", Retryable, "503"),
    ],
)
def test_each_error_says_what_happens_next(
    served: Served, status: int, code: str, kind: type[Exception], says: str
) -> None:
    """A server's refusal parks, rejects or asks again, by its kind."""
    session = served.sink().open(served.view, {})
    body = json.dumps({"error_code": code, "message": "no"}).encode()
    served.proxy.faults = [Fault(LOG_BATCH, status, body=body)]
    with pytest.raises(kind, match=says):
        session.write(batch(served.view, row(0)))


def test_a_server_that_is_not_there_is_asked_again_later() -> None:
    """Nobody listens: Retryable, from `open` on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen: connections are refused, and nobody is given the port
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(Retryable):
            MlflowSink(url).open(RUN, {})


def test_a_deleted_run_parks(served: Served) -> None:
    """A run that somebody deleted is not written on, and the way out is said."""
    memo = write(served.sink(), served.view, {}, row(0)).memo
    served.client().delete_run(served.run(served.view).info.run_id)
    with pytest.raises(Parked, match="mlflow runs restore"):
        write(served.sink(), served.view, memo, row(1))


# A local database


def test_a_lost_state_sends_only_what_is_missing(tmp_path: Path) -> None:
    """A row that went in two parts and comes again as one, with the later time, stays as it was sent."""
    harness = Harness(tmp_path)
    first = row(3, loss=0.5)
    memo = write(harness.sink(), RUN, {}, first).memo
    write(harness.sink(), RUN, memo, amend(first, acc=0.9))
    whole = Row(3, first.t + 2, 3.0, {"loss": 0.5, "acc": 0.9})
    memo = write(harness.sink(), RUN, {}, whole).memo
    write(harness.sink(), RUN, memo, whole, row(4, loss=0.25))

    assert harness.expect([first, row(3, t=first.t + 2, acc=0.9), row(4, loss=0.25)]) == harness.actual(RUN)


def test_a_changed_parameter_is_counted(tmp_path: Path) -> None:
    """MLflow keeps a parameter as first set; the new config is whole in `config.json`."""
    harness = Harness(tmp_path)
    memo = write(harness.sink(), RUN, {}, Config({"lr": 0.1})).memo
    ack = write(harness.sink(), RUN, memo, Config({"lr": 0.2, "new": 1}))

    assert [(one.key, one.reason.split(";")[0]) for one in ack.refused] == [
        ("lr", "MLflow keeps a parameter as first set")
    ]
    assert harness.run(RUN).data.params == {"lr": "0.1", "new": "1"}


def test_infinities_and_rewinds_are_counted(tmp_path: Path) -> None:
    """MLflow would store infinity as the largest float, and takes nothing back."""
    harness = Harness(tmp_path)
    ack = write(harness.sink(), RUN, {}, row(0, up=inf, down=-inf, loss=0.5), Rewind(0))

    assert [(one.step, one.key) for one in ack.refused] == [(0, "up"), (0, "down"), (0, None)]
    assert harness.expect([row(0, loss=0.5)]) == harness.actual(RUN)


@pytest.mark.parametrize("target", ["mlruns", "./mlruns", "/tmp/mlruns", "file:///tmp/mlruns"])
def test_a_store_of_files_is_refused(target: str) -> None:
    """A store of files, which older versions of MLflow take, would append repeats: the sink says what to use."""
    with pytest.raises(Misconfigured, match="use a server or sqlite:///FILE"):
        MlflowSink(target).open(RUN, {})


# Names


def test_names_are_mapped_without_clashes_and_back() -> None:
    """Odd names become verl's, pairs that would meet stay two, and the tags give the true names back."""
    names = [
        "timing(s)/gen",
        "val/mean@1",
        "val/mean_at_1",
        "m@1",
        "m_at_1",
        "a//b",
        "a/b",
        "a b",
        "a:b",
        "..",
        "x" * 300,
    ]
    news: dict[str, str] = {}
    held = Names({}, ["m_at_1"])
    mapped = [held.map(name, news) for name in names]

    assert mapped[:2] == ["timing_s_/gen", "val/mean_at_1"]
    assert len(set(mapped)) == len(names)
    assert all(allowed(one) == one for one in mapped)
    again = Names(news, mapped)
    assert [again.map(name, {}) for name in names] == mapped


def test_params_are_flattened_as_verl_does() -> None:
    """Nested keys are joined by a slash, lists have their length and their places."""
    config = {"a": {"b": 1, "c": []}, "d": [True, {"e": None}], "f@g": "x", "f_at_g": "y", "empty": {}}

    params = params_of(config)

    assert params.pop(f"f_at_g_{__import__('hashlib').sha256(b'f@g').hexdigest()[:8]}") == "x"
    assert params == {
        "a/b": "1",
        "a/c/list_len": "0",
        "d/list_len": "2",
        "d/0": "True",
        "d/1/e": "None",
        "f_at_g": "y",
        "empty": "{}",
    }


def test_an_hour_without_the_server_costs_nothing(served: Served, tmp_path: Path) -> None:
    """A real server that nobody reaches for an hour has every row afterwards, once."""
    (tmp_path / "uploader").mkdir()
    world = World(tmp_path / "uploader", served)
    play_outage(world)
    world.turner.uploader.stop()


def test_a_database_that_was_moved_away_is_not_made_anew(tmp_path: Path) -> None:
    """MLflow would begin an empty database in its place; the run waits until the one that was there is back."""
    harness = Harness(tmp_path)
    memo = write(harness.sink(), RUN, {}, row(0)).memo
    session = harness.sink().open(RUN, memo)
    with harness.outage():
        with pytest.raises(Parked, match=r"mlflow\.db lacks what was acknowledged; put it back"):
            session.write(batch(RUN, row(1)))
        with pytest.raises(Parked, match=r"mlflow\.db lacks what was acknowledged; put it back"):
            harness.sink().open(RUN, memo)
    session.write(batch(RUN, row(1)))

    assert harness.expect([row(0), row(1)]) == harness.actual(RUN)
