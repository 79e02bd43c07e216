"""Projects and experiments as the server tells them to a client."""

from __future__ import annotations

from typing import Any

from tests.servers.swanlab.model import Experiment, Project


def project_shape(project: Project) -> dict[str, Any]:
    return {
        "cuid": project.cuid,
        "name": project.name,
        "username": project.owner.username,
        "path": project.path,
        "version": 1,
        "visibility": project.visibility,
        "description": project.description,
        "group": {"username": project.owner.username, "name": project.owner.name},
        "projectLabels": [],
        "createdAt": project.created_at,
        "updatedAt": project.created_at,
        "_count": {
            "experiments": len(project.experiments),
            "contributors": 1,
            "collaborators": 0,
            "clones": 0,
        },
    }


def experiment_shape(experiment: Experiment) -> dict[str, Any]:
    return {
        "cuid": experiment.cuid,
        "slug": experiment.slug,
        "name": experiment.name,
        "type": "CHAPTER",
        "description": experiment.description,
        "labels": experiment.labels,
        "colors": experiment.colors,
        "cluster": experiment.cluster,
        "job": experiment.job,
        "show": True,
        "state": experiment.state,
        "createdAt": experiment.created_at,
        "finishedAt": experiment.finished_at,
        "rootProId": "",
        "rootExpId": "",
        "user": {"username": experiment.user.username, "name": experiment.user.name},
        "profile": experiment.profile,
    }
