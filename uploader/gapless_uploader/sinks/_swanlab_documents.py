"""A run's two documents at SwanLab: the config, always whole, and the metadata of the training's own machine.

The config's top-level keys are wrapped as the library wraps them. One key of ours, `_gapless`, holds what SwanLab has
no place for: the original start, end and duration, the end's exit code, the summary that the training set.
"""

from __future__ import annotations

from datetime import UTC, date, datetime
from math import isfinite, isnan
from typing import Any

from gapless_uploader.operations import Media, Missing, Table, Text
from gapless_uploader.sink import RunView
from gapless_uploader.sinks._swanlab_names import MAX_DESCRIPTION, MAX_NAME, MAX_TAGS, one_line, run_slug
from gapless_uploader.sinks._swanlab_run import OWN_KEY, Naming

END_STATES = {"finished": "FINISHED", "failed": "CRASHED", "crashed": "CRASHED"}
_INTERRUPTED = (130, 143)
"""Exit codes of SIGINT and SIGTERM."""


def end_state(state: str, exit_code: int | None) -> str:
    """SwanLab's word for a run's end: ABORTED when somebody stopped it, CRASHED when it died."""
    return "ABORTED" if state == "failed" and exit_code in _INTERRUPTED else END_STATES[state]


def naming_of(run: RunView, extra_tags: tuple[str, ...] = ()) -> Naming:
    """What the experiment is called, within SwanLab's limits."""
    return Naming(
        slug=run_slug(run.tracker_id),
        name=one_line(run.name or run.tracker_id, MAX_NAME),
        description=one_line(run.notes or "", MAX_DESCRIPTION),
        tags=tuple(one_line(tag, MAX_NAME) for tag in [*run.tags, *extra_tags][:MAX_TAGS] if tag),
        group=one_line(run.group or "", MAX_NAME),
        job_type=one_line(run.job_type or "", MAX_NAME),
    )


def cut_names(run: RunView) -> list[str]:
    """What of the run's naming is beyond SwanLab's limits, as reasons; all of it is in the config."""
    found = []
    if len(run.notes or "") > MAX_DESCRIPTION:
        found.append(f"notes beyond {MAX_DESCRIPTION} characters: they are in the config")
    if len(run.tags) > MAX_TAGS:
        found.append(f"tags beyond {MAX_TAGS}: they are in the config")
    if any(len(text or "") > MAX_NAME for text in (run.name, run.group, run.job_type, *run.tags)):
        found.append(f"a name beyond {MAX_NAME} characters: it is in the config")
    return found


def config_document(run: RunView, own: dict[str, Any]) -> dict[str, Any]:
    """The whole config, `own` under our key."""
    name = OWN_KEY
    while name in run.config:
        name += "_"
    told = {
        "run_id": run.run_id,
        "host": run.host,
        "started_at": moment(run.created),
        **({"notes": run.notes, "tags": run.tags, "name": run.name} if cut_names(run) else {}),
        **own,
    }
    entries = [*run.config.items(), (name, told)]
    return {
        _text(key): {"desc": "", "sort": place, "value": _plain(value)} for place, (key, value) in enumerate(entries)
    }


def metadata_document(system: dict[str, Any]) -> dict[str, Any]:
    """The training's environment in SwanLab's shape; what the spool does not know is null, never this machine's."""
    git = system.get("git")
    gpus = system.get("gpus")
    devices = gpus if isinstance(gpus, list) else []
    accelerator = {
        "vendor": "nvidia",
        "devices": [
            {"index": place, "name": _text(name), "memory": None, "memory_unit": None}
            for place, name in enumerate(devices)
        ],
        "version": None,
        "cuda_version": _said(system, "cuda"),
        "cann_version": None,
    }
    hardware = {"apple_silicon": None, "cpu": None, "memory": None, "accelerators": [accelerator]}
    return {
        "_version": 2,
        "hardware": hardware if devices else None,
        "runtime": {
            "os": _said(system, "os"),
            "os_pretty": None,
            "hostname": _said(system, "host"),
            "pid": system.get("pid") if type(system.get("pid")) is int else None,
            "cwd": _said(system, "cwd"),
            "python_version": _said(system, "python"),
            "python_verbose": None,
            "python_executable": None,
            "command": _said(system, "command"),
        },
        "git": {
            "remote_url": _said(git, "remote"),
            "branch": _said(git, "branch"),
            "commit": _said(git, "commit"),
        }
        if isinstance(git, dict)
        else None,
        "swanlab": None,
    }


def moment(t: float) -> str:
    """`t`, unix seconds, as UTC text; as a number's text where no calendar has it."""
    try:
        return datetime.fromtimestamp(t, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return repr(t)


def plain_summary(values: dict[str, Any]) -> dict[str, Any]:
    """Summary values as a config and a memo hold them: integers beyond 64 bits are text."""
    return {_text(key): _within_64_bits(_plain(value)) for key, value in values.items()}


def _within_64_bits(value: Any) -> Any:
    match value:
        case dict():
            return {key: _within_64_bits(inner) for key, inner in value.items()}
        case list():
            return [_within_64_bits(inner) for inner in value]
        case int() if not -(1 << 63) <= value < 1 << 63:
            return str(value)
    return value


def _plain(value: Any) -> Any:
    """`value` as strict JSON; NaN and the infinities as text, which is how the library writes them too."""
    match value:
        case dict():
            return {_text(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case float() if not isfinite(value):
            return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"
        case bool() | int() | float() | None:
            return value
        case Text():
            return _text(value.text)
        case date():
            return value.isoformat()
        case Table() | Media() | Missing():
            return type(value).__name__.lower()
        case _:
            return _text(value)


def _text(value: Any) -> str:
    return str(value).encode("utf-8", "replace").decode()


def _said(holder: Any, name: str) -> str | None:
    value = holder.get(name) if isinstance(holder, dict) else None
    return None if value is None else _text(value)
