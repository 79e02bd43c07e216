"""The RL-Insight sink in the contract suite: its gauges scraped, its server the package's own app."""

import atexit
import socket
import threading
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from urllib.request import urlopen

import uvicorn
from omegaconf import OmegaConf
from prometheus_client.parser import text_string_to_metric_families
from rl_insight.server.http_api import create_app
from rl_insight.utils import load_server_config_file

from gapless_uploader.sink import RunView
from gapless_uploader.sinks.rl_insight import RlInsightSink, _registry, _shown
from tests.sinks.harness import Point
from tests.sinks.harness_prometheus import LatestHarness


class Harness(LatestHarness):
    kind = "rl_insight"
    extra = "rl-insight"
    vendor = "rl_insight"

    def sink(self) -> RlInsightSink:
        return RlInsightSink(server(), listen="127.0.0.1", port=port())

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.close()

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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@cache
def targets() -> Path:
    """The file in which the server keeps what its Prometheus scrapes."""
    folder = Path(mkdtemp(prefix="gapless-rl-insight-"))
    atexit.register(rmtree, folder)
    return folder / "targets" / "prometheus-targets.yml"


@cache
def server() -> str:
    """The URL of the package's own HTTP server, in a thread of this process."""
    conf = load_server_config_file()
    OmegaConf.update(conf, "server.data_dir", str(targets().parent.parent))
    OmegaConf.update(conf, "server.runtime_dir", str(targets().parent.parent / "runtime"))
    config = uvicorn.Config(create_app(conf), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    served = uvicorn.Server(config)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        handle = listening.dup()
    handle.listen()
    threading.Thread(target=served.run, args=([handle],), daemon=True).start()
    return f"http://127.0.0.1:{handle.getsockname()[1]}"
