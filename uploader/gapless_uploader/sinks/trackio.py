"""trackio's local database, through the package's own storage: its dashboard shows it with no network.

Each operation is one log with an id made from run, step, time and content; trackio's unique index ignores an id that is
there. The uploader keeps a batch's end before it writes it (`settles_intents`), so a batch that comes again is the same
one. After a lost state the session asks what is there and sends the rest. trackio takes nothing back, keeps no end
state, and holds one folder a process; to a Space goes `trackio sync --project NAME --space-id OWNER/SPACE`, which keeps
the times that trackio's upload call would drop.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from gapless_schemas import path_name
from gapless_uploader.operations import Amend, Log, Media, MediaItem, Missing, Rewind, Row, Table, Text, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Parked, Refusal, Retryable, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._disk import disk_trouble, folder_target
from gapless_uploader.sinks._json import as_json
from gapless_uploader.sinks._naming import run_part

_WORDS = frozenset(["NaN", "Infinity", "-Infinity"])
_GENERATION = ["input", "output", "score"]
_FOREIGN = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)


class TrackioSink:
    """The databases in the folder `target`."""

    kind = "trackio"
    needs = "trackio"
    capabilities = Capabilities(
        exactly_once="a log's id comes from its content, and trackio's unique index ignores an id that is there",
        text=True,
        tables=True,
        media=True,
        read_back=True,
        settles_intents=True,
    )

    def __init__(self, target: str = "") -> None:
        """`target`: trackio's folder; empty: `TRACKIO_DIR`, or trackio's own default."""
        self.target = folder_target(target) if target else ""

    def open(self, run: RunView, memo: Memo) -> TrackioSession:
        """A session on the run with our id. Raises Misconfigured when trackio has another folder already."""
        if self.target:
            # trackio reads its folder once, at its import.
            os.environ["TRACKIO_DIR"] = self.target
        utils = need("trackio", "trackio.utils")
        if self.target and Path(utils.TRACKIO_DIR) != Path(self.target):
            raise Misconfigured(
                f"sink 'trackio': this process writes to {utils.TRACKIO_DIR}; start another uploader for {self.target}"
            )
        return TrackioSession(run, memo)


class TrackioSession:
    """One run. Not thread safe."""

    def __init__(self, run: RunView, memo: Memo) -> None:
        self._storage: Any = need("trackio", "trackio.sqlite_storage").SQLiteStorage
        self._utils: Any = need("trackio", "trackio.utils")
        self._project = _project_name(run.project, self._storage)
        self._id = _id_of(run, self._project)
        self._name = run_part(run).partition("@")[0]
        self._database = Path(self._storage.get_project_db_path(self._project))
        self._logged: bool = memo.get("logged", False)
        """The database holds rows that were acknowledged."""
        self._described = False
        self._asks: bool
        self._held: dict[str, set[int]] = {}
        with _translated(self._database):
            self._check_place()
            known = [] if memo and not memo["asks"] else self._storage.get_logs(self._project, run_id=self._id)
        for log in known:
            for key in log:
                self._held.setdefault(key, set()).add(log["step"])
        self._asks = memo["asks"] if memo else bool(known)

    def write(self, batch: Batch) -> Ack:
        """Log the batch in one transaction. Raises Retryable."""
        refused: list[Refusal] = []
        logs: list[tuple[int, float, dict[str, Any]]] = []
        for operation in batch.operations:
            match operation:
                case Row(step=int(step), t=t, values=values):
                    self._add(logs, step, t, values, refused)
                case Amend(step=step, t=t, values=values, changed=changed):
                    self._add(logs, step, t, {key: values[key] for key in changed if key in values}, refused)
                case Row():
                    refused.append(Refusal(None, None, "trackio has no row without a step"))
                case Rewind(step=step):
                    refused.append(Refusal(step, None, "trackio takes nothing back"))
                case Log():
                    refused.append(Refusal(None, None, "trackio has no console lines"))
                case _:
                    self._described = False
        if logs:
            with _translated(self._database):
                self._check_place()
                self._storage.bulk_log(
                    self._project,
                    self._name,
                    [metrics for _, _, metrics in logs],
                    steps=[step for step, _, _ in logs],
                    timestamps=[datetime.fromtimestamp(t, UTC).isoformat() for _, t, _ in logs],
                    config=None if self._described else _config(batch.run),
                    log_ids=[str(uuid5(NAMESPACE_URL, as_json([self._id, *log]))) for log in logs],
                    run_id=self._id,
                )
            self._described = self._logged = True
            if self._asks:
                for step, _, metrics in logs:
                    for key in metrics:
                        self._held.setdefault(key, set()).add(step)
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: trackio knows no heartbeat."""

    def flush(self) -> Memo:
        """The memo; every write was a transaction."""
        return {"asks": self._asks, "logged": self._logged}

    def close(self) -> None:
        """Nothing is held. May be called twice."""

    def _check_place(self) -> None:
        """trackio makes a new database where it finds none, which would hide the one that was only moved away."""
        if self._logged and not self._database.is_file():
            raise Parked(f"{self._database} lacks what was acknowledged; put it back, or choose another folder")

    def _add(
        self,
        logs: list[tuple[int, float, dict[str, Any]]],
        step: int,
        t: float,
        values: dict[str, Value],
        refused: list[Refusal],
    ) -> None:
        metrics = {}
        for key, value in values.items():
            if self._asks and step in self._held.get(key, ()):
                continue
            try:
                metrics[key] = self._value(step, value)
            except _Unfit as reason:
                refused.append(Refusal(step, key, str(reason)))
        if metrics:
            logs.append((step, t, metrics))

    def _value(self, step: int, value: Value) -> Any:
        match value:
            case bool() | float():
                return value
            case int():
                if not -(1 << 63) <= value < 1 << 63:
                    raise _Unfit("an integer beyond 64 bits")
                return value
            case str() | Text():
                text = value.text if isinstance(value, Text) else value
                if text in _WORDS:
                    raise _Unfit("a text that trackio would read as a number")
                return text
            case list():
                return as_json(value)
            case Table(columns=columns, rows=rows) if columns[-3:] == _GENERATION:
                return [_trace(columns, row, place) for place, row in enumerate(rows)]
            case Table(columns=columns, rows=rows):
                cells = [
                    [cell if isinstance(cell, (bool, int, float, str)) else as_json(cell) for cell in row]
                    for row in rows
                ]
                return {"_type": "trackio.table", "_value": [dict(zip(columns, row, strict=False)) for row in cells]}
            case Media(type=kind, items=items) if kind in ("image", "audio", "video"):
                made = [self._media(step, kind, item) for item in items]
                return made[0] if len(made) == 1 else made
            case Media(type="histogram", items=[MediaItem(info={"edges": edges, "counts": counts})]):
                return {"_type": "trackio.histogram", "bins": edges, "values": counts}
            case Media(type=kind):
                raise _Unfit(f"trackio has no {kind}")
            case Missing(reason=reason):
                raise _Unfit(reason)

    def _media(self, step: int, kind: str, item: MediaItem) -> dict[str, Any]:
        """A copy in trackio's media folder, under the name of its content, so that the same again is the same."""
        if item.path is None:
            raise _Unfit("a media item without its file")
        folder = Path(self._utils.project_media_dir(self._project)) / path_name(self._id) / str(step)
        try:
            content = item.path.open("rb")
        except OSError as error:
            raise _Unfit(f"its file cannot be read: {error.strerror}") from None
        with content, _translated(folder):
            folder.mkdir(parents=True, exist_ok=True)
            copy = folder / item.path.name
            with open(copy.with_name(f".{copy.name}"), "wb") as file:
                shutil.copyfileobj(content, file)
            copy.with_name(f".{copy.name}").replace(copy)
        path = str(copy.relative_to(self._utils.MEDIA_DIR))
        return {"_type": f"trackio.{kind}", "file_path": path, "caption": item.info.get("caption")}


class _Unfit(Exception):
    """trackio cannot hold this value; the text says why."""


@contextmanager
def _translated(place: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        reason = f"trackio's database {place}: {error}"
        if getattr(error, "sqlite_errorcode", None) in _FOREIGN:
            way_out = "move that file away, and a watch goes on by itself, or choose another folder"
            raise Parked(f"{reason}; {way_out}") from error
        raise Retryable(reason) from error
    except OSError as error:
        raise disk_trouble(f"trackio's folder {place.parent}", error) from error


def _project_name(project: str, storage: Any) -> str:
    """A name that trackio's files hold whole and that trackio does not reserve."""
    plain = "".join(one for one in project if one.isalnum() or one in "-_") == project and 0 < len(project) <= 100
    name = project if plain else path_name(project).replace("~", "-").replace(".", "-")
    try:
        storage.validate_project_name(name)
    except ValueError:
        return f"{name}-project"
    return name


def _id_of(run: RunView, project: str) -> str:
    """The run's id; with the project's true name in it where trackio could not keep that."""
    if project == run.project:
        return run.tracker_id
    return f"{run.tracker_id}-{uuid5(NAMESPACE_URL, run.project).hex[:8]}"


def _config(run: RunView) -> dict[str, Any]:
    user = run.system.get("user")
    own = {"_Created": datetime.fromtimestamp(run.created, UTC).isoformat(), "_Group": run.group, "_Username": user}
    return {**{key: _plain(value) for key, value in run.config.items()}, **own, "_Host": run.host}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63 else value


def _cell(cell: Any) -> Any:
    return cell if isinstance(cell, (bool, int, float, str)) else as_json(cell)


def _trace(columns: list[str], row: list[Any], place: int) -> dict[str, Any]:
    """A generation as verl gives it to trackio: a conversation with its score."""
    *others, prompt, answer, score = row
    known = {"source": "validation_generations", "sample_index": place, "score": score}
    return {
        "_type": "trackio.trace",
        "messages": [{"role": "user", "content": str(prompt)}, {"role": "assistant", "content": str(answer)}],
        "metadata": {**dict(zip(columns, others, strict=False)), **known},
        "spans": [],
    }
