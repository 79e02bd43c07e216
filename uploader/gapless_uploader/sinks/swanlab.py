"""SwanLab, over the HTTP calls of its own client library, each point once although the server only appends.

1. `open` finds the project and makes the experiment under the spool's run id, or takes it up again.
2. `write` sends the documents that changed, then the points (`_swanlab_delivery.py`: how each is stored once), and last
   the end state, when everything before it is acknowledged.
3. `heartbeat` keeps a long step from being closed as a crash.
4. `flush` after the end counts the points per key, read back unsampled, against what was sent.

With `mode` "offline" or "local" the real library is driven instead (`_swanlab_library.py`).
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gapless_uploader.sink import Capabilities, Memo, Misconfigured, Parked, RunView, Session
from gapless_uploader.sinks._swanlab_account import find_account
from gapless_uploader.sinks._swanlab_http import PROTOCOL, Api
from gapless_uploader.sinks._swanlab_library import MODES, LibrarySession
from gapless_uploader.sinks._swanlab_names import project_name
from gapless_uploader.sinks._swanlab_run import find_project
from gapless_uploader.sinks._swanlab_session import SwanlabSession, Ways

HEARTBEAT_S = 300.0


class SwanlabSink:
    """The account's own workspace, or the one that `target` names."""

    kind = "swanlab"
    needs = "swanlab"
    meter: Callable[[int], None] = staticmethod(lambda num_bytes: None)  # noqa: ARG005
    """Called before each request with its bytes: the uploader puts its budget here."""

    def __init__(
        self,
        target: str = "",
        *,
        settle: float = 60.0,
        timeout: float = 60.0,
        audit: bool = True,
        mode: str | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`settle`: seconds until what was sent can surely be read back. `timeout`: seconds for one answer.

        `audit`: count the points at the tracker when a run has ended. `mode`: "online", "offline" or "local"; without
        it `SWANLAB_MODE` decides, and `target` is a folder in the last two. `now`: monotonic seconds, for tests.
        """
        mode = mode or os.environ.get("SWANLAB_MODE", "").strip("\"'") or "online"
        if mode not in ("online", "cloud", *MODES):
            raise Misconfigured(f"sink 'swanlab': mode is {mode!r}; it is online, {' or '.join(MODES)}")
        for name, value in (("settle", settle), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
                raise Misconfigured(f"sink 'swanlab': {name} is {value!r}; it is seconds, from 0 to 3600")
        self.mode = mode
        if "://" in target:
            raise Misconfigured(
                f"sink 'swanlab': {target!r} is a server; set SWANLAB_API_HOST to it, and leave the target out"
            )
        self.target = target or ("swanlab-runs" if mode in MODES else "")
        self.timeout_s = max(0.001, float(timeout))
        self.ways = Ways(float(settle), bool(audit), now)
        self.capabilities = Capabilities(
            exactly_once=(
                "an interrupted batch is read back after the settle time and only what is missing is sent;"
                " assumes that reads lag less than that behind writes"
            ),
            text=True,
            tables=True,
            media=True,
            end_state=True,
            read_back=True,
            heartbeat_s=HEARTBEAT_S,
            settles_intents=True,
            max_bytes=2 << 20,
        )
        if mode in MODES:
            self.capabilities = Capabilities(
                exactly_once="a journal beside the library's folder is cut back to the checkpoint and played again",
                text=True,
                tables=True,
                media=True,
                end_state=True,
                original_time=False,
                max_bytes=2 << 20,
            )
        self._warned = False
        self._lock = threading.Lock()
        self._api: Api | None = None
        self._host = ""
        self._projects: dict[str, tuple[str, str, str]] = {}

    def open(self, run: RunView, memo: Memo) -> Session:
        """A session on the run's experiment. Raises Misconfigured, Retryable or Parked."""
        self._warn_of_a_newer_library()
        if self.mode in MODES:
            return LibrarySession(Path(self.target), self.mode, self.timeout_s, run, memo)
        api = self.api()
        if memo and memo.get("host") != self._host:
            raise Parked(
                f"this run was uploaded to {memo.get('host')}, and the account is now at {self._host}: set"
                " SWANLAB_API_HOST back, or use another --state"
            )
        return SwanlabSession(self.ways, api, lambda name: self._project(api, name), run, memo)

    def _warn_of_a_newer_library(self) -> None:
        """Say once that the installed library is newer than what this sink was compared with."""
        if self._warned:
            return
        self._warned = True
        try:
            installed = version("swanlab")
        except PackageNotFoundError:
            return
        if _minor(installed) > _minor(PROTOCOL):
            warnings.warn(
                f"swanlab {installed} is newer than {PROTOCOL}, with which the SwanLab sink was compared; look at the"
                " count that gapless status shows when a run has ended",
                RuntimeWarning,
                stacklevel=3,
            )

    def api(self) -> Api:
        """The account's client, which logs in at its first call. Raises Misconfigured."""
        with self._lock:
            if self._api is None or self._api.key_was_refused:
                account = find_account(os.environ)
                if self._api is None or self._api.account != account:
                    # The first time, or somebody logged in again since the key was refused.
                    self._api = Api(account, self.timeout_s, self.ways.now, self._metered)
                    self._host = account.api_host
            return self._api

    def _metered(self, num_bytes: int) -> None:
        self.meter(num_bytes)

    def check(self) -> str:
        """Who we are and where, for `gapless doctor`. Raises Misconfigured, Retryable (network) or Parked (key)."""
        return f"{self.api().username} at {self._host}"

    def _project(self, api: Api, name: str) -> tuple[str, str, str]:
        """User, name and id of a project, asked for once. Raises Retryable or Parked."""
        found = self._projects.get(name)
        if found is None:
            workspace = self.target or os.environ.get("SWANLAB_WORKSPACE", "")
            found = self._projects[name] = find_project(api, workspace, project_name(name))
        return found


def _minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version; what is no number counts as 0."""
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
