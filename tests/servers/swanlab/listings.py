"""The calls that show users, projects, runs and columns."""

from __future__ import annotations

import math
from typing import Any

from tests.servers.swanlab.http import Answer, Request
from tests.servers.swanlab.model import User
from tests.servers.swanlab.shapes import experiment_shape, project_shape
from tests.servers.swanlab.state import Refused, State


def get_user(state: State, request: Request, user: User) -> Answer:
    names = ("bio", "url", "institution", "school", "email", "location")
    return Answer(dict.fromkeys(names, "") | {"username": user.username, "name": user.name})


def get_group(state: State, request: Request, user: User) -> Answer:
    state.own(user, request.params["user"])
    return Answer(_group(user))


def get_groups(state: State, request: Request, user: User) -> Answer:
    return Answer([_group(user)])


def _group(user: User) -> dict[str, Any]:
    return {"username": user.username, "name": user.name, "type": "PERSON", "role": "OWNER", "profile": {}}


def get_self_hosted(state: State, request: Request, user: User) -> Answer:
    return Answer({"enabled": True, "expired": False, "root": False, "plan": "free", "seats": 1})


def get_project(state: State, request: Request, user: User) -> Answer:
    return Answer(project_shape(state.project(request, user)))


def list_projects(state: State, request: Request, user: User) -> Answer:
    state.own(user, request.params["user"])
    mine = [each for (owner, _), each in state.projects.items() if owner == user.username]
    return _page(request, [project_shape(project) for project in mine])


def get_experiment(state: State, request: Request, user: User) -> Answer:
    return Answer(experiment_shape(state.run(request, user)))


def list_experiments(state: State, request: Request, user: User) -> Answer:
    return _page(request, _experiments(state, request, user))


def show_experiments(state: State, request: Request, user: User) -> Answer:
    """Every run of the project. Filters, groups and sorts are not modelled, and refused."""
    if any(request.json().get(name) for name in ("filters", "groups", "sorts")):
        raise Refused(400, "Validation_Error", "this server has no filters, groups or sorts")
    return Answer(_experiments(state, request, user))


def _experiments(state: State, request: Request, user: User) -> list[dict[str, Any]]:
    project = state.project(request, user)
    return [experiment_shape(state.by_id(each.cuid, user)) for each in project.experiments.values()]


def _page(request: Request, items: list[Any]) -> Answer:
    page, size = int(request.query.get("page", 1)), int(request.query.get("size", 20))
    shown = items[(page - 1) * size : page * size]
    pages = max(1, math.ceil(len(items) / size))
    return Answer({"list": shown, "size": size, "pages": pages, "total": len(items)})


def list_columns(state: State, request: Request, user: User) -> Answer:
    experiment = state.run(request, user)
    logged = {row.key for row in experiment.raw}
    found = []
    for key, column in experiment.project.columns.items():
        system = column["type"] == "SYSTEM"
        shape = {"key": key, "name": key, "class": "SYSTEM" if system else "CUSTOM", "createdAt": 0}
        shape["type"] = "FLOAT" if system else column["type"]
        wanted = all(shape[name] == request.query[name] for name in ("class", "type") if name in request.query)
        if key in logged and wanted and request.query.get("search", "").lower() in key.lower():
            found.append(shape)
    return _page(request, found)


HANDLERS = {
    "user": get_user,
    "group": get_group,
    "groups": get_groups,
    "self_hosted": get_self_hosted,
    "project.get": get_project,
    "project.list": list_projects,
    "experiment.get": get_experiment,
    "experiment.list": list_experiments,
    "experiment.shows": show_experiments,
    "columns": list_columns,
}
