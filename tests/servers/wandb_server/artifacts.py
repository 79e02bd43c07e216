"""Artifacts: versions of a collection, deduplicated by digest, their files and manifests, committed once complete."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from tests.servers.wandb_server.graphql import GraphQLError
from tests.servers.wandb_server.state import Run


class Artifact:
    """One version. `state` is PENDING until `commitArtifact`."""

    def __init__(self, artifact_id: str, run: Run, given: dict[str, Any], now: float) -> None:
        self.id, self.run, self.created_at = artifact_id, run, now
        self.type = given["artifactTypeName"]
        names = given.get("artifactCollectionNames") or [given.get("artifactCollectionName")]
        self.name: str = names[0]
        self.digest: str = given["digest"]
        self.aliases: list[str] = [a["alias"] for a in given.get("aliases") or []]
        self.metadata: str | None = given.get("metadata")
        self.description: str | None = given.get("description")
        self.history_step: int | None = given.get("historyStep")
        self.client_id: str | None = given.get("clientID")
        self.sequence_client_id: str | None = given.get("sequenceClientID")
        self.state = "PENDING"
        self.version: int | None = None
        self.manifest: dict[str, Any] | None = None
        self.manifest_digest: str | None = None
        self.files: dict[str, bytes] = {}

    @property
    def full_name(self) -> str:
        return f"{self.name}:v{self.version if self.version is not None else '?'}"

    def as_dict(self) -> dict[str, Any]:
        """What a test reads of it."""
        return {
            "id": self.id,
            "name": self.name,
            "version": self.version,
            "type": self.type,
            "state": self.state,
            "digest": self.digest,
            "aliases": list(self.aliases),
            "history_step": self.history_step,
            "metadata": json.loads(self.metadata) if self.metadata else None,
            "manifest": self.manifest,
            "files": {name: len(data) for name, data in self.files.items()},
        }


class Artifacts:
    """Every artifact of a server. Ids are numbers in order, so that a replayed journal gives the same ones."""

    def __init__(self) -> None:
        self.by_id: dict[str, Artifact] = {}
        self.blobs: dict[str, bytes] = {}
        """Stored bytes by storage path; the same content is asked for once."""
        self._manifests: dict[str, str] = {}
        self._digests: dict[str, str] = {}

    def collection(self, run: Run, name: str) -> list[Artifact]:
        """The committed versions of a collection, oldest first."""
        same = (a for a in self.by_id.values() if (a.run.entity, a.run.project) == (run.entity, run.project))
        found = [a for a in same if a.name == name and a.state == "COMMITTED"]
        return sorted(found, key=lambda a: a.version or 0)

    def named(self, entity: str, project: str, full_name: str) -> Artifact | None:
        """The committed version that `collection:alias`, `collection:vN` or a bare collection (its newest) names."""
        name, _, which = full_name.partition(":")
        for artifact in reversed(self.by_id.values()):
            run = artifact.run
            if (run.entity, run.project, artifact.name, artifact.state) != (entity, project, name, "COMMITTED"):
                continue
            if not which or which == f"v{artifact.version}" or which in artifact.aliases:
                return artifact
        return None

    def create(self, run: Run, given: dict[str, Any], now: float) -> Artifact:
        """`createArtifact`: the version with this digest where one is there and may be shared, else a new one."""
        if given.get("enableDigestDeduplication"):
            names = given.get("artifactCollectionNames") or [given.get("artifactCollectionName")]
            for artifact in self.collection(run, names[0]):
                if artifact.digest == given["digest"]:
                    self._move_aliases(artifact, [a["alias"] for a in given.get("aliases") or []])
                    return artifact
        for artifact in self.by_id.values():
            if given.get("clientID") and artifact.client_id == given["clientID"]:
                return artifact
        artifact = Artifact(_id("Artifact", len(self.by_id) + 1), run, given, now)
        self.by_id[artifact.id] = artifact
        return artifact

    def create_manifest(self, given: dict[str, Any]) -> tuple[str, str]:
        """(manifest id, storage path) of a new manifest of an artifact."""
        artifact = self._get(given["artifactID"])
        manifest_id = _id("ArtifactManifest", len(self._manifests) + 1)
        self._manifests[manifest_id] = artifact.id
        artifact.manifest_digest = given.get("digest")
        return manifest_id, f"{artifact.id}/wandb_manifest.json"

    def update_manifest(self, given: dict[str, Any]) -> tuple[str, str]:
        manifest_id = given["artifactManifestID"]
        if manifest_id not in self._manifests:
            raise GraphQLError(f"no artifact manifest {manifest_id}")
        artifact = self._get(self._manifests[manifest_id])
        artifact.manifest_digest = given.get("digest") or artifact.manifest_digest
        return manifest_id, f"{artifact.id}/wandb_manifest.json"

    def add_file(self, spec: dict[str, Any]) -> tuple[Artifact, str, bool]:
        """(artifact, storage path, whether the bytes have to be sent) of a file declared for an artifact."""
        artifact = self._get(spec["artifactID"])
        path = f"{artifact.run.entity}/{spec['md5'].replace('/', '_')}/{spec['name']}"
        self._digests[path] = spec["md5"]
        if path in self.blobs:
            artifact.files[spec["name"]] = self.blobs[path]
            return artifact, path, False
        return artifact, path, True

    def put(self, path: str, data: bytes) -> bool:
        """Store uploaded bytes; False where they are not what was declared."""
        head, _, tail = path.partition("/")
        if tail == "wandb_manifest.json" and head in self.by_id:
            artifact = self.by_id[head]
            if artifact.manifest_digest and artifact.manifest_digest != md5(data):
                return False
            artifact.manifest = json.loads(data)
            return True
        if self._digests.get(path) != md5(data):
            return False
        self.blobs[path] = data
        return True

    def commit(self, artifact_id: str) -> Artifact:
        """`commitArtifact`: refused while a file of the manifest is missing; a second commit changes nothing."""
        artifact = self._get(artifact_id)
        if artifact.state == "COMMITTED":
            return artifact
        if artifact.manifest is None:
            raise GraphQLError(f"artifact {artifact.name} has no manifest")
        for name, entry in artifact.manifest["contents"].items():
            if "ref" in entry:
                continue
            path = self._path_of(artifact, name, entry["digest"])
            if path is None:
                raise GraphQLError(f"artifact {artifact.name} lacks its file {name}")
            artifact.files[name] = self.blobs[path]
        artifact.version = len(self.collection(artifact.run, artifact.name))
        artifact.state = "COMMITTED"
        aliases, artifact.aliases = artifact.aliases, []
        self._move_aliases(artifact, aliases)
        return artifact

    def _path_of(self, artifact: Artifact, name: str, digest: str) -> str | None:
        path = f"{artifact.run.entity}/{digest.replace('/', '_')}/{name}"
        return path if path in self.blobs else None

    def _move_aliases(self, artifact: Artifact, aliases: list[str]) -> None:
        """An alias points at one version of a collection."""
        for other in self.collection(artifact.run, artifact.name):
            other.aliases = [a for a in other.aliases if a not in aliases or other is artifact]
        artifact.aliases += [a for a in aliases if a not in artifact.aliases]

    def _get(self, artifact_id: str) -> Artifact:
        if artifact_id not in self.by_id:
            raise GraphQLError(f"no artifact {artifact_id}")
        return self.by_id[artifact_id]


def md5(data: bytes) -> str:
    """The base64 MD5 that artifacts are declared with."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _id(kind: str, number: int) -> str:
    return base64.urlsafe_b64encode(f"{kind}:{number:012d}".encode()).decode()
