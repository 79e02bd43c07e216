"""A stand-in for a ClearML API server: the calls the sink makes, with the server's own rule for an event's id.

Written after the request classes of the `clearml` package; the real server was not at hand.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import jwt


class ClearmlServer:
    """Tasks, projects and events. `failures`: (result code, whether applied) of the next calls that add events."""

    def __init__(self) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}
        self.projects: dict[str, str] = {}
        self.events: dict[str, dict[str, Any]] = {}
        self.failures: list[tuple[int, bool]] = []
        self.login_code = 200
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not server._is_up:
                    self.close_connection = True  # one that was open when the server went down
                    return
                code, data = server._answer(self.path.rpartition("/")[2].split("?")[0], body)
                meta = {
                    "id": "1",
                    "trx": "1",
                    "endpoint": {},
                    "result_code": code,
                    "result_subcode": 0,
                    "result_msg": "",
                }
                answer = json.dumps({"meta": meta, "data": data}).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = handle_any  # noqa: N815 - http.server's names

            def log_message(self, *_: object) -> None:
                pass

        self._handler, self._port = Handler, 0
        self.up()
        self.url = f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        """Listen; after `down` at the same port, with everything as it was."""
        self._is_up = True
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        self._thread = Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def down(self) -> None:
        """Refuse connections, and break those that are open."""
        self._is_up = False
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    close = down

    def _answer(self, call: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if call == "auth.login":
            claims = {"exp": int(time.time()) + 3600, "api_version": "2.20", "server_version": "1.15"}
            token = jwt.encode(claims, "a key of thirty-two bytes at least", "HS256")
            return (200, {"token": token}) if self.login_code == 200 else (self.login_code, {})
        if call == "events.add_batch":
            code, applied = self.failures.pop(0) if self.failures else (200, True)
            if applied:
                self._add(json.loads(line) for line in body.splitlines())
            return code, {"added": 1, "errors": 0}
        fields = json.loads(body or b"{}")
        match call:
            case "projects.get_all":
                found = [{"id": id_, "name": name} for name, id_ in self.projects.items()]
                return 200, {"projects": found}
            case "projects.create":
                self.projects[fields["name"]] = f"project-{len(self.projects)}"
                return 200, {"id": self.projects[fields["name"]]}
            case "tasks.get_all":
                found = [{"id": id_} for id_, task in self.tasks.items() if set(fields["tags"]) <= set(task["tags"])]
                return 200, {"tasks": found}
            case "tasks.create":
                id_ = f"task-{len(self.tasks)}"
                self.tasks[id_] = {**fields, "status": "created"}
                return 200, {"id": id_}
            case "tasks.edit":
                self.tasks[fields["task"]].update(fields)
                return 200, {"updated": 1, "fields": {}}
            case "tasks.started" | "tasks.completed" | "tasks.failed":
                self.tasks[fields["task"]].update(status=call[6:], status_reason=fields.get("status_reason"))
                return 200, {"updated": 1, "fields": {}}
        return 400, {}

    def _add(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            key = "/".join(str(event.get(name)) for name in ("task", "iter", "metric", "variant", "type"))
            self.events[md5(key.encode(), usedforsecurity=False).hexdigest()] = event
