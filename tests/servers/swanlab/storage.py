"""The object store behind presigned links: media of rows, saved files in one piece or many, exports."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Any
from urllib.parse import quote

from tests.servers.swanlab.http import Answer, Request
from tests.servers.swanlab.model import Experiment, File, User
from tests.servers.swanlab.state import Refused, State


def _signature(state: State, verb: str, name: str) -> str:
    return hmac.new(state.secret.encode(), f"{verb} {name}".encode(), hashlib.sha256).hexdigest()[:32]


def _link(state: State, verb: str, name: str, extra: str = "") -> str:
    return f"{state.url}/_store/{quote(name)}?sig={_signature(state, verb, name)}{extra}"


def _base(experiment: Experiment) -> str:
    return f"{experiment.project.cuid}/{experiment.cuid}"


def presign_put(state: State, request: Request, user: User) -> Answer:
    body = request.json()
    experiment = state.by_id(body["experimentId"], user)
    return Answer({"urls": [_link(state, "PUT", f"{_base(experiment)}/{path}") for path in body["paths"]]})


def presign_get(state: State, request: Request, user: User) -> Answer:
    """Links to a run's media; `prefix` is project id, slash, experiment id."""
    body = request.json()
    state.by_id(body["prefix"].partition("/")[2], user)
    return Answer({"urls": [_link(state, "GET", f"{body['prefix']}/{path}") for path in body["paths"]]})


def presign_file(state: State, request: Request, user: User) -> Answer:
    """Links to exports, by the `cosKey` that the export answered."""
    return Answer({"urls": [_link(state, "GET", path) for path in request.json()["paths"]]})


def put_object(state: State, request: Request) -> Answer:
    """Stores the bytes under the link's name. Refused 403 for a link that this server did not sign."""
    name = request.params["name"]
    if not hmac.compare_digest(request.query.get("sig", ""), _signature(state, "PUT", name)):
        raise Refused(403, "SignatureDoesNotMatch", name)
    cuid, path = name.split("/", 2)[1:]
    experiment = state.experiments.get(cuid)
    if experiment is None:
        raise Refused(404, "NoSuchBucket", cuid)
    part = request.query.get("partNumber")
    experiment.objects[path if part is None else f"{path}#{int(part):06d}"] = request.body
    return Answer(body=b"", headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})  # noqa: S324


def get_object(state: State, request: Request) -> Answer:
    name = request.params["name"]
    if not hmac.compare_digest(request.query.get("sig", ""), _signature(state, "GET", name)):
        raise Refused(403, "SignatureDoesNotMatch", name)
    if name in state.exports:
        return Answer(body=state.exports[name], content_type="text/csv; charset=utf-8")
    cuid, path = name.split("/", 2)[1:]
    experiment = state.experiments.get(cuid)
    if experiment is None or path not in experiment.objects:
        raise Refused(404, "NoSuchKey", name)
    return Answer(body=experiment.objects[path], content_type="application/octet-stream")


def prepare_files(state: State, request: Request, user: User) -> Answer:
    experiment = state.run(request, user)
    urls = [
        _link(state, "PUT", f"{_base(experiment)}/files/{_announce(experiment, file).path}") for file in _files(request)
    ]
    return Answer({"urls": urls})


def complete_files(state: State, request: Request, user: User) -> Answer:
    """Takes the client's word for FAILED, and for UPLOADED only if the bytes are there and are those announced."""
    experiment = state.run(request, user)
    for entry in _files(request):
        file = experiment.files.get(entry["path"])
        if file is None:
            raise Refused(404, "Not_Found", f"file {entry['path']} was not announced")
        if entry["state"] == "UPLOADED":
            _compare(file, experiment.objects.get(f"files/{file.path}"))
        file.state = entry["state"]
    return Answer({"message": "ok"}, 201)


def prepare_multipart(state: State, request: Request, user: User) -> Answer:
    experiment = state.run(request, user)
    answers = []
    for entry in _files(request):
        file = _announce(experiment, entry)
        file.upload_id = secrets.token_hex(8)
        name = f"{_base(experiment)}/files/{file.path}"
        parts = [
            {"partNumber": number, "url": _link(state, "PUT", name, f"&partNumber={number}")}
            for number in range(1, entry["count"] + 1)
        ]
        answers.append({"uploadId": file.upload_id, "parts": parts})
    return Answer({"files": answers})


def complete_multipart(state: State, request: Request, user: User) -> Answer:
    """Joins the parts in the order of their numbers."""
    experiment = state.run(request, user)
    for entry in _files(request):
        file = experiment.files.get(entry["path"])
        if file is None or file.upload_id != entry["uploadId"]:
            raise Refused(404, "Not_Found", f"upload {entry['uploadId']}")
        numbers = sorted(part["partNumber"] for part in entry["parts"])
        try:
            parts = [experiment.objects.pop(f"files/{file.path}#{number:06d}") for number in numbers]
        except KeyError as error:
            raise Refused(400, "Validation_Error", f"part {error} never came") from None
        experiment.objects[f"files/{file.path}"] = b"".join(parts)
        _compare(file, experiment.objects[f"files/{file.path}"])
        file.state = "UPLOADED"
    return Answer({"message": "ok"}, 201)


def _files(request: Request) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = request.json()["files"]
    return files


def _announce(experiment: Experiment, entry: dict[str, Any]) -> File:
    file = File(entry["path"], entry["size"], entry["md5"], entry["mimeType"])
    experiment.files[file.path] = file
    return file


def _compare(file: File, content: bytes | None) -> None:
    if content is None:
        raise Refused(404, "Not_Found", f"file {file.path} was not uploaded")
    if len(content) != file.size or hashlib.md5(content).hexdigest() != file.md5:  # noqa: S324
        raise Refused(400, "Validation_Error", f"file {file.path} is not what was announced")


OPEN_HANDLERS = {"object.put": put_object, "object.get": get_object}
HANDLERS = {
    "presign.put": presign_put,
    "presign.get": presign_get,
    "presign.file": presign_file,
    "files.prepare": prepare_files,
    "files.complete": complete_files,
    "files.prepare_multipart": prepare_multipart,
    "files.complete_multipart": complete_multipart,
}
