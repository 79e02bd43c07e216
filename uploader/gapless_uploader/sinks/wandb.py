"""Weights & Biases, each row once, as if the run had been online.

The sink speaks W&B's own write protocol and keeps what its client cannot: an acknowledgement for each request. Line i
of a run's history is the i-th row or amend operation of the run's generation, for ever, so a request that comes twice
writes the same lines to the same places. The progress travels in the summary of the request that carries the lines.

The `wandb` package gives credentials and host, and reads back what arrived; it lives in a child process
(`_wandb_reader`). With `mode = "offline"` it writes its own `offline-run-*` folders instead (`_wandb_offline`).
"""

from __future__ import annotations

import importlib.util
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapless_uploader.operations import ENDS
from gapless_uploader.sink import (
    Capabilities,
    Memo,
    Misconfigured,
    Parked,
    Place,
    Rejected,
    Resume,
    Retryable,
    RunView,
    Session,
)
from gapless_uploader.sinks._wandb_describe import project_name, run_name
from gapless_uploader.sinks._wandb_draft import Limits
from gapless_uploader.sinks._wandb_files import RunPlace
from gapless_uploader.sinks._wandb_find import Finder
from gapless_uploader.sinks._wandb_http import NOT_LET_IN, Credentials, Http
from gapless_uploader.sinks._wandb_reader import READER
from gapless_uploader.sinks._wandb_session import WandbSession

MODES = ("online", "offline", "disabled")
TESTED = (0, 31)
"""The version of `wandb` that the sink was compared with."""


class WandbSink:
    """W&B at one server. `open` may be called from several threads."""

    kind = "wandb"
    needs = "wandb"

    def __init__(
        self,
        target: str = "",
        *,
        mode: str | None = None,
        late: str = "amend",
        upload_interval: float = 2.0,
        read_back: bool = True,
        settle_s: float = 5.0,
        timeout_s: float = 60.0,
        max_row_bytes: int = 10_000_000,
        adopt: list[str] | None = None,
        new_id: dict[str, str] | None = None,
        offline_folder: str = "wandb",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`target` is `entity` or `entity/project` and stands above what the run says."""
        if "://" in target:
            raise Misconfigured(
                f"sink 'wandb': {target!r} is a server; set WANDB_BASE_URL to it, and leave the target out"
            )
        self.target = target
        self._entity, _, self._project = target.partition("/")
        _check("mode", mode, (None, *MODES))
        _check("late", late, ("amend", "axis"))
        for name, value in {"settle_s": settle_s, "upload_interval": upload_interval}.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise Misconfigured(f"sink 'wandb': {name} is {value!r}; it must be a number of seconds")
        self._mode = mode
        self._late = late
        self._adopt = set(adopt or ())
        self._new_id = dict(new_id or {})
        self._offline_folder = Path(offline_folder)
        self._settle_s = settle_s
        self._clock = clock
        self._limits = Limits(max_row_bytes=max_row_bytes, read_back=read_back)
        self._lock = threading.Lock()
        self._known: Credentials | None = None
        self._version = ""
        self._http = Http(self.credentials, timeout_s, "gapless")
        self._finder = Finder(self._http, settle_s, clock, self._adopts)
        self.capabilities = Capabilities(
            exactly_once=(
                "line i of the history is the i-th row operation for ever, and the progress is in the summary of the"
                " same request; assumes that W&B writes a line to the offset it is sent with"
            ),
            unstepped=True,
            text=True,
            tables=True,
            media=True,
            end_state=True,
            read_back=read_back,
            heartbeat_s=30.0,
            interval_s=upload_interval,
            settles_intents=True,
            begins_with_memo=True,
            # Rows of many metrics take ten times as much in memory, twice: a batch and the next one, read ahead.
            max_bytes=2 << 20,
            takes_json=self._mode_now() == "online",
        )

    @property
    def meter(self) -> Callable[[int], None]:
        """Called before each request with its bytes: the uploader puts its budget here."""
        return self._http.meter

    @meter.setter
    def meter(self, meter: Callable[[int], None]) -> None:
        self._http.meter = meter

    def prepare(self) -> None:
        """Begin to load `wandb`, which takes a second, and return at once."""
        if self._limits.read_back and self._mode_now() == "online":
            with suppress(OSError):  # whoever needs it starts it again, and says so
                READER.start()

    def _mode_now(self) -> str:
        return self._mode or os.environ.get("WANDB_MODE") or "online"

    def open(self, run: RunView, memo: Memo) -> Session:
        """A session that goes on where W&B and `memo` agree. Raises Retryable, Parked, Misconfigured and Resume."""
        mode = self._mode_now()
        if mode == "disabled":
            return Nothing()
        if importlib.util.find_spec("wandb") is None:
            raise Misconfigured("sink 'wandb' needs wandb: pip install 'gapless[wandb]'")
        if mode in ("offline", "dryrun"):
            from gapless_uploader.sinks._wandb_offline import OfflineSession

            return OfflineSession(self._offline_folder, self.place(run), run, memo)
        self.prepare()
        self._know_the_library()
        place = self.place(run)
        if memo and memo.get("run", place.run) != place.run:
            raise Resume("the run has another id at W&B now", run.generation, Place(), {})
        found = self._finder.find(place, run, memo)
        if self._limits.read_back:
            READER.connect(self.credentials(False))  # W&B let us in with these
        progress, held = found.progress, found.held
        progress.late = progress.late or self._late
        session = WandbSession(self, self._http, place, progress, self._limits, self._version)
        if held is not None:
            session.know(held)
        if held is not None and held.entity and progress.ended and run.state in ENDS:
            session.go_on_ended(run.state, held.entity, memo)  # a run that is described shows as running again
        else:
            session.describe(run, must_be_new=held is None)
        return session

    def _know_the_library(self) -> None:
        """Say once that the installed package is another than the one that the sink was compared with."""
        if self._version:
            return
        from importlib import metadata  # a dozen modules, which `prepare` need not wait for

        self._version = metadata.version("wandb")
        numbers = tuple(int(part) for part in self._version.split(".")[:2] if part.isdigit())
        if numbers < TESTED:
            warnings.warn(
                f"wandb {self._version} is older than {TESTED[0]}.{TESTED[1]}, which the W&B sink needs to read"
                " credentials, to write offline folders and to read back: pip install 'gapless[wandb]'",
                RuntimeWarning,
                stacklevel=3,
            )
        elif numbers > TESTED:
            warnings.warn(
                f"wandb {self._version} is newer than {TESTED[0]}.{TESTED[1]}, with which the W&B sink was compared;"
                ' what it sends is read back through wandb.Api as always, and mode = "offline" is the way out',
                RuntimeWarning,
                stacklevel=3,
            )

    def place(self, run: RunView) -> RunPlace:
        """Where the run is at W&B; the entity is empty where W&B knows it."""
        own = self._new_id.get(run.run_id, run.run_id)
        own = self._new_id.get(f"{run.project}/{run.run_id}", own)
        tracker_id = replace(run, run_id=own).tracker_id
        return RunPlace(
            self._entity or run.entity or "",
            project_name(self._project or run.project),
            run_name(tracker_id),
        )

    def count_lines(self, place: RunPlace) -> int:
        """How many lines of history W&B counts. Raises Retryable."""
        try:
            held = self._finder.look(place)
        except Rejected as error:
            raise Retryable(str(error)) from None
        return held.lines if held else 0

    def look(self, place: RunPlace, steps: list[tuple[int, int]]) -> dict[str, Any]:
        """What `wandb.Api` shows of the run. Raises Retryable."""
        try:
            return READER.look(self.credentials(False), str(place), steps)
        except Retryable:
            self.count_lines(place)  # by our own request a key that expired is found out, and read anew
            raise

    def credentials(self, anew: bool) -> Credentials:
        """Host and key, from the environment or where `wandb` keeps them; anew when the server refused the key."""
        with self._lock:
            if self._known is not None and not anew:
                return self._known
            before, self._known = self._known, None
            found = self._ask(anew)
            if anew and before is not None and found.api_key == before.api_key:
                raise Parked(NOT_LET_IN, whole_sink=True)
            self._known = found
            return found

    def _ask(self, anew: bool) -> Credentials:
        base_url, key = os.environ.get("WANDB_BASE_URL"), os.environ.get("WANDB_API_KEY")
        if base_url and key:
            return Credentials(base_url.rstrip("/"), key)
        found = READER.credentials(base_url, anew)
        if not found["api_key"]:
            raise Parked(
                f"no key for {found['base_url']}: set WANDB_API_KEY or run `wandb login`; it is looked for again",
                whole_sink=True,
            )
        return Credentials(found["base_url"], found["api_key"], found["proxies"])

    def check(self) -> str:
        """Who we are and where, for `gapless doctor`. Raises Misconfigured, Retryable (network) or Parked (key)."""
        viewer = self._http.graphql("Viewer", "query Viewer { viewer { username } }", {}).get("viewer")
        host = self.credentials(False).base_url
        if not isinstance(viewer, dict):
            raise Parked(f"{host} does not know the key: set WANDB_API_KEY or run `wandb login`", whole_sink=True)
        return f"{viewer.get('username')} at {host}"

    def _adopts(self, run: RunView) -> bool:
        return bool(self._adopt & {run.run_id, f"{run.project}/{run.run_id}"})


class Nothing:
    """What `disabled` does."""

    def write(self, batch: Any) -> Any:
        """Take everything, and do nothing with it."""
        from gapless_uploader.sink import Ack

        return Ack(len(batch.operations), {})

    def heartbeat(self, now: float) -> None:
        """Nothing."""

    def flush(self) -> Memo:
        """Nothing to remember."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


def _check(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        named = ", ".join(str(item) for item in allowed if item is not None)
        raise Misconfigured(f"sink 'wandb': {name} is {value!r}; it may be {named}")
