"""SwanLab's HTTP calls, each with its answer put into one of four kinds.

- acknowledged: 2xx (202 apart) with a JSON object or list;
- `NotStored`: connection refused, no route, no name, a connect that timed out, 429; it may be sent again at once;
- `Unknown`: a reset, a read that timed out, 5xx, 408, 202, 2xx without JSON (a captive portal), 3xx;
- `Declined` (400, 413, 422: this body, never) or `Parked` (401 after a new login, 403, 404 and the rest).

A 401 is answered with one new login and the same request again. Safe from several threads: each has its own
connections. No message holds the key, the session or a header.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from gapless_uploader.sink import Parked, Retryable
from gapless_uploader.sinks import need
from gapless_uploader.sinks._swanlab_account import Account

PROTOCOL = "0.10.3"
"""The version of the `swanlab` package whose calls these are."""
_CONNECT_S = 10.0
_IDLE_S = 20.0
_REFUSED_S = 60.0
_MAX_ANSWER_BYTES = 256 << 20
_HTTP_ACCEPTED = 202
_HTTP_UNAUTHORIZED = 401


class NotStored(Retryable):
    """The tracker did not take the request."""


class Unknown(Retryable):
    """The tracker may have taken the request, or a part of it."""


class Declined(Exception):
    """The tracker will not take this body. `too_large` when a smaller one may pass; `code` is its own short word."""

    def __init__(self, reason: str, code: str, too_large: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.too_large = too_large


class Missing(Parked):
    """404: there is no such thing, or no longer."""


class Api:
    """One account at one host."""

    def __init__(
        self,
        account: Account,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        meter: Callable[[int], None] | None = None,
    ) -> None:
        """`clock`: monotonic seconds, after which a refused key may be tried again. Raises Misconfigured.

        `meter` is called before each request with its bytes, and waits while the sink's budget is spent.
        """
        self._meter = meter
        self._requests = need("swanlab", "requests")
        self._exceptions: Any = need("swanlab", "requests.exceptions")
        self.account = account
        self._clock = clock
        self._refused: tuple[float, str] | None = None
        """When and with which words the key was refused."""
        self._timeout = (min(_CONNECT_S, timeout_s), timeout_s)
        self._lock = threading.Lock()
        self._sid = ""
        self._username = ""
        self._local = threading.local()
        self.clock_skew_s = 0.0
        """What to add to this machine's clock for the tracker's, by the Date of its last login."""

    @property
    def key_was_refused(self) -> bool:
        """Whether the last login was refused."""
        return self._refused is not None

    @property
    def username(self) -> str:
        """The account's name. Logs in when nobody has. Raises Retryable or Parked."""
        if not self._sid:
            self._login("")
        return self._username

    def call(self, method: str, path: str, body: Any = None, *, data: bytes | None = None) -> Any:
        """The decoded answer of `HOST/api` + `path`; `data` is a JSON body that is encoded already.

        Raises NotStored, Unknown, Declined, Missing or Parked.
        """
        return self.request(method, path, body, data=data)[1]

    def request(self, method: str, path: str, body: Any = None, *, data: bytes | None = None) -> tuple[int, Any]:
        """The same with the HTTP status before it."""
        if data is None and body is not None:
            data = json.dumps(body, ensure_ascii=True, allow_nan=False).encode()
        for _ in range(2):
            if not self._sid:
                self._login("")
            sid = self._sid
            status, headers, content = self._send(
                method,
                f"{self.account.api_host}/api{path}",
                data,
                {"Cookie": f"sid={sid}", "Content-Type": "application/json"},
            )
            if status != _HTTP_UNAUTHORIZED:
                return status, self._judge(f"{method} {_shown(path)}", status, headers, content)
            self._login(sid)
        raise Parked(f"SwanLab at {self.account.api_host} takes no session of {self._username}: swanlab login")

    def put_object(self, url: str, content: bytes, content_type: str) -> None:
        """Bytes to a link that the tracker signed. Raises Retryable; the same bytes may be put again."""
        status, _, _ = self._send("PUT", url, content, {"Content-Type": content_type})
        if not 200 <= status < 300:
            raise NotStored(f"PUT of a media file: HTTP {status}")

    def get_lines(self, url: str) -> Iterator[bytes]:
        """The lines of a file behind a signed link, complete or not at all. Raises Retryable."""
        pending = b""
        for chunk in self._stream("GET", url, None, {}):
            lines = (pending + chunk).split(b"\n")
            pending = lines.pop()
            yield from lines
        if pending:
            yield pending

    def close(self) -> None:
        """Let go of this thread's connections."""
        session = getattr(self._local, "session", None)
        if session is not None:
            session.close()
            del self._local.session

    # login

    def _login(self, stale: str) -> None:
        """A new session, unless another thread already replaced the `stale` one."""
        with self._lock:
            if self._sid != stale:
                return
            host = self.account.api_host
            if self._refused is not None and self._clock() - self._refused[0] < _REFUSED_S:
                # The runs of a sink do not ask about one key, one after the other.
                raise Parked(self._refused[1], whole_sink=True)
            status, headers, content = self._send(
                "POST", f"{host}/api/login/api_key", None, {"authorization": self.account.key}
            )
            if status in (400, 401, 403):
                reason = (
                    f"SwanLab at {host} does not take the API key (HTTP {status}): swanlab login --relogin -h {host},"
                    " or set SWANLAB_API_KEY"
                )
                self._refused = (self._clock(), reason)
                raise Parked(reason, whole_sink=True)
            answer = self._judge("login", status, headers, content)
            try:
                self._username = str(answer["userInfo"]["username"])
                self._sid = str(answer["sid"])
            except (LookupError, TypeError):
                raise Retryable(f"login at {host}: the answer holds no session; is it a SwanLab server?") from None
            self._refused = None
            self.clock_skew_s = _skew(headers.get("Date"))

    # transport

    def _session(self) -> Any:
        """This thread's connections. Those idle for long are dropped, so that a keep-alive that the other side gave
        up is not found out by losing an answer."""
        session = getattr(self._local, "session", None)
        now = time.monotonic()
        if session is None:
            session = self._local.session = self._requests.Session()
            session.headers.update({"User-Agent": "gapless", "X-SwanLab-SDK-Version": PROTOCOL})
        elif now - self._local.used > _IDLE_S:
            for adapter in session.adapters.values():
                adapter.close()
        self._local.used = now
        return session

    def _send(self, method: str, url: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, Any, bytes]:
        """Status, headers and whole body of an answer. Raises NotStored or Unknown."""
        answer = self._open(method, url, data, headers)
        with answer:
            return answer.status_code, answer.headers, b"".join(self._read(answer, method))

    def _stream(self, method: str, url: str, data: bytes | None, headers: dict[str, str]) -> Iterator[bytes]:
        answer = self._open(method, url, data, headers)
        with answer:
            if answer.status_code != 200:
                raise Retryable(f"{method} of a file: HTTP {answer.status_code}")
            yield from self._read(answer, method)

    def _open(self, method: str, url: str, data: bytes | None, headers: dict[str, str]) -> Any:
        errors = self._exceptions
        what = f"{method} {_shown_url(url)}"
        if self._meter is not None:
            self._meter(len(data or b""))
        try:
            # Our own no-op `auth` keeps requests from reading ~/.netrc for the host.
            return self._session().request(
                method,
                url,
                data=data,
                headers=headers,
                auth=_no_auth,
                timeout=self._timeout,
                allow_redirects=False,
                stream=True,
            )
        except errors.ConnectTimeout:
            raise NotStored(f"{what}: no connection within {self._timeout[0]:g} s") from None
        except errors.ProxyError as error:
            raise NotStored(f"{what}: proxy: {_cause(error)}") from None
        except errors.Timeout:
            raise Unknown(f"{what}: no answer within {self._timeout[1]:g} s") from None
        except errors.ConnectionError as error:
            if _never_connected(error):
                raise NotStored(f"{what}: no connection: {_cause(error)}") from None
            raise Unknown(f"{what}: the connection broke: {_cause(error)}") from None
        except errors.RequestException as error:
            raise Unknown(f"{what}: {type(error).__name__}") from None

    def _read(self, answer: Any, method: str) -> Iterator[bytes]:
        """The body in chunks, whole; bounded in time and size, so that a server that drips bytes holds nobody."""
        deadline = time.monotonic() + max(self._timeout[1], 1.0) * (10 if method == "GET" else 1)
        size = 0
        try:
            for chunk in answer.iter_content(1 << 16):
                size += len(chunk)
                if time.monotonic() > deadline or (size > _MAX_ANSWER_BYTES and method != "GET"):
                    raise Unknown(f"{method}: the answer does not end")
                yield chunk
        except (self._exceptions.RequestException, OSError) as error:
            raise Unknown(f"{method}: the answer broke off: {_cause(error)}") from None

    def _judge(self, what: str, status: int, headers: Any, content: bytes) -> Any:
        """The decoded body of an acknowledged request; the other kinds are raised."""
        if 200 <= status < 300 and status != _HTTP_ACCEPTED:
            try:
                answer = json.loads(content)
            except ValueError:
                raise Unknown(f"{what}: HTTP {status} without JSON; a captive portal or proxy?") from None
            if not isinstance(answer, dict | list):
                raise Unknown(f"{what}: HTTP {status} with JSON that is no object")
            return answer
        said = f"{what}: HTTP {status} {_message(content)}".rstrip()
        if status == 429:
            raise NotStored(said, _retry_after(headers.get("Retry-After")))
        if status in (400, 413, 422):
            raise Declined(said, f"HTTP {status} {_message(content, 'code')}".rstrip(), too_large=status == 413)
        if status == 404:
            raise Missing(f"{said}; see that project and run are there and the account may write, then start again")
        if status < 400 or status >= 500 or status == 408:
            raise Unknown(said, _retry_after(headers.get("Retry-After")))
        raise Parked(f"{said}; see that the account may write there, then start the uploader again")


def segment(text: str) -> str:
    """A part of a path, escaped."""
    return quote(text, safe="")


def _no_auth(request: Any) -> Any:
    return request


def _never_connected(error: Exception) -> bool:
    """Whether urllib3 says that no connection was made: refused, no route, no such name."""
    reason = getattr(error.args[0], "reason", error.args[0]) if error.args else None
    return type(reason).__name__ in ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError")


def _cause(error: Exception) -> str:
    """The innermost reason as a short text, without addresses of objects."""
    inner: Any = error.args[0] if error.args else error
    inner = getattr(inner, "reason", inner)
    if isinstance(inner, tuple) and inner:
        inner = inner[-1]
    return str(inner).rpartition(">: ")[2][:200]


def _message(content: bytes, *fields: str) -> str:
    """What an error answer says of itself, on one line: its `code` and `message`."""
    try:
        answer = json.loads(content)
        text = " ".join(str(answer.get(name, "")) for name in fields or ("code", "message"))
    except (ValueError, AttributeError):
        return ""
    return " ".join(text.split())[:200]


def _retry_after(text: str | None) -> float | None:
    """Seconds, where the header says seconds."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None


def _skew(date: str | None) -> float:
    if not date:
        return 0.0
    try:
        skew = parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0
    # The header has whole seconds and the answer took its time: a difference below that says nothing.
    return skew if abs(skew) > 5.0 else 0.0


def _shown(path: str) -> str:
    return path.partition("?")[0]


def _shown_url(url: str) -> str:
    """A URL without its query, which may hold a signature."""
    return url.partition("?")[0]
