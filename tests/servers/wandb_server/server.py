"""The loopback server: sockets, faults, authentication and clock around a `Backend`."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.servers.wandb_server.backend import Backend
from tests.servers.wandb_server.faults import Fault, Faults, Kind
from tests.servers.wandb_server.messages import Request, Response, json_response
from tests.servers.wandb_server.state import Lag, Run

HTML = "<!doctype html><html><head><title>Sign in</title></head><body>Accept the terms of use.</body></html>"


class WandbServer:
    """A W&B server on loopback, a context manager.

    `clock` gives the server's time, so that a test sets when a heartbeat is old. Everything that a test reads
    (`runs`, `requests`, `cpu_s`) may be read while requests come in.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        state_file: str | None = None,
        valid_keys: set[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.backend = Backend(state_file=state_file, valid_keys=valid_keys)
        self.faults = Faults()
        self.clock = clock
        self.cpu_s = 0.0
        """Processor time spent on requests, in seconds, over all threads."""
        self._cpu_lock = threading.Lock()
        self._port = port
        self._http: _HTTP | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> WandbServer:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def runs(self) -> dict[tuple[str, str, str], Run]:
        """Runs by (entity, project, id), deleted ones included."""
        return self.backend.runs

    @property
    def requests(self) -> list[Request]:
        return self.backend.requests

    @property
    def lag(self) -> Lag:
        return self.backend.lag

    def run(self, project: str, run_id: str, entity: str = "acme") -> Run:
        return self.backend.runs[entity, project, run_id]

    def arm(self, endpoint: str, kind: Kind, **how: Any) -> Fault:
        """Arm a fault and return it; see `Fault` for `how`."""
        return self.faults.arm(Fault(endpoint, kind, **how))

    def up(self) -> None:
        """Listen; after `down` at the same port."""
        self._http = _HTTP(("127.0.0.1", self._port), self)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def down(self) -> None:
        """Refuse connections, and reset those that are open; the state stays."""
        http, thread = self._http, self._thread
        if http is None or thread is None:
            return
        self._http = self._thread = None
        http.shutdown()
        thread.join()
        http.server_close()
        http.reset_all()

    def close(self) -> None:
        self.faults.disarm()
        self.down()
        self.backend.close()

    def add_cpu(self, seconds: float) -> None:
        with self._cpu_lock:
            self.cpu_s += seconds


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], app: WandbServer) -> None:
        self.app = app
        self._open: set[socket.socket] = set()
        self._open_lock = threading.Lock()
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._open_lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._open_lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def reset_all(self) -> None:
        with self._open_lock:
            left = list(self._open)
        for connection in left:
            # shutdown, not close: the handler's thread still holds the number, and it could be given out again.
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that went away is what many tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    rbufsize = 1 << 20
    server: _HTTP

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET  # noqa: N815 (the names are http.server's)

    def log_message(self, *args: Any) -> None:
        """Nothing: the request log is `WandbServer.requests`."""

    def _handle(self) -> None:
        app = self.server.app
        started = time.thread_time()
        try:
            body = self._body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            path = self.path.partition("?")[0]
            request = Request(self.command, path, headers, body, len(body), app.clock())
            if path.startswith("/_debug/"):
                self._debug(request)
                return
            try:
                app.backend.receive(request)
            except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
                request.names = request.names or ["unreadable"]
                self._finish(request, json_response(400, {"error": f"unreadable request: {error}"}))
                return
            fault = app.faults.take(request)
            if fault is None:
                self._finish(request, self._answer(request))
            else:
                request.fault = fault.kind
                try:
                    self._play(fault, request)
                finally:
                    fault.played.set()
        finally:
            app.add_cpu(time.thread_time() - started)

    def _debug(self, request: Request) -> None:
        from tests.servers.wandb_server.debug import answer_debug

        self._send(answer_debug(self.server.app, request))

    def _answer(self, request: Request, keep: int | None = None) -> Response:
        return self.server.app.backend.answer(request, f"http://{self.headers.get('host')}", keep)

    def _finish(self, request: Request, response: Response) -> None:
        request.status = response.status
        self.server.app.backend.record(request)
        self._send(response)

    def _play(self, fault: Fault, request: Request) -> None:
        """Play a fault. The request is recorded before anything that may block, so that tests see it."""
        response = None
        if fault.kind == "half":
            self._answer(request, keep=fault.lines)
        elif fault.when == "after":
            response = self._answer(request)
        if fault.kind in ("status", "half", "html"):
            self._finish(request, self._made_up(fault))
        elif fault.kind in ("hang", "reset", "cut"):
            self.server.app.backend.record(request)
            if fault.kind == "hang":
                fault.released.wait(fault.seconds)
            self._cut(response, reset=fault.kind == "reset")
        elif fault.kind == "delay":
            self.server.app.backend.record(request)
            fault.released.wait(fault.seconds)
            response = response or self._answer(request)
            request.status = response.status
            self._send(response)
        elif response is not None and fault.kind == "truncated":
            self._finish(request, Response(response.status, response.body[: len(response.body) // 2]))
        elif response is not None:
            self.server.app.backend.record(request)
            self._drip(fault, response)

    def _made_up(self, fault: Fault) -> Response:
        if fault.kind == "html":
            return Response(200, (fault.body or HTML).encode(), "text/html; charset=utf-8")
        if fault.body is not None:
            return Response(fault.status, fault.body.encode(), headers=fault.headers)
        message = f"made to fail with {fault.status}"
        response = json_response(fault.status, {"error": message, "errors": [{"message": message}]})
        response.headers = fault.headers
        return response

    def _cut(self, response: Response | None, *, reset: bool) -> None:
        self.close_connection = True
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.wfile.close()
            self.connection.close()
        elif response is not None:
            self._head(response)
            self.wfile.write(response.body[: len(response.body) // 2])

    def _drip(self, fault: Fault, response: Response) -> None:
        """One byte at a time, evenly over `seconds`; all the rest at once when released."""
        self._head(response)
        self.wfile.flush()
        pause = (fault.seconds or 0.0) / max(len(response.body), 1)
        for i in range(len(response.body)):
            self.wfile.write(response.body[i : i + 1])
            self.wfile.flush()
            if fault.released.wait(pause):
                self.wfile.write(response.body[i + 1 :])
                break
        self.wfile.flush()

    def _send(self, response: Response) -> None:
        self._head(response)
        if self.command != "HEAD":
            self.wfile.write(response.body)
        self.wfile.flush()

    def _head(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        length = int(self.headers.get("content-length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the client went away within its request")
        return body
