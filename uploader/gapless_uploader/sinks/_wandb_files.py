"""A run's files and artifacts on their way up. Every step may be repeated: names and ids are made of the content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from gapless_uploader.sink import Rejected, Retryable
from gapless_uploader.sinks import _wandb_queries as queries
from gapless_uploader.sinks._wandb_http import Http
from gapless_uploader.sinks._wandb_media import GONE, Upload
from gapless_uploader.sinks._wandb_tables import TableArtifact, manifest, md5_of

_AT_ONCE = 100


class FileRefused(Rejected):
    """A value's file that cannot be read, or that W&B does not take: it costs its key in its row, and no more."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run at the server."""

    entity: str
    project: str
    run: str

    def __str__(self) -> str:
        return f"{self.entity}/{self.project}/{self.run}"


def upload(http: Http, place: RunPlace, uploads: Sequence[Upload]) -> list[str]:
    """Put files into the run; their names. Raises Retryable, Rejected, FileRefused, Parked and OSError."""
    wanted = {upload.name: upload for upload in uploads}
    names = list(wanted)
    for first in range(0, len(names), _AT_ONCE):
        some = [wanted[name] for name in names[first : first + _AT_ONCE]]
        try:
            _put(http, place, some)
        except FileRefused:
            raise
        except Rejected:  # one of the names is the reason
            for upload in some:
                with _at_the_cost_of(upload):
                    _put(http, place, [upload])
    return names


def _put(http: Http, place: RunPlace, uploads: Sequence[Upload]) -> None:
    names = [upload.name for upload in uploads]
    variables = {"entity": place.entity, "project": place.project, "run": place.run, "files": names}
    made = http.graphql("CreateRunFiles", queries.FILES, variables).get("createRunFiles") or {}
    addresses = {file["name"]: file["uploadUrl"] for file in made.get("files") or []}
    for upload in uploads:
        if not addresses.get(upload.name):
            raise Retryable(f"CreateRunFiles: no address for {upload.name}")
        with _at_the_cost_of(upload):
            http.put(addresses[upload.name], made.get("uploadHeaders") or [], upload.read())


@contextmanager
def _at_the_cost_of(file: Upload | TableArtifact) -> Iterator[None]:
    """What is permanent is a value's own affair, if the file is a value's."""
    try:
        yield
    except FileRefused:
        raise
    except Rejected as error:
        if not file.of_a_value:
            raise
        raise FileRefused(file.name, str(error)) from None
    except GONE as error:
        if not file.of_a_value:
            raise
        raise FileRefused(file.name, f"a payload that cannot be read ({error.strerror})") from None


def send_artifact(http: Http, place: RunPlace, artifact: TableArtifact) -> None:
    """Make the artifact's version, unless W&B has it. Raises Retryable, FileRefused and Parked."""
    with _at_the_cost_of(artifact):
        _send_artifact(http, place, artifact)


def _send_artifact(http: Http, place: RunPlace, artifact: TableArtifact) -> None:
    given = {
        "entityName": place.entity,
        "projectName": place.project,
        "runName": place.run,
        "artifactTypeName": artifact.type,
        "artifactCollectionName": artifact.collection,
        "digest": artifact.digest,
        "digestAlgorithm": "MANIFEST_MD5",
        "clientID": artifact.client_id,
        "sequenceClientID": artifact.sequence_client_id,
        "enableDigestDeduplication": True,
        "historyStep": artifact.step,
        "aliases": [{"alias": "latest", "artifactCollectionName": artifact.collection}],
    }
    made = _got(http.graphql("CreateArtifact", queries.CREATE_ARTIFACT, {"input": given}), "createArtifact", "artifact")
    if made.get("state") == "COMMITTED":
        return
    artifact_id = str(made["id"])
    base = ((made.get("artifactSequence") or {}).get("latestArtifact") or {}).get("id")
    kind = "INCREMENTAL" if artifact.incremental else "FULL"
    variables: dict[str, Any] = {
        "artifactID": artifact_id,
        "baseArtifactID": base,
        "name": "wandb_manifest.incremental.json" if artifact.incremental else "wandb_manifest.json",
        "digest": "",
        "entityName": place.entity,
        "projectName": place.project,
        "runName": place.run,
        "manifestType": kind,
        "includeUpload": False,
    }
    manifest_id = _manifest(http, "CreateArtifactManifest", queries.CREATE_MANIFEST, variables)["id"]
    declared = {
        "artifactID": artifact_id,
        "artifactManifestID": manifest_id,
        "md5": artifact.md5,
        "name": artifact.file,
    }
    answer = http.graphql(
        "CreateArtifactFiles",
        queries.ARTIFACT_FILES,
        {"input": {"artifactFiles": [declared], "storageLayout": "V2"}},
    )
    for edge in _got(answer, "createArtifactFiles", "files").get("edges") or []:
        node = edge["node"]
        if node.get("uploadUrl"):
            http.put(node["uploadUrl"], node.get("uploadHeaders") or [], artifact.content)
    content = manifest(artifact, artifact_id)
    finished = {"digest": md5_of(content), "includeUpload": True}
    if artifact.incremental:
        changed = {"artifactManifestID": manifest_id, "baseArtifactID": base, **finished}
        held = _manifest(http, "UpdateArtifactManifest", queries.UPDATE_MANIFEST, changed)
    else:
        held = _manifest(http, "CreateArtifactManifest", queries.CREATE_MANIFEST, {**variables, **finished})
    http.put(held["file"]["uploadUrl"], held["file"].get("uploadHeaders") or [], content)
    http.graphql("CommitArtifact", queries.COMMIT_ARTIFACT, {"artifactID": artifact_id})


def _manifest(http: Http, operation: str, query: str, variables: dict[str, Any]) -> dict[str, Any]:
    answer = http.graphql(operation, query, variables)
    return _got(answer, operation[0].lower() + operation[1:], "artifactManifest")


def _got(answer: dict[str, Any], *names: str) -> dict[str, Any]:
    held: Any = answer
    for name in names:
        held = held.get(name) if isinstance(held, dict) else None
    if not isinstance(held, dict):
        raise Retryable(f"{names[0]}: the answer lacks {names[-1]}")
    return held
