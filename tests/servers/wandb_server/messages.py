"""A request, what became of it, and its response."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.servers.wandb_server.graphql import Document


@dataclass
class Request:
    """One request as it came, and what became of it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    num_bytes: int
    time: float
    names: list[str] = field(default_factory=list)
    """The endpoint's names, the most telling one first."""
    operation: str = ""
    document: Document | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    entity: str | None = None
    project: str | None = None
    run_id: str | None = None
    status: int | None = None
    """What was answered; None where no whole answer was sent."""
    fault: str | None = None
    """The kind of the fault that hit it."""
    took_effect: bool = False
    post: dict[str, Any] | None = None
    """The parsed body of a file_stream request, until it is answered."""

    def json(self) -> Any:
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:  # Python's own takes NaN, and says what is wrong
            return json.loads(self.body)


@dataclass
class Response:
    """One response, sent whole unless a fault says otherwise."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_response(status: int, value: Any) -> Response:
    return Response(status, json.dumps(value).encode())
