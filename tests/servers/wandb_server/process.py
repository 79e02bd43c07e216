"""A server in a process of its own: started, asked, killed and started again at the same port."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[3]


class ServerProcess:
    """A context manager. With a `state_file`, `kill` and `start` lose nothing that was answered."""

    def __init__(self, state_file: Path | None = None, *, any_key: bool = False) -> None:
        self._state_file, self._any_key = state_file, any_key
        self._process: subprocess.Popen[str] | None = None
        self._port = 0
        self.url = ""

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start, at the port it had before if it had one; returns when it listens."""
        command = [sys.executable, "-m", "tests.servers.wandb_server", "--port", str(self._port)]
        if self._state_file is not None:
            command += ["--state-file", str(self._state_file)]
        if self._any_key:
            command.append("--any-key")
        self._process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        if not self.url:
            self.kill()
            raise RuntimeError("the server did not start; its standard error says why")
        self._port = int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        """SIGKILL, as a machine that goes away."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def debug(self, name: str, given: Any = None) -> Any:
        """Ask or tell a debug path: `stats`, `state`, `run`, `arm`, `disarm`, `faults`, `lag`, `set`."""
        request = urllib.request.Request(f"{self.url}/_debug/{name}", data=json.dumps(given or {}).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def run(self, project: str, run_id: str, entity: str = "acme") -> dict[str, Any] | None:
        """Everything about a run, see `debug.run_as_dict`; None where it is not there."""
        found: dict[str, Any] | None = self.debug("run", {"entity": entity, "project": project, "run": run_id})
        return found

    def arm(self, endpoint: str, kind: str, **how: Any) -> None:
        """Arm a fault; see `Fault` for `how`. What waits for an event is let go by `debug("disarm")`."""
        self.debug("arm", {"endpoint": endpoint, "kind": kind, **how})
