"""Ours in place of verl's classes: `install()`, `python -m gapless.verl`, and Ray's workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gapless._fronts import ray_hook
from tests.fronts.fake_verl import lay_out
from tests.spool.oracle import only


@pytest.fixture
def verl(tmp_path: Path) -> Path:
    """A folder with a package `verl`."""
    return lay_out(tmp_path / "packages")


def run(verl: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python with `verl` importable, in a working folder of its own."""
    folder = verl.parent / "work"
    folder.mkdir(exist_ok=True)
    paths = [str(verl), *(path for path in sys.path if path)]
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PYTHONPATH": os.pathsep.join(paths), "PATH": "/usr/bin:/bin", **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def only_run(verl: Path) -> Path:
    (folder,) = (verl.parent / "work/gapless/p").iterdir()
    return folder


def test_a_module_runs_unedited(verl: Path) -> None:
    """`python -m gapless.verl -m verl.trainer.main_ppo` runs it as main, with its arguments and our classes."""
    done = run(verl, "-m", "gapless.verl", "-m", "verl.trainer.main_ppo", "trainer.logger=x")
    folder = only_run(verl)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "argv ['trainer.logger=x'] __main__ verl.trainer.main_ppo"
    assert "step:2 - actor/loss:0.5" in done.stdout
    assert [(r.step, r.data) for r in only(folder, "metrics")] == [
        (0, {"val/acc": 0.25}),
        (1, {"actor/loss": 1.0}),
        (2, {"actor/loss": 0.5}),
    ]
    assert [r.step for r in only(folder, "table")] == [0, 1, 2]
    assert only(folder, "finish")[0].data == {"state": "finished", "exit_code": 0}


def test_a_failure_is_the_programs_own(verl: Path) -> None:
    """The exception reaches the caller's exit status, and the run has failed as the runner said."""
    done = run(verl, "-m", "gapless.verl", "-m", "verl.trainer.main_ppo", "fail")

    assert done.returncode == 1
    assert "a worker died" in done.stderr
    assert only(only_run(verl), "finish")[0].data == {"state": "failed", "exit_code": 1}


def test_a_script_runs_unedited(verl: Path) -> None:
    """A path in place of `-m`: its folder is importable, as when it is started alone."""
    folder = verl.parent / "scripts"
    folder.mkdir()
    (folder / "beside.py").write_text("from verl.trainer.trainer import Trainer\n")
    (folder / "train.py").write_text(
        "import sys\nfrom beside import Trainer\nTrainer({'fail': False}).fit()\nprint(sys.argv[1:], __name__)\n"
    )
    done = run(verl, "-m", "gapless.verl", str(folder / "train.py"), "a", "-m")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['a', '-m'] __main__"
    assert len(only(only_run(verl), "metrics")) == 3


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--what",)])
def test_no_program_is_misuse(verl: Path, arguments: tuple[str, ...]) -> None:
    """Without a program to run it says how it is used, with exit status 2."""
    done = run(verl, "-m", "gapless.verl", *arguments)

    assert (done.returncode, done.stderr[:6]) == (2, "usage:")


def test_help_says_how(verl: Path) -> None:
    """`--help` prints usage and what it does."""
    assert "install()" in run(verl, "-m", "gapless.verl", "--help").stdout


def test_install_waits_for_verl(verl: Path) -> None:
    """Called first, it loads nothing of verl, and verl's module has our classes when it comes, and its own loader."""
    script = """
import sys, inspect
from gapless import tracking
tracking.install(); tracking.install()
assert 'verl' not in sys.modules
import verl.utils.tracking as theirs
assert theirs.Tracking is tracking.Tracking
assert theirs.ValidationGenerationsLogger is tracking.ValidationGenerationsLogger
assert theirs.DapoFilteredRewardTableLogger is tracking.DapoFilteredRewardTableLogger
assert theirs.RLInsightLogger.__module__ == 'verl.utils.tracking'
assert "Stands for verl's own" in inspect.getsource(theirs)
assert sum(type(finder).__name__ == '_Finder' for finder in sys.meta_path) == 1
"""
    done = run(verl, "-c", script)

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_install_late_says_who_has_verls_own(verl: Path) -> None:
    """A trainer that was imported before keeps verl's class: its name is told, with the way out."""
    script = """
import verl.trainer.trainer
from gapless import tracking
tracking.install()
assert verl.utils.tracking.Tracking is tracking.Tracking
"""
    done = run(verl, "-c", script)

    assert done.returncode == 0, done.stderr
    assert "verl.trainer.trainer.Tracking" in done.stderr
    assert "python -m gapless.verl" in done.stderr


# Ray: the trainer runs in a worker process


def test_the_driver_tells_ray_to_call_us(verl: Path) -> None:
    """The spool's root becomes absolute, since workers start elsewhere, and Ray is told of the hook."""
    script = "import os; print(os.environ['GAPLESS_DIR'], os.environ['RAY_RUNTIME_ENV_HOOK'])"
    (verl.parent / "say.py").write_text(script)
    done = run(verl, "-m", "gapless.verl", str(verl.parent / "say.py"))

    assert done.stdout.split() == [str(verl.parent / "work/gapless"), "gapless._fronts.ray_hook.hook"]


def test_the_hook_adds_our_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's own runtime environment stays, with our setup and our variables beside it."""
    monkeypatch.setenv("GAPLESS_DIR", "/shared/spool")
    made = ray_hook.hook({"env_vars": {"NCCL_DEBUG": "WARN"}, "working_dir": None})

    assert made == {
        "env_vars": {"GAPLESS_DIR": "/shared/spool", "NCCL_DEBUG": "WARN"},
        "working_dir": None,
        "worker_process_setup_hook": "gapless.tracking.install",
    }
    assert ray_hook.hook(made) == made


calls: list[str] = []


def their_setup() -> None:
    calls.append("setup")


def their_hook(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    return {**(runtime_env or {}), "pip": ["x"]}


@pytest.mark.parametrize("theirs", [their_setup, f"{__name__}.their_setup"])
def test_another_setup_is_called_too(theirs: Any) -> None:
    """A setup that the user gave, a function or its name, runs after ours."""
    calls.clear()
    ray_hook.hook({"worker_process_setup_hook": theirs})["worker_process_setup_hook"]()
    finders = [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"]
    for finder in finders:
        sys.meta_path.remove(finder)

    assert calls == ["setup"]
    assert len(finders) == 1


def test_another_hook_is_called_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that Ray was told of before ours still has its say."""
    environment = {"RAY_RUNTIME_ENV_HOOK": f"{__name__}.their_hook"}
    ray_hook.prepare(environment, "/spool")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = ray_hook.hook(None)

    assert environment["RAY_RUNTIME_ENV_HOOK"] == ray_hook.HOOK
    assert (made["pip"], made["worker_process_setup_hook"]) == (["x"], "gapless.tracking.install")


def test_a_submitted_jobs_setup_is_left_alone() -> None:
    """Ray refuses a second setup beside one that a submitted job brought along: none is added."""
    inherited = {"env_vars": {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "x.y"}}

    assert "worker_process_setup_hook" not in ray_hook.hook(inherited)


@pytest.mark.torture
def test_a_trainer_in_a_ray_actor_logs_to_the_spool(verl: Path) -> None:
    """With Ray itself: the driver's command, an actor that imports verl, the spool in the driver's folder."""
    pytest.importorskip("ray")
    (verl.parent / "train.py").write_text("""
import ray

@ray.remote
class TaskRunner:
    def run(self, config):
        from verl.trainer.trainer import Trainer
        trainer = Trainer(config)
        trainer.fit()
        trainer.logger.finish(exit_code=0)

ray.init(num_cpus=1, include_dashboard=False, runtime_env={"env_vars": {"X": "1"}, "working_dir": None})
ray.get(TaskRunner.remote().run.remote({"fail": False}))
""")
    done = run(
        verl,
        *("-m", "gapless.verl", str(verl.parent / "train.py")),
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        HOME=str(verl.parent),
    )

    assert done.returncode == 0, done.stderr
    assert [r.step for r in only(only_run(verl), "metrics")] == [0, 1, 2]
    assert only(only_run(verl), "finish")[0].data == {"state": "finished", "exit_code": 0}
