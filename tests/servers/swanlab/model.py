"""What the server holds: users, sessions, projects with their columns, experiments with their documents and rows."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from tests.servers.swanlab.clock import iso, unix
from tests.servers.swanlab.rows import Duplicates, Row, Rows

COLUMN_TYPES = {*("FLOAT", "SYSTEM", "IMAGE", "AUDIO", "VIDEO", "TEXT", "ECHARTS", "OBJECT3D", "MOLECULE", "HTML")}
END_STATES = ("FINISHED", "CRASHED", "ABORTED")
PROFILE_DOCUMENTS = ("config", "metadata", "requirements", "conda")


def new_cuid() -> str:
    """An id as the server makes them. Never equal to a run id, so that mixing the two up shows."""
    return "c" + secrets.token_hex(12)


@dataclass
class User:
    username: str
    name: str
    api_key: str


@dataclass
class Session:
    user: User
    expires_at: float


@dataclass
class File:
    """A file saved with a run: announced, then uploaded, then completed."""

    path: str
    size: int
    md5: str
    mime_type: str
    state: str = "PENDING"
    upload_id: str = ""


@dataclass
class Experiment:
    """One run. `slug` is the client's run id, `cuid` the server's own, used in every write."""

    cuid: str
    slug: str
    name: str
    description: str
    labels: list[dict[str, Any]]
    colors: list[str]
    cluster: str | None
    job: str | None
    created_at: str
    user: User
    project: Project
    state: str = "RUNNING"
    finished_at: str | None = None
    last_seen: float = 0.0
    closed_by_silence: bool = False
    heartbeats: list[float] = field(default_factory=list)
    num_posts: int = 1
    states: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)
    profile_puts: list[tuple[str, Any]] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)
    objects: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)

    @property
    def raw(self) -> list[Row]:
        """Every row stored, repeats included, in order of arrival."""
        return self.rows.all()

    @property
    def config(self) -> dict[str, Any]:
        """The config as logged: `{key: value}` of the profile's `{key: {value, sort, desc}}`."""
        return {key: entry["value"] for key, entry in (self.profile.get("config") or {}).items()}

    @property
    def duplicates(self) -> Duplicates:
        return self.rows.duplicates()

    @property
    def batch_sizes(self) -> list[tuple[str, int, int]]:
        """(kind, rows, bytes of the body) of each stored request."""
        return [(batch.kind, len(batch.rows()), len(batch.body)) for batch in self.rows.batches]

    def points(self, key: str | None = None, *, system: bool = False) -> dict[str, dict[int, float]]:
        """`{key: {step: value}}` of the scalars, the first of each (key, step); system keys only if asked."""
        found: dict[str, dict[int, float]] = {}
        for row in self.rows.first("scalar").values():
            if (key is None or row.key == key) and (system or not row.key.startswith("__swanlab__.")):
                found.setdefault(row.key, {})[row.step] = row.value
        return found

    def times(self, key: str) -> dict[int, float]:
        """`{step: unix seconds}` of a key's rows, as the client said them."""
        first = self.rows.first().values()
        return {row.step: unix(row.create_time) for row in first if row.key == key}

    def media(self, key: str) -> dict[int, list[tuple[str, bytes]]]:
        """`{step: [(path, bytes)]}` of a media key; KeyError if a row names an object that never came."""
        found = (row for row in self.rows.first("media").values() if row.key == key)
        return {row.step: [(path, self.objects[path]) for path in row.data] for row in found}

    def logs(self) -> list[str]:
        """The terminal lines in order of their number."""
        rows = sorted(self.rows.first("log").values(), key=lambda row: row.step)
        return [row.data for row in rows]

    def type_conflicts(self) -> set[str]:
        """Keys with rows of two kinds, or of another kind than their column says."""
        kinds: dict[str, set[str]] = {}
        for row in self.raw:
            if row.kind != "log":
                kinds.setdefault(row.key, set()).add(row.kind)
        for key, column in self.project.columns.items():
            if key in kinds:
                kinds[key].add("scalar" if column["type"] in ("FLOAT", "SYSTEM") else "media")
        return {key for key, seen in kinds.items() if len(seen) > 1}

    def close_if_silent(self, now: float, silence_s: float) -> None:
        """A running experiment that was not heard of for `silence_s` is taken for dead, as of its last sign."""
        if self.state == "RUNNING" and now - self.last_seen > silence_s:
            self.state, self.finished_at, self.closed_by_silence = "CRASHED", iso(self.last_seen), True


@dataclass
class Project:
    cuid: str
    name: str
    owner: User
    visibility: str
    created_at: str
    description: str | None = None
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    ignored_columns: list[dict[str, Any]] = field(default_factory=list)
    experiments: dict[str, Experiment] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)

    @property
    def path(self) -> str:
        return f"/{self.owner.username}/{self.name}"

    def find(self, name: str) -> Experiment | None:
        """The experiment of that slug or cuid."""
        found = self.experiments.get(name)
        return found or next((each for each in self.experiments.values() if each.cuid == name), None)
