"""ClearML: an offline session a run, a folder that `clearml` itself imports to a server; or a server itself.

`<target>/<project>/<run>/` holds `task.json` and `metrics.jsonl`, made of the `clearml` package's own request classes,
with original times. It goes to a server by `Task.import_offline_session(FOLDER)`, where the server overwrites an event
of the same task, iteration, title and series; again, or more of it, with `previous_task_id=` of the first import.

ClearML's own client writes 0 for NaN and infinity; here they are refused and counted. Its import marks every task
completed, so another end is told in the task's comment. `clearml:server` is in `_clearml_server.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import Any

from gapless_schemas import path_name
from gapless_uploader.operations import Amend, Log, Media, Missing, Rewind, Row, Table, Text, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Refusal, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._clearml_server import ClearmlServerSession, connect
from gapless_uploader.sinks._disk import check_folder, disk, folder_target, regular_file, replace_durably
from gapless_uploader.sinks._json import as_json
from gapless_uploader.sinks._naming import project_part, run_part
from gapless_uploader.sinks._own_file import OwnFile


class ClearmlSink:
    """Offline sessions under the folder `target`."""

    kind = "clearml"
    needs = "clearml"
    capabilities = Capabilities(
        exactly_once="the checkpoint holds the session file's length; at the server an event's key overwrites",
        rewind=True,
        non_finite=False,
        tables=True,
        read_back=True,
        settles_intents=False,
    )

    def __init__(self, target: str = "") -> None:
        """`target`: the folder of the offline sessions, or `server` for the one that ClearML's own configuration names;
        empty: `clearml-offline`.
        """
        self.target = target if target == "server" else folder_target(target or "clearml-offline")
        self._lock = Lock()
        self._api: Any = None
        if target == "server":
            mechanism = "an event's id is task, iteration, title and series: the same again replaces itself"
            self.capabilities = replace(
                self.capabilities, exactly_once=mechanism, rewind=False, end_state=True, settles_intents=True
            )

    def open(self, run: RunView, memo: Memo) -> ClearmlSession | ClearmlServerSession:
        """A session behind what `memo` describes. Raises Misconfigured, Retryable or Parked."""
        events = Events()
        if self.target != "server":
            return ClearmlSession(Path(self.target), run, memo, events)
        with self._lock:
            if self._api is None:
                self._api = connect()
        return ClearmlServerSession(self._api, run, memo, f"gapless:{_digest(run)}", events.event, _Unfit, split)

    def check(self) -> str:
        """For `doctor`: that the folder can be written. Raises Parked and Retryable."""
        return "sends to ClearML's own server" if self.target == "server" else check_folder(self.target)


class ClearmlSession:
    """One run's offline session. Not thread safe."""

    def __init__(self, target: Path, run: RunView, memo: Memo, events: Events) -> None:
        self._events = events
        self._id = f"offline-{_digest(run)}"
        project = target / project_part(run)
        with disk("open", project):
            self._folder = project / str(memo.get("folder") or self._earlier(project, run) or run_part(run))
            if not memo:  # with one the folder was there, and is not made anew where a disk is only not mounted
                self._folder.mkdir(parents=True, exist_ok=True)
            self._rows = OwnFile(self._folder, ".metrics.jsonl", lambda _: "metrics.jsonl", run.generation)
            if memo:
                self._rows.resume(memo)
            else:
                self._describe(run)
                self._rows.begin(b"")

    def write(self, batch: Batch) -> Ack:
        """Append the batch, durable when it returns. Raises Retryable or Parked, with the file as before."""
        with self._rows.whole_or_not():
            refused = self._apply(batch)
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: a folder does not beat."""

    def flush(self) -> Memo:
        """The memo; everything acknowledged is on disk already."""
        return {"folder": self._folder.name, **self._rows.memo()}

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._rows.close()

    def _apply(self, batch: Batch) -> list[Refusal]:
        refused: list[Refusal] = []
        lines: list[bytes] = []
        described = False
        for operation in batch.operations:
            match operation:
                case Row(step=int(step), t=t, values=values):
                    lines += self._line(step, t, values, refused)
                case Amend(step=step, t=t, values=values, changed=changed):
                    lines += self._line(step, t, {key: values[key] for key in changed if key in values}, refused)
                case Rewind(step=step):
                    self._rows.append(b"".join(lines))
                    lines = []
                    self._rows.rewrite(line for line in self._read() if json.loads(line)[0]["iter"] < step)
                case Row():
                    refused.append(Refusal(None, None, "ClearML has no row without an iteration"))
                case Log():
                    refused.append(Refusal(None, None, "the offline session keeps no console lines"))
                case _:
                    described = True
        self._rows.append(b"".join(lines))
        if described:
            self._describe(batch.run)
        return refused

    def _line(self, step: int, t: float, values: dict[str, Value], refused: list[Refusal]) -> list[bytes]:
        """The line of a row's events, or none."""
        events = []
        for key, value in values.items():
            title, series = split(key)
            place = {"task": self._id, "iter": step, "timestamp": round(t * 1000), "metric": title, "variant": series}
            try:
                events.append(self._events.event(value, place))
            except _Unfit as reason:
                refused.append(Refusal(step, key, str(reason)))
        if not events:
            return []
        return [json.dumps([self._events.request(event) for event in events]).encode() + b"\n"]

    def _earlier(self, project: Path, run: RunView) -> str | None:
        """The folder in which an earlier session, whose state is lost, wrote this run."""
        for path in project.glob(f"*{path_name(run.tracker_id)}/task.json"):
            try:
                with open(path, "rb", opener=regular_file) as file:
                    if json.load(file).get("id") == self._id:
                        return path.parent.name
            except (OSError, ValueError, AttributeError):
                continue
        return None

    def _describe(self, run: RunView) -> None:
        """`task.json`: what `Task.import_offline_session` makes the task of."""
        git = run.system.get("git")
        script = {"entry_point": str(run.system.get("command") or ""), "working_dir": str(run.system.get("cwd") or "")}
        if isinstance(git, dict):
            script |= {"repository": str(git.get("remote") or ""), "version_num": str(git.get("commit") or "")}
        end = "" if run.state in ("running", "finished") else f"{run.state}, exit code {run.exit_code}"
        config = {"name": "Hyperparameters", "type": "dictionary", "value": as_json(run.config, indent=2)}
        task = {
            "id": self._id,
            "name": run.name or run.tracker_id,
            "project_name": run.project,
            "type": "training",
            "comment": "\n".join(part for part in (run.notes or "", end) if part),
            "tags": run.tags,
            "configuration": {"Hyperparameters": config},
            "execution": {"artifacts": [], "parameters": {}},
            "script": script,
            "offline_folder": str(self._folder),
            "offline_output_models": [],
        }
        replace_durably(self._folder / "task.json", json.dumps(task, indent=2).encode(), ".task.json.tmp")

    def _read(self) -> Iterator[bytes]:
        with open(self._rows.path, "rb") as file:
            left = self._rows.length
            while left > 0:
                line = file.readline()
                left -= len(line)
                yield line


class Events:
    """ClearML's own event classes, of one value each. Raises Misconfigured without the package."""

    def __init__(self) -> None:
        self._events: Any = need("clearml", "clearml.backend_api.services").events

    def request(self, event: Any) -> dict[str, Any]:
        """The request that adds `event`, as the offline session holds it."""
        fields: dict[str, Any] = self._events.AddRequest(event=event).to_dict()
        return fields

    def event(self, value: Value, place: dict[str, Any]) -> Any:
        """ClearML's own event of a value. Raises _Unfit."""
        match value:
            case bool() | int() | float():
                try:
                    number = float(value)
                except OverflowError:
                    raise _Unfit("an integer beyond a 64-bit float") from None
                if not isfinite(number):
                    raise _Unfit("ClearML writes 0 for NaN and infinity")
                return self._events.MetricsScalarEvent(value=number, **place)
            case Table():
                return self._events.MetricsPlotEvent(plot_str=_plot(value, place["metric"], place["variant"]), **place)
            case str() | Text() | list():
                raise _Unfit("ClearML has no text of an iteration")
            case Media(type=kind):
                raise _Unfit(f"the offline session holds no {kind}")
            case Missing(reason=reason):
                raise _Unfit(reason)


class _Unfit(Exception):
    """The session cannot hold this value; the text says why."""


def split(key: str) -> tuple[str, str]:
    """Title and series of a key, as verl splits it at the first slash; no two keys give the same.

    A key without a slash is the series of its own title. A series that would be empty or be mistaken for that one
    begins with a slash.
    """
    title, slash, series = key.partition("/")
    if not slash:
        return key, key
    if series in ("", title) or series.startswith("/"):
        series = f"/{series}"
    return title or "/", series


def _digest(run: RunView) -> str:
    return sha256(f"{run.project}\0{run.tracker_id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _plot(table: Table, title: str, series: str) -> str:
    """A table as ClearML's own client draws it: a plotly table, a list of cells a column."""
    cells = [[row[place] if place < len(row) else None for row in table.rows] for place in range(len(table.columns))]
    header = {"values": [[str(name)] for name in table.columns], "align": "left"}
    drawn = {"type": "table", "header": header, "cells": {"values": cells, "align": "left"}}
    return as_json({"data": [drawn], "layout": {"title": series, "title.text": title}})
