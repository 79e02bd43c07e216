"""An HTTP proxy on loopback in front of a real server, that fails when told to."""

from __future__ import annotations

from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class Fault:
    """Answer the next request whose path ends in `path` with `status`, or cut the connection when that is 0.

    `after`: the server gets the request first, so it is applied and only the answer is lost.
    """

    path: str
    status: int = 0
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"


class FaultProxy:
    """Forwards to `host:port`; `faults` are used up in order, `requests` says what came."""

    def __init__(self, host: str, port: int) -> None:
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str, bytes]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if not proxy._is_up:
                    self.close_connection = True  # one that was open when the server went down
                    return
                proxy.requests.append((self.command, self.path, body))
                fault = proxy._fault_for(self.path.split("?")[0])
                if fault is None or fault.after:
                    status, headers, answer = proxy._forward(host, port, self, body)
                if fault is not None:
                    if fault.status == 0:
                        self.close_connection = True
                        self.connection.close()
                        return
                    status, headers, answer = fault.status, fault.headers, fault.body
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815 - http.server's names

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A connection that was cut on purpose."""

        self._kind, self._handler, self._port = Server, Handler, 0
        self.up()
        self.url = f"http://127.0.0.1:{self._port}"

    def up(self) -> None:
        """Listen; after `down` at the same port."""
        self._is_up = True
        self._server = self._kind(("127.0.0.1", self._port), self._handler)
        self._port = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def count(self, path: str) -> int:
        """How many requests came for paths that end in `path`."""
        return sum(one.split("?")[0].endswith(path) for _, one, _ in self.requests)

    def down(self) -> None:
        """Refuse connections, and break those that are open."""
        self._is_up = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    close = down

    def _fault_for(self, path: str) -> Fault | None:
        if self.faults and path.endswith(self.faults[0].path):
            return self.faults.pop(0)
        return None

    @staticmethod
    def _forward(
        host: str, port: int, request: BaseHTTPRequestHandler, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection(host, port, timeout=60)
        dropped = {"host", "connection", "content-length"}
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        connection.request(request.command, request.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        kept = {"content-type", "retry-after"}
        connection.close()
        return answer.status, {name: value for name, value in answer.getheaders() if name.lower() in kept}, content
