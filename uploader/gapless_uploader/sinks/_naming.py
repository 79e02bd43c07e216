"""Names of folders and files that a sink makes for a run.

A spool is not trusted, so no name from it is used as it is: what comes out is one path part, never hidden, never
`..`, and two runs never share one.
"""

from __future__ import annotations

import re

from gapless_schemas import path_name
from gapless_uploader.sink import RunView

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9._+=-]+")


def project_part(run: RunView) -> str:
    """The path part of the run's project."""
    return path_name(run.project)


def run_part(run: RunView) -> str:
    """The path part of the run: `name@id`, or `id` where there is no name. The id alone makes it unique."""
    name = _NOT_PLAIN.sub("-", run.name or "")[:80].strip("-.")
    unique = path_name(run.tracker_id)
    return f"{name}@{unique}" if name and name != unique else unique
