"""The latest value of every metric of every followed run, for a Prometheus to scrape.

`gapless_<key>{project,run,name,key}` holds a value, `gapless_step` the run's last step, `gapless_run_state` is 1 at the
label that is the run's state. The true key is a label, so keys that Prometheus would write alike stay apart. Prometheus
keeps its own time: a value counts from its scrape on, and what lies before is not brought in.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from threading import Lock
from typing import Any

from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._latest import Latest

_ODD = re.compile(r"[^a-zA-Z0-9_]")
_LABELS = ("project", "run", "name")


class PrometheusSink:
    """Serves `http://<target>/metrics`. Its server starts with the first `open` and ends with the process."""

    kind = "prometheus"
    needs = "prometheus_client"
    capabilities = Capabilities(
        exactly_once="only the latest value is served, and a repeated batch sets the same one",
        rewind=True,
        unstepped=True,
        end_state=True,
        original_time=False,
        settles_intents=False,
    )

    def __init__(self, target: str = "") -> None:
        """`target`: `host:port` to listen on; empty: 127.0.0.1:9109."""
        self.target = target or "127.0.0.1:9109"
        host, _, port = self.target.rpartition(":")
        if not host or not port.isdigit():
            raise Misconfigured(f"sink 'prometheus': target is {target!r}; it is host:port, as in 127.0.0.1:9109")
        self._host, self._port = host.strip("[]"), int(port)
        self._lock = Lock()
        self._server: Any = None
        self._sessions: dict[tuple[str, ...], PrometheusSession] = {}

    @property
    def port(self) -> int:
        """The port that is listened on, once a session was opened."""
        port: int = self._server.server_address[1]
        return port

    def open(self, run: RunView, memo: Memo) -> PrometheusSession:
        """A session whose values are served, those of the memo at once."""
        client = need("prometheus", "prometheus_client")
        families = need("prometheus", "prometheus_client.core")
        session = PrometheusSession(run, memo)
        with self._lock:
            if self._server is None:
                registry = client.CollectorRegistry(auto_describe=False)
                registry.register(_Collector(self, families.GaugeMetricFamily))
                try:
                    self._server, _ = client.start_http_server(self._port, self._host, registry)
                except OSError as error:
                    raise self._taken(error) from error
            self._sessions[run.project, run.tracker_id] = session
        return session

    def check(self) -> str:
        """For `doctor`: that the port can be listened on. Raises Misconfigured."""
        try:
            with socket.create_server((self._host, self._port)):
                return f"serves {self.target}"
        except OSError as error:
            raise self._taken(error) from error

    def _taken(self, error: OSError) -> Misconfigured:
        way_out = "end what listens there, and a watch goes on by itself, or use --to prometheus:HOST:PORT"
        return Misconfigured(f"sink 'prometheus': listen on {self.target}: {error.strerror}; {way_out}")

    def sessions(self) -> list[PrometheusSession]:
        """The runs that are served, sessions that were closed included."""
        with self._lock:
            return list(self._sessions.values())

    def close(self) -> None:
        """End the server. May be called twice."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


class PrometheusSession:
    """One run's latest values, served until the process ends."""

    def __init__(self, run: RunView, memo: Memo) -> None:
        self._latest = Latest(memo)
        self._lock = Lock()
        self.labels = run.project, run.tracker_id, run.name or run.tracker_id
        self.state = memo.get("state", run.state)

    def write(self, batch: Batch) -> Ack:
        """Take the batch's last values."""
        with self._lock:
            _, _, refused = self._latest.apply(batch, "Prometheus")
            self.labels = batch.run.project, batch.run.tracker_id, batch.run.name or batch.run.tracker_id
            self.state = batch.run.state
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: Prometheus asks by itself."""

    def flush(self) -> Memo:
        """The memo: the values, so that a new process serves them before the next row."""
        return {**self._latest.memo(), "state": self.state}

    def close(self) -> None:
        """The values stay served. May be called twice."""

    def snapshot(self) -> dict[str, tuple[int, float]]:
        """Key -> (step, value). Safe from the server's thread."""
        with self._lock:
            return dict(self._latest.values)


class _Collector:
    def __init__(self, sink: PrometheusSink, family: Any) -> None:
        self._sink = sink
        self._family = family

    def collect(self) -> Iterator[Any]:
        """Metric families, as prometheus_client asks for them at each scrape."""
        steps = self._family("gapless_step", "The last step of a run.", labels=_LABELS)
        states = self._family("gapless_run_state", "1 at the state of a run.", labels=[*_LABELS, "state"])
        found: dict[str, Any] = {}
        for session in self._sink.sessions():
            values = session.snapshot()
            states.add_metric([*session.labels, session.state], 1.0)
            if values:
                steps.add_metric(session.labels, max(step for step, _ in values.values()))
            for key, (_, value) in values.items():
                name = f"gapless_{_ODD.sub('_', key)}"
                if name in ("gapless_step", "gapless_run_state"):
                    name += "_"
                if name not in found:
                    found[name] = self._family(name, "The latest value of a metric.", labels=[*_LABELS, "key"])
                found[name].add_metric([*session.labels, key], value)
        yield states
        yield steps
        yield from found.values()
