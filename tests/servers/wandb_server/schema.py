"""What the server answers to GraphQL: the queries and mutations that the client and `wandb.Api` send."""

from __future__ import annotations

from collections.abc import Callable

from tests.servers.wandb_server.graphql import GraphQLError
from tests.servers.wandb_server.views import Missing, Object, Views, connection


class Schema(Views):
    """The root objects of one request."""

    def root(self, kind: str) -> Object:
        return self._mutations() if kind == "mutation" else self._queries()

    # --- queries

    def _queries(self) -> Object:
        return {
            "__typename": "Query",
            "viewer": self._viewer,
            "serverInfo": self._server_info,
            "project": lambda name, entityName=None: self.project(entityName, name),
            "model": lambda name, entityName=None: self.project(entityName, name),
            "entity": lambda name: self.entity(name),
            "organization": lambda name: None,
            "artifact": lambda **given: self.artifact(self.backend.artifacts.by_id.get(given["id"])),
            "clientIDMapping": self._client_id,
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
            "defaultEntity": self.entity(name),
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

    def _models(self, entityName: str | None = None, after: str | None = None, first: int = 50) -> Object:
        entity = entityName or self.backend.default_entity
        names = sorted({run.project for run in self.backend.runs.values() if run.entity == entity})
        return connection([self.project(entity, name) for name in names], after, first)

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
                "artifact": self.artifact(self.backend.commit_artifact(given["artifactID"]))
            },
            "useArtifact": lambda given: {"artifact": {"id": given["artifactID"]}},
            "notifyScriptableRunAlert": lambda given: {"success": True},
        }
        root: Object = {"__typename": "Mutation"}
        for name, resolve in table.items():
            root[name] = lambda resolve=resolve, **given: resolve(given["input"])
        return root

    def _upsert(self, given: Object) -> Object:
        run, inserted = self.backend.upsert(given, self.now)
        return {"bucket": self.run(run), "inserted": inserted, "clientMutationId": None}

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
        return {"rewoundRun": self.run(run)}

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
        return {"artifact": self.artifact(self.backend.create_artifact(given, self.now))}

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
            node: Object = {
                "__typename": "File",
                "storagePath": path,
                "uploadUrl": url,
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": artifact.id},
            }
            edges.append({"node": node})
        return {"files": {"edges": edges}}
