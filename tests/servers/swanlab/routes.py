"""Which request goes to which endpoint. The endpoint's name is also what faults are armed at."""

from __future__ import annotations

import re

PART = r"(?P<{}>[^/]+)"
RUN = "/api/project/<user>/<project>/runs/<run>"

ROUTES: list[tuple[str, str, str]] = [
    ("login", "POST", "/api/login/api_key"),
    ("user", "GET", "/api/user/profile"),
    ("groups", "GET", "/api/user/<user>/groups"),
    ("group", "GET", "/api/group/<user>"),
    ("self_hosted", "GET", "/api/self_hosted/info"),
    ("project.get", "GET", "/api/project/<user>/<project>"),
    ("project.list", "GET", "/api/project/<user>"),
    ("project.create", "POST", "/api/projects/<user>"),
    ("project.delete", "DELETE", "/api/project/<user>/<project>"),
    ("series", "POST", "/api/projects/<user>/<project>/series"),
    ("experiment.post", "POST", "/api/project/<user>/<project>/experiment"),
    ("experiment.list", "GET", "/api/project/<user>/<project>/runs"),
    ("experiment.shows", "POST", "/api/project/<user>/<project>/runs/shows"),
    ("experiment.delete_many", "POST", "/api/project/<user>/<project>/runs/del"),
    ("experiment.get", "GET", RUN),
    ("experiment.delete", "DELETE", RUN),
    ("profile", "PUT", RUN + "/profile"),
    ("state", "PUT", RUN + "/state"),
    ("columns", "GET", "/api/experiment/<run>/column"),
    ("heartbeat", "POST", "/api/house/experiments/<run>/heartbeat"),
    ("metrics", "POST", "/api/house/metrics"),
    ("marks", "GET", "/api/house/metrics/summaries/<project_id>/<run>"),
    ("summaries", "POST", "/api/house/metrics/summaries"),
    ("scalar", "POST", "/api/house/metrics/scalar"),
    ("scalar.value", "POST", "/api/house/metrics/scalar/value"),
    ("scalar.export", "POST", "/api/house/metrics/scalar/export"),
    ("keys", "POST", "/api/house/metrics/<kind>/keys"),
    ("availability", "POST", "/api/house/metrics/<kind>/availability"),
    ("media", "POST", "/api/house/metrics/media"),
    ("media.all", "POST", "/api/house/metrics/f_media"),
    ("log", "GET", "/api/house/metrics/log"),
    ("log.export", "POST", "/api/house/metrics/log/export"),
    ("presign.put", "POST", "/api/resources/presigned/put"),
    ("presign.get", "POST", "/api/resources/presigned/get"),
    ("presign.file", "POST", "/api/files/presigned/get"),
    ("files.prepare", "POST", "/api/experiment/<run>/files/prepare"),
    ("files.complete", "POST", "/api/experiment/<run>/files/complete"),
    ("files.prepare_multipart", "POST", "/api/experiment/<run>/files/prepare-multipart"),
    ("files.complete_multipart", "POST", "/api/experiment/<run>/files/complete-multipart"),
    ("object.put", "PUT", "/_store/<name>"),
    ("object.get", "GET", "/_store/<name>"),
]

_COMPILED = [
    (name, method, re.compile(re.sub(r"<(\w+)>", lambda part: PART.format(part[1]), path)))
    for name, method, path in ROUTES
]


def find(method: str, path: str) -> tuple[str, dict[str, str]]:
    """(endpoint, parameters) of a request; ("", {}) if there is no such route."""
    if path.startswith("/_store/"):
        return ("object.put" if method == "PUT" else "object.get"), {"name": path.removeprefix("/_store/")}
    for name, verb, pattern in _COMPILED:
        if verb == method and (found := pattern.fullmatch(path)):
            return name, found.groupdict()
    return "", {}
