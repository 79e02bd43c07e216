"""The command as it is started: what takes long begins before anything else, and only where it is of use."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest

from gapless_uploader import command, sinks

BEGUN: list[str] = []


def begin() -> None:
    BEGUN.append("slow")


@pytest.mark.parametrize(
    ("arguments", "begins"),
    [
        ("replay ./spool --to slow", True),
        ("replay ./spool --to console --to slow:team/project --json", True),
        ("replay --to=slow ./spool", True),
        ("replay ./spool --to console", False),
        ("replay ./spool --to slower", False),
        ("replay ./spool --to slow --dry-run", False),
        ("replay --help --to slow", False),
        ("watch ./spool --to slow", False),
        ("status slow", False),
        ("", False),
    ],
)
def test_a_replay_to_a_slow_sink_begins_at_once(arguments: str, begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    BEGUN.clear()
    monkeypatch.setattr(sinks, "HEAD_STARTS", {"slow": f"{__name__}:begin"})
    monkeypatch.setitem(sys.modules, __name__, sys.modules[begin.__module__])
    command.give_head_starts(arguments.split())
    assert BEGUN == (["slow"] if begins else [])


def test_every_head_start_is_there_and_of_a_sink_of_ours() -> None:
    for kind, place in sinks.HEAD_STARTS.items():
        module, _, name = place.partition(":")
        assert kind in sinks.SINKS
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize(("mode", "expected"), [("online", "True"), ("offline", "False"), ("disabled", "False")])
def test_wandb_begins_before_anything_that_takes_time_is_imported(mode: str, expected: str) -> None:
    script = """
import sys
from gapless_uploader.command import give_head_starts
give_head_starts(["replay", "spool", "--to", "wandb"])
from gapless_uploader.sinks._wandb_reader import READER
print(READER._child is not None and READER._child.is_there)
print(*sorted({"click", "dataclasses", "json", "msgspec", "orjson", "requests"} & set(sys.modules)))
READER.close()
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], env=with_mode(mode), capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines() == [expected, ""]


def with_mode(mode: str) -> dict[str, str]:
    return {**os.environ, "WANDB_MODE": mode, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
