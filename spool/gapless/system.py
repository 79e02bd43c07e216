"""Where the training runs: the `system` record's data, read from this process and small files, by no child process.

CUDA is asked nothing unless the training has initialised it: asking would make a context on the device and spoil later
forks.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from socket import gethostname
from time import monotonic
from typing import Any

from gapless.config import Environment
from gapless.redact import scrub_command, scrub_value

LIMIT_S = 1.0
MAX_COMMAND_CHARS = 20_000
_MAX_FILE_BYTES = 1 << 20


def describe(environment: Environment, now: Callable[[], float] = monotonic) -> dict[str, Any]:
    """What can be said within `LIMIT_S`; what is unknown, or was not reached in time, is None.

    The limit is looked at between the parts: a single read from a dead disk is not broken off.
    """
    deadline = now() + LIMIT_S
    parts: dict[str, Callable[[], Any]] = {
        "host": gethostname,
        "user": _user,
        "command": _command,
        "cwd": os.getcwd,
        "python": platform.python_version,
        "torch": lambda: _torch("__version__"),
        "cuda": lambda: _torch("version.cuda"),
        "world_size": lambda: _world_size(environment),
        "slurm_job_id": lambda: environment.slurm_job_id,
        "gpus": _gpus,
        "git": lambda: _git(Path.cwd()),
    }
    found: dict[str, Any] = dict.fromkeys(parts)
    for name, part in parts.items():
        if now() >= deadline:
            break
        with suppress(Exception):  # a part that fails is unknown; the training goes on
            found[name] = part()
    return found


def _user() -> str:
    return getpass.getuser()


def _command() -> str:
    args = scrub_command(getattr(sys, "orig_argv", sys.argv))
    command = " ".join(args)
    if len(command) > MAX_COMMAND_CHARS:
        command = f"{command[:MAX_COMMAND_CHARS]}... ({len(command)} characters)"
    return command


def _torch(attribute: str) -> str | None:
    found: Any = sys.modules.get("torch")
    for name in attribute.split("."):
        found = getattr(found, name, None)
    return None if found is None else str(found)


def _world_size(environment: Environment) -> int | None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return environment.world_size


def _gpus() -> list[str] | None:
    names = []
    root = Path("/proc/driver/nvidia/gpus")
    if root.is_dir():
        for gpu in sorted(root.iterdir()):
            found = re.search(r"^Model:\s*(.+)$", (gpu / "information").read_text(errors="replace"), re.MULTILINE)
            if found:
                names.append(found[1].strip())
    if names:
        return names
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return [str(cuda.get_device_name(index)) for index in range(cuda.device_count())]
    return None


def _git(start: Path) -> dict[str, Any] | None:
    """The commit, branch and remote of the repository that holds `start`, read from `.git`."""
    for folder in (start, *start.parents):
        dot = folder / ".git"
        if dot.is_dir():
            return _repository(dot)
        if dot.is_file():  # a worktree or submodule
            target = _read(dot).removeprefix("gitdir:").strip()
            return _repository((folder / target).resolve())
    return None


def _repository(git: Path) -> dict[str, Any]:
    common = git
    if (git / "commondir").is_file():
        common = (git / _read(git / "commondir").strip()).resolve()
    head = _read(git / "HEAD").strip()
    branch = None
    commit: str | None = head
    if head.startswith("ref:"):
        ref = head.removeprefix("ref:").strip()
        branch = ref.removeprefix("refs/heads/")
        commit = _resolve(git, common, ref)
    remote = None
    if (common / "config").is_file():
        found = re.search(r'^\[remote "[^"]*"\][^\[]*?^\s*url\s*=\s*(.+)$', _read(common / "config"), re.MULTILINE)
        if found:
            # No user belongs into a fetch URL that is shown to others, with or without a password.
            url = re.sub(r"^(https?://)[^/@]*@", r"\1", found[1].strip())
            remote = scrub_value(url, "git")
    return {"commit": commit, "branch": branch, "remote": remote}


def _resolve(git: Path, common: Path, ref: str) -> str | None:
    for base in (git, common):
        if (base / ref).is_file():
            return _read(base / ref).strip()
    if (common / "packed-refs").is_file():
        for line in _read(common / "packed-refs").splitlines():
            commit, _, name = line.partition(" ")
            if name == ref:
                return commit
    return None


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
