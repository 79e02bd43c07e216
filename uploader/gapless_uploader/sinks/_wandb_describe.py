"""A run as W&B's overview shows it: names, config, host, git and program of the training, never the uploader's."""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime
from hashlib import sha256
from math import isfinite, isnan
from typing import Any

from gapless_uploader.sink import RunView
from gapless_uploader.sinks._wandb_axes import definitions
from gapless_uploader.sinks._wandb_lines import TooBig, plain, tracker_key

_NOT_IN_A_PROJECT = re.compile(r"[/\\#?%:\x00-\x1f\x7f-\x9f]")
_NOT_IN_A_RUN = re.compile(r"[/\\:;,#?%\x00-\x1f\x7f-\x9f\s]")
_MAX_NAME = 128
_MAX_TAG = _MAX_JOB_TYPE = 64
"""Characters: W&B refuses a run with more."""


def project_name(name: str) -> str:
    """The project's name at W&B: its own where W&B takes it, else what is left of it and a part of its hash."""
    return _fit(name, _NOT_IN_A_PROJECT)


def run_name(name: str) -> str:
    """The run's id at W&B, in the same way."""
    return _fit(name, _NOT_IN_A_RUN)


def _fit(name: str, bad: re.Pattern[str]) -> str:
    if name and len(name) <= _MAX_NAME and not bad.search(name) and name.strip(". ") == name and name.isprintable():
        return name
    unique = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    left = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:64].strip("-.")
    return f"{left}-{unique}" if left else unique


def config_text(run: RunView, late_axis: bool, version: str, renamed: list[str]) -> str:
    """The whole config as JSON text, each key as `{"value": ...}`, W&B's own block `_wandb` among them.

    What `changes_of` finds is in it, too.
    """
    config: dict[str, Any] = {}
    for key, value in run.config.items():
        if key != "_wandb":
            config[key] = {"value": _held(value)}
    for key, value in changes_of(run, renamed).items():
        config[key] = {"value": value}
    python = run.system.get("python")
    python = python if isinstance(python, str) else None
    block: dict[str, Any] = {
        "cli_version": version,
        "m": definitions(run.axes, run.summary, late_axis),
        "t": {"5": version, "12": version, **({"4": python} if python else {})},
    }
    if python:
        block["python_version"] = python
    if run.system:
        about = metadata(run)
        block["e"] = {"gapless": {**about, "writerId": "gapless"}}
    config["_wandb"] = {"value": block}
    return json.dumps(config)


def _held(value: Any) -> Any:
    """A value as strict JSON holds it: W&B's configs are no place for NaN, so it is a text there."""
    if isinstance(value, dict):
        return {str(key): _held(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_held(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"
    try:
        return plain(value)
    except TooBig:
        return str(value)


def metadata(run: RunView) -> dict[str, Any]:
    """What `wandb-metadata.json` holds: the training's environment and true start."""
    system = run.system
    found: dict[str, Any] = {
        "startedAt": datetime.fromtimestamp(run.created, UTC).isoformat().replace("+00:00", "Z"),
        "host": run.host,
    }
    program = program_of(system.get("command"))
    if program:
        found["program"] = program
    for theirs, ours in (("python", "python"), ("root", "cwd"), ("username", "user"), ("cudaVersion", "cuda")):
        if isinstance(system.get(ours), str):
            found[theirs] = system[ours]
    command = system.get("command")
    if isinstance(command, str):
        found["args"] = _words(command)[1:]
    gpus = system.get("gpus")
    if isinstance(gpus, list) and gpus:
        found["gpu"] = str(gpus[0])
        found["gpu_count"] = len(gpus)
    if system.get("slurm_job_id") is not None:
        found["slurm"] = {"job_id": str(system["slurm_job_id"])}
    remote, commit = git_of(run)
    if remote or commit:
        found["git"] = {"remote": remote, "commit": commit}
    return found


def git_of(run: RunView) -> tuple[str | None, str | None]:
    """(remote, commit) of the training's repository, None where unknown."""
    git = run.system.get("git")
    if not isinstance(git, dict):
        return None, None
    remote, commit = git.get("remote"), git.get("commit")
    return (remote if isinstance(remote, str) else None), (commit if isinstance(commit, str) else None)


def program_of(command: object) -> str | None:
    """The script, or `-m module`, in a command line of Python, as W&B names a run's program."""
    if not isinstance(command, str):
        return None
    words = _words(command)[1:]
    while words:
        word = words.pop(0)
        if word == "-m":
            return f"-m {words[0]}" if words else None
        if word in ("-W", "-X"):
            words = words[1:]
        elif not word.startswith("-"):
            return word
    return None


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()


def labels_of(run: RunView) -> dict[str, str | None]:
    """`name`, `group` and `job_type` of the run, each as long as W&B takes it."""
    return {
        "name": run.name and run.name[:_MAX_NAME],
        "group": run.group and run.group[:_MAX_NAME],
        "job_type": run.job_type and run.job_type[:_MAX_JOB_TYPE],
    }


def changes_of(run: RunView, renamed: list[str]) -> dict[str, Any]:
    """What the config says of keys that arrive under another name, and the whole of labels that were cut."""
    cut = {name: getattr(run, name) for name, text in labels_of(run).items() if text != getattr(run, name)}
    renames = {tracker_key(key): key for key in renamed}
    return {name: found for name, found in (("gapless_renamed_keys", renames), ("gapless_cut", cut)) if found}


def exit_code_of(state: str, code: int | None) -> int:
    """What W&B is told of a run that ended as `state`: a run that did not finish has failed with something."""
    return code or (0 if state == "finished" else 1)


def successor(name: str, generation: int) -> str:
    """The id at W&B of the run that follows the one called `name`, of this generation, after a rewind."""
    return f"{name.removesuffix(f'-r{generation}')}-r{generation + 1}"


def superseded_tag(following: str) -> str:
    """The tag of a run whose corrected history is in the run `following`."""
    return f"superseded-by:{following}"[:_MAX_TAG]


def tags_of(run: RunView) -> list[str]:
    """The run's tags as W&B takes them: 1 to 64 characters each."""
    return [tag[:_MAX_TAG] for tag in run.tags if tag]
