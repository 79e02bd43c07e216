"""The calls that read rows: high-water marks, samples, exports, media, terminal lines.

Rows that repeat a (key, step) show twice in a sampled line; an export has one line a step, as the real one
groups by step, so a doubled point cannot be seen there.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable
from typing import Any

from tests.servers.swanlab.clock import unix
from tests.servers.swanlab.http import Answer, Request
from tests.servers.swanlab.model import Experiment, User, new_cuid
from tests.servers.swanlab.rows import Row
from tests.servers.swanlab.state import Refused, State

MAX_EXPORT_COLUMNS = 16


def get_marks(state: State, request: Request, user: User) -> Answer:
    """Per key the highest step seen, as of `summary_lag_s` ago: what a resuming client skips up to."""
    experiment = state.by_id(request.params["run"], user, request.params["project_id"])
    lag_s, created_at = state.settings.summary_lag_s, request.query.get("createdAt")
    answer = {}
    for kind in ("scalar", "media", "log"):
        marks: dict[str, int] = {}
        for row in state.visible(experiment, created_at, kind, lag_s=lag_s):
            marks[row.key] = max(row.step, marks.get(row.key, -1))
        answer[kind] = [{"key": key, "step": step} for key, step in marks.items()]
    return Answer(answer)


def get_summaries(state: State, request: Request, user: User) -> Answer:
    body = request.json()
    answer: dict[str, Any] = {}
    for ref in body["experiments"]:
        experiment = state.by_id(ref["experimentId"], user, ref["projectId"])
        rows = _by_key(state.visible(experiment, ref.get("createdAt"), "scalar"))
        keys = body.get("keys") or list(rows)
        answer[experiment.cuid] = {key: _summary(rows[key]) for key in keys if key in rows} or None
    return Answer(answer)


def _summary(rows: list[Row]) -> dict[str, Any]:
    last = max(rows, key=lambda row: row.step)
    values = [row.value for row in rows if math.isfinite(row.value)]
    summary: dict[str, Any] = {"step": last.step, "value": "NaN" if math.isnan(last.value) else last.value}
    if values:
        summary |= {"min": min(values), "max": max(values), "minMax": [min(values), max(values)]}
        summary |= {"avg": statistics.fmean(values), "median": statistics.median(values)}
        summary["stdDev"] = statistics.pstdev(values)
    return summary


def _by_key(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.key, []).append(row)
    return found


def _columns(state: State, request: Request, user: User, kind: str) -> list[tuple[Experiment, str, list[Row]]]:
    """(experiment, key, its visible rows by step) of each column that the body asks for."""
    body = request.json()
    found = []
    for column in body["columns"]:
        experiment = state.by_id(column["experimentId"], user, body["projectId"])
        rows = [row for row in state.visible(experiment, column.get("createdAt"), kind) if row.key == column["key"]]
        found.append((experiment, column["key"], sorted(rows, key=lambda row: row.step)))
    return found


def get_scalar(state: State, request: Request, user: User) -> Answer:
    """At most `num` finite points of each column, evenly picked, over the axis asked for."""
    body = request.json()
    answer = []
    for experiment, key, rows in _columns(state, request, user, "scalar"):
        index = _axis(state, experiment, body)
        finite = [row for row in rows if math.isfinite(row.value) and index(row) is not None]
        most = max(1, min(body.get("num") or 1500, 1500))
        stride = max(1, math.ceil(len(finite) / most))
        points = [{"index": index(row), "data": row.value, "timestamp": _ms(row)} for row in finite[::stride]]
        answer.append({"experimentId": experiment.cuid, "key": key, "metrics": points})
    return Answer(answer)


def _axis(state: State, experiment: Experiment, body: dict[str, Any]) -> Callable[[Row], Any]:
    if body.get("xKey"):
        first = {row.step: row.value for row in experiment.raw if row.key == body["xKey"]}
        return lambda row: first.get(row.step)
    if body.get("xType") in ("time", "timestamp"):
        return _ms
    if body.get("xType") == "relative_time":
        start = unix(experiment.created_at) * 1000
        return lambda row: _ms(row) - start
    return lambda row: row.step


def get_scalar_value(state: State, request: Request, user: User) -> Answer:
    answer = []
    for experiment, key, rows in _columns(state, request, user, "scalar"):
        index = _axis(state, experiment, request.json())
        finite = [row for row in rows if math.isfinite(row.value)]
        entry: dict[str, Any] = {"experimentId": experiment.cuid, "key": key}
        if finite:
            least, most = min(finite, key=lambda row: row.value), max(finite, key=lambda row: row.value)
            for name, row in (("min", least), ("max", most), ("latest", finite[-1])):
                entry[name] = {"index": index(row), "data": row.value}
            values = [row.value for row in finite]
            entry["avg"] = {"data": statistics.fmean(values)}
            entry["median"] = {"data": statistics.median(values)}
        answer.append(entry)
    return Answer(answer)


def export_scalar(state: State, request: Request, user: User) -> Answer:
    """A CSV with a line a step: `step`, then value and time (ms) of each column; the last row of a step wins."""
    names = [column["experimentName"] for column in request.json()["columns"]]
    if len(names) > MAX_EXPORT_COLUMNS:
        raise Refused(400, "Validation_Error", f"{len(names)} columns")
    columns = _columns(state, request, user, "scalar")
    text = io.StringIO()
    writer = csv.writer(text)
    head = [
        f"{name}-{key}_{part}"
        for name, (_, key, _) in zip(names, columns, strict=True)
        for part in ("step", "timestamp")
    ]
    writer.writerow(["step", *head])
    by_step = [{row.step: row for row in rows} for _, _, rows in columns]
    for step in sorted({step for rows in by_step for step in rows}):
        cells: list[Any] = []
        for rows in by_step:
            row = rows.get(step)
            cells += ["", ""] if row is None else [repr(row.value), _ms(row)]
        writer.writerow([step, *cells])
    return _exported(state, "csv", text.getvalue())


def export_log(state: State, request: Request, user: User) -> Answer:
    body = request.json()
    experiment = state.by_id(body["experimentId"], user, body["projectId"])
    rows = sorted(state.visible(experiment, body.get("createdAt"), "log"), key=lambda row: row.step)
    lines = [row.data for row in rows[body["start"] : body["start"] + body["rows"]]]
    return _exported(state, "log", "".join(line + "\n" for line in lines))


def _exported(state: State, suffix: str, text: str) -> Answer:
    name = f"exports/{new_cuid()}.{suffix}"
    state.exports[name] = text.encode()
    return Answer({"cosKey": name})


def _ms(row: Row) -> int:
    return round(unix(row.create_time) * 1000)


def get_media(state: State, request: Request, user: User) -> Answer:
    """The media of one step, 0 if none is asked for, and every step there is."""
    columns = _columns(state, request, user, "media")
    step = request.json().get("step", 0)
    entries = [
        {"key": key, "data": row.data, "more": row.more} for _, key, rows in columns for row in rows if row.step == step
    ]
    steps = sorted({row.step for _, _, rows in columns for row in rows})
    return Answer({"steps": steps, "step": step, "metrics": entries or None})


def get_all_media(state: State, request: Request, user: User) -> Answer:
    return Answer(
        [
            {"key": key, "metrics": [{"index": row.step, "data": row.data, "more": row.more} for row in rows]}
            for _, key, rows in _columns(state, request, user, "media")
        ]
    )


def get_log(state: State, request: Request, user: User) -> Answer:
    query = request.query
    experiment = state.by_id(query["experimentId"], user, query["projectId"])
    rows = sorted(state.visible(experiment, query.get("createdAt"), "log"), key=lambda row: row.step)
    if query.get("level") == "ERROR":
        rows = [row for row in rows if row.more["level"] == "ERROR"]
    start, size = int(query.get("epoch") or 0), int(query.get("size") or 1000)
    lines = [
        {"epoch": row.step, "level": row.more["level"], "message": row.data, "tag": "", "timestamp": row.create_time}
        for row in rows[start * size : (start + 1) * size]
    ]
    return Answer({"logs": lines, "count": len(rows)})


def _keys(state: State, request: Request, user: User) -> dict[str, list[str]]:
    """`{key: [experiment id, ...]}` over the experiments in the body, sorted by key."""
    found: dict[str, dict[str, None]] = {}
    for ref in request.json()["experiments"]:
        experiment = state.by_id(ref["experimentId"], user, ref["projectId"])
        for row in state.visible(experiment, ref.get("createdAt"), request.params["kind"]):
            found.setdefault(row.key, {})[experiment.cuid] = None
    return {key: list(found[key]) for key in sorted(found)}


def get_keys(state: State, request: Request, user: User) -> Answer:
    body = request.json()
    keys = [key for key in _keys(state, request, user) if key > body.get("cursor", "")]
    page = keys[: body.get("limit", 2000)]
    more = len(page) < len(keys)
    return Answer({"keys": page, "hasMore": more, "nextCursor": page[-1] if more else ""})


def get_availability(state: State, request: Request, user: User) -> Answer:
    found = _keys(state, request, user)
    return Answer({key: found.get(key, []) for key in request.json()["keys"]})


HANDLERS = {
    "marks": get_marks,
    "summaries": get_summaries,
    "scalar": get_scalar,
    "scalar.value": get_scalar_value,
    "scalar.export": export_scalar,
    "media": get_media,
    "media.all": get_all_media,
    "log": get_log,
    "log.export": export_log,
    "keys": get_keys,
    "availability": get_availability,
}
