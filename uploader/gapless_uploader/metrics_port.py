"""What the uploader does, as Prometheus text on 127.0.0.1: counters from its events, gauges from its current trouble.

`/metrics` is all there is. It answers this host only, and names runs by nothing: a thousand runs are a few lines.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gapless_uploader import events
from gapless_uploader.events import Event

_FAMILIES = {
    "gapless_rows_total": ("counter", "Rows that a sink acknowledged."),
    "gapless_failures_total": ("counter", "Steps of a run that a sink did not take; they are tried again."),
    "gapless_refused_total": ("counter", "Values that a tracker cannot hold; they stay in the spool."),
    "gapless_damaged_total": ("counter", "Damaged lines of the spool, kept as dead letters."),
    "gapless_stuck_calls_total": ("counter", "Calls of a sink that ran over their time limit."),
    "gapless_runs": ("gauge", "Runs that were found."),
    "gapless_live_runs": ("gauge", "Runs that are not over, or not wholly uploaded, at a sink."),
    "gapless_failing_runs": ("gauge", "Runs that are behind at a sink because of a failure, or parked."),
    "gapless_lag_bytes": ("gauge", "Bytes of the spool, times sinks, that are not uploaded yet."),
    "gapless_lag_seconds": (
        "gauge",
        "Seconds since a sink last took rows, while some are not uploaded; else 0.",
    ),
    "gapless_up_seconds": ("gauge", "Seconds since the start."),
}


class Metrics:
    """Counts events; `text` is read by the server's threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._gauges: dict[tuple[str, str], float] = {}
        self._last_rows: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case events.Uploaded(sink=sink, rows=rows):
                    self._counts["gapless_rows_total", sink] += rows
                    self._last_rows[sink] = self._clock()
                case events.SinkFailed(sink=sink) | events.RunParked(sink=sink):
                    self._counts["gapless_failures_total", sink] += 1
                case events.RecordsRefused(sink=sink, count=count):
                    self._counts["gapless_refused_total", sink] += count
                case events.CallStuck(sink=sink):
                    self._counts["gapless_stuck_calls_total", sink] += 1
                case events.DamageFound():
                    self._counts["gapless_damaged_total", ""] += 1
                case _:
                    pass

    def observe(self, uploader: Any) -> None:
        """Take the gauges from an `Uploader`, in the turn's thread."""
        total, done = uploader.bytes_total_and_done()
        gauges = {("gapless_runs", ""): float(uploader.num_runs), ("gapless_lag_bytes", ""): float(total - done)}
        failing = Counter(name for _, name in uploader.failed)
        behind = {name for _, name in uploader.behind()}
        now = self._clock()
        with self._lock:
            for name, lane in uploader.lanes.items():
                gauges["gapless_live_runs", name] = float(len(lane.pipelines))
                gauges["gapless_failing_runs", name] = float(failing[name])
                since = self._last_rows.get(name, self._began)
                gauges["gapless_lag_seconds", name] = now - since if name in behind else 0.0
            self._gauges = gauges

    def text(self) -> str:
        """All of it, in Prometheus' text format."""
        with self._lock:
            values: dict[tuple[str, str], float] = {**self._counts, **self._gauges}
        values["gapless_up_seconds", ""] = self._clock() - self._began
        lines = []
        for family, (kind, says) in _FAMILIES.items():
            lines += [f"# HELP {family} {says}", f"# TYPE {family} {kind}"]
            for (name, sink), value in sorted(values.items()):
                if name == family:
                    label = f'{{sink="{_label(sink)}"}}' if sink else ""
                    lines.append(f"{name}{label} {value}")
        return "\n".join(lines) + "\n"


class MetricsServer:
    """Serves `metrics` on 127.0.0.1 from a daemon thread. Raises OSError when the port is taken."""

    def __init__(self, metrics: Metrics, port: int) -> None:
        """Port 0 takes a free one."""
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(metrics))
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop serving. May be called once."""
        self._server.shutdown()
        self._server.server_close()


def _handler(metrics: Metrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "there is /metrics alone")
                return
            body = metrics.text().encode("utf-8", "backslashreplace")
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Say nothing: events are what the uploader says."""

    return Handler


def _label(text: str) -> str:
    return text.removesuffix(":").replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
