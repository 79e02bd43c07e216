"""`watch`, `replay` and `status` as a person or a script sees them."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner, Result
from prometheus_client.parser import text_string_to_metric_families

from gapless_schemas import seal
from gapless_uploader.cli import main
from tests.uploader.spool_made import MadeRun, alive_here

ENVIRONMENT = {**os.environ, "PYTHONPATH": "uploader:schemas", "COLUMNS": "100", "LINES": "40", "TERM": "xterm"}


def gapless(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], env={"COLUMNS": "100"})


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "gapless_uploader", *map(str, args)]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in text.splitlines()]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A spool of two finished runs and one that lives."""
    spool = tmp_path / "spool"
    MadeRun(spool, "r-1", name="qwen 7b").rows(0, 30).finish()
    MadeRun(spool, "r-2", name="llama").rows(0, 20).finish("failed")
    MadeRun(spool, "r-3", **alive_here()).rows(0, 10)
    return spool


def where(root: Path, *sinks: str) -> list[str | Path]:
    """The flags of state and sinks, beside the root."""
    kinds = sinks or (f"file:{root.parent / 'out'}",)
    return ["--state", root.parent / "state", *(arg for kind in kinds for arg in ("--to", kind))]


# replay


def test_a_name_of_no_run_is_said(root: Path) -> None:
    result = gapless("replay", root, *where(root), "--adopt", "r-1", "--adopt", "grpo/r-2", "--new-id", "r-9=other")
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if "names" in line] == [
        "--adopt or --new-id names r-9, and no such run is there"
    ]


def test_replay_says_what_it_did(root: Path):
    """A replay uploads everything, says so in one line, and exits 0; a second one has nothing to do."""
    first = gapless("replay", root, *where(root))
    assert first.exit_code == 0
    assert re.search(r"^60 rows uploaded in \d+\.\d s$", first.stdout, re.MULTILINE)
    second = gapless("replay", root, *where(root))

    assert second.exit_code == 0
    assert "up to date: nothing to upload" in second.stdout
    assert len((root.parent / "out/grpo/qwen-7b@r-1.jsonl").read_text().splitlines() or []) in (0, 30)


def test_replay_json(root: Path):
    """`--json` gives one object a line: events, and what was done at the end."""
    result = gapless("replay", root, *where(root), "--json")
    told = lines_of(result.stdout)

    assert told[0]["event"] == "started"
    assert told[-1] == {**told[-1], "event": "replayed", "rows": 60, "bytes_left": 0, "left": []}
    assert sum(line["rows"] for line in told if line["event"] == "uploaded") == 60


def test_replay_of_a_damaged_spool_exits_1(root: Path):
    """A damaged line costs that line and exit status 1; the others are uploaded."""
    (segment,) = (root / "grpo" / "r-1").iterdir()
    segment.write_bytes(segment.read_bytes().replace(b'"loss":7.5', b'"loss":9.5'))
    result = gapless("replay", root, *where(root))

    assert result.exit_code == 1
    assert "59 rows uploaded" in result.stdout
    assert "damage-found run=grpo/r-1" in result.stderr


def test_replay_of_what_is_no_segment_uploads_nothing(tmp_path: Path):
    """It says why, and not that a run may yet come."""
    (tmp_path / "notes.txt").touch()
    result = gapless("replay", tmp_path / "notes.txt", *where(tmp_path))

    assert result.exit_code == 1
    assert "Not a directory" in result.stderr
    assert result.stdout == "nothing was uploaded\n"


def test_replay_says_what_is_left(root: Path):
    """What a sink cannot take is listed with run, sink, reason; the other sinks are done; the exit status is 1."""
    taken = root.parent / "taken"
    taken.write_text("a file, no folder")
    result = gapless("replay", root, *where(root, f"file:{root.parent / 'out'}", f"file:{taken}"))

    assert result.exit_code == 1
    assert "60 rows uploaded" in result.stdout
    assert f"grpo/r-1 -> file:{taken}: " in result.stderr


def test_dry_run_says_what_would_go_where(root: Path):
    """A dry run lists runs, sinks and bytes, keeps to the filters, and writes nothing."""
    result = gapless("replay", root, *where(root), "--dry-run", "--run", "qwen*")

    assert result.exit_code == 0
    assert re.fullmatch(
        r"grpo/qwen 7b \(r-1\) \(finished, 32 records\) -> file:\S+/out: [\d.]+ kB to upload\n", result.stdout
    )
    assert sorted(path.name for path in root.parent.iterdir()) == ["spool"]


def test_dry_run_json(root: Path):
    """`--dry-run --json` gives one object for each run and sink."""
    result = gapless("watch", root, *where(root), "--dry-run", "--json")
    told = lines_of(result.stdout)

    assert [(line["run"], line["state"], line["records"]) for line in told] == [
        ("r-1", "finished", 32),
        ("r-2", "failed", 22),
        ("r-3", "running", 11),
    ]


@pytest.mark.parametrize(
    "args",
    [
        ["replay"],
        ["replay", "{root}"],
        ["replay", "{root}", "--to", "nowhere"],
        ["replay", "{root}", "--to", "console", "--rate", "fast"],
        ["replay", "{root}", "--to", "console", "--bandwidth", "1MB"],
        ["replay", "{root}", "--to", "console", "--workers", "0"],
        ["replay", "{root}", "--to", "console", "--call-timeout", "-1"],
        ["replay", "{root}", "--to", "console", "--to", "console"],
        ["replay", "{root}", "--to", "console", "--on-rewind", "guess"],
        ["watch", "{root}", "--to", "console", "--metrics-port", "70000"],
        ["watch", "{root}/nothing", "--to", "console"],
        ["status", "{root}/nothing"],
    ],
)
def test_misuse_exits_2(root: Path, args: list[str]):
    """A mistake in the command's arguments is exit status 2 and one message."""
    result = gapless(*(arg.format(root=root) for arg in args))

    assert result.exit_code == 2
    assert "Error: " in result.stderr


def test_the_environment_is_as_good_as_a_flag(root: Path, monkeypatch: pytest.MonkeyPatch):
    """`GAPLESS_<COMMAND>_<FLAG>` says what the flag would."""
    monkeypatch.setenv("GAPLESS_REPLAY_RATE", "fast")
    assert "rate is 'fast'" in gapless("replay", root, *where(root)).stderr
    monkeypatch.setenv("GAPLESS_REPLAY_RATE", "600/min")
    monkeypatch.setenv("GAPLESS_REPLAY_RUN", "r-2")

    assert "20 rows uploaded" in gapless("replay", root, *where(root)).stdout


def test_a_held_spool_exits_1(root: Path):
    """A second uploader of the same spool and state says who holds it, and exits 1."""
    with subprocess.Popen(
        command("watch", root, *where(root), "--json"), stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as first:
        assert first.stdout is not None
        assert b"started" in first.stdout.readline()
        second = gapless("replay", root, *where(root))
        first.terminate()
        first.stdout.read()

    assert second.exit_code == 1
    assert f"pid {first.pid} on " in second.stderr
    assert first.returncode == 0


def test_an_unwritable_state_exits_1(root: Path):
    """A state folder that cannot be made is said, with the way out."""
    taken = root.parent / "taken"
    taken.write_text("a file")
    result = gapless("replay", root, "--to", "console", "--state", taken)

    assert result.exit_code == 1
    assert "choose another with --state" in result.stderr


# status


def test_status_while_nothing_runs(root: Path):
    """`status` reads spool and state alone: runs by their names, what each sink has, what is left."""
    gapless("replay", root, *where(root))
    size = MadeRun(root, "r-4").rows(0, 5).path.stat().st_size
    result = gapless("status", root, "--state", root.parent / "state")
    lines = [line.split() for line in result.stdout.splitlines()]

    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 100
    assert any(line[:5] == ["grpo/qwen", "7b", "(r-1)", "finished", "32"] for line in lines)
    assert any(line[:2] == ["grpo/llama", "(r-2)"] and "failed" in line for line in lines)
    assert any(line[0] == "grpo/r-3" and line[1] == "running" for line in lines if line)
    assert any(line[0] == "grpo/r-4" and line[-2:] == [str(size), "B"] for line in lines if line)


def test_status_json(root: Path):
    """`status --json` has the same as an object a run, with its sinks."""
    gapless("replay", root, *where(root))
    found = orjson.loads(gapless("status", root, "--state", root.parent / "state", "--json").stdout)
    (first, *_) = found["runs"]
    (sink,) = first["sinks"]

    assert (first["project"], first["run"], first["name"], first["records"]) == ("grpo", "r-1", "qwen 7b", 32)
    assert (sink["uploaded"], sink["step"], sink["behind_bytes"], sink["state"]) == (30, 29, 0, "finished")


def test_status_says_that_a_segment_was_cut_since_it_was_uploaded(root: Path):
    """The trackers have its rows; the spool has not any more."""
    gapless("replay", root, *where(root))
    (segment,) = (root / "grpo" / "r-1").glob("*.jsonl")
    size = segment.stat().st_size
    os.truncate(segment, size // 2)
    (note,) = orjson.loads(gapless("status", root, "--state", root.parent / "state", "--json").stdout)["runs"][0][
        "notes"
    ]

    assert note == f"{segment.name} has {size // 2} bytes, and {size} of it were uploaded: it was cut since"


def test_status_writes_nothing(root: Path):
    """`status` makes no state, not even a folder for it."""
    gapless("status", root, "--state", root.parent / "state")

    assert sorted(path.name for path in root.parent.iterdir()) == ["spool"]


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        ("10/min", "carries 5 live runs' heartbeats; now 1: enough"),
        ("1/min", "carries 0 live runs' heartbeats; now 1: too few"),
    ],
)
def test_status_says_what_a_budget_carries(root: Path, rate: str, says: str):
    """`status` says how many live runs' heartbeats the rate of each configured sink carries."""
    config = root.parent / "gapless.toml"
    config.write_text(f'to = ["memory"]\nrate = "{rate}"\n[sinks.memory]\nheartbeat_s = 30.0\n')
    result = gapless("status", root, "--state", root.parent / "state", "--config", config)

    assert says in " ".join(result.stdout.split())


def test_status_shows_names_unharmed(tmp_path: Path):
    """A name that would move the terminal's cursor is shown with its escapes."""
    MadeRun(tmp_path / "spool", name="\x1b[2Jevil\nname")
    result = gapless("status", tmp_path / "spool", "--state", tmp_path / "state")

    assert "\x1b[2J" not in result.stdout
    assert "x1b" in result.stdout


# watch


@pytest.mark.parametrize("flags", [[], ["--no-events"]])
def test_watch_ends_when_all_is_done(root: Path, flags: list[str]):
    """`--exit-when-done` ends once every run is over and uploaded, with exit status 0, with file events or without."""
    run = MadeRun(root, "r-3b", **alive_here()).rows(0, 10)
    shutil.rmtree(root / "grpo" / "r-3")
    with subprocess.Popen(
        command("watch", root, *where(root), "--exit-when-done", "--json", *flags),
        stdout=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as child:
        assert child.stdout is not None
        assert b"started" in child.stdout.readline()
        run.rows(10, 5).finish()
        told = lines_of(child.stdout.read().decode())

    assert child.returncode == 0
    assert told[-1]["event"] == "stopped"
    assert told[-1]["rows"] == 65


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_it_cleanly(root: Path, number: signal.Signals):
    """A signal ends `watch` with what it has said and done in order, and exit status 0."""
    heeded = partial(signal.signal, number, signal.SIG_DFL)  # whatever this process was started under, nohup for one
    with subprocess.Popen(
        command("watch", root, *where(root), "--json"), stdout=subprocess.PIPE, env=ENVIRONMENT, preexec_fn=heeded
    ) as child:
        assert child.stdout is not None
        told = [orjson.loads(child.stdout.readline())]
        while told[-1].get("state") != "finished":
            told.append(orjson.loads(child.stdout.readline()))
        child.send_signal(number)
        told += lines_of(child.stdout.read().decode())

    assert child.returncode == 0
    assert {"event": "stopping", "signal": number.name, "times": 1} in told
    assert told[-1] == {"event": "stopped", "rows": 60, "times": 1}


HANGING = r"""
import os, sys, threading
from gapless_uploader import sinks
from gapless_schemas import seal
from gapless_uploader.cli import main
from gapless_uploader.sinks.memory import MemorySink

class HangingSink(MemorySink):
    def __init__(self, target=""):
        super().__init__(target)
        self.before_write = self.hang
    def hang(self, batch):
        os.write(1, b"hanging\n")
        threading.Event().wait()

sys.modules["hanging"] = sys.modules["__main__"]
sinks.SINKS["hanging"] = "hanging:HangingSink"
main(sys.argv[1:])
"""


def test_nohup_outlives_a_logout(root: Path):
    """A SIGHUP that was ignored when it began stays ignored; SIGTERM ends it."""
    command_line = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command("watch", root, "--json", *where(root))]
    child = subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert child.stdout is not None
    while "uploaded" not in child.stdout.readline():
        pass
    child.send_signal(signal.SIGHUP)
    MadeRun(root, "r-4").rows(0, 3)
    while "r-4" not in child.stdout.readline():
        pass
    child.send_signal(signal.SIGTERM)
    told = lines_of(child.communicate()[0])

    assert child.returncode == 0
    assert [line["signal"] for line in told if line["event"] == "stopping"] == ["SIGTERM"]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_hanging_sink_does_not_keep_it(root: Path, signals: int):
    """With a sink call that never returns, a signal ends `watch` after `STOP_S`, and a second one at once."""
    args = ["watch", root, *where(root, "hanging")]
    with subprocess.Popen(
        [sys.executable, "-c", HANGING, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        told = child.stdout.readline()
        child.terminate()
        if signals == 2:
            while (said := child.stderr.readline()) and b"stopping" not in said:
                pass
            child.terminate()
        child.wait(60)

    assert told == b"hanging\n"
    assert child.returncode == (128 + signal.SIGTERM if signals == 2 else 0)


def test_metrics_are_prometheus_text(root: Path):
    """`--metrics-port 0` serves what Prometheus' own parser reads, on 127.0.0.1, and nothing else."""
    with subprocess.Popen(
        command("watch", root, *where(root), "--json", "--metrics-port", "0"), stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as child:
        assert child.stdout is not None
        told = orjson.loads(child.stdout.readline())
        assert told["event"] == "serving-metrics"
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", told["url"])
        rows = 0.0
        while rows < 60:
            with urllib.request.urlopen(told["url"], timeout=60) as answer:
                families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
            rows = sum(sample.value for sample in families["gapless_rows"].samples)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(told["url"].replace("/metrics", "/"), timeout=60)
        child.terminate()

    (sample,) = families["gapless_rows"].samples
    assert sample.labels == {"sink": f"file:{root.parent / 'out'}"}
    assert {"gapless_failures", "gapless_refused", "gapless_lag_bytes", "gapless_lag_seconds", "gapless_runs"} <= set(
        families
    )
    assert all(family.type in ("counter", "gauge") and family.documentation for family in families.values())


# a terminal


def screen_of(args: list[str], done: re.Pattern[str], stop: bool) -> str:
    """What the command writes to a terminal until `done` is found in it; then it is stopped, or ends itself."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(args[0], args, ENVIRONMENT)  # noqa: S606 - a terminal of its own needs the fork
    text, stopped, deadline = "", False, time.monotonic() + 120.0
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                text += os.read(terminal, 65_536).decode(errors="replace")
            except OSError:  # the child closed its side
                break
        if stop and not stopped and done.search(text):
            os.kill(pid, signal.SIGINT)
            stopped = True
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert done.search(text), text
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_watch_on_a_terminal_is_a_live_table(root: Path):
    """On a terminal `watch` draws runs by name with step, rows, lag and state, and leaves the last table there."""
    text = screen_of(command("watch", root, *where(root)), re.compile(r"60 rows .*", re.DOTALL), stop=True)
    last = text[text.rindex("gapless watch") :]

    assert "3 runs" in last
    assert re.search(r"grpo/qwen 7b \(r-\S+ +file:\S+ +finished +29 +30 ", last)
    assert re.search(r"grpo/llama \(r-2\) +file:\S+ +failed +19 +20 ", last)
    assert re.search(r"grpo/r-3 +file:\S+ +running +9 +10 ", last)
    assert "stopping signal=SIGINT" in last


def test_replay_on_a_terminal_is_a_bar(root: Path):
    """On a terminal `replay` draws a bar with bytes, rows, rate and what is left, and ends with its summary."""
    text = screen_of(command("replay", root, *where(root)), re.compile("60 rows uploaded"), stop=False)

    assert re.search(r"replay .*\d+ %  \d+\.\d MB  \d+ rows +\d+ rows/s +\d+:\d\d:\d\d", text)


def test_show_takes_any_number_and_says_what_it_leaves_out(tmp_path: Path):
    """An integer beyond any float, and rows without a step."""
    run = MadeRun(tmp_path / "spool").rows(0, 3)
    run.append("metrics", {"loss": 1.0})
    body = b'{"seq":%d,"t":1.0,"mono":1.0,"kind":"metrics","step":9,"data":{"big":"1%b"},"marks":[[["big"],"int"]]}'
    with open(run.path, "ab") as file:
        file.write(seal(body % (run.seq + 1, b"0" * 400)))
    shown = gapless("show", tmp_path / "spool")
    as_json = gapless("show", tmp_path / "spool", "big", "--json")

    assert (shown.exit_code, as_json.exit_code) == (0, 0)
    assert "big" in shown.stdout
    assert "1 rows without a step are not shown" in shown.stdout
    assert as_json.stdout == '{"big": [9, Infinity]}\n'
