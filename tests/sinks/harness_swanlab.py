"""The SwanLab sink in the contract suite, against the test server that the real library works against.

Points are the server's raw rows: one that was stored twice is there twice.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from pathlib import Path
from typing import Any

from gapless_uploader.operations import Value
from gapless_uploader.sink import RunView
from gapless_uploader.sinks._swanlab_names import key_name, project_name, run_slug
from gapless_uploader.sinks.swanlab import SwanlabSink
from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.clock import unix
from tests.servers.swanlab.model import Experiment
from tests.sinks.harness import Point, SinkHarness


class Harness(SinkHarness):
    kind = "swanlab"
    vendor = "requests"
    refusal_is_for_all = True
    way_out = "see that the account may write there"
    random_histories = 20

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = SwanLabServer()
        self._before = dict(os.environ)
        os.environ |= {"SWANLAB_API_HOST": self.server.url, "SWANLAB_API_KEY": self.server.api_key, "NO_PROXY": "*"}

    def sink(self) -> SwanlabSink:
        return SwanlabSink(settle=0)

    def outage(self) -> AbstractContextManager[None]:
        return self.server.refused()

    @contextmanager
    def refusal(self, run: RunView) -> Iterator[None]:
        fault = self.server.arm("metrics", "status", status=403, count=None)
        yield
        self.server.faults.armed.remove(fault)

    def experiment(self, run: RunView) -> Experiment:
        return self.server.projects[project_name(run.project)].experiments[run_slug(run.tracker_id)]

    def points(self, run: RunView) -> list[Point]:
        """Every row as stored; a NaN with a sign beside it is the infinity of that sign."""
        rows = [row for row in self.experiment(run).raw if row.kind == "scalar"]
        signs = {(row.step, row.key.removesuffix("~inf")): row.value for row in rows if row.key.endswith("~inf")}
        found = []
        for row in rows:
            sign = signs.get((row.step, row.key))
            if not row.key.endswith("~inf"):
                value = row.value if sign is None else sign * inf
                found.append(Point(row.step, row.key, value, unix(row.create_time)))
        return found

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        return {place: content.decode() for place, content in self.media(run).items()}

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        held = self.experiment(run)
        return {(row.step, row.key): held.objects[row.data[0]] for row in held.raw if row.kind == "media"}

    def state(self, run: RunView) -> str | None:
        return {"FINISHED": "finished", "CRASHED": "failed"}.get(self.experiment(run).state)

    def held(self, value: Value) -> Any:
        return float(value) if isinstance(value, int | float) else value

    def key(self, key: str) -> str:
        return key_name(key)

    def close(self) -> None:
        os.environ.clear()
        os.environ |= self._before
        self.server.stop()
        assert self.server.bugs == []
