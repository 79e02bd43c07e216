"""The server in a process of its own, for benchmarks and for clients that must outlive a test's thread."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


class SwanLabServerProcess:
    """`python -m tests.servers.swanlab_server` as a child; ends with the `with` block or with this process.

    `options` are flags of that command, e.g. "--trust-rows".
    """

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "tests.servers.swanlab_server", "--port", "0", *options]
        self._child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._child.stdout is not None
        self.pid = self._child.pid
        self.url = self._child.stdout.readline().strip()
        if not self.url.startswith("http://127.0.0.1:"):
            self.stop()
            raise RuntimeError(f"the server did not start: {self.url!r}")

    def __enter__(self) -> SwanLabServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> dict[str, Any]:
        """Ends the child; `{"cpu_s", "num_bytes", "num_requests"}` as it reported them, {} the second time."""
        if self._child.stdin is None or self._child.stdin.closed:
            return {}
        out, _ = self._child.communicate(timeout=30)
        report: dict[str, Any] = json.loads(out.splitlines()[-1]) if out.strip() else {}
        return report

    def debug(self, name: str, body: dict[str, Any] | None = None, *, method: str | None = None) -> Any:
        """The answer of `/_debug/NAME`: a GET without a body, a POST with one."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/_debug/{name}", data=data, method=method)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.load(answer)

    def state(self, *, points: bool = False) -> dict[str, Any]:
        state: dict[str, Any] = self.debug(f"state?points={int(points)}")
        return state

    def arm(self, endpoint: str, kind: str, **options: Any) -> None:
        """Arms a fault; `where` cannot travel, `contains` can."""
        self.debug("faults", {"endpoint": endpoint, "kind": kind, **options})
