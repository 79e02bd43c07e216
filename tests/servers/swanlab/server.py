"""The server as a test holds it: start, arm, look, stop."""

from __future__ import annotations

import sys
import traceback
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

from tests.servers.swanlab import debug, listings, reads, routes, storage, writes
from tests.servers.swanlab.faults import Fault, Faults
from tests.servers.swanlab.http import Answer, BadRequest, Call, Request, Transport
from tests.servers.swanlab.model import Experiment, Project
from tests.servers.swanlab.settings import Settings
from tests.servers.swanlab.state import Refused, State

if TYPE_CHECKING:
    from collections.abc import Iterator

HANDLERS = writes.HANDLERS | listings.HANDLERS | reads.HANDLERS | storage.HANDLERS
API_KEY = "loopback-key-000000000"
USERNAME = "tester"


class SwanLabServer:
    """A SwanLab server on 127.0.0.1 that the real client library works against.

    Starts listening when built and stops at the end of a `with` block, or by `stop`. One user, `username`
    with `api_key`, is there from the start. What it holds may be looked at from the test's thread at any time.
    """

    def __init__(self, *, port: int = 0, **settings: object) -> None:
        self.settings = Settings()
        self.settings.update(settings)
        self.state = State(self.settings)
        self.faults = Faults()
        self.user = self.state.add_user(USERNAME, API_KEY, "Loopback Tester")
        self.transport = Transport(self._route, self._answer, self.faults, port)
        self.state.url = self.url = f"http://127.0.0.1:{self.transport.port}"

    api_key = API_KEY
    username = USERNAME

    def __enter__(self) -> SwanLabServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self.bugs:
            raise AssertionError(f"the server broke on a request:\n{self.bugs[0]}")

    def stop(self) -> None:
        """Breaks every connection; what was stored can still be looked at. Once only."""
        self.transport.stop()

    @property
    def projects(self) -> dict[str, Project]:
        """By name, of every user."""
        return {project.name: project for project in self.state.projects.values()}

    @property
    def experiments(self) -> dict[str, Experiment]:
        """By slug, the client's run id, of every project; a run that fell silent is closed first.

        Where two projects have runs of one id, look at `projects[NAME].experiments`.
        """
        now = self.state.clock.now()
        found = {}
        with self.state.lock:
            for experiment in self.state.experiments.values():
                experiment.close_if_silent(now, self.settings.silence_s)
                found[experiment.slug] = experiment
        return found

    @property
    def bugs(self) -> list[str]:
        """Tracebacks of requests on which the server itself broke; leaving the `with` block raises for them."""
        return self.transport.bugs

    @property
    def calls(self) -> list[Call]:
        """Every request so far, `/_debug` apart, in the order in which they were answered."""
        return self.transport.calls

    def count(self, endpoint: str) -> int:
        """How many requests an endpoint got."""
        return sum(call.endpoint == endpoint for call in self.transport.calls)

    def arm(self, endpoint: str, kind: str, **options: object) -> Fault:
        """Arms a fault; see `Faults.arm`."""
        return self.faults.arm(endpoint, kind, **options)

    def advance(self, seconds: float) -> None:
        """Lets time pass at the server: lags end, silent runs are closed, sessions run out."""
        self.state.clock.advance(seconds)

    def expire_sessions(self) -> None:
        """Every `sid` handed out so far is answered 401 from now on."""
        with self.state.lock:
            self.state.sessions.clear()

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Inside the block connections are refused, as when the server is down; its state stays."""
        with self.transport.refused():
            yield

    def _route(self, request: Request) -> None:
        request.endpoint, request.params = routes.find(request.method, request.path)

    def _answer(self, request: Request) -> Answer:
        try:
            return self._dispatch(request)
        except Refused as refused:
            return refused.answer
        except BadRequest as error:
            return Answer({"code": "Validation_Error", "message": str(error)}, 400)
        except Exception:
            self.bugs.append(f"{request.method} {request.path}\n{traceback.format_exc()}")
            print(self.bugs[-1], file=sys.stderr)
            return Answer({"code": "Internal_Error", "message": "the server broke"}, 500)

    def _dispatch(self, request: Request) -> Answer:
        if request.path.startswith("/_debug/"):
            return debug.answer(self, request)
        if request.endpoint == "login":
            with self.state.lock:
                return writes.login(self.state, request)
        if request.endpoint in storage.OPEN_HANDLERS:
            with self.state.lock:
                return storage.OPEN_HANDLERS[request.endpoint](self.state, request)
        if not request.endpoint:
            raise Refused(404, "Not_Found", f"{request.method} {request.path}")
        with self.state.lock:
            user = self.state.authenticate(request)
        if request.endpoint == "metrics":
            return writes.post_metrics(self.state, request, user)
        with self.state.lock:
            return HANDLERS[request.endpoint](self.state, request, user)
