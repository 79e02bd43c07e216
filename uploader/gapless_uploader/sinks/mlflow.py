"""MLflow, through its own client: a tracking server, or a local database.

Project is experiment, run is run, found again by a tag with our run id. A metric point keeps its original time in
milliseconds. The SQL store's primary key holds key, value, time and step, so the same point twice is one point; a
server that keeps its runs in files appends instead, and a store of files without a server is refused. After a lost
state a point's time may differ (its row was sent in two parts before, as one now), so the session asks what is there
and sends the rest.

MLflow has no infinity (it stores the largest float), takes nothing back, and keeps a parameter as first set.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gapless_schemas import path_name
from gapless_uploader.intervals import Intervals
from gapless_uploader.operations import (
    Amend,
    Config,
    Identity,
    Log,
    Media,
    MediaItem,
    Missing,
    Rewind,
    Row,
    State,
    Summary,
    System,
    Table,
    Text,
    Value,
)
from gapless_uploader.sink import (
    Ack,
    Batch,
    Capabilities,
    Memo,
    Misconfigured,
    Parked,
    Refusal,
    Rejected,
    Retryable,
    RunView,
)
from gapless_uploader.sinks import need
from gapless_uploader.sinks._json import as_json
from gapless_uploader.sinks._mlflow_names import Names, allowed, params_of

_CHECK_S = 5.0
_MAX_METRICS = 1_000
_MAX_REPEATED = 100
"""Points a request that may have come before: a server older than 3.10 refuses more where some of them are there."""
_MAX_TAGS = 100
_MAX_REQUEST_BYTES = 900_000
_MAX_TEXT = 5_000
"""Of a tag's or parameter's value, in the oldest supported server."""
_STATUS = {"running": "RUNNING", "finished": "FINISHED", "failed": "FAILED", "crashed": "FAILED"}
_ID = "gapless.id"
_SQLITE = "sqlite:///"


class MlflowSink:
    """A tracking URI: `http(s)://...` or `sqlite:///...`."""

    kind = "mlflow"
    needs = "mlflow"
    capabilities = Capabilities(
        exactly_once="the SQL store's primary key: the same key, value, time and step is one point",
        text=True,
        tables=True,
        media=True,
        end_state=True,
        read_back=True,
        settles_intents=True,
    )

    def __init__(self, target: str = "", *, timeout_s: float = 30.0, artifacts: str = "") -> None:
        """`target`: the tracking URI; empty: MLflow's own default, `MLFLOW_TRACKING_URI` or a local database.

        `timeout_s`: seconds for one request. `artifacts`: where a new experiment keeps its artifacts; empty: the
        server's choice, or beside a local database. Credentials are MLflow's own (`MLFLOW_TRACKING_TOKEN` and so on).
        """
        if timeout_s <= 0:
            raise Misconfigured(f"sink 'mlflow': timeout_s is {timeout_s}; it is above 0")
        self.target = target
        self._timeout_s = timeout_s
        self._artifacts = artifacts

    def open(self, run: RunView, memo: Memo) -> MlflowSession:
        """A session on the run with our id, made when it is not there."""
        # MLflow retries for minutes on its own, and reports its use over the network; both belong to the uploader.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, round(self._timeout_s))))
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        mlflow = need("mlflow", "mlflow")
        uri = self.target or mlflow.get_tracking_uri()
        if urlsplit(uri).scheme == "file" or (urlsplit(uri).scheme == "" and uri != "databricks"):
            hint = "it would keep a repeated point twice; use a server or sqlite:///FILE"
            raise Misconfigured(f"sink 'mlflow': {uri} is a store of files: {hint}")
        if memo:
            _check_place(uri)
        try:
            client = mlflow.MlflowClient(uri)
        except mlflow.exceptions.MlflowException as error:
            raise Misconfigured(f"sink 'mlflow': {str(error)[:500]}; use a server or sqlite:///FILE") from error
        with translated():
            return MlflowSession(client, run, memo, self._artifacts or _beside_database(client.tracking_uri))

    def check(self) -> str:
        """For `doctor`: that a server listens. Raises Retryable."""
        uri = self.target or need("mlflow", "mlflow").get_tracking_uri()
        parts = urlsplit(uri)
        if parts.scheme in ("http", "https"):
            try:
                port = parts.port or (443 if parts.scheme == "https" else 80)
                with socket.create_connection((parts.hostname or "", port), timeout=_CHECK_S):
                    pass
            except (OSError, ValueError) as error:
                raise Retryable(f"no connection to {parts.hostname}:{parts.port}: {error}") from error
        return f"writes to {parts.hostname if parts.username else uri}"


class MlflowSession:
    """One run. Not thread safe."""

    def __init__(self, client: Any, run: RunView, memo: Memo, artifacts: str) -> None:
        self._client = client
        self._entities: Any = need("mlflow", "mlflow.entities")
        known = memo.get("run")
        held = client.get_run(known) if known else self._find(run, artifacts)
        self._id: str = held.info.run_id
        _check_active(held)
        self._names = Names(held.data.tags, held.data.metrics)
        self._params: dict[str, str] = dict(held.data.params)
        self._tables: list[dict[str, str]] = json.loads(held.data.tags.get("mlflow.loggedArtifacts") or "[]")
        self._asks: bool = memo["asks"] if known else bool(held.data.metrics)
        """The state was lost: a point goes only where none is."""
        self._steps: dict[str, Intervals] = {}
        self._failed = False
        """The last write raised: part of it may have been applied."""

    def write(self, batch: Batch) -> Ack:
        """Send the batch. Raises Retryable, Rejected or Parked; what was sent by then is harmless to send again."""
        refused: list[Refusal] = []
        points: list[Any] = []
        tags: dict[str, str] = {}
        config: dict[str, Any] | None = None
        state: State | None = None
        _check_place(self._client.tracking_uri)
        with self._translated():
            for operation in batch.operations:
                match operation:
                    case Row(step=int(step), t=t, values=values):
                        self._row(step, t, values, points, tags, refused)
                    case Amend(step=step, t=t, values=values, changed=changed):
                        part = {key: values[key] for key in changed if key in values}
                        self._row(step, t, part, points, tags, refused)
                    case Row():
                        refused.append(Refusal(None, None, "MLflow has no row without a step"))
                    case Rewind(step=step):
                        refused.append(Refusal(step, None, "MLflow takes nothing back"))
                    case Log():
                        refused.append(Refusal(None, None, "MLflow has no console lines"))
                    case Config(config=config):
                        pass
                    case Identity() | System() | Summary():
                        tags.update(_description(batch.run))
                    case State():
                        state = operation
            repeats, self._failed = batch.uncertain or self._failed, True
            self._send(points, tags, _MAX_REPEATED if repeats else _MAX_METRICS)
            if config is not None:
                self._send_config(config, refused)
            if state is not None:
                self._end(state)
        self._failed = False
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: MLflow knows no heartbeat."""

    def flush(self) -> Memo:
        """The memo; every answer was an acknowledgement."""
        return {"run": self._id, "asks": self._asks}

    def close(self) -> None:
        """Nothing is held. May be called twice."""

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with translated():
                yield
        except Rejected:
            # MLflow says of a deleted run that its request is invalid.
            with translated():
                _check_active(self._client.get_run(self._id))
            raise

    def _find(self, run: RunView, artifacts: str) -> Any:
        client = self._client
        name = run.project if 0 < len(run.project) <= 500 and run.project.isprintable() else path_name(run.project)
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            place = f"{artifacts}/{path_name(name)}" if artifacts else None
            experiment_id = client.create_experiment(name, artifact_location=place)
        elif experiment.lifecycle_stage != "active":
            raise Parked(
                f"MLflow's experiment {name!r} was deleted: mlflow experiments restore -x {experiment.experiment_id}"
            )
        else:
            experiment_id = experiment.experiment_id
        key = sha256(f"{run.project}\0{run.tracker_id}".encode("utf-8", "surrogatepass")).hexdigest()
        found = client.search_runs([experiment_id], f"tags.`{_ID}` = '{key}'", max_results=1)
        if found:
            return found[0]
        tags = {_ID: key, "gapless.run_id": run.tracker_id[:_MAX_TEXT], **_description(run)}
        return client.create_run(
            experiment_id, start_time=round(run.created * 1000), tags=tags, run_name=run.name or run.tracker_id
        )

    def _row(
        self,
        step: int,
        t: float,
        values: dict[str, Value],
        points: list[Any],
        tags: dict[str, str],
        refused: list[Refusal],
    ) -> None:
        for key, value in values.items():
            try:
                if isinstance(value, (bool, int, float)):
                    number = _number(value)
                    name = self._names.map(key, tags)
                    if not self._asks or step not in self._steps_of(name):
                        points.append(self._entities.Metric(name, number, round(t * 1000), step))
                else:
                    self._artifact(step, key, value, tags)
            except _Unfit as reason:
                refused.append(Refusal(step, key, str(reason)))

    def _steps_of(self, name: str) -> Intervals:
        """The steps at which the tracker has a point of this name, without those of the batch at hand."""
        if name not in self._steps:
            steps = self._steps[name] = Intervals()
            for point in self._client.get_metric_history(self._id, name):
                steps.add(point.step)
        return self._steps[name]

    def _artifact(self, step: int, key: str, value: Value, tags: dict[str, str]) -> None:
        """What is no number lies in a file of its key and step; the same file again is the same file."""
        name = self._names.map(key, tags)
        match value:
            case str():
                self._client.log_text(self._id, value, f"text/{name}/{step}.txt")
            case Text(text=text):
                self._client.log_text(self._id, text, f"text/{name}/{step}.txt")
            case list():
                self._client.log_text(self._id, as_json(value), f"text/{name}/{step}.json")
            case Table(columns=columns, rows=rows):
                path = f"tables/{name}/{step}.json"
                self._client.log_text(self._id, as_json({"columns": columns, "data": rows}), path)
                entry = {"path": path, "type": "table"}
                if entry not in self._tables:
                    self._tables.append(entry)
                # The tag by which MLflow's page finds tables has room for some of them: the newest.
                while len(text := as_json(self._tables)) > _MAX_TEXT:
                    self._tables.pop(0)
                tags["mlflow.loggedArtifacts"] = text
            case Media(type=kind, items=items):
                for place, item in enumerate(items):
                    self._media(item, f"{kind}/{name}/{step}-{place}")
            case Missing(reason=reason):
                raise _Unfit(reason)

    def _media(self, item: MediaItem, path: str) -> None:
        if item.path is None:
            self._client.log_text(self._id, as_json(item.info), f"{path}.json")
            return
        try:
            content = item.path.read_bytes()
        except OSError as error:
            raise _Unfit(f"its file cannot be read: {error.strerror}") from None
        with _folder_of(self._id) as folder:
            copy = Path(folder) / f"{Path(path).name}{item.path.suffix}"
            copy.write_bytes(content)
            self._client.log_artifact(self._id, str(copy), str(Path(path).parent))

    def _send(self, points: list[Any], tags: dict[str, str], most: int) -> None:
        """In requests within MLflow's limits, the names of a request's points before or with them."""
        entities = [self._entities.RunTag(tag, value[:_MAX_TEXT]) for tag, value in tags.items()]
        for start in range(0, len(entities), _MAX_TAGS):
            self._log_batch([], entities[start : start + _MAX_TAGS])
        chunk: list[Any] = []
        size = 0
        for point in points:
            bytes_of_it = len(point.key.encode()) + 100
            if len(chunk) == most or size + bytes_of_it > _MAX_REQUEST_BYTES:
                self._log_batch(chunk, [])
                chunk, size = [], 0
            chunk.append(point)
            size += bytes_of_it
        if chunk:
            self._log_batch(chunk, [])
        if self._asks:
            for point in points:
                self._steps_of(point.key).add(point.step)

    def _log_batch(self, metrics: list[Any], tags: list[Any]) -> None:
        store = self._client._tracking_client.store
        if not hasattr(store, "get_host_creds"):
            self._client.log_batch(self._id, metrics=metrics, tags=tags)
            return
        # The client's own call drops a 429's Retry-After; this is the same request with the answer kept.
        rest = need("mlflow", "mlflow.utils.rest_utils")
        endpoint = "/api/2.0/mlflow/runs/log-batch"
        body = {
            "run_id": self._id,
            "metrics": [
                {"key": one.key, "value": _rest_number(one.value), "timestamp": one.timestamp, "step": one.step}
                for one in metrics
            ],
            "tags": [{"key": one.key, "value": one.value} for one in tags],
        }
        answer = rest.http_request(store.get_host_creds(), endpoint, "POST", raise_on_status=False, json=body)
        if answer.status_code == 413:
            raise Rejected("MLflow: the request is too large", too_large=True)
        if answer.status_code == 429 or answer.status_code >= 500:
            wait = answer.headers.get("Retry-After", "")
            raise Retryable(f"MLflow answered {answer.status_code}", float(wait) if wait.isdigit() else None)
        rest.verify_rest_response(answer, endpoint)

    def _send_config(self, config: dict[str, Any], refused: list[Refusal]) -> None:
        self._client.log_text(self._id, as_json(config), "config.json")
        news = []
        for name, value in params_of(config).items():
            text = value[:_MAX_TEXT]
            held = self._params.get(name)
            if held is None:
                news.append(self._entities.Param(name, text))
            elif held != text:
                refused.append(
                    Refusal(None, name, "MLflow keeps a parameter as first set; config.json has the new one")
                )
        for start in range(0, len(news), _MAX_TAGS):
            self._client.log_batch(self._id, params=news[start : start + _MAX_TAGS])
        self._params.update((param.key, param.value) for param in news)

    def _end(self, state: State) -> None:
        if state.state == "running":
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._client.set_terminated(self._id, _STATUS.get(state.state, "FAILED"), round(state.t * 1000))
        code = "" if state.exit_code is None else str(state.exit_code)
        self._log_batch([], [self._entities.RunTag("gapless.state", f"{state.state} {code}".strip())])


def _check_active(run: Any) -> None:
    if run.info.lifecycle_stage != "active":
        way_out = f"mlflow runs restore --run-id {run.info.run_id}"
        raise Parked(f"MLflow's run {run.info.run_name!r} was deleted: {way_out}, or upload under a new id")


class _Unfit(Exception):
    """MLflow cannot hold this value; the text says why."""


@contextmanager
def translated() -> Iterator[None]:
    """MLflow's exceptions as the uploader's."""
    exceptions = need("mlflow", "mlflow.exceptions")
    try:
        yield
    except exceptions.MlflowException as error:
        reason = f"MLflow: {str(error)[:500]}"
        match error.error_code:
            case "RESOURCE_DOES_NOT_EXIST" | "INVALID_STATE":
                raise Parked(f"{reason}; restore the run (mlflow runs restore), or upload under a new id") from error
            case "PERMISSION_DENIED" | "UNAUTHENTICATED" | "CUSTOMER_UNAUTHORIZED":
                way_out = "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and _PASSWORD"
                raise Parked(f"{reason}; {way_out}", whole_sink=True) from error
            case "INVALID_PARAMETER_VALUE" | "BAD_REQUEST" | "NOT_IMPLEMENTED" | "ENDPOINT_NOT_FOUND":
                raise Rejected(reason) from error
            case _:
                raise Retryable(reason) from error
    except (OSError, TimeoutError) as error:
        raise Retryable(f"MLflow: {error}") from error


@contextmanager
def _folder_of(run: str) -> Iterator[str]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix=f"gapless-{run[:8]}-") as folder:
        yield folder


def _description(run: RunView) -> dict[str, str]:
    """Tags that say what the run is and where it was trained."""
    system = {f"system.{allowed(key)}": value for key, value in run.system.items()}
    git = run.system.get("git")
    fields: dict[str, Any] = {
        "mlflow.runName": run.name,
        "mlflow.note.content": run.notes,
        "mlflow.user": run.system.get("user"),
        "mlflow.source.name": run.system.get("command"),
        "mlflow.source.git.commit": git.get("commit") if isinstance(git, dict) else None,
        "gapless.group": run.group,
        "gapless.job_type": run.job_type,
        "gapless.tags": run.tags or None,
        "gapless.host": run.host,
        **system,
        **{f"summary.{allowed(key)}": value for key, value in run.summary.items() if isinstance(value, str)},
    }
    texts = {
        key: value if isinstance(value, str) else as_json(value) for key, value in fields.items() if value is not None
    }
    return {key: value[:_MAX_TEXT] for key, value in texts.items()}


def _number(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise _Unfit("an integer beyond a 64-bit float") from None
    if number in (float("inf"), float("-inf")):
        raise _Unfit("MLflow stores an infinity as the largest float")
    return number


def _rest_number(value: float) -> float | str:
    return "NaN" if value != value else value


def _check_place(uri: str) -> None:
    """MLflow makes a new database where it finds none, which would hide the one that was only moved away."""
    path = Path(uri.removeprefix(_SQLITE).partition("?")[0])
    if uri.startswith(_SQLITE) and not path.is_file():
        raise Parked(f"{path} lacks what was acknowledged; put it back, or choose another database")


def _beside_database(uri: str) -> str:
    """Where the artifacts of a local database go; empty for a server, which has its own place."""
    return str(Path(uri[len(_SQLITE) :]).resolve().parent / "mlartifacts") if uri.startswith(_SQLITE) else ""
