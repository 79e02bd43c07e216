"""`install()` in every worker process of Ray, where verl's trainer runs.

Ray calls `hook` (named in `RAY_RUNTIME_ENV_HOOK`) in the driver with the job's runtime environment, and what that names
as `worker_process_setup_hook` in each worker before it does any work.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

HOOK = f"{__name__}.hook"
NEXT = "GAPLESS_RAY_HOOK_NEXT"
"""The hook that `RAY_RUNTIME_ENV_HOOK` named before ours."""

_SETUP = "gapless.tracking.install"
_INHERITED = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
"""Ray's own note of a setup hook that a submitted job brings along; another one beside it is an error to Ray."""


def prepare(environment: dict[str, str], root: str) -> None:
    """Have Ray call us: variables for this process and its children. `root` is the spool, an absolute path."""
    environment["GAPLESS_DIR"] = root
    before = environment.get("RAY_RUNTIME_ENV_HOOK")
    if before != HOOK:
        if before:
            environment[NEXT] = before
        environment["RAY_RUNTIME_ENV_HOOK"] = HOOK


def hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """`runtime_env` with our setup beside what it had, and with this process's `GAPLESS_*` variables."""
    then = os.environ.get(NEXT)
    if then:
        runtime_env = _load(then)(runtime_env)
    made = dict(runtime_env or {})
    ours = {name: value for name, value in os.environ.items() if name.startswith("GAPLESS_") and name != NEXT}
    made["env_vars"] = {**ours, **(made.get("env_vars") or {})}
    if _INHERITED not in made["env_vars"]:
        theirs = made.get("worker_process_setup_hook")
        made["worker_process_setup_hook"] = _SETUP if theirs in (None, _SETUP) else _both(theirs)
    return made


def _both(theirs: str | Callable[[], None]) -> Callable[[], None]:
    def set_up_worker() -> None:
        from gapless.tracking import install

        install()
        (_load(theirs) if isinstance(theirs, str) else theirs)()

    return set_up_worker


def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.rpartition(".")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    return found
