"""The MLflow sink in the contract suite, on a database of its own, read back with MLflow's client."""

import atexit
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import isinf
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp
from typing import Any

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

import mlflow

from gapless_uploader.operations import Value
from gapless_uploader.sink import RunView
from gapless_uploader.sinks._mlflow_names import TAG
from gapless_uploader.sinks.mlflow import MlflowSink
from tests.sinks.harness import Point, SinkHarness, moved_away


class Harness(SinkHarness):
    kind = "mlflow"
    vendor = "mlflow"
    way_out = "mlflow runs restore --run-id"
    random_histories = 4

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        copyfile(empty_database(), folder / "mlflow.db")
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"

    def sink(self) -> MlflowSink:
        return MlflowSink(self.uri)

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(self.folder / "mlflow.db")

    @contextmanager
    def refusal(self, run: RunView) -> Iterator[None]:
        """Somebody deletes the run, and restores it as the message says."""
        known = self.run(run).info.run_id
        self.client().delete_run(known)
        yield
        self.client().restore_run(known)

    def client(self) -> Any:
        return mlflow.MlflowClient(self.uri)

    def run(self, run: RunView) -> Any:
        experiment = self.client().get_experiment_by_name(run.project)
        (found,) = self.client().search_runs([experiment.experiment_id], f"tags.`gapless.run_id` = '{run.tracker_id}'")
        return found

    def points(self, run: RunView) -> list[Point]:
        held = self.run(run)
        names = {tag[len(TAG) :]: name for tag, name in held.data.tags.items() if tag.startswith(TAG)}
        return [
            Point(point.step, names.get(key, key), point.value, point.timestamp / 1000)
            for key in held.data.metrics
            for point in self.client().get_metric_history(held.info.run_id, key)
        ]

    def _files(self, run: RunView, kind: str) -> dict[tuple[int, str], bytes]:
        held = self.run(run).info
        root = Path(held.artifact_uri.removeprefix("file://")) / kind
        return {
            (int(path.stem.split("-")[0]), str(path.parent.relative_to(root))): path.read_bytes()
            for path in root.rglob("*.*")
        }

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        texts = {place: content.decode() for place, content in self._files(run, "text").items()}
        tables = {place: json.dumps(json.loads(content)) for place, content in self._files(run, "tables").items()}
        return texts | tables

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        return self._files(run, "image")

    def state(self, run: RunView) -> str | None:
        return {"RUNNING": None, "FINISHED": "finished", "FAILED": "failed"}[self.run(run).info.status]

    def held(self, value: Value) -> float | None:
        number = float(value)  # type: ignore[arg-type]
        # SQLite keeps no sign of a zero.
        return None if isinf(number) else number + 0.0


@cache
def empty_database() -> Path:
    """A database with MLflow's tables, made once a process, since that takes seconds."""
    folder = Path(mkdtemp(prefix="gapless-mlflow-"))
    atexit.register(rmtree, folder)
    mlflow.MlflowClient(f"sqlite:///{folder / 'empty.db'}")
    return folder / "empty.db"
