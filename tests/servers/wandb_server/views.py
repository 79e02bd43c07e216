"""The objects that GraphQL answers are made of: entities, projects, runs, files and artifacts, as a lagging reader
sees them."""

from __future__ import annotations

import fnmatch
import json
import mimetypes
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.servers.wandb_server.artifacts import Artifact, md5
from tests.servers.wandb_server.graphql import GraphQLError
from tests.servers.wandb_server.state import Run, sampled

if TYPE_CHECKING:
    from tests.servers.wandb_server.backend import Backend

Object = dict[str, Any]


class Missing(GraphQLError):
    """Something that was asked for is not there; answered with status `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Views:
    """Objects over a backend at a time `now`, with URLs under `base_url`. Held under the backend's lock."""

    def __init__(self, backend: Backend, base_url: str, now: float) -> None:
        self.backend, self.base_url, self.now = backend, base_url, now

    def entity(self, name: str) -> Object:
        return {
            "__typename": "Entity",
            "id": f"Entity:{name}",
            "name": name,
            "organization": None,
            "xxhashDigestsEnabled": False,
        }

    def project(self, entity: str | None, project: str | None) -> Object | None:
        entity, project = entity or self.backend.default_entity, project or "uncategorized"
        runs = self.backend.runs_of(entity, project)
        number = self.backend.project_number(entity, project)

        def find(name: str) -> Object | None:
            run = self.backend.find(entity, project, name)
            return None if run is None else self.run(run)

        def bucket(name: str, missingOk: bool = False) -> Object | None:
            found = find(name)
            if found is None and not missingOk:
                raise Missing(404, f"could not find run {entity}/{project}/{name}")
            return found

        def listing(
            filters: str | None = None, after: str | None = None, first: int = 50, order: str | None = None
        ) -> Object:
            if filters not in (None, "{}"):
                raise GraphQLError("this server filters no runs")
            live = sorted((r for r in runs if not r.deleted), key=lambda r: r.serial)
            return connection([self.run(run) for run in live], after, first)

        def named(full_name: str) -> Artifact | None:
            return self.backend.artifacts.named(entity, project, full_name)

        if number is None:
            return None
        return {
            "__typename": "Project",
            "id": f"Project:v1:{project}:{entity}",
            "internalId": str(number),
            "name": project,
            "entityName": entity,
            "entity": self.entity(entity),
            "readOnly": False,
            "createdAt": iso(min((r.created_at for r in runs), default=self.now)),
            "isBenchmark": False,
            "runCount": lambda filters=None: sum(not run.deleted for run in runs),
            "run": find,
            "bucket": bucket,
            "runs": listing,
            "artifactType": lambda name: None,
            "artifact": lambda name, enableTracking=False: self.artifact(named(name)),
            "artifactCollection": lambda name: {
                "__typename": "ArtifactSequence",
                "artifactMembership": lambda aliasName: self.membership(named(f"{name}:{aliasName}")),
            },
            "artifactCollectionMembership": lambda name: self.membership(named(name)),
        }

    def run(self, run: Run) -> Object:
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
            "project": lambda: self.project(run.entity, run.project),
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
            "createdAt": iso(run.created_at),
            "heartbeatAt": iso(run.heartbeat_at),
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
            "logLines": lambda **page: self.log_lines(run, **page),
            "fileCount": len(run.files),
            "files": lambda **page: self.files(run, **page),
            "outputArtifacts": lambda after=None, first=50: self.run_artifacts(run, after, first),
            "inputArtifacts": lambda after=None, first=50: self.run_artifacts(None, after, first),
            "stopped": False,
        }

    def log_lines(
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
        return connection(nodes[-last:] if last else nodes, after, first or len(nodes) or 1)

    def files(
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
                    "updatedAt": iso(run.heartbeat_at),
                    "md5": md5(run.files[name]),
                }
            )
        return connection(nodes, after, first)

    def run_artifacts(self, run: Run | None, after: str | None, first: int) -> Object:
        made = [a for a in self.backend.artifacts.by_id.values() if a.run is run and a.state == "COMMITTED"]
        return connection([self.artifact(a) for a in made], after, first) | {"totalCount": len(made)}

    def artifact(self, artifact: Artifact | None) -> Object | None:
        if artifact is None:
            return None
        run = artifact.run
        collection: Object = {
            "__typename": "ArtifactSequence",
            "id": f"ArtifactCollection:{artifact.name}",
            "name": artifact.name,
            "project": lambda: self.project(run.entity, run.project),
            "latestArtifact": lambda: self.artifact(
                next(iter(reversed(self.backend.artifacts.collection(run, artifact.name))), None)
            ),
        }
        aliases = [{"__typename": "ArtifactAlias", "id": f"{artifact.id}:{a}", "alias": a} for a in artifact.aliases]
        manifest = {"file": {"directUrl": f"{self.base_url}/storage/artifacts/{artifact.id}/wandb_manifest.json"}}

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
            "createdAt": iso(artifact.created_at),
            "updatedAt": iso(artifact.created_at),
            "artifactType": {"name": artifact.type},
            "artifactSequence": collection,
            "artifactCollections": connection([collection], None, 1),
            "aliases": [alias | {"artifactCollection": collection} for alias in aliases],
            "currentManifest": manifest,
            "filesByManifestEntries": lambda entries, **_: self.artifact_files(artifact, entries, None, 1 << 30),
        }

    def artifact_files(self, artifact: Artifact, entries: list[Object] | None, after: str | None, first: int) -> Object:
        wanted = set(artifact.files) if entries is None else {entry["name"] for entry in entries}
        root = f"{self.base_url}/storage/artifact-files/{artifact.id}"
        names = [name for name in sorted(artifact.files) if name in wanted]
        nodes = [{"__typename": "File", "name": name, "directUrl": f"{root}/{name}"} for name in names]
        return connection(nodes, after, first)

    def membership(self, artifact: Artifact | None) -> Object | None:
        if artifact is None:
            return None
        shown = self.artifact(artifact) or {}
        return {
            "__typename": "ArtifactCollectionMembership",
            "id": f"ArtifactCollectionMembership:{artifact.id}",
            "versionIndex": artifact.version,
            "createdAt": shown["createdAt"],
            "aliases": shown["aliases"],
            "files": lambda after=None, first=50: self.artifact_files(artifact, None, after, first),
            "artifactCollection": shown["artifactSequence"],
            "artifact": shown,
        }


def _sampled_by(indexed: list[tuple[float, int, str]], spec: Object) -> list[Object]:
    """Rows that have every key of the spec, with those keys alone."""
    keys, low, high = spec.get("keys") or [], spec.get("minStep"), spec.get("maxStep")
    rows = []
    for step, _, text in indexed:
        if (low is None or step >= low) and (high is None or step < high):
            row = json.loads(text)
            if all(key in row for key in keys):
                rows.append({key: row[key] for key in keys} if keys else row)
    return sampled(rows, spec.get("samples", 500))


def _history_keys(indexed: list[tuple[float, int, str]]) -> Object | None:
    """`lastStep` and the keys of the first and the last row; null while there is no row."""
    if not indexed:
        return None
    keys = {**json.loads(indexed[0][2]), **json.loads(indexed[-1][2])}
    found = {key: {"typeCounts": [{"type": "number", "count": len(indexed)}]} for key in keys}
    return {"sets": [], "keys": found, "lastStep": indexed[-1][0]}


def connection(nodes: list[Any], after: str | None, first: int) -> Object:
    start = int(after) if after else 0
    page = nodes[start : start + first]
    end = start + len(page)
    return {
        "__typename": "Connection",
        "edges": [{"node": node, "cursor": str(start + i + 1)} for i, node in enumerate(page)],
        "pageInfo": {"__typename": "PageInfo", "endCursor": str(end), "hasNextPage": end < len(nodes)},
    }


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
