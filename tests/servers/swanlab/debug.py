"""`/_debug`: the same looks and turns as in-process, for the server that runs in a process of its own.

GET  /_debug/state[?points=1]    everything but the rows; with points, the de-duplicated scalars too
GET  /_debug/raw?run=SLUG        every row of a run as [kind, key, step, data, create_time, ingest_time, batch]
GET  /_debug/calls               [endpoint, status, bytes, fault] of every request
POST /_debug/faults {...}        arms a fault (the fields of `Fault` but `where`); DELETE clears them
POST /_debug/settings {...}      sets fields of `Settings`
POST /_debug/advance {"seconds"} moves the clock
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tests.servers.swanlab.http import Answer, Request
from tests.servers.swanlab.model import Experiment
from tests.servers.swanlab.shapes import experiment_shape
from tests.servers.swanlab.state import Refused

if TYPE_CHECKING:
    from tests.servers.swanlab.server import SwanLabServer


def answer(server: SwanLabServer, request: Request) -> Answer:
    """Answers a debug request; these are neither logged nor hit by faults, and need no session."""
    match request.method, request.path.removeprefix("/_debug/"):
        case "GET", "state":
            return Answer(snapshot(server, points=request.query.get("points") == "1"))
        case "GET", "raw":
            with server.state.lock:
                rows = server.experiments[request.query["run"]].raw
            fields = ("kind", "key", "step", "data", "create_time", "ingest_time", "batch")
            return Answer([[getattr(row, name) for name in fields] for row in rows])
        case "GET", "calls":
            return Answer([[call.endpoint, call.status, call.num_bytes, call.fault] for call in server.calls])
        case "POST", "faults":
            server.faults.arm(**request.json())
        case "DELETE", "faults":
            server.faults.clear()
        case "POST", "settings":
            server.settings.update(request.json())
        case "POST", "advance":
            server.advance(request.json()["seconds"])
        case _:
            raise Refused(404, "Not_Found", request.path)
    return Answer({"message": "ok"})


def snapshot(server: SwanLabServer, *, points: bool = False) -> dict[str, Any]:
    """The state as JSON. `cpu_s` is what this process has used so far, before the rows are looked at."""
    cpu_s = time.process_time()
    with server.state.lock:
        runs = {slug: run_state(each, points=points) for slug, each in server.experiments.items()}
        projects = {
            name: {
                "columns": project.columns,
                "ignored_columns": project.ignored_columns,
                "deleted": sorted(project.deleted),
            }
            for name, project in server.projects.items()
        }
        return {
            "url": server.url,
            "cpu_s": cpu_s,
            "num_logins": server.state.num_logins,
            "num_bytes": sum(call.num_bytes for call in server.calls),
            "projects": projects,
            "experiments": runs,
            "bugs": server.bugs,
        }


def run_state(experiment: Experiment, *, points: bool = False) -> dict[str, Any]:
    """A run without its rows: what was told of it, and how many of each kind there are."""
    rows = experiment.rows
    shape = experiment_shape(experiment)
    shape["project"] = experiment.project.name
    shape["heartbeats"] = len(experiment.heartbeats)
    shape["states"] = experiment.states
    shape["closed_by_silence"] = experiment.closed_by_silence
    shape["num_batches"] = len(rows.batches)
    shape["rows"] = {}
    for kind in ("scalar", "media", "log"):
        repeats = rows.duplicates(kind)
        shape["rows"][kind] = {
            "raw": sum(row.kind == kind for row in rows.all()),
            "distinct": len(rows.first(kind)),
            "identical": repeats.identical,
            "conflicting": repeats.conflicting,
        }
    shape["objects"] = {path: len(content) for path, content in experiment.objects.items()}
    shape["files"] = {path: file.state for path, file in experiment.files.items()}
    if points:
        shape["points"] = {}
        for row in rows.first("scalar").values():
            shape["points"].setdefault(row.key, []).append([row.step, row.data, row.create_time])
    return shape
