"""The ClearML sink in the contract suite: its offline session, read by ClearML's own import."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CLEARML_OFFLINE_MODE", "1")

from clearml.backend_interface.metrics.interface import Metrics

from gapless_uploader.operations import Value
from gapless_uploader.sink import RunView
from gapless_uploader.sinks.clearml import ClearmlSink, split
from tests.sinks.harness import Point, SinkHarness, moved_away, pipe_in_place_of


class Harness(SinkHarness):
    kind = "clearml"
    vendor = "clearml"
    way_out = "put it back, or choose another folder"

    def sink(self) -> ClearmlSink:
        return ClearmlSink(str(self.folder / "sessions"))

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(self.folder / "sessions")

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        return pipe_in_place_of(self.session(run) / "metrics.jsonl")

    def session(self, run: RunView) -> Path:
        found = [path.parent for path in (self.folder / "sessions" / run.project).glob("*/task.json")]
        (folder,) = (path for path in found if path.name.rpartition("@")[2] == run.tracker_id)
        return folder

    def events(self, run: RunView) -> list[dict[str, Any]]:
        """Every event that ClearML's import sends to the server."""
        sent: list[dict[str, Any]] = []

        def send(batch: Any) -> Any:
            sent.extend(batch.requests)
            return SimpleNamespace(ok=lambda: True)

        task = SimpleNamespace(id="imported", session=SimpleNamespace(send=send))
        folder = self.session(run)
        task_id = json.loads((folder / "task.json").read_text())["id"]
        Metrics.report_offline_session(task, str(folder), remote_url="file://nowhere", only_with_id=task_id)
        return sent

    def points(self, run: RunView) -> list[Point]:
        """By the server's rule that the last event of an iteration, title and series stays."""
        newest: dict[tuple[int, str], Point] = {}
        repeated = []
        for event in self.events(run):
            if event["type"] == "training_stats_scalar":
                key = self._key_of(event["metric"], event["variant"])
                point = Point(event["iter"], key, event["value"], event["timestamp"] / 1000)
                if newest.get((point.step, key)) == point:
                    repeated.append(point)
                newest[point.step, key] = point
        return [*newest.values(), *repeated]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        plots = (event for event in self.events(run) if event["type"] == "plot")
        return {(event["iter"], self._key_of(event["metric"], event["variant"])): event["plot_str"] for event in plots}

    @staticmethod
    def _key_of(title: str, series: str) -> str:
        if series == title:
            return title
        title = "" if title == "/" else title
        return f"{title}/{series.removeprefix('/')}"

    def held(self, value: Value) -> float:
        return float(value)  # type: ignore[arg-type]


def check(key: str) -> bool:
    """Whether `key` comes back from its title and series."""
    return Harness._key_of(*split(key)) == key
