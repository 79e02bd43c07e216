"""The real `wandb` client against a server, in a process of its own that knows nothing of this machine's accounts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.servers.wandb_server.backend import DEFAULT_KEY

PREAMBLE = """
import glob, json, math, os, sys, time
import wandb
def settings(**more):
    return wandb.Settings(**{**dict(
        console="off", x_disable_stats=True, x_disable_meta=True, disable_git=True, disable_code=True,
        save_code=False, x_save_requirements=False, host="train-7", program="train.py", silent=True,
    ), **more})
def report(**what):
    print(json.dumps(what, default=dict), flush=True)
"""
"""What a script may use: `settings(...)`, quiet and without this host's identity, and `report(name=value)`."""


def client_env(url: str, folder: Path, **more: str) -> dict[str, str]:
    """The environment of a client whose files, caches and credentials are all under `folder`."""
    paths = {
        "HOME": "home",
        "TMPDIR": "tmp",
        "WANDB_DIR": "runs",
        "WANDB_CACHE_DIR": "cache",
        "WANDB_CONFIG_DIR": "config",
        "WANDB_DATA_DIR": "data",
        "WANDB_ARTIFACT_DIR": "artifacts",
    }
    env = {name: str(folder / sub) for name, sub in paths.items()}
    for path in env.values():
        os.makedirs(path, exist_ok=True)
    quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "PYTHONUTF8": "1"}
    return {
        "PATH": os.environ["PATH"],
        **env,
        **quiet,
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": DEFAULT_KEY,
        **more,
    }


def start_client(url: str, folder: Path, script: str, **more: str) -> subprocess.Popen[str]:
    """Start a client process that runs `script` after the preamble; its output is the caller's to read."""
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)],
        cwd=folder,
        env=client_env(url, folder, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_client(url: str, folder: Path, script: str, **more: str) -> dict[str, Any]:
    """Run a client script to its end; everything that it reported. Raises with its output if it fails."""
    with start_client(url, folder, script, **more) as process:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    if process.returncode != 0:
        raise RuntimeError(f"the client ended with {process.returncode}:\n{out}\n{err}")
    found: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith("{"):
            found.update(json.loads(line))
    return found
