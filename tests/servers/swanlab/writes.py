"""The calls that write: login, project, experiment, documents, columns, rows, heartbeat, state, deletion."""

from __future__ import annotations

from typing import Any

from tests.servers.swanlab.clock import iso, unix
from tests.servers.swanlab.http import Answer, BadRequest, Request
from tests.servers.swanlab.model import COLUMN_TYPES, END_STATES, PROFILE_DOCUMENTS, Experiment, User, new_cuid
from tests.servers.swanlab.rows import BadBatch, Batch, check_rows, read_envelope
from tests.servers.swanlab.shapes import experiment_shape, project_shape
from tests.servers.swanlab.state import Refused, State


def ok() -> Answer:
    return Answer({"message": "ok"})


def _check_moment(text: str) -> None:
    try:
        unix(text)
    except (TypeError, ValueError):
        raise BadRequest(f"{text!r} is no time") from None


def login(state: State, request: Request) -> Answer:
    sid, session = state.login(request.headers.get("authorization", ""))
    user = {"name": session.user.name, "username": session.user.username}
    return Answer({"sid": sid, "expiredAt": iso(session.expires_at), "userInfo": user})


def create_project(state: State, request: Request, user: User) -> Answer:
    body = request.json()
    owner = request.params["user"]
    project, new = state.create_project(user, owner, body["name"], body.get("visibility", "PRIVATE"))
    return Answer(project_shape(project), 201 if new else 200)


def delete_project(state: State, request: Request, user: User) -> Answer:
    project = state.project(request, user)
    for experiment in list(project.experiments.values()):
        state.delete(experiment)
    del state.projects[(project.owner.username, project.name)]
    return ok()


def post_experiment(state: State, request: Request, user: User) -> Answer:
    """Makes the run (201), or takes it up again and sets it RUNNING (200)."""
    project = state.project(request, user)
    body = request.json()
    if not body.get("name"):
        raise Refused(400, "Validation_Error", "name is missing")
    _check_moment(body["createdAt"])
    slug = body.get("cuid") or new_cuid()
    found = project.find(slug)
    told: dict[str, Any] = {
        "name": body["name"],
        "description": body.get("description"),
        "labels": body.get("labels") or [],
        "colors": body.get("colors") or [],
    }
    if found is not None:
        found.state, found.finished_at, found.closed_by_silence = "RUNNING", None, False
        found.last_seen = state.clock.now()
        found.num_posts += 1
        if state.settings.resume_renames:
            for name, value in told.items():
                setattr(found, name, value)
        return Answer(experiment_shape(found))
    if state.settings.burn_deleted_ids and slug in project.deleted:
        raise Refused(404, "Disabled_Resource", f"run {slug} was deleted")
    experiment = Experiment(
        cuid=new_cuid(),
        slug=slug,
        cluster=body.get("cluster"),
        job=body.get("job"),
        created_at=body["createdAt"],
        user=user,
        project=project,
        last_seen=state.clock.now(),
        **told,
    )
    project.experiments[slug] = state.experiments[experiment.cuid] = experiment
    shape = experiment_shape(experiment)
    return Answer({name: shape[name] for name in ("cuid", "slug", "name")}, 201)


def delete_experiment(state: State, request: Request, user: User) -> Answer:
    state.delete(state.run(request, user))
    return ok()


def delete_experiments(state: State, request: Request, user: User) -> Answer:
    for cuid in request.json()["cuids"]:
        state.delete(state.by_id(cuid, user))
    return ok()


def put_profile(state: State, request: Request, user: User) -> Answer:
    """Overwrites each document that the body names, whole."""
    experiment = state.run(request, user)
    body = request.json()
    unknown = set(body) - set(PROFILE_DOCUMENTS)
    if unknown or not body:
        raise Refused(400, "Validation_Error", f"no such document: {sorted(unknown)}")
    for name, document in body.items():
        experiment.profile[name] = document
        experiment.profile_puts.append((name, document))
    return ok()


def post_series(state: State, request: Request, user: User) -> Answer:
    """Columns belong to the project; what was said first of a key stands."""
    project = state.project(request, user)
    for column in request.json()["series"]:
        if column["type"] not in COLUMN_TYPES or not column["key"]:
            raise Refused(400, "Validation_Error", f"column {column}")
        if column["key"] in project.columns:
            project.ignored_columns.append(column)
        else:
            project.columns[column["key"]] = column
    return ok()


def post_metrics(state: State, request: Request, user: User) -> Answer:
    """Stores the rows as they are. Nothing is compared with what is there: a repeat is stored again."""
    settings = state.settings
    if settings.max_body_bytes is not None and len(request.body) > settings.max_body_bytes:
        raise Refused(413, "Payload_Too_Large", f"{len(request.body)} bytes")
    try:
        kind, project_id, experiment_id = read_envelope(request.body)
        if settings.check_rows or settings.max_rows is not None:
            num_rows = check_rows(kind, request.body)
            if settings.max_rows is not None and num_rows > settings.max_rows:
                raise Refused(413, "Payload_Too_Large", f"{num_rows} rows")
    except BadBatch as error:
        raise Refused(400, "Validation_Error", str(error)) from None
    with state.lock:
        experiment = state.by_id(experiment_id, user, project_id)
        state.num_batches += 1
        now = state.clock.now()
        batch = Batch(state.num_batches, kind, project_id, experiment_id, request.body, now, request.half)
        experiment.rows.append(batch)
        experiment.last_seen = now
    return ok()


def post_heartbeat(state: State, request: Request, user: User) -> Answer:
    experiment = state.run(request, user)
    experiment.last_seen = state.clock.now()
    experiment.heartbeats.append(experiment.last_seen)
    return ok()


def put_state(state: State, request: Request, user: User) -> Answer:
    experiment = state.run(request, user)
    body = request.json()
    if body.get("state") not in END_STATES:
        raise Refused(400, "Validation_Error", f"state is {body.get('state')!r}")
    _check_moment(body["finishedAt"])
    experiment.state, experiment.finished_at = body["state"], body["finishedAt"]
    experiment.states.append(body)
    return ok()


HANDLERS = {
    "project.create": create_project,
    "project.delete": delete_project,
    "experiment.post": post_experiment,
    "experiment.delete": delete_experiment,
    "experiment.delete_many": delete_experiments,
    "profile": put_profile,
    "series": post_series,
    "heartbeat": post_heartbeat,
    "state": put_state,
}
