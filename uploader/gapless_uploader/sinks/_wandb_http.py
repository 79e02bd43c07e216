"""Requests to a W&B server, each with one of few outcomes. One place knows what every status means.

An acknowledgement is a 2xx whose body is the JSON it should be; anything else that came back whole or in part, or not
at all, is not. The key is sent in a header and is in no message.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from gapless_uploader.sink import Parked, Rejected, Retryable

CONNECT_S = 10.0
MAX_WAIT_S = 300.0
"""The longest `Retry-After` that is obeyed; W&B's own client waits as long as it is told, days included."""
MAX_ANSWER_BYTES = 64 << 20

NOT_LET_IN = "W&B does not know this key (401); log in again (`wandb login`) or set WANDB_API_KEY: it is read anew"


class Unauthorized(Exception):
    """401: the key is not, or no longer, good."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where the server is and who asks. Its repr holds no key."""

    base_url: str
    api_key: str = field(repr=False)
    proxies: dict[str, str] = field(default_factory=dict)


class Http:
    """The calls of W&B's write protocol. Thread safe: each thread has its own connections."""

    def __init__(self, credentials: Callable[[bool], Credentials], timeout_s: float, agent: str) -> None:
        """`credentials(anew)` gives them; anew after the server refused the ones before."""
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._agent = agent
        self.meter: Callable[[int], None] = _unmetered
        """Called before each request with its bytes; waits while the sink's budget is spent."""
        self._local = threading.local()

    def graphql(self, operation: str, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The `data` of the answer. Raises Retryable, Rejected or Parked."""
        body = orjson.dumps({"query": query, "variables": variables, "operationName": operation})
        answer = self._json("POST", "/graphql", body, operation)
        data = answer.get("data")
        errors = answer.get("errors")
        if errors or not isinstance(data, dict):
            raise Retryable(f"{operation}: {_first_message(errors)}")
        return data

    def stream(self, path: str, body: bytes, meanwhile: Callable[[], None] | None = None) -> None:
        """Post to a run's file_stream; `meanwhile` is called when the request has left. Raises Retryable, Rejected
        (too_large for 413) or Parked."""
        self._json("POST", path, body, "file_stream", meanwhile)

    def put(self, url: str, headers: list[str], content: bytes) -> None:
        """Upload bytes to the address that the server gave. Raises Retryable, Rejected or Parked."""
        given = dict(header.split(":", 1) for header in headers)
        given = {name.strip(): value.strip() for name, value in given.items()}
        status, _, wait = self._send("PUT", url, content, {"Content-Type": "", **given}, "upload")
        if not 200 <= status < 300:
            # An upload address is signed and expires: whatever it says, a fresh one is asked for.
            if status == 413:
                raise Rejected(f"upload: W&B's storage takes no file of {len(content)} bytes (413)")
            raise Retryable(f"upload: the storage answered {status}", wait)

    def _json(
        self, method: str, path: str, body: bytes, what: str, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        for anew in (False, True):
            credentials = self._credentials(anew)
            headers = {"Content-Type": "application/json", "User-Agent": self._agent}
            url = credentials.base_url + path
            status, content, wait = self._send(method, url, body, headers, what, credentials, meanwhile)
            if status != 401:
                break
            self._local.session = None
        outcome(what, status, content, wait)
        try:
            answer = json.loads(content)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Retryable(
                f"{what}: {credentials.base_url} answered {status} with {_shape(content)}, which is no answer of W&B's:"
                " a proxy or a login page stands between"
            )
        return answer

    def _send(
        self,
        method: str,
        url: str,
        body: bytes,
        headers: dict[str, str],
        what: str,
        credentials: Credentials | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[int, bytes, float | None]:
        import requests
        from urllib3.exceptions import HTTPError

        self.meter(len(body))
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.max_redirects = 3
        deadline = time.monotonic() + self._timeout_s
        auth = ("api", credentials.api_key) if credentials else _no_auth
        try:
            with session.request(
                method,
                url,
                data=body if meanwhile is None else _Body(body, meanwhile),
                headers=headers,
                auth=auth,
                timeout=(min(CONNECT_S, self._timeout_s), self._timeout_s),
                stream=True,
                proxies=(credentials.proxies if credentials else None) or None,
                allow_redirects=method != "POST",
            ) as response:
                content = _read(response, deadline)
                return response.status_code, content, _retry_after(response.headers.get("Retry-After"))
        except (requests.RequestException, HTTPError) as error:
            raise Retryable(f"{what}: {_cause(error)} ({_host(url)})") from None
        except (OSError, ValueError) as error:
            raise Retryable(f"{what}: {type(error).__name__} ({_host(url)})") from None


class _Body:
    """A request's body after which there is something to do before the answer is read."""

    def __init__(self, content: bytes, meanwhile: Callable[[], None]) -> None:
        self._content = content
        self._meanwhile = meanwhile

    def __len__(self) -> int:
        return len(self._content)

    def __iter__(self) -> Iterator[bytes]:
        yield self._content
        self._meanwhile()


def outcome(what: str, status: int, content: bytes, wait: float | None) -> None:
    """Nothing for an acknowledgement, else the error that says what happens next."""
    if 200 <= status < 300:
        return
    said = _said(content)
    if status == 401:
        raise Parked(NOT_LET_IN, whole_sink=True)
    if status == 403:
        raise Parked(f"{what}: this key may not write there (403{said}); ask the entity's owner, or choose `entity`")
    if status == 404:
        raise Parked(f"{what}: W&B has no such run or project (404{said}); begin it anew with --new-id RUN=ID")
    if status in (409, 410):
        raise Parked(
            f"{what}: the run was deleted at W&B, which never gives its id again ({status}{said});"
            " upload it under another with --new-id RUN=ID"
        )
    if status == 413:
        raise Rejected(f"{what}: W&B takes no request of that size (413)", too_large=True)
    if status == 429:
        raise Retryable(f"{what}: W&B asks for fewer requests (429)", wait)
    if status >= 500 or status in (408, 425):
        raise Retryable(f"{what}: W&B answered {status}", wait)
    if 300 <= status < 400:
        raise Retryable(
            f"{what}: redirected ({status}): a login page stands between, or WANDB_BASE_URL is not the server's"
        )
    raise Rejected(f"{what}: W&B refuses the request ({status}{said})")


def _no_auth(request: Any) -> Any:
    """No credentials, netrc's neither: an upload address is signed, and may be another host's."""
    return request


def _read(response: Any, deadline: float) -> bytes:
    """The body, within the deadline also when it comes byte by byte. Raises what urllib3 and OSError raise."""
    parts, size = [], 0
    expected = response.headers.get("Content-Length")
    while part := response.raw.read1(1 << 16, decode_content=True):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline or size > MAX_ANSWER_BYTES:
            raise TimeoutError("the answer takes too long")
    if expected is not None and "Content-Encoding" not in response.headers and size < int(expected):
        raise ConnectionError("the answer ended early")
    return b"".join(parts)


def _retry_after(value: str | None) -> float | None:
    """Seconds, at most MAX_WAIT_S; None where there are none, or a date that nobody's clock need share."""
    try:
        return min(max(float(value or ""), 0.0), MAX_WAIT_S)
    except ValueError:
        return None


def _first_message(errors: object) -> str:
    if isinstance(errors, list) and errors and isinstance(errors[0], dict):
        return f"W&B answered with an error: {str(errors[0].get('message'))[:300]}"
    return "W&B answered without data"


def _said(content: bytes) -> str:
    try:
        answer = json.loads(content)
    except ValueError:
        return ""
    if not isinstance(answer, dict):
        return ""
    errors = answer.get("errors")
    message = errors[0].get("message") if isinstance(errors, list) and errors else answer.get("error")
    return f": {message[:200]}" if isinstance(message, str) else ""


def _shape(content: bytes) -> str:
    return "HTML" if content.lstrip()[:1] == b"<" else f"{len(content)} bytes that are no JSON object"


def _cause(error: BaseException) -> str:
    """The innermost reason, without addresses of objects."""
    inner: BaseException = error
    while inner.__cause__ is not None or inner.__context__ is not None:
        inner = inner.__cause__ or inner.__context__ or inner
    return f"{type(error).__name__}: {getattr(inner, 'strerror', None) or type(inner).__name__}"


def _host(url: str) -> str:
    return "/".join(url.split("/", 3)[:3])


def _unmetered(num_bytes: int) -> None:
    del num_bytes
