"""RL-Insight, with the `rl-insight` package's own metric registry and metrics server.

verl sends gauges through Ray to an actor that holds this registry. The uploader has no Ray, so it holds the registry
itself, serves it and registers its address with the RL-Insight server, whose Prometheus then scrapes it. Names are
verl's (`/` becomes `_`, and so does what Prometheus has no letter for); labels are verl's `project` and
`experiment_name`, and `run` and `key`, which keep apart what would meet. Gauges have no time and no history.
"""

from __future__ import annotations

import json
import os
import re
import socket
from functools import cache
from threading import Lock
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Retryable, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._latest import Latest

_ODD = re.compile(r"[^a-zA-Z0-9_]")
_SERVER = "RL_INSIGHT_SERVER_URL"
_lock = Lock()
_shown: dict[tuple[str, str], set[tuple[str, str]]] = {}
"""(project, run) -> (experiment name, key) of its gauges. The package keeps its gauges in one registry a process."""


class RlInsightSink:
    """Gauges for the RL-Insight server at the URL `target`."""

    kind = "rl_insight"
    needs = "rl_insight"
    capabilities = Capabilities(
        exactly_once="only the latest value is served, and a repeated batch sets the same one",
        rewind=True,
        unstepped=True,
        original_time=False,
        settles_intents=False,
    )

    def __init__(
        self,
        target: str = "",
        *,
        listen: str = "0.0.0.0",  # noqa: S104 - the server scrapes from another host
        port: int = 9092,
        namespace: str = "rl_insight_monitor",
    ) -> None:
        """`target`: the RL-Insight server's URL; empty: `RL_INSIGHT_SERVER_URL`.

        `listen`, `port`: where the gauges are served; the port is rl-insight's own default. `namespace`: the prefix of
        every metric's name, rl-insight's own default.
        """
        if not 0 < port < 65536:
            raise Misconfigured(f"sink 'rl_insight': port is {port}; it is 1 to 65535")
        self.target = target
        self._listen = listen
        self._port = port
        self._namespace = namespace

    def open(self, run: RunView, memo: Memo) -> RlInsightSession:
        """A session whose gauges are served and known to the server. Raises Misconfigured or Retryable."""
        url = self.target or os.environ.get(_SERVER, "")
        if not url.startswith(("http://", "https://")):
            raise Misconfigured(f"sink 'rl_insight' needs its server: --to rl_insight:http://HOST:PORT, or {_SERVER}")
        need("rl-insight", "rl_insight")
        with _lock:
            _serve(self._listen, self._port)
            registry = _registry(self._namespace)
        _register(url.rstrip("/"), f"{_address(self._listen)}:{self._port}")
        return RlInsightSession(registry, run, memo)


class RlInsightSession:
    """One run's gauges."""

    def __init__(self, registry: Any, run: RunView, memo: Memo) -> None:
        self._registry = registry
        self._latest = Latest(memo)
        self._show(run, set(self._latest.values))

    def write(self, batch: Batch) -> Ack:
        """Set the batch's last values."""
        changed, gone, refused = self._latest.apply(batch, "RL-Insight")
        self._show(batch.run, changed)
        for key in gone:
            self._unset(batch.run, _experiment(batch.run), key)
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: Prometheus asks by itself."""

    def flush(self) -> Memo:
        """The memo: the values, so that a new process serves them before the next row."""
        return self._latest.memo()

    def close(self) -> None:
        """The gauges stay served. May be called twice."""

    def _show(self, run: RunView, keys: set[str]) -> None:
        for experiment, key in list(_shown.get((run.project, run.tracker_id), ())):
            if experiment != _experiment(run):
                self._unset(run, experiment, key)
                keys |= {key} & self._latest.values.keys()
        for key in keys:
            self._set(run, key, self._latest.values[key][1])

    def _set(self, run: RunView, key: str, value: float) -> None:
        name = _ODD.sub("_", key)
        with _lock:
            self._registry.value(name, f"Gauge {name}", value, {}, _labels(run, _experiment(run), key))
            _shown.setdefault((run.project, run.tracker_id), set()).add((_experiment(run), key))

    def _unset(self, run: RunView, experiment: str, key: str) -> None:
        labels = _labels(run, experiment, key)
        names = tuple(sorted(labels))
        with _lock:
            _shown[run.project, run.tracker_id].discard((experiment, key))
            # The package has no call that takes a gauge away; this is where it keeps them.
            gauge = self._registry._gauges[_ODD.sub("_", key), names]
            gauge.remove(*(labels[name] for name in names))


def _experiment(run: RunView) -> str:
    return run.name or run.tracker_id


def _labels(run: RunView, experiment: str, key: str) -> dict[str, str]:
    return {"project": run.project, "experiment_name": experiment, "run": run.tracker_id, "key": key}


@cache
def _registry(namespace: str) -> Any:
    return need("rl-insight", "rl_insight.utils").MetricRegistry(namespace=namespace)


@cache
def _serve(listen: str, port: int) -> None:
    try:
        need("rl-insight", "rl_insight.utils").start_metrics_http_server(port, listen)
    except OSError as error:
        way_out = "end what listens there, and a watch goes on by itself, or set the sink's option port"
        raise Misconfigured(f"sink 'rl_insight': listen on {listen}:{port}: {error.strerror}; {way_out}") from error


def _address(listen: str) -> str:
    return socket.gethostname() if listen in ("0.0.0.0", "::") else listen  # noqa: S104 - a comparison


def _register(url: str, address: str) -> None:
    """Tell the server where to scrape; again is the same. The package's own call only logs when it fails."""
    body = json.dumps({"job_name": "trainer_metrics", "targets": [{"target": address}]}).encode()
    request = Request(f"{url}/api/v1/prometheus/targets", body, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=10):
            return
    except HTTPError as error:
        error.close()
        reason = f"RL-Insight's server at {url} answered {error.code}"
        if 400 <= error.code < 500 and error.code not in (408, 429):
            raise Misconfigured(f"{reason}; is it an RL-Insight server?") from None
        raise Retryable(reason) from None
    except (URLError, OSError) as error:
        raise Retryable(f"RL-Insight's server at {url}: {error}") from error
