"""One experiment at SwanLab: its ids, and the calls that make it, describe it, read it and end it.

Every call here may be repeated freely, except `post`, whose rows the tracker appends.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gapless_uploader.intervals import StepSet
from gapless_uploader.sink import Parked, Retryable
from gapless_uploader.sinks._swanlab_http import PROTOCOL, Api, Declined, Missing, segment

_KEYS_AN_EXPORT = 16
_COLUMNS_A_REQUEST = 3_000
_PAGE = 1_000
# Rows are looked for by when they came in, and this machine's clock may be fast: a day's margin costs nothing.
_MARGIN_S = 86_400
OWN_KEY = "_gapless"
"""The config's key for what SwanLab has no place for."""
_COLOR = "#528d59"
_HTTP_CREATED = 201


@dataclass(frozen=True, slots=True)
class Place:
    """Where an experiment is."""

    user: str
    project: str
    project_id: str
    experiment_id: str
    created: int
    """Unix seconds of its creation, as the tracker has it."""

    def memo(self) -> dict[str, Any]:
        """JSON that `place_of` takes."""
        return {name: getattr(self, name) for name in self.__slots__}


def place_of(memo: dict[str, Any]) -> Place:
    """The place that a memo names. Raises LookupError or TypeError."""
    return Place(*(memo[name] for name in Place.__slots__))


@dataclass(frozen=True, slots=True)
class Naming:
    """What the experiment is called; the tracker may keep what it was told first."""

    slug: str
    name: str
    description: str
    tags: tuple[str, ...]
    group: str
    job_type: str


def find_project(api: Api, workspace: str, name: str) -> tuple[str, str, str]:
    """User, name and id of the project, made when it is not there. Raises Retryable or Parked."""
    user = workspace or api.username
    path = f"/project/{segment(user)}/{segment(name)}"
    try:
        found = api.call("GET", path)
    except Missing:
        try:
            api.call("POST", f"/projects/{segment(user)}", {"name": name, "visibility": "PRIVATE"})
        except Declined as error:
            raise Parked(f"project {user}/{name}: {error}; make it by hand, then start again") from None
        found = api.call("GET", path)
    try:
        return str(found["group"]["username"]), str(found["name"]), str(found["cuid"])
    except (LookupError, TypeError):
        raise Retryable(f"project {user}/{name}: the answer holds no id; is it a SwanLab server?") from None


def announce(api: Api, project: tuple[str, str, str], naming: Naming) -> tuple[Place, bool]:
    """Make the experiment, or take it up again, which sets it running; and whether it is new.

    Raises Retryable or Parked.
    """
    user, name, project_id = project
    now = datetime.fromtimestamp(time.time() + api.clock_skew_s, UTC)
    body: dict[str, Any] = {
        "name": naming.name,
        "description": naming.description,
        "createdAt": now.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "colors": [_COLOR, _COLOR],
        "labels": [{"name": tag} for tag in naming.tags],
        "job": naming.job_type,
        "cluster": naming.group,
        "cuid": naming.slug,
    }
    path = f"/project/{segment(user)}/{segment(name)}"
    try:
        status, found = api.request("POST", f"{path}/experiment", {key: value for key, value in body.items() if value})
    except Missing as error:
        raise Parked(
            f"run {naming.slug} of {user}/{name} was deleted at SwanLab ({error});"
            " --to swanlab:WORKSPACE sends it to another workspace"
        ) from None
    except Declined as error:
        raise Parked(f"run {naming.slug}: {error}; mend it at the tracker, then start again") from None
    try:
        new = status == _HTTP_CREATED
        created_at = found.get("createdAt")
        if created_at is None and not new:
            created_at = api.call("GET", f"{path}/runs/{segment(str(found['cuid']))}").get("createdAt")
        created = now if created_at is None else datetime.fromisoformat(str(created_at))
        return Place(user, name, project_id, str(found["cuid"]), int(created.timestamp())), new
    except (LookupError, TypeError, AttributeError, ValueError):
        raise Retryable(f"run {naming.slug}: the answer holds no id; is it a SwanLab server?") from None


@contextmanager
def _as_told() -> Iterator[None]:
    """An answer that has not the fields it should have is no answer."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Retryable(f"an answer is not what SwanLab {PROTOCOL} answers ({type(error).__name__})") from None


class Experiment:
    """Calls about one experiment. Not thread safe."""

    def __init__(self, api: Api, place: Place) -> None:
        self.api = api
        self.place = place
        self._path = f"/project/{segment(place.user)}/{segment(place.project)}/runs/{segment(place.experiment_id)}"
        self._since = max(1, place.created - _MARGIN_S)
        self.shows_nan = False
        """Whether an export was seen to show a NaN."""

    # writing

    def state(self) -> str:
        """RUNNING, FINISHED, CRASHED or ABORTED. Raises Missing when the experiment was deleted."""
        return str(self.api.call("GET", self._path).get("state"))

    def put_profile(self, name: str, document: Any) -> None:
        """Replace the whole `config` or `metadata`."""
        self.api.call("PUT", f"{self._path}/profile", {name: document})

    def put_state(self, state: str) -> None:
        """End the experiment."""
        now = datetime.fromtimestamp(time.time() + self.api.clock_skew_s, UTC)
        moment = now.isoformat(timespec="microseconds").replace("+00:00", "Z")
        self.api.call("PUT", f"{self._path}/state", {"state": state, "finishedAt": moment, "from": "sdk"})

    def heartbeat(self) -> None:
        """The training lives. The flag is the library's own constant."""
        self.api.call("POST", f"/house/experiments/{segment(self.place.experiment_id)}/heartbeat", {"flagId": "123456"})

    def put_columns(self, columns: Sequence[dict[str, Any]]) -> None:
        """Define columns of the project; what was said first of a key stands."""
        path = f"/projects/{segment(self.place.user)}/{segment(self.place.project)}/series"
        for at in range(0, len(columns), _COLUMNS_A_REQUEST):
            self.api.call("POST", path, {"series": list(columns[at : at + _COLUMNS_A_REQUEST])})

    def post(self, kind: str, rows: bytes) -> None:
        """Append rows, JSON objects joined by commas. The one call that must not be repeated blindly."""
        ids = f'"projectId":{json.dumps(self.place.project_id)},"experimentId":{json.dumps(self.place.experiment_id)}'
        head = f'{{"type":"{kind}",{ids},"metrics":['.encode()
        self.api.call("POST", "/house/metrics", data=head + rows + b"]}")

    def put_media(self, files: Sequence[tuple[str, bytes, str]]) -> None:
        """The bytes of media files: (path, bytes, content type). The same may be put again."""
        body = {"experimentId": self.place.experiment_id, "paths": [path for path, _, _ in files]}
        urls = self._links("/resources/presigned/put", body, len(files))
        for url, (_, content, content_type) in zip(urls, files, strict=True):
            self.api.put_object(url, content, content_type)

    # reading

    @_as_told()
    def own_config(self) -> dict[str, Any]:
        """What an uploader left under our key of the config; empty when there is none."""
        config = (self.api.call("GET", self._path).get("profile") or {}).get("config") or {}
        found = (config.get(OWN_KEY) or {}).get("value")
        return found if isinstance(found, dict) else {}

    @_as_told()
    def marks(self) -> tuple[int, int]:
        """The highest step of any key, and the highest console line; -1 and 0 when there is none."""
        path = f"/house/metrics/summaries/{segment(self.place.project_id)}/{segment(self.place.experiment_id)}"
        found = self.api.call("GET", f"{path}?all=True&createdAt={self._since}")
        steps = [int(mark["step"]) for kind in ("scalar", "media") for mark in found.get(kind) or []]
        lines = [int(mark["step"]) for mark in found.get("log") or []]
        return max(steps, default=-1), max(lines, default=0)

    @_as_told()
    def keys(self) -> list[str]:
        """Every key with numbers."""
        found: list[str] = []
        cursor = ""
        while True:
            ref = {"projectId": self.place.project_id, **self._ref()}
            page = self.api.call(
                "POST", "/house/metrics/scalar/keys", {"experiments": [ref], "limit": 2000, "cursor": cursor}
            )
            found += page["keys"]
            if not page.get("hasMore"):
                return found
            if page["nextCursor"] == cursor:
                raise Retryable("keys: the list does not end")
            cursor = page["nextCursor"]

    @_as_told()
    def steps(self, names: Iterable[str], lowest: int, highest: int) -> dict[str, StepSet]:
        """The steps from `lowest` to `highest` at which each key has a number, read unsampled.

        Raises Retryable unless the answer was whole.
        """
        wanted = list(names)
        found: dict[str, StepSet] = {}
        for at in range(0, len(wanted), _KEYS_AN_EXPORT):
            found.update(self._export(wanted[at : at + _KEYS_AN_EXPORT], lowest, highest))
        return found

    @_as_told()
    def counts(self, names: Iterable[str]) -> dict[str, int]:
        """How many steps have a number of each key, read unsampled."""
        wanted = list(names)
        found: dict[str, int] = {}
        for at in range(0, len(wanted), _KEYS_AN_EXPORT):
            part = wanted[at : at + _KEYS_AN_EXPORT]
            counts = [0] * len(part)
            for _, values in self._table(part):
                for place, value in enumerate(values):
                    if value:
                        counts[place] += 1
            found.update(zip(part, counts, strict=True))
        return found

    @_as_told()
    def media_steps(self, names: Iterable[str]) -> dict[str, StepSet]:
        """The steps at which each key has media."""
        wanted = list(names)
        found = {name: StepSet() for name in wanted}
        for at in range(0, len(wanted), _KEYS_AN_EXPORT):
            refs = [{"key": name, **self._ref()} for name in wanted[at : at + _KEYS_AN_EXPORT]]
            body = {"projectId": self.place.project_id, "columns": refs}
            for entry in self.api.call("POST", "/house/metrics/f_media", body) or []:
                for row in (entry or {}).get("metrics") or []:
                    found[entry["key"]].add(int(row["index"]))
        return found

    @_as_told()
    def console_lines(self) -> StepSet:
        """The numbers of the console lines that are there."""
        found = StepSet()
        place, page = self.place, 0
        while True:
            query = f"projectId={place.project_id}&experimentId={place.experiment_id}&createdAt={self._since}"
            answer = self.api.call("GET", f"/house/metrics/log?{query}&size={_PAGE}&epoch={page}&level=INFO")
            lines = answer["logs"] or []
            for line in lines:
                found.add(int(line["epoch"]))
            page += 1
            if len(lines) < _PAGE:
                return found

    def _export(self, names: list[str], lowest: int, highest: int) -> dict[str, StepSet]:
        found = [StepSet() for _ in names]
        for step, values in self._table(names):
            if lowest <= step <= highest:
                for steps, value in zip(found, values, strict=True):
                    if value:
                        steps.add(step)
        return dict(zip(names, found, strict=True))

    def _table(self, names: list[str]) -> Iterator[tuple[int, list[bytes]]]:
        """(step, value of each key or nothing) of a run's whole history. Raises Retryable when it is no such table."""
        columns = [{"experimentName": "run", "key": name, **self._ref()} for name in names]
        answer = self.api.call(
            "POST", "/house/metrics/scalar/export", {"projectId": self.place.project_id, "columns": columns}
        )
        (url,) = self._links("/files/presigned/get", {"paths": [answer["cosKey"]]}, 1)
        lines = self.api.get_lines(url)
        width = 1 + 2 * len(names)
        head = next(lines, b"")
        if not head.startswith(b"step,") or len(_cells(head)) != width:
            raise Retryable("the export is no table of these keys: a captive portal, or not whole")
        for line in lines:
            cells = line.rstrip(b"\r").split(b",")
            if len(cells) != width or not cells[0].isdigit():
                raise Retryable("the export is no table of these keys: a captive portal, or not whole")
            values = cells[1::2]
            if not self.shows_nan and any(value[:1] in (b"n", b"N") for value in values):
                self.shows_nan = True
            yield int(cells[0]), values

    def _ref(self) -> dict[str, Any]:
        return {"experimentId": self.place.experiment_id, "createdAt": self._since}

    def _links(self, path: str, body: dict[str, Any], count: int) -> list[str]:
        answer = self.api.call("POST", path, body)
        urls = answer.get("urls") if isinstance(answer, dict) else None
        if not isinstance(urls, list) or len(urls) != count or not all(isinstance(url, str) for url in urls):
            raise Retryable(f"{path}: the answer holds not the links asked for")
        return urls


def _cells(line: bytes) -> list[str]:
    """A header line's cells: names may hold commas and quotes."""
    return next(csv.reader(io.StringIO(line.decode("utf-8", "replace"))), [])
