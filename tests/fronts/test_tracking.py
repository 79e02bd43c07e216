"""verl's Tracking: its names and signatures, what goes to the console and to the spool, how a run ends."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from gapless._fronts import current
from gapless.tracking import Tracking, ValidationGenerationsLogger
from tests.fronts.shapes import verl_config
from tests.spool.oracle import header, only, records, segments


def identity(tracking: Tracking) -> dict[str, Any]:
    tracking.finish()
    return only(tracking.run.path, "run")[0].data


def rows(tracking: Tracking) -> list[tuple[int | None, dict[str, Any]]]:
    tracking.finish()
    return [(r.step, r.data) for r in only(tracking.run.path, "metrics")]


# Backends


def test_the_ten_names_of_verl_are_taken(root: Path) -> None:
    """All of verl's backends at once: the trackers among them are asked for, each once."""
    told = identity(Tracking("p", "e", Tracking.supported_backend, verl_config()))

    assert len(Tracking.supported_backend) == 10
    assert told["sinks"] == [name for name in Tracking.supported_backend if name != "console"]
    assert told["name"] == "e"


def test_another_name_is_refused_with_the_list(root: Path) -> None:
    """A name that verl does not know is an error that says which there are; no run is begun."""
    with pytest.raises(ValueError, match="swanlb is not supported; there are: wandb, mlflow, swanlab"):
        Tracking("p", "e", ["console", "swanlb"])

    assert not root.exists()


def test_the_old_name_tracking_is_wandb(root: Path) -> None:
    """`tracking` warns of its end, as in verl, and asks for W&B once."""
    with pytest.warns(DeprecationWarning, match="'wandb'"):
        tracking = Tracking("p", "e", ["tracking", "wandb"])

    assert identity(tracking)["sinks"] == ["wandb"]


def test_a_single_name_and_an_omegaconf_list_are_backends(root: Path) -> None:
    """`trainer.logger` may be one text or a ListConfig."""
    assert identity(Tracking("p", "e", "wandb"))["sinks"] == ["wandb"]
    assert identity(Tracking("p", "e", OmegaConf.create(["console", "swanlab"])))["sinks"] == ["swanlab"]


def test_no_tracker_is_imported_and_nobody_called(tmp_path: Path) -> None:
    """With every backend asked for, a process loads no tracker, opens no socket and starts no other process."""
    script = """
import sys
seen = []
sys.addaudithook(lambda event, args: seen.append(event))
from gapless.tracking import Tracking, ValidationGenerationsLogger
t = Tracking('p', 'e', Tracking.supported_backend, {'a': 1})
t.log({'a': 1.0}, step=1)
ValidationGenerationsLogger('p', 'e').log(Tracking.supported_backend, [('i', 'o', 1.0)], 1)
t.finish()
trackers = {'wandb', 'swanlab', 'mlflow', 'clearml', 'trackio', 'tensorboard', 'requests', 'urllib3', 'torch', 'ray'}
print(sorted(trackers & set(sys.modules)))
print(sorted({e for e in seen if e.startswith(('socket.', 'subprocess.', 'os.fork', 'os.posix_spawn', 'os.system'))}))
"""
    done = run_python(script, tmp_path)

    assert done.stdout.splitlines()[-2:] == ["[]", "['socket.gethostname']"]


# Rows


def test_console_prints_the_numbers_of_a_row_at_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """verl's line: the step, then `key:value` of every number; what is none is left out of it."""
    tracking = Tracking("p", "e", ["console", "wandb"])
    tracking.log({"a/b": 0.1, "n": np.float64(2.5), "i": 3, "text": "x"}, step=7)

    assert capsys.readouterr().out == "step:7 - a/b:0.1 - n:2.5 - i:3\n"
    assert rows(tracking) == [(7, {"a/b": 0.1, "n": 2.5, "i": 3, "text": "x"})]


def test_a_closed_stdout_hurts_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that cannot be printed is recorded."""
    tracking = Tracking("p", "e", ["console"])
    monkeypatch.setattr(sys, "stdout", None)
    tracking.log({"a": 1}, step=1)

    assert rows(tracking) == [(1, {"a": 1})]


@pytest.mark.parametrize(
    ("backend", "printed", "spooled"),
    [
        (None, True, True),
        ("console", True, False),
        (["console"], True, False),
        ("wandb", False, True),
        (["wandb", "console"], True, True),
        ("vemlp_wandb", False, False),
        ([], False, False),
    ],
)
def test_backend_chooses_per_call(
    root: Path, capsys: pytest.CaptureFixture[str], backend: Any, printed: bool, spooled: bool
) -> None:
    """A row goes where `backend` says, by whole names; a name that was not configured takes nothing."""
    tracking = Tracking("p", "e", ["console", "wandb"])
    tracking.log({"a": 1}, 4, backend)

    assert bool(capsys.readouterr().out) is printed
    assert rows(tracking) == ([(4, {"a": 1})] if spooled else [])


def test_backend_chooses_among_the_trackers_of_the_run(root: Path) -> None:
    """A row for one tracker is noted as not for the others; samples of verl's loggers likewise."""
    tracking = Tracking("p", "e", ["console", "wandb", "swanlab", "file"])
    tracking.log({"a": 1}, 1, "wandb")
    tracking.log({"a": 2}, 2, ["swanlab", "file", "console"])
    tracking.log({"a": 3}, 3)
    ValidationGenerationsLogger("p", "e").log(["wandb", "console"], [("i", "o", 1)], 4)
    tracking.finish()

    (found,) = records(tracking.run.path).values()
    assert {r.step: list(r.skip_sinks) for r in found if r.step is not None} == {
        1: ["swanlab", "file"],
        2: ["wandb"],
        3: [],
        4: ["swanlab", "file"],
    }


def test_a_row_for_several_trackers_is_written_once(root: Path) -> None:
    """Three trackers share one line of the spool."""
    tracking = Tracking("p", "e", ["wandb", "swanlab", "tensorboard"])
    tracking.log({"a": 1}, step=1)

    assert rows(tracking) == [(1, {"a": 1})]


def test_where_rows_go_is_said_once(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run's folder and the trackers asked for, on stderr when the run begins."""
    tracking = Tracking("p", "e", ["console", "wandb", "swanlab"])
    tracking.log({"a": 1}, step=1)

    assert capsys.readouterr().err == f"gapless: e writes to {tracking.run.path}, for wandb, swanlab\n"


def test_console_alone_is_spooled_too(root: Path) -> None:
    """The default backend asks for no tracker, and its rows are kept for whoever wants them later."""
    tracking = Tracking("p", "e")
    tracking.log({"a": 1}, step=1)

    assert rows(tracking) == [(1, {"a": 1})]
    assert identity(tracking)["sinks"] == []


def test_no_backend_at_all_writes_nothing(root: Path) -> None:
    """An empty list is a Tracking that does nothing."""
    tracking = Tracking("p", "e", [])
    tracking.log({"a": 1}, step=1)
    tracking.finish()

    assert not root.exists()


def test_verls_values_arrive_as_they_were(root: Path) -> None:
    """numpy and torch scalars, bf16 included, NaN and names like `timing(s)/gen` and `mean@1`."""
    tracking = Tracking("p", "e", "wandb")
    bf16 = torch.tensor(0.1, dtype=torch.bfloat16)
    tracking.log({"timing(s)/gen": np.float32(0.1), "val/mean@1": bf16, "损失": float("nan")}, step=1)
    ((_, data),) = rows(tracking)

    assert data["timing(s)/gen"] == float(np.float32(0.1))
    assert data["val/mean@1"] == 0.10009765625
    assert data["损失"] != data["损失"]


def test_a_data_frame_becomes_a_table(root: Path) -> None:
    """verl's ClearML backend takes frames; they are tables for every tracker."""
    tracking = Tracking("p", "e", "clearml")
    tracking.log({"t": pd.DataFrame({"x": [1, 2], "y": ["a", "b"]}), "n": 1}, step=3)
    tracking.finish()
    (table,) = only(tracking.run.path, "table")

    assert (table.data["columns"], table.data["rows"]) == (["x", "y"], [[1, "a"], [2, "b"]])


def test_what_is_no_dict_is_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that is no mapping is refused with a warning and raises nothing."""
    tracking = Tracking("p", "e", ["console", "wandb"])
    tracking.log(3, step=1)  # type: ignore[arg-type]

    assert tracking.run.stats().refused == 1
    assert "log() takes a dict" in capsys.readouterr().err


# Identity


def test_config_is_kept_without_its_secrets(root: Path) -> None:
    """The config arrives whole; the proxy's password does not."""
    told = identity(Tracking("p", "e", "wandb", verl_config(api_key="sk-abc")))["config"]

    assert told["data"] == {"train_batch_size": 8, "tokenizer": "qwen"}
    assert told["trainer"]["wandb_proxy"] == "http://<redacted>@proxy.example:3128"
    assert told["trainer"]["api_key"] == "<redacted>"


def test_the_trackers_environment_is_information(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Variables are noted, names among them used, folders and hosts neither made nor called, keys not looked at."""
    environment = {
        "WANDB_ENTITY": "team",
        "WANDB_TAGS": "a,b",
        "WANDB_RUN_GROUP": "g",
        "SWANLAB_LOG_DIR": str(tmp_path / "swanlog"),
        "TENSORBOARD_DIR": str(tmp_path / "tb"),
        "MLFLOW_TRACKING_URI": "https://ann:hunter22@mlflow.example",
        "VERL_FILE_LOGGER_PATH": str(tmp_path / "log.jsonl"),
    }
    secrets = {"WANDB_API_KEY": "k" * 40, "SWANLAB_API_KEY": "s" * 21, "VOLC_SECRET_ACCESS_KEY": "v" * 30}
    for name, value in (environment | secrets).items():
        monkeypatch.setenv(name, value)
    told = identity(Tracking("p", "e", Tracking.supported_backend))
    noted = told["config"]["gapless"]["environment"]
    everything = b"".join(path.read_bytes() for path in root.rglob("*") if path.is_file())

    assert noted == {**environment, "MLFLOW_TRACKING_URI": "https://<redacted>@mlflow.example"}
    assert (told["entity"], told["tags"], told["group"]) == ("team", ["a", "b"], "g")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spool"]
    assert not [secret for secret in secrets.values() if secret.encode() in everything]


def test_wandbs_names_are_for_wandb(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where W&B is not asked for, its entity is noted and not used."""
    monkeypatch.setenv("WANDB_ENTITY", "team")

    assert identity(Tracking("p", "e", "swanlab"))["entity"] is None


def test_swanlab_finds_verls_mark(root: Path) -> None:
    """verl marks its SwanLab runs with `FRAMEWORK`."""
    assert identity(Tracking("p", "e", "swanlab", {}))["config"]["FRAMEWORK"] == "verl"
    assert "FRAMEWORK" not in identity(Tracking("p", "e", "wandb", {}))["config"]


def test_whoever_builds_it_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's SFT trainer logs from the last pipeline stage: a rank that is not 0 writes where it builds a Tracking."""
    monkeypatch.setenv("RANK", "3")
    tracking = Tracking("p", "e", "wandb")
    tracking.log({"a": 1}, step=1)

    assert rows(tracking) == [(1, {"a": 1})]


def test_missing_names_are_defaults(root: Path) -> None:
    """Without project and experiment a run is begun all the same."""
    tracking = Tracking(None, None, "wandb")
    told = identity(tracking)

    assert (header(segments(tracking.run.path)[0]).project, told["name"]) == ("default", "default")


# A requeued job


def start(**trainer: Any) -> str:
    """The run id that a process started anew finds."""
    from gapless import tracking

    tracking._seen.clear()
    made = Tracking("p", "e", "wandb", verl_config(**trainer))
    made.finish()
    return made.run.id


def test_a_requeued_slurm_job_goes_on_with_its_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job and names, with verl going on from its checkpoint, are the same run: a second attempt."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first, second = start(), start()

    assert first == second
    assert [header(path).attempt for path in segments(root / "p" / first)] == [1, 2]


@pytest.mark.parametrize(
    ("job", "trainer"), [("78", {}), (None, {}), ("77", {"resume_mode": "disable"}), ("77", {"experiment_name": "e"})]
)
def test_another_start_is_another_run(
    root: Path, monkeypatch: pytest.MonkeyPatch, job: str | None, trainer: dict[str, Any]
) -> None:
    """Another job, no job, a training from scratch, or a second run of this process each have an id of their own."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    made = [Tracking("p", "e", "wandb", verl_config())]
    if job is None:
        monkeypatch.delenv("SLURM_JOB_ID")
    else:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    made.append(Tracking("p", "e", "wandb", verl_config(**trainer)))

    assert made[0].run.id != made[1].run.id


def test_a_run_id_from_outside_goes_first(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GAPLESS_RUN_ID` names the run, in a Slurm job too."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("GAPLESS_RUN_ID", "mine")

    assert start() == "mine"


# The end


@pytest.mark.parametrize(("code", "state"), [(0, "finished"), (1, "failed")])
def test_finish_says_the_exit_code_once(root: Path, code: int, state: str) -> None:
    """verl's runner finishes with 0 or 1; what is said after that changes nothing."""
    tracking = Tracking("p", "e", "wandb")
    tracking.finish(exit_code=code)
    tracking.finish(exit_code=1 - code)
    del tracking
    gc.collect()
    (folder,) = (root / "p").iterdir()

    assert [r.data for r in only(folder, "finish")] == [{"state": state, "exit_code": code}]


def test_a_block_that_raises_fails_the_run(root: Path) -> None:
    """As a context manager it passes the exception on and ends the run as failed."""
    with pytest.raises(KeyError), Tracking("p", "e", "wandb") as tracking:
        raise KeyError("x")

    assert only(tracking.run.path, "finish")[0].data == {"state": "failed", "exit_code": 1}


def test_letting_go_ends_the_run(root: Path) -> None:
    """A trainer's `fit` that returns drops its Tracking: the run ends there, not with the process."""

    def fit() -> Path:
        logger = Tracking("p", "e", "wandb")
        logger.log({"a": 1}, step=1)
        return logger.run.path

    folder = fit()
    gc.collect()

    assert only(folder, "finish")[0].data == {"state": "finished", "exit_code": None}


def test_letting_go_in_the_background_ends_the_run(root: Path) -> None:
    """Garbage may be collected in the run's own writer thread: the run ends, and no thread waits for itself."""
    tracking = Tracking("p", "e", "wandb")
    run = tracking.run
    held = [tracking]
    del tracking
    background = Thread(target=held.clear, daemon=True)
    background.start()
    background.join()

    assert run._writer.done.wait(30)
    assert only(run.path, "finish")[0].data == {"state": "finished", "exit_code": None}


def test_letting_go_while_tables_are_logged_waits_for_nobody(root: Path) -> None:
    """Garbage may be collected between any two steps of the logger of tables, which holds a lock there."""
    tracking = Tracking("p", "e", "wandb")
    folder = tracking.run.path
    with current._lock:
        del tracking
        gc.collect()

    assert only(folder, "finish")[0].data == {"state": "finished", "exit_code": None}


@pytest.mark.parametrize(
    ("ending", "end"),
    [
        ("pass", {"state": "finished", "exit_code": None}),
        ("raise RuntimeError('x')", {"state": "failed", "exit_code": 1}),
    ],
)
def test_an_interpreters_end_ends_the_run(tmp_path: Path, ending: str, end: dict[str, Any]) -> None:
    """Without `finish` a script that ends finishes its run, and one that raises fails it."""
    script = (
        "from gapless.tracking import Tracking\nt = Tracking('p', 'e', 'wandb')\nt.log({'a': 1}, step=1)\n" + ending
    )
    run_python(script, tmp_path, check=False)
    (folder,) = (tmp_path / "p").iterdir()
    ((*_, last),) = records(folder).values()

    assert (last.kind, last.data) == ("finish", end)


def run_python(script: str, root: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": ":".join(path for path in sys.path if path), "PATH": "/usr/bin:/bin"}
    environment["GAPLESS_DIR"] = str(root)
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=check
    )
