"""The command as it is started: what takes long begins before anything else, and only where it is of use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gapless_uploader import command, sinks
from tests.wandb_spool import Attempt

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
        assert kind in sinks.SINKS
        assert callable(sinks.named(place))


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


def test_an_interrupt_while_the_command_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "give_head_starts", interrupted)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert (end.value.code, capsys.readouterr().err) == (1, "Aborted!\n")


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_hold_up_nothing(tmp_path: Path, closed: str) -> None:
    """A cron job's, a daemon's: what is said goes nowhere, and no file of ours takes the stream's number."""
    attempt = Attempt(tmp_path / "spool")
    attempt.add_rows([(step, {"loss": 0.5}) for step in range(50)])
    attempt.add("finish", {"state": "finished", "exit_code": 0})
    line = f"exec {sys.executable} -m gapless_uploader replay spool --to file:out --state state {closed}"
    ran = subprocess.run(["sh", "-c", line], cwd=tmp_path, env=with_mode("online"), timeout=60)
    (written,) = (tmp_path / "out").rglob("*.jsonl")
    assert ran.returncode == 0
    assert [json.loads(line)["step"] for line in written.read_text().splitlines()] == list(range(50))
