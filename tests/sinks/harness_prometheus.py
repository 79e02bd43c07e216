"""The Prometheus sink in the contract suite, scraped and read by Prometheus's own parser."""

import socket
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gapless_uploader.operations import Row, Value
from gapless_uploader.sink import RunView
from gapless_uploader.sinks.prometheus import PrometheusSink
from tests.sinks.harness import Point, SinkHarness, free_port


class LatestHarness(SinkHarness):
    """A tracker that shows the last value of a key and no step."""

    keeps_history = False
    open_sessions_notice = False

    def expect(self, rows: Iterable[Row]) -> list[Point]:
        last: dict[str, Point] = {}
        for point in super().expect(rows):
            last[point.key] = max(point, last.get(point.key, point), key=lambda one: one.step)
        return sorted((replace(point, step=0) for point in last.values()), key=repr)

    def held(self, value: Value) -> float | None:
        try:
            return float(value)  # type: ignore[arg-type]
        except OverflowError:
            return None


class Harness(LatestHarness):
    kind = "prometheus"
    vendor = "prometheus_client"
    refusal_is_for_all = True
    way_out = "end what listens there"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sink = PrometheusSink("127.0.0.1:0")

    def sink(self) -> PrometheusSink:
        return self._sink

    def uploading(self) -> PrometheusSink:
        """At a port that somebody else can take."""
        self._sink = PrometheusSink(f"127.0.0.1:{free_port()}")
        return self._sink

    @contextmanager
    def outage(self) -> Iterator[None]:
        """Prometheus asks and is not asked, so what can be away is the port: somebody else took it."""
        self._sink.close()
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", int(self._sink.target.rpartition(":")[2])))
            other.listen()
            yield

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        return self.outage()

    def samples(self, run: RunView) -> list[Sample]:
        with urlopen(f"http://127.0.0.1:{self._sink.port}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        return [one for one in samples if (one.labels["project"], one.labels["run"]) == (run.project, run.tracker_id)]

    def points(self, run: RunView) -> list[Point]:
        return [Point(0, one.labels["key"], one.value) for one in self.samples(run) if "key" in one.labels]

    def state(self, run: RunView) -> str | None:
        (state,) = (one.labels["state"] for one in self.samples(run) if one.name == "gapless_run_state")
        return None if state == "running" else state

    def close(self) -> None:
        self._sink.close()
