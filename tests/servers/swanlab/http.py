"""The transport: keep-alive HTTP/1.1 on loopback, a thread a connection, and the faults, which live here.

What a request means is the router's business. This module reads it whole, asks for an armed fault, lets the
router answer unless the fault came first, and sends the answer or what the fault makes of it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.servers.swanlab.faults import Fault, Faults

PORTAL = b"<!DOCTYPE html><html><body><h1>Please sign in to the network</h1></body></html>"


class BadRequest(ValueError):
    """A request that is not what its endpoint takes."""


class _Fields(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise BadRequest(f"{name} is missing")


@dataclass
class Request:
    """One request, read whole. `endpoint` is the route's name, "" where there is no such route."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    endpoint: str = ""
    params: dict[str, str] = field(default_factory=dict)
    half: bool = False

    def json(self) -> Any:
        """The body's JSON, {} if it is empty. BadRequest if it is none, or where a field is asked for in vain."""
        try:
            return json.loads(self.body or b"{}", object_hook=_Fields)
        except ValueError as error:
            raise BadRequest(f"not JSON: {error}") from None


@dataclass
class Answer:
    """What goes back: JSON unless `body` is given."""

    data: Any = None
    status: int = 200
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json; charset=utf-8"

    def payload(self) -> bytes:
        return json.dumps(self.data).encode() if self.body is None else self.body


@dataclass(frozen=True)
class Call:
    """A request as the log keeps it. `status` is None where no answer goes out; bulk bodies are not kept."""

    endpoint: str
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    num_bytes: int
    status: int | None
    fault: str | None


class Transport:
    """Listens on 127.0.0.1 and serves until `stop`. `route` names a request, `answer` answers it."""

    def __init__(
        self, route: Callable[[Request], None], answer: Callable[[Request], Answer], faults: Faults, port: int = 0
    ) -> None:
        self.route, self.answer, self.faults = route, answer, faults
        self.calls: list[Call] = []
        self.bugs: list[str] = []
        self.stopping = threading.Event()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._open(port)

    def _open(self, port: int) -> None:
        transport = self

        class Handler(_Handler):
            owner = transport

        self._server = _Server(("127.0.0.1", port), Handler)
        self._server.owner = self
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name="swanlab-server", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stops listening and breaks every connection; hanging requests are let go."""
        self.stopping.set()
        self.faults.clear()
        self._close()

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Inside the block connections are refused, and those that were open are broken; the port stays ours."""
        self._close()
        with socket.socket() as holder:
            # Bound and not listening: connections are refused, and nobody else is given the port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", self.port))
            try:
                yield
            finally:
                self._open(self.port)

    def _close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def log(self, request: Request, status: int | None, fault: Fault | None) -> None:
        bulk = request.endpoint in ("metrics", "object.put")
        self.calls.append(
            Call(
                *(request.endpoint, request.method, request.path, request.query, request.headers),
                body=b"" if bulk else request.body,
                num_bytes=len(request.body),
                status=status,
                fault=f"{fault.when} {fault.kind}" if fault else None,
            )
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Threads of broken connections end by themselves; nobody waits for them.
    block_on_close = False
    request_queue_size = 128
    owner: Transport

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no event here; anything else is a bug of ours, and kept as one."""
        if not isinstance(sys.exception(), OSError):
            self.owner.bugs.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    owner: Transport
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        with self.owner._lock:
            self.owner._connections.add(self.connection)

    def finish(self) -> None:
        with self.owner._lock:
            self.owner._connections.discard(self.connection)
        super().finish()

    def log_message(self, *args: Any) -> None:
        """Silent: `Transport.calls` is the log."""

    def handle_method(self) -> None:
        parts = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=unquote(parts.path),
            query=_Fields(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self._read_body(),
        )
        self.owner.route(request)
        fault = None if request.path.startswith("/_debug/") else self.owner.faults.take(request)
        if fault is not None and fault.when == "before":
            answer = Answer({"message": "ok"})
        else:
            request.half = fault is not None and fault.when == "half"
            answer = self.owner.answer(request)
        if not request.path.startswith("/_debug/"):
            # Before the answer goes out, so that a client that has it finds its call in the log.
            self.owner.log(request, _status_seen(answer, fault), fault)
        self._send(answer, fault)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_method  # noqa: N815

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        """Sends the answer, or what the fault makes of it."""
        match fault.kind if fault else None:
            case None:
                self._write(answer)
            case "status":
                assert fault is not None
                error = {"code": f"FAULT_{fault.status}", "message": "armed"}
                headers = {"Retry-After": fault.retry_after} if fault.retry_after is not None else {}
                self._write(Answer(error, fault.status, headers=headers))
            case "html":
                self._write(Answer(body=PORTAL, content_type="text/html"))
            case "truncated":
                self._write(Answer(body=answer.payload()[:-1] or b"{"))
            case "drip":
                assert fault is not None
                self._write(answer, drip_s=0.05 if fault.seconds is None else fault.seconds)
            case "cut":
                self._write(answer, promise_more=16)
                self.close_connection = True
            case "hang":
                assert fault is not None
                self._hang(fault)
                self.close_connection = True
            case "reset":
                # With a linger of zero the close, which comes when the handler ends, is a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

    def _hang(self, fault: Fault) -> None:
        end = None if fault.seconds is None else time.monotonic() + fault.seconds
        while not self.owner.stopping.is_set() and (end is None or time.monotonic() < end):
            if fault.released.wait(0.05):
                return

    def _write(self, answer: Answer, *, promise_more: int = 0, drip_s: float | None = None) -> None:
        payload = answer.payload()
        headers = {
            "Content-Type": answer.content_type,
            "Content-Length": str(len(payload) + promise_more),
            **answer.headers,
        }
        lines = [f"HTTP/1.1 {answer.status} {http.client.responses.get(answer.status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        if drip_s is None:
            # One write: a head and a body in two packets cost 40 ms where the other side delays its ACK.
            self.wfile.write(head + payload)
            return
        for byte in head + payload:
            self.wfile.write(bytes([byte]))
            if self.owner.stopping.wait(drip_s):
                return


def _status_seen(answer: Answer, fault: Fault | None) -> int | None:
    """The status that the client will see; None if it gets no answer."""
    if fault is None or fault.kind in ("drip", "cut"):
        return answer.status
    return {"status": fault.status, "html": 200, "truncated": 200}.get(fault.kind)
