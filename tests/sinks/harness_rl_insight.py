"""The RL-Insight sink in the contract suite: its gauges scraped, its server the package's own app."""

import atexit
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from urllib.request import urlopen

import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf
from prometheus_client.parser import text_string_to_metric_families
from rl_insight.server.http_api import create_app
from rl_insight.utils import load_server_config_file

from gapless_uploader.sink import RunView
from gapless_uploader.sinks.rl_insight import RlInsightSink, _registry, _shown
from tests.sinks.harness import Point, free_port
from tests.sinks.harness_prometheus import LatestHarness


class Harness(LatestHarness):
    kind = "rl_insight"
    extra = "rl-insight"
    vendor = "rl_insight"
    refusal_is_for_all = True
    way_out = "is it an RL-Insight server?"

    def sink(self) -> RlInsightSink:
        return RlInsightSink(server(), listen="127.0.0.1", port=port())

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.close()

    @contextmanager
    def outage(self) -> Iterator[None]:
        rl_insight_server().down()
        yield
        rl_insight_server().up()

    @contextmanager
    def refusal(self, run: RunView) -> Iterator[None]:
        rl_insight_server().down()
        rl_insight_server().up_as_another()
        yield
        rl_insight_server().down()
        rl_insight_server().up()

    def points(self, run: RunView) -> list[Point]:
        with urlopen(f"http://127.0.0.1:{port()}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [one for family in families for one in family.samples if "key" in one.labels]
        place = (run.project, run.tracker_id)
        return [
            Point(0, one.labels["key"], one.value)
            for one in samples
            if (one.labels["project"], one.labels["run"]) == place
        ]

    def close(self) -> None:
        """The package's registry is one a process; the next test begins with none of this one's gauges."""
        for gauge in _registry("rl_insight_monitor")._gauges.values():
            gauge.clear()
        _shown.clear()


@cache
def port() -> int:
    """The port on which this process serves the package's gauges."""
    return free_port()


@cache
def targets() -> Path:
    """The file in which the server keeps what its Prometheus scrapes."""
    folder = Path(mkdtemp(prefix="gapless-rl-insight-"))
    atexit.register(rmtree, folder)
    return folder / "targets" / "prometheus-targets.yml"


class RlInsightServer:
    """The package's own HTTP app, in a thread of this process, always at one port."""

    def __init__(self) -> None:
        self._conf = load_server_config_file()
        OmegaConf.update(self._conf, "server.data_dir", str(targets().parent.parent))
        OmegaConf.update(self._conf, "server.runtime_dir", str(targets().parent.parent / "runtime"))
        self._port = free_port()
        self.up()
        self.url = f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        """Listen; after `down` with what it knew."""
        self._serve(create_app(self._conf))

    def up_as_another(self) -> None:
        """Listen at the same port as a server that knows none of RL-Insight's paths."""
        self._serve(FastAPI())

    def down(self) -> None:
        """Refuse connections."""
        self._server.should_exit = True
        self._thread.join()

    def _serve(self, app: Any) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        listening = socket.create_server(("127.0.0.1", self._port))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()


@cache
def rl_insight_server() -> RlInsightServer:
    """One a process."""
    return RlInsightServer()


def server() -> str:
    """The URL of the package's own HTTP server."""
    return rl_insight_server().url
