"""Two clients for tests: the real library in a process of its own, and one that speaks plain HTTP.

The real library keeps globals, threads and files, so it never runs inside the test's process: each script
gets a child with its own home and working directory, and none of the caller's SWANLAB_ variables or proxies.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.servers.swanlab.clock import iso

QUIET = {
    "SWANLAB_INTERACTIVE": "false",
    "SWANLAB_TERMINAL_PROXY_TYPE": "none",
    **{
        f"SWANLAB_PROBE_{name}": "false"
        for name in ("HARDWARE", "RUNTIME", "REQUIREMENTS", "CONDA", "GIT", "SWANLAB", "MONITOR")
    },
}
"""Switches off what the library would record of its host and of the terminal."""


class RealClient:
    """Runs scripts and commands of the real swanlab package below `root`, against one server."""

    def __init__(self, root: Path, url: str, api_key: str, *, quiet: bool = True) -> None:
        self.home, self.cwd = root / "home", root / "cwd"
        self.home.mkdir(parents=True, exist_ok=True)
        self.cwd.mkdir(exist_ok=True)
        self.env = {
            "HOME": str(self.home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "NO_PROXY": "*",
            "PYTHONUNBUFFERED": "1",
            "SWANLAB_API_KEY": api_key,
            "SWANLAB_API_HOST": url,
            **(QUIET if quiet else {}),
        }

    def run(self, *command: str, timeout_s: float = 120, check: bool = True) -> str:
        """The output of a command in the client's world. AssertionError with all it said if it fails."""
        done = subprocess.run(
            command,
            cwd=self.cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command[:3]} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def script(self, source: str, **arguments: Any) -> Any:
        """Runs Python source with `arguments` as globals; what it assigned to `result` comes back through JSON."""
        answer = self.cwd / "result.json"
        answer.unlink(missing_ok=True)
        lines = [
            "import json, pathlib, swanlab",
            f"globals().update(json.loads({json.dumps(json.dumps(arguments))}))",
            "result = None",
            textwrap.dedent(source),
            f"pathlib.Path({str(answer)!r}).write_text(json.dumps(result))",
        ]
        self.run(sys.executable, "-c", "\n".join(lines))
        return json.loads(answer.read_text())

    def run_dirs(self) -> list[Path]:
        """The run directories that offline runs left, oldest first."""
        return sorted((self.cwd / "swanlog").glob("run-*"), key=lambda path: path.stat().st_mtime_ns)


class RawClient:
    """One keep-alive connection, logged in. Not thread safe."""

    def __init__(self, url: str, api_key: str, *, timeout_s: float = 30) -> None:
        self.netloc, self.api_key, self.timeout_s = url.removeprefix("http://"), api_key, timeout_s
        self.connection = http.client.HTTPConnection(self.netloc, timeout=timeout_s)
        self.sid = ""
        self.username = ""
        self.project: dict[str, Any] = {}
        self.run: dict[str, Any] = {}

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
        """Sends a request and returns its answer unread; JSON unless `body` is bytes."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if self.sid:
            headers["Cookie"] = f"sid={self.sid}"
        self.connection.request(method, path, data, headers)
        return self.connection.getresponse()

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """(status, decoded JSON) of a request below `/api`."""
        answer = self.send(method, "/api" + path, body, **headers)
        text = answer.read()
        return answer.status, json.loads(text) if text else None

    def login(self) -> dict[str, Any]:
        """Logs in and keeps the session. AssertionError if the server would not have us."""
        self.sid = ""
        status, answer = self.call("POST", "/login/api_key", authorization=self.api_key)
        assert status == 200, answer
        self.sid, self.username = answer["sid"], answer["userInfo"]["username"]
        found: dict[str, Any] = answer
        return found

    def open_run(self, run_id: str = "run", project: str = "proj", **told: Any) -> int:
        """Logs in, makes the project and the run, or takes it up again; the status of the run's POST."""
        self.login()
        self.call("POST", f"/projects/{self.username}", {"name": project, "visibility": "PRIVATE"})
        _, self.project = self.call("GET", f"/project/{self.username}/{project}")
        path = f"/project/{self.username}/{project}"
        body = {"name": run_id, "cuid": run_id, "createdAt": "2026-01-01T00:00:00.000000Z", **told}
        status, self.run = self.call("POST", f"{path}/experiment", body)
        return status

    @property
    def run_path(self) -> str:
        return f"/project/{self.username}/{self.project['name']}/runs/{self.run['cuid']}"

    def batch(self, rows: list[dict[str, Any]], kind: str = "scalar") -> dict[str, Any]:
        """A metrics request's body."""
        ids = {"projectId": self.project["cuid"], "experimentId": self.run["cuid"]}
        return {"type": kind, **ids, "metrics": rows}

    def post_rows(self, rows: list[dict[str, Any]], kind: str = "scalar") -> tuple[int, Any]:
        return self.call("POST", "/house/metrics", self.batch(rows, kind))

    def read(self, *keys: str, created_at: int = 1) -> dict[str, list[Any]]:
        """`{key: [[step, value], ...]}` of the sampled lines that the server shows now."""
        refs = [{"experimentId": self.run["cuid"], "key": key, "createdAt": created_at} for key in keys]
        body = {"projectId": self.project["cuid"], "xType": "step", "range": [0, 0], "columns": refs, "num": 1500}
        _, lines = self.call("POST", "/house/metrics/scalar", body)
        return {line["key"]: [[point["index"], point["data"]] for point in line["metrics"]] for line in lines}


def row(key: str, step: int, data: Any, t: float = 1_700_000_000.0) -> dict[str, Any]:
    """A scalar or media row as the library would send it, logged at `t` (unix seconds)."""
    return {"key": key, "index": step, "data": data, "create_time": iso(t)}
