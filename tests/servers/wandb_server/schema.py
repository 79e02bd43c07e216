"""What the server answers to GraphQL: the queries and mutations that the client and `wandb.Api` send."""

from __future__ import annotations

import fnmatch
import json
import mimetypes
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tests.servers.wandb_server.artifacts import Artifact, md5
from tests.servers.wandb_server.graphql import GraphQLError
from tests.servers.wandb_server.state import Run, sampled

Object = dict[str, Any]


class Missing(GraphQLError):
    """Something that was asked for is not there; answered with status `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Schema:
    """The root objects of one request: `query` and `mutation` over a backend at a time `now`."""

    def __init__(self, backend: Any, base_url: str, now: float) -> None:
        self.backend, self.base_url, self.now = backend, base_url, now

    def root(self, kind: str) -> Object:
        return self._mutations() if kind == "mutation" else self._queries()

    # --- queries

    def _queries(self) -> Object:
        return {
            "__typename": "Query",
            "viewer": self._viewer,
            "serverInfo": self._server_info,
            "project": lambda name, entityName=None: self._project(entityName, name),
            "model": lambda name, entityName=None: self._project(entityName, name),
            "entity": lambda name: self._entity(name),
            "organization": lambda name: None,
            "artifact": lambda id: self._artifact(self.backend.artifacts.by_id.get(id)),
            "clientIDMapping": self._client_id,
            "__type": lambda name: None,
            "models": self._models,
        }

    def _viewer(self) -> Object:
        name = self.backend.default_entity
        return {
            "__typename": "User",
            "id": "VXNlcjox",
            "name": name,
            "username": name,
            "email": f"{name}@example.test",
            "entity": name,
            "admin": False,
            "flags": "{}",
            "deletedAt": None,
            "defaultEntity": self._entity(name),
            "apiKeys": {"edges": []},
            "teams": {"edges": [{"node": {"name": name}}]},
        }

    def _server_info(self) -> Object:
        features = [{"name": name, "isEnabled": on} for name, on in self.backend.features.items()]
        return {
            "__typename": "ServerInfo",
            "features": features,
            "cliVersionInfo": {"max_cli_version": "999.0.0", "min_cli_version": "0.0.1"},
            "latestLocalVersionInfo": None,
        }

    def _entity(self, name: str) -> Object:
        return {
            "__typename": "Entity",
            "id": f"Entity:{name}",
            "name": name,
            "organization": None,
            "xxhashDigestsEnabled": False,
        }

    def _models(self, entityName: str | None = None, after: str | None = None, first: int = 50) -> Object:
        entity = entityName or self.backend.default_entity
        names = sorted({run.project for run in self.backend.runs.values() if run.entity == entity})
        return _connection([self._project(entity, name) for name in names], after, first)

    def _project(self, entity: str | None, name: str | None) -> Object | None:
        entity, name = entity or self.backend.default_entity, name or "uncategorized"
        runs = self.backend.runs_of(entity, name)
        number = self.backend.project_number(entity, name)

        def find(name: str, missingOk: bool = False) -> Object | None:
            run = next((r for r in runs if r.id == name and not r.deleted), None)
            if run is None and not missingOk:
                raise Missing(404, f"could not find run {entity}/{name}")
            return None if run is None else self._run(run)

        def connection(
            filters: str | None = None, after: str | None = None, first: int = 50, order: str | None = None
        ) -> Object:
            if filters not in (None, "{}"):
                raise GraphQLError("this server filters no runs")
            live = sorted((r for r in runs if not r.deleted), key=lambda r: r.serial)
            return _connection([self._run(run) for run in live], after, first)

        if number is None:
            return None
        return {
            "__typename": "Project",
            "id": f"Project:v1:{name}:{entity}",
            "internalId": str(number),
            "name": name,
            "entityName": entity,
            "entity": self._entity(entity),
            "readOnly": False,
            "createdAt": _iso(min((r.created_at for r in runs), default=self.now)),
            "isBenchmark": False,
            "runCount": lambda filters=None: sum(not run.deleted for run in runs),
            "run": find,
            "bucket": find,
            "runs": connection,
            "artifactType": lambda name: None,
        }

    def _run(self, run: Run) -> Object:
        lag = self.backend.lag
        counts = run.seen(lag.counts, self.now).num_lines
        tails = run.seen(lag.tails, self.now).tails
        summary = run.seen(lag.summaries, self.now).summary
        visible = run.seen(lag.history, self.now).num_lines[0]
        fields = run.fields

        def history(minStep: int | None = None, maxStep: int | None = None, samples: int = 500) -> list[str]:
            low = minStep if minStep is not None else -(1 << 62)
            high = maxStep if maxStep is not None else 1 << 62
            rows = [text for step, _, text in run.indexed(visible) if low <= step < high]
            return rows if minStep is not None else sampled(rows, samples)

        def sampled_history(specs: list[str]) -> list[list[Object]]:
            return [_sampled_by(run.indexed(visible), json.loads(spec)) for spec in specs]

        def parquet(liveKeys: list[str] | None = None) -> Object:
            return {"__typename": "ParquetHistory", "parquetUrls": [], "liveData": []}

        return {
            "__typename": "Run",
            "id": self.backend.storage_id(run),
            "name": run.id,
            "projectId": str(self.backend.project_number(run.entity, run.project)),
            "project": lambda: self._project(run.entity, run.project),
            "displayName": fields["displayName"] or run.id,
            "description": fields["description"],
            "notes": fields["notes"],
            "commit": fields["commit"],
            "host": fields["host"],
            "jobType": fields["jobType"],
            "jobProgram": fields["jobProgram"],
            "jobRepo": fields["jobRepo"],
            "sweepName": fields["sweep"],
            "tags": fields["tags"] or [],
            "group": run.group,
            "state": run.state(self.now),
            "config": run.config_text,
            "wandbConfig": lambda keys: json.dumps({k: run.wandb_config.get(k) for k in keys}),
            "summaryMetrics": summary,
            "systemMetrics": next((e for e in reversed(run.events) if e is not None), "{}"),
            "readOnly": False,
            "createdAt": _iso(run.created_at),
            "heartbeatAt": _iso(run.heartbeat_at),
            "user": {"name": self.backend.default_entity, "username": self.backend.default_entity},
            "historyLineCount": counts[0],
            "eventsLineCount": counts[1],
            "logLineCount": counts[2],
            "historyTail": json.dumps([tails[0]] if tails[0] is not None else []),
            "eventsTail": json.dumps([tails[1]] if tails[1] is not None else []),
            "historyKeys": lambda: _history_keys(run.indexed(visible)),
            "history": history,
            "events": lambda samples=500: sampled([e for e in run.events if e is not None], samples),
            "sampledHistory": sampled_history,
            "parquetHistory": parquet,
            "logLines": lambda **page: self._log_lines(run, **page),
            "fileCount": len(run.files),
            "files": lambda **page: self._files(run, **page),
            "outputArtifacts": lambda after=None, first=50: self._run_artifacts(run, after, first),
            "inputArtifacts": lambda after=None, first=50: self._run_artifacts(None, after, first),
            "stopped": False,
        }

    def _log_lines(
        self,
        run: Run,
        first: int | None = None,
        after: str | None = None,
        last: int | None = None,
        useImprovedPagination: bool = False,
    ) -> Object:
        nodes = [
            {
                "number": i,
                "timestamp": None,
                "level": "error" if (line or "").startswith("ERROR ") else None,
                "label": None,
                "line": line or "",
            }
            for i, line in enumerate(run.output)
        ]
        return _connection(nodes[-last:] if last else nodes, after, first or len(nodes) or 1)

    def _files(
        self,
        run: Run,
        names: list[str] | None = None,
        after: str | None = None,
        first: int = 50,
        pattern: str | None = None,
    ) -> Object:
        shell = (pattern or "%").replace("%", "*").replace("_", "?")
        nodes = []
        for name in sorted(run.files):
            if (names and name not in names) or not fnmatch.fnmatchcase(name, shell):
                continue
            url = f"{self.base_url}/storage/runs/{run.entity}/{run.project}/{run.id}/{name}"
            nodes.append(
                {
                    "__typename": "File",
                    "id": f"File:{run.serial}:{name}",
                    "name": name,
                    "url": lambda upload=False, url=url: url,
                    "directUrl": url,
                    "sizeBytes": len(run.files[name]),
                    "mimetype": mimetypes.guess_type(name)[0],
                    "updatedAt": _iso(run.heartbeat_at),
                    "md5": md5(run.files[name]),
                }
            )
        return _connection(nodes, after, first)

    def _run_artifacts(self, run: Run | None, after: str | None, first: int) -> Object:
        made = [a for a in self.backend.artifacts.by_id.values() if a.run is run and a.state == "COMMITTED"]
        return _connection([self._artifact(a) for a in made], after, first) | {"totalCount": len(made)}

    def _artifact(self, artifact: Artifact | None) -> Object | None:
        if artifact is None:
            return None
        run = artifact.run
        collection: Object = {
            "__typename": "ArtifactSequence",
            "id": f"ArtifactCollection:{artifact.name}",
            "name": artifact.name,
            "project": lambda: self._project(run.entity, run.project),
            "latestArtifact": lambda: self._artifact(
                next(iter(reversed(self.backend.artifacts.collection(run, artifact.name))), None)
            ),
        }
        aliases = [{"__typename": "ArtifactAlias", "id": f"{artifact.id}:{a}", "alias": a} for a in artifact.aliases]
        manifest = {"file": {"directUrl": f"{self.base_url}/storage/artifacts/{artifact.id}/wandb_manifest.json"}}

        def files(entries: list[Object] | None = None, **_: Any) -> Object:
            wanted = {e["name"] for e in entries} if entries is not None else set(artifact.files)
            root = f"{self.base_url}/storage/artifact-files/{artifact.id}"
            nodes = [{"name": n, "directUrl": f"{root}/{n}"} for n in sorted(artifact.files) if n in wanted]
            return _connection(nodes, None, len(nodes) or 1)

        return {
            "__typename": "Artifact",
            "id": artifact.id,
            "state": artifact.state,
            "digest": artifact.digest,
            "digestAlgorithm": "MANIFEST_MD5",
            "versionIndex": artifact.version,
            "description": artifact.description,
            "metadata": artifact.metadata,
            "ttlDurationSeconds": -1,
            "ttlIsInherited": True,
            "tags": [],
            "historyStep": artifact.history_step,
            "size": sum(map(len, artifact.files.values())),
            "commitHash": None,
            "fileCount": len(artifact.files),
            "createdAt": _iso(artifact.created_at),
            "updatedAt": _iso(artifact.created_at),
            "artifactType": {"name": artifact.type},
            "artifactSequence": collection,
            "artifactCollections": _connection([collection], None, 1),
            "aliases": [alias | {"artifactCollection": collection} for alias in aliases],
            "currentManifest": manifest,
            "filesByManifestEntries": files,
        }

    def _client_id(self, clientID: str) -> Object:
        found = [a.id for a in self.backend.artifacts.by_id.values() if a.client_id == clientID]
        return {"serverID": found[0] if found else None}

    # --- mutations

    def _mutations(self) -> Object:
        table: dict[str, Callable[[Object], Object]] = {
            "upsertBucket": self._upsert,
            "deleteRun": self._delete,
            "rewindRun": self._rewind,
            "updateRunState": self._update_state,
            "stopRun": lambda given: {"success": self.backend.run_by_storage_id(given["id"]) is not None},
            "createRunFiles": self._create_files,
            "markRunFilesUploaded": lambda given: {"success": True},
            "createArtifact": self._create_artifact,
            "createArtifactManifest": self._manifest(self.backend.artifacts.create_manifest),
            "updateArtifactManifest": self._manifest(self.backend.artifacts.update_manifest),
            "createArtifactFiles": self._create_artifact_files,
            "commitArtifact": lambda given: {
                "artifact": self._artifact(self.backend.commit_artifact(given["artifactID"]))
            },
            "useArtifact": lambda given: {"artifact": {"id": given["artifactID"]}},
            "notifyScriptableRunAlert": lambda given: {"success": True},
        }
        root: Object = {"__typename": "Mutation"}
        for name, resolve in table.items():
            root[name] = lambda input, resolve=resolve: resolve(input)
        return root

    def _upsert(self, given: Object) -> Object:
        run, inserted = self.backend.upsert(given, self.now)
        return {"bucket": self._run(run), "inserted": inserted, "clientMutationId": None}

    def _delete(self, given: Object) -> Object:
        run = self.backend.run_by_storage_id(given["id"])
        if run is None:
            raise Missing(404, "run not found")
        run.deleted = True
        return {"clientMutationId": None, "success": True}

    def _rewind(self, given: Object) -> Object:
        run = self.backend.find(given.get("entityName"), given.get("projectName"), given["runName"])
        if run is None:
            raise Missing(404, f"run {given['runName']} not found")
        if not self.backend.can_rewind:
            raise GraphQLError("rewinding runs is not enabled here")
        run.rewind(given["metricName"], given["metricValue"], self.now)
        return {"rewoundRun": self._run(run)}

    def _update_state(self, given: Object) -> Object:
        run = self.backend.run_by_storage_id(given["id"])
        if run is None:
            raise Missing(404, "run not found")
        run.base_state = given["state"]
        return {"success": True}

    def _create_files(self, given: Object) -> Object:
        run = self.backend.find(given.get("entityName"), given.get("projectName"), given["runName"])
        if run is None:
            raise Missing(404, f"run {given['runName']} not found")
        root = f"{self.base_url}/storage/runs/{run.entity}/{run.project}/{run.id}"
        files = [{"name": name, "uploadUrl": f"{root}/{name}"} for name in given["files"]]
        return {"runID": self.backend.storage_id(run), "uploadHeaders": [], "files": files}

    def _create_artifact(self, given: Object) -> Object:
        return {"artifact": self._artifact(self.backend.create_artifact(given, self.now))}

    def _manifest(self, make: Callable[[Object], tuple[str, str]]) -> Callable[[Object], Object]:
        def resolve(given: Object) -> Object:
            manifest_id, path = make(given)
            url = f"{self.base_url}/storage/artifacts/{path}"
            file = {"id": f"File:{manifest_id}", "uploadUrl": url, "uploadHeaders": []}
            return {"artifactManifest": {"id": manifest_id, "file": file}}

        return resolve

    def _create_artifact_files(self, given: Object) -> Object:
        edges = []
        for spec in given["artifactFiles"]:
            artifact, path, wanted = self.backend.artifacts.add_file(spec)
            url = f"{self.base_url}/storage/artifacts/{path}" if wanted else None
            node = {
                "__typename": "File",
                "storagePath": path,
                "uploadUrl": url,
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": artifact.id},
            }
            edges.append({"node": node})
        return {"files": {"edges": edges}}


def _sampled_by(indexed: list[tuple[int, int, str]], spec: Object) -> list[Object]:
    """Rows that have every key of the spec, with those keys alone."""
    keys, low, high = spec.get("keys") or [], spec.get("minStep"), spec.get("maxStep")
    rows = []
    for step, _, text in indexed:
        if (low is None or step >= low) and (high is None or step < high):
            row = json.loads(text)
            if all(key in row for key in keys):
                rows.append({key: row[key] for key in keys} if keys else row)
    return sampled(rows, spec.get("samples", 500))


def _history_keys(indexed: list[tuple[int, int, str]]) -> Object | None:
    """`lastStep` and the keys of the first and the last row; null while there is no row."""
    if not indexed:
        return None
    keys = {**json.loads(indexed[0][2]), **json.loads(indexed[-1][2])}
    found = {key: {"typeCounts": [{"type": "number", "count": len(indexed)}]} for key in keys}
    return {"sets": [], "keys": found, "lastStep": indexed[-1][0]}


def _connection(nodes: list[Any], after: str | None, first: int) -> Object:
    start = int(after) if after else 0
    page = nodes[start : start + first]
    end = start + len(page)
    return {
        "__typename": "Connection",
        "edges": [{"node": node, "cursor": str(start + i + 1)} for i, node in enumerate(page)],
        "pageInfo": {"__typename": "PageInfo", "endCursor": str(end), "hasNextPage": end < len(nodes)},
    }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
