"""Names as SwanLab takes them: keys, projects, run ids. What it would trim, cut, drop or join stays apart here.

A name that SwanLab keeps as it is stays as it is. Any other becomes its readable part and 16 hex digits of the true
name's sha256, and so does a name that looks like one that we made: two names never become one.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256

MAX_KEY = 512
MAX_NAME = 512
MAX_DESCRIPTION = 1024
MAX_TAGS = 30
MAX_STEP = 1 << 48
_EDGES = " \t\n\r./"
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_OURS = re.compile(r"~(inf|num|text|image|audio|table|[0-9a-f]{16})$")
_RESERVED = "__swanlab__."
_PROJECT = re.compile(r"[0-9a-zA-Z_\-+.]{1,100}")
_NOT_PROJECT = re.compile(r"[^0-9a-zA-Z_\-+.]+")
_NOT_RUN = re.compile(r'[<>:"/\\|?*#%\s\x00-\x1f\x7f\ud800-\udfff]+')
_MAX_RUN = 64


@lru_cache(maxsize=65_536)
def key_name(key: str) -> str:
    """The metric key at SwanLab: at most 512 characters, no edge that it strips, not its own prefix."""
    if (
        0 < len(key) <= MAX_KEY - 6
        and key.strip(_EDGES) == key
        and not key.startswith(_RESERVED)
        and not _CONTROL.search(key)
        and not _OURS.search(key)
    ):
        return key
    readable = _CONTROL.sub("?", key).strip(_EDGES).removeprefix(_RESERVED).strip(_EDGES)
    return f"{readable[: MAX_KEY - 23].rstrip(_EDGES)}~{_digest(key)}"


def project_name(project: str) -> str:
    """The project at SwanLab: letters, digits and `_-+.`, at most 100 of them."""
    if _PROJECT.fullmatch(project) and project.strip("."):
        return project
    readable = _NOT_PROJECT.sub("-", project).strip("-.")
    return f"{readable[:80]}-{_digest(project)}".lstrip("-")


def run_slug(run_id: str) -> str:
    """The run id at SwanLab: no character that a path or URL gives a meaning, at most 64."""
    if 0 < len(run_id) <= _MAX_RUN and not _NOT_RUN.search(run_id) and run_id.strip("."):
        return run_id
    readable = _NOT_RUN.sub("-", run_id).strip("-.")
    return f"{readable[: _MAX_RUN - 17]}-{_digest(run_id)}".lstrip("-")


def section_of(key: str) -> str | None:
    """The panel section that the library gives a key: what stands before its first slash."""
    section, slash, _ = key.partition("/")
    return section if slash and section else None


def one_line(text: str, limit: int) -> str:
    """`text` without lone surrogates, cut to `limit` characters."""
    return text.encode("utf-8", "replace").decode()[:limit]


def _digest(name: str) -> str:
    return sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
