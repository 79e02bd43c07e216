"""The whole of what the server knows, behind one lock, and the lookups that end in an error answer."""

from __future__ import annotations

import secrets
import threading
from typing import Any

from tests.servers.swanlab.clock import Clock, iso, unix
from tests.servers.swanlab.http import Answer, Request
from tests.servers.swanlab.model import Experiment, Project, Session, User, new_cuid
from tests.servers.swanlab.rows import Row
from tests.servers.swanlab.settings import Settings


class Refused(Exception):
    """An error answer: `code` and `message` as the real server's errors carry them."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.answer = Answer({"code": code, "message": message}, status)


class State:
    """Callers hold `lock` while they read or change anything below it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clock = Clock()
        self.lock = threading.RLock()
        self.url = ""
        self.secret = secrets.token_hex(8)
        self.users: dict[str, User] = {}
        self.sessions: dict[str, Session] = {}
        self.projects: dict[tuple[str, str], Project] = {}
        self.experiments: dict[str, Experiment] = {}
        self.exports: dict[str, bytes] = {}
        self.num_batches = 0
        self.num_logins = 0

    def add_user(self, username: str, api_key: str, name: str = "") -> User:
        user = User(username, name or username, api_key)
        self.users[api_key] = user
        return user

    def login(self, api_key: str) -> tuple[str, Session]:
        """A new session. Refused 401 for an unknown key."""
        user = self.users.get(api_key)
        if user is None:
            raise Refused(401, "Unauthorized", "the API key is wrong")
        sid = secrets.token_urlsafe(24)
        self.num_logins += 1
        self.sessions[sid] = Session(user, self.clock.now() + self.settings.session_s)
        return sid, self.sessions[sid]

    def authenticate(self, request: Request) -> User:
        """The user whose `sid` cookie came along. Refused 401 without one, or with one that ran out."""
        cookies = dict(pair.strip().partition("=")[::2] for pair in request.headers.get("cookie", "").split(";"))
        session = self.sessions.get(cookies.get("sid", ""))
        if session is None or session.expires_at <= self.clock.now():
            raise Refused(401, "Unauthorized", "no valid session")
        return session.user

    def project(self, request: Request, user: User) -> Project:
        """The project in the path. Refused 404 if there is none, 403 if it is another user's."""
        owner, name = request.params["user"], request.params["project"]
        self.own(user, owner)
        project = self.projects.get((owner, name))
        if project is None:
            raise Refused(404, "Not_Found", f"no project {owner}/{name}")
        return project

    def own(self, user: User, owner: str) -> None:
        if owner != user.username:
            raise Refused(403, "Forbidden", f"{user.username} may not touch {owner}")

    def create_project(self, user: User, owner: str, name: str, visibility: str) -> tuple[Project, bool]:
        self.own(user, owner)
        key = (owner, name)
        if key in self.projects:
            return self.projects[key], False
        self.projects[key] = Project(new_cuid(), name, user, visibility, iso(self.clock.now()))
        return self.projects[key], True

    def delete(self, experiment: Experiment) -> None:
        project = experiment.project
        project.deleted.add(experiment.slug)
        del project.experiments[experiment.slug]
        del self.experiments[experiment.cuid]

    def run(self, request: Request, user: User) -> Experiment:
        """The experiment in the path, by slug or cuid within its project, by cuid alone elsewhere."""
        name = request.params["run"]
        if "project" not in request.params:
            return self.by_id(name, user)
        experiment = self.project(request, user).find(name)
        if experiment is None:
            raise Refused(404, "Disabled_Resource", f"no run {name}")
        return self._fresh(experiment)

    def by_id(self, cuid: Any, user: User, project_id: Any = None) -> Experiment:
        """The experiment of that cuid. Refused 404 if there is none or it is of another project, 403 as above."""
        experiment = self.experiments.get(cuid)
        if experiment is None or project_id not in (None, experiment.project.cuid):
            raise Refused(404, "Disabled_Resource", f"no experiment {cuid} in project {project_id}")
        self.own(user, experiment.project.owner.username)
        return self._fresh(experiment)

    def _fresh(self, experiment: Experiment) -> Experiment:
        experiment.close_if_silent(self.clock.now(), self.settings.silence_s)
        return experiment

    def visible(self, experiment: Experiment, created_at: Any, kind: str, *, lag_s: float | None = None) -> list[Row]:
        """The rows that a query sees: old enough for the lag, and inside the ingestion window.

        The window's end is the stop that the client reported; its clock is the machine's, so what a test
        advanced is added.
        """
        lag_s = self.settings.read_lag_s if lag_s is None else lag_s
        newest = self.clock.now() - lag_s
        oldest = 0.0
        if self.settings.window:
            oldest = float(created_at or 0)
            if experiment.state != "RUNNING" and experiment.finished_at is not None:
                newest = min(newest, unix(experiment.finished_at) + self.clock.offset_s)
        return [row for row in experiment.raw if row.kind == kind and oldest <= row.ingest_time <= newest]
