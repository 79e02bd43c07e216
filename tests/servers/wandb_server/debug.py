"""The debug paths of a server that runs in another process: `/_debug/state`, `/_debug/arm` and so on."""

from __future__ import annotations

import json
import resource
import time
from typing import TYPE_CHECKING, Any

from tests.servers.wandb_server.faults import Fault
from tests.servers.wandb_server.messages import Request, Response, json_response
from tests.servers.wandb_server.state import Run, Staleness

if TYPE_CHECKING:
    from tests.servers.wandb_server.server import WandbServer


def answer_debug(app: WandbServer, request: Request) -> Response:
    """Answer one debug request; 404 for a name that is none."""
    name = request.path.removeprefix("/_debug/")
    given = json.loads(request.body) if request.body else {}
    with app.backend.lock:
        if name == "stats":
            return json_response(200, _stats(app))
        if name == "state":
            return json_response(200, _state(app))
        if name == "run":
            run = app.backend.runs.get((given["entity"], given["project"], given["run"]))
            return json_response(200, None if run is None else run_as_dict(run, app.clock()))
        if name == "lag":
            for kind, staleness in given.items():
                setattr(app.lag, kind, Staleness(**staleness))
            return json_response(200, {})
        if name == "set":
            for attribute, value in given.items():
                if not hasattr(app.backend, attribute):
                    return json_response(400, {"error": f"no such switch: {attribute}"})
                is_keys = attribute == "valid_keys" and value is not None
                setattr(app.backend, attribute, set(value) if is_keys else value)
            return json_response(200, {})
    if name == "arm":
        app.faults.arm(Fault(**given))
        return json_response(200, {})
    if name == "faults":
        return json_response(200, app.faults.hits())
    if name == "disarm":
        app.faults.disarm()
        return json_response(200, {})
    return Response(404, b"no such debug path", "text/plain")


def run_as_dict(run: Run, now: float) -> dict[str, Any]:
    """Everything of a run that a test compares, as JSON."""
    return {
        "entity": run.entity,
        "project": run.project,
        "id": run.id,
        "fields": run.fields,
        "group": run.group,
        "config": json.loads(run.config_text),
        "summary": run.summary,
        "lines": run.lines,
        "events": run.events,
        "output": run.output,
        "files": {name: len(data) for name, data in run.files.items()},
        "artifacts": run.artifacts,
        "state": run.state(now),
        "complete": run.complete,
        "exit_code": run.exit_code,
        "deleted": run.deleted,
        "created_at": run.created_at,
        "heartbeat_at": run.heartbeat_at,
        "rewrites": run.rewrites,
        "conflicts": run.conflicts,
        "holes": run.holes,
        "rewound": run.rewound,
        "request_counts": dict(run.request_counts),
    }


def _state(app: WandbServer) -> dict[str, Any]:
    now = app.clock()
    runs = {
        "/".join(key): {"state": run.state(now), "num_lines": len(run.lines)} for key, run in app.backend.runs.items()
    }
    return {"runs": runs, "unanswered": sorted(app.backend.unanswered)}


def _stats(app: WandbServer) -> dict[str, Any]:
    """The process's own cost so far; `process_cpu_s` counts every thread, the interpreter's start included."""
    return {
        "process_cpu_s": time.process_time(),
        "request_cpu_s": app.cpu_s,
        "max_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "num_requests": len(app.requests),
        "num_lines": sum(len(run.lines) for run in app.backend.runs.values()),
    }
