"""The server without its sockets: one request in, one response out, every change kept in a journal if asked.

The state is what the requests that took effect made of it, in their order, at their times. So the journal is those
requests, and reading it again after a kill gives the same state, ids included.
"""

from __future__ import annotations

import base64
import functools
import gzip
import json
import re
import threading
import urllib.parse
from pathlib import Path
from typing import Any

from tests.servers.wandb_server.artifacts import Artifact, Artifacts
from tests.servers.wandb_server.graphql import Document, GraphQLError, execute
from tests.servers.wandb_server.journal import Journal
from tests.servers.wandb_server.messages import Request, Response, json_response
from tests.servers.wandb_server.schema import Schema
from tests.servers.wandb_server.state import Lag, Run
from tests.servers.wandb_server.views import Missing

DEFAULT_KEY = "0123456789abcdef0123456789abcdef01234567"
_STREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream")


class Backend:
    """Thread-safe: one lock around each request's effect and answer."""

    def __init__(self, *, state_file: str | None = None, valid_keys: set[str] | None = None) -> None:
        self.lock = threading.RLock()
        self.runs: dict[tuple[str, str, str], Run] = {}
        self.artifacts = Artifacts()
        self.requests: list[Request] = []
        self.lag = Lag()
        self.valid_keys: set[str] | None = {DEFAULT_KEY} if valid_keys is None else valid_keys
        """Keys that are let in; None lets in everybody."""
        self.default_entity = "acme"
        self.features: dict[str, bool] = {}
        """What `serverInfo.features` says; the client takes an absent one as off."""
        self.can_rewind = True
        self.upsert_revives = True
        """Whether an upsert that names its run, as a client's does, makes an ended run read as running, as a heartbeat
        does. `wandb.Api` gives the id alone, and changes no state."""
        self.replaces_equal_steps = True
        """Whether of two lines with one `_step` queries show the later one only."""
        self.unanswered: set[str] = set()
        """GraphQL fields that were asked for and that this server does not know, as `Type.field`."""
        self.keeps_bodies = False
        """Whether `requests` keeps the bodies; off, since benchmarks post gigabytes."""
        self._projects: dict[tuple[str, str], int] = {}
        self._journal: Journal | None = None
        if state_file is not None:
            self._begin_from(Journal(Path(state_file)))

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()

    # --- requests

    def receive(self, request: Request) -> None:
        """Say what the request is; raises ValueError where its body is not what its headers or path say."""
        if request.headers.get("content-encoding") == "gzip":
            request.body = gzip.decompress(request.body)
        path = urllib.parse.unquote(request.path)
        if path == "/graphql":
            given = request.json()
            request.document = _document(given["query"])
            request.variables = given.get("variables") or {}
            request.operation = given.get("operationName") or request.document.operation
            request.names = [request.operation, "graphql"]
            self._name_run(request)
        elif match := _STREAM.fullmatch(path):
            request.names = ["file_stream"]
            request.entity, request.project, request.run_id = match.groups()
            if request.method == "POST":
                request.post = _checked_post(request.json())
        elif path.startswith("/storage/"):
            request.names = ["storage", "storage-" + request.method.lower()]
            parts = path.split("/", 6)
            if parts[2] == "runs" and len(parts) > 5:
                request.entity, request.project, request.run_id = parts[3:6]
        else:
            request.names = ["other"]

    def record(self, request: Request) -> None:
        with self.lock:
            self.requests.append(request)
            run = self._run_of(request)
            if run is not None:
                run.requests.append(request)
                run.request_counts[request.names[0]] += 1

    def answer(self, request: Request, base_url: str, keep: int | None = None) -> Response:
        """Let the request take effect and answer it; with `keep` only that many of its history lines."""
        if not self._let_in(request):
            return json_response(401, {"errors": [{"message": "user is not logged in", "path": ["viewer"]}]})
        with self.lock:
            try:
                response = self._apply(request, base_url, keep)
            except Missing as error:
                return json_response(error.status, {"error": str(error), "errors": [{"message": str(error)}]})
            except GraphQLError as error:
                return json_response(200, {"data": None, "errors": [{"message": str(error)}]})
            if request.took_effect and self._journal is not None:
                self._journal.append(request, keep)
        if not self.keeps_bodies:
            request.body, request.post, request.document = b"", None, None
        return response

    def _apply(self, request: Request, base_url: str, keep: int | None) -> Response:
        path = urllib.parse.unquote(request.path)
        if request.document is not None:
            schema = Schema(self, base_url, request.time)
            root = schema.root(request.document.kind)
            data = execute(request.document, request.variables, root, self.unanswered.add)
            request.took_effect = request.document.kind == "mutation"
            if request.operation == "UpsertBucket" and request.run_id is None:
                self._name_run(request)
            return json_response(200, {"data": data})
        if request.post is not None:
            run = self.find(request.entity, request.project, request.run_id or "")
            if run is None:
                raise Missing(404, f"run {request.entity}/{request.project}/{request.run_id} not found")
            run.stream(request.post, request.time, keep)
            request.took_effect = True
            return json_response(200, {"exitcode": None, "limits": {}, "stopped": False})
        if path.startswith("/storage/"):
            return self._storage(request, path.removeprefix("/storage/"))
        return json_response(404, {"error": f"no such path: {request.path}"})

    def _storage(self, request: Request, path: str) -> Response:
        kind, _, rest = path.partition("/")
        if kind == "runs":
            entity, project, run_id, name = rest.split("/", 3)
            run = self.find(entity, project, run_id)
            if run is None:
                raise Missing(404, "run not found")
            if request.method == "PUT":
                run.files[name] = request.body
                request.took_effect = True
                return Response(200, b"", "text/plain")
            found = run.files.get(name)
        elif request.method == "PUT":
            if not self.artifacts.put(rest, request.body):
                return json_response(400, {"error": "the content is not what was declared"})
            request.took_effect = True
            return Response(200, b"", "text/plain")
        else:
            artifact_id, _, name = rest.partition("/")
            artifact = self.artifacts.by_id.get(artifact_id)
            if artifact is None:
                found = None
            elif kind == "artifacts":
                found = json.dumps(artifact.manifest).encode()
            else:
                found = artifact.files.get(name)
        if found is None:
            raise Missing(404, f"no file {path}")
        return Response(200, found, "application/octet-stream")

    # --- runs

    def find(self, entity: str | None, project: str | None, run_id: str) -> Run | None:
        run = self.runs.get((entity or self.default_entity, project or "uncategorized", run_id))
        return None if run is None or run.deleted else run

    def runs_of(self, entity: str, project: str) -> list[Run]:
        return [run for key, run in self.runs.items() if key[:2] == (entity, project)]

    def project_number(self, entity: str, project: str) -> int | None:
        return self._projects.get((entity, project))

    def storage_id(self, run: Run) -> str:
        return base64.b64encode(f"Run:v1:{run.id}:{run.project}:{run.entity}".encode()).decode()

    def run_by_storage_id(self, storage_id: str) -> Run | None:
        return next((r for r in self.runs.values() if self.storage_id(r) == storage_id and not r.deleted), None)

    def upsert(self, given: dict[str, Any], now: float) -> tuple[Run, bool]:
        """(run, whether it is new); by `id` an existing run, by `name` any, made where it is not there yet."""
        if given.get("id") is not None:
            found = self.run_by_storage_id(given["id"])
            if found is None:
                raise Missing(404, "run not found")
            found.upsert(given, now, revives=self.upsert_revives and bool(given.get("name")))
            return found, False
        if not given.get("name"):
            raise GraphQLError("a run needs a name")
        entity, project = given.get("entityName") or self.default_entity, given.get("modelName") or "uncategorized"
        key = (entity, project, given["name"])
        run = self.runs.get(key)
        if run is not None and run.deleted:
            raise Missing(409, f"run {'/'.join(key)} was previously created and deleted; try a new run name")
        inserted = run is None
        if run is None:
            self._projects.setdefault((entity, project), len(self._projects) + 1)
            run = self.runs[key] = Run(*key, now, len(self.runs) + 1)
            run.replaces_equal_steps = self.replaces_equal_steps
        run.upsert(given, now, revives=inserted or self.upsert_revives)
        return run, inserted

    def create_artifact(self, given: dict[str, Any], now: float) -> Artifact:
        run = self.find(given.get("entityName"), given.get("projectName"), given.get("runName") or "")
        if run is None:
            raise Missing(404, f"run {given.get('runName')} not found")
        return self.artifacts.create(run, given, now)

    def commit_artifact(self, artifact_id: str) -> Artifact:
        artifact = self.artifacts.commit(artifact_id)
        run = artifact.run
        made = [a for a in self.artifacts.by_id.values() if a.run is run and a.state == "COMMITTED"]
        run.artifacts = [a.as_dict() for a in made]
        return artifact

    # --- inside

    def _begin_from(self, journal: Journal) -> None:
        keys, self.valid_keys = self.valid_keys, None  # they were let in when they came
        for request, keep in journal.read():
            self.receive(request)
            self.answer(request, "", keep)
        self.valid_keys, self._journal = keys, journal

    def _let_in(self, request: Request) -> bool:
        if self.valid_keys is None or "storage" in request.names:
            return True  # an upload URL is signed; the key is no part of it
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        try:
            user, _, key = base64.b64decode(token).decode().partition(":")
        except ValueError:
            return False
        return scheme.lower() == "basic" and user == "api" and key in self.valid_keys

    def _name_run(self, request: Request) -> None:
        given = request.variables
        inner = given.get("input") if isinstance(given.get("input"), dict) else {}
        both = {**given, **(inner or {})}
        if request.operation == "UpsertBucket" and both.get("id"):
            run = self.run_by_storage_id(both["id"])
            if run is not None:
                request.entity, request.project, request.run_id = run.entity, run.project, run.id
            return
        request.entity = both.get("entity") or both.get("entityName")
        request.project = both.get("project") or both.get("projectName")
        request.run_id = both.get("run") or both.get("runName") or both.get("name")

    def _run_of(self, request: Request) -> Run | None:
        if request.run_id is None:
            return None
        key = (request.entity or self.default_entity, request.project or "uncategorized", request.run_id)
        return self.runs.get(key)


@functools.lru_cache(maxsize=256)
def _document(text: str) -> Document:
    return Document(text)


def _checked_post(post: Any) -> dict[str, Any]:
    """The post, if it has the shape of one; nothing of a malformed post may take effect."""
    if not isinstance(post, dict):
        raise ValueError("a file_stream post is an object")
    for name, chunk in (post.get("files") or {}).items():
        content = chunk["content"]
        if not isinstance(chunk["offset"], int) or chunk["offset"] < 0 or not isinstance(content, list):
            raise ValueError(f"{name} needs an offset and content")
        if name == "wandb-summary.json":
            json.loads(content[-1])
    return post
