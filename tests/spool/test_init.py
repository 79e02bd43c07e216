"""`init`: who writes, where, under which names, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gapless
from gapless import jobs
from gapless_schemas import path_name
from tests.spool.oracle import header, only, records, segments
from tests.spool.scripts import ROOT, environment, run, start


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without any job's or Gapless' variables."""
    for name in list(os.environ):
        if name.startswith(("GAPLESS_", "SLURM_", "TORCHELASTIC", "RANK", "WORLD_SIZE")):
            monkeypatch.delenv(name)


def test_a_fresh_import_loads_and_opens_nothing() -> None:
    """`import gapless` loads no tracker, CLI, HTTP or array library, starts no thread and opens no file but modules."""
    script = """
        import os, sys, threading
        opened = []
        sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
        reads = []
        environ = type(os.environ)
        real = environ.__getitem__
        environ.__getitem__ = lambda self, key: (reads.append(key), real(self, key))[1]
        import gapless
        heavy = "click watchdog rich filelock wandb swanlab tensorboard torch numpy requests PIL gapless_uploader"
        print([name for name in heavy.split() if name in sys.modules])
        print([path for path in opened if not str(path).endswith((".py", ".pyc", ".so")) and ".pyc." not in str(path)])
        print(threading.active_count(), [key for key in reads if not key.startswith("PYTHON")])
        """
    done = run(script)

    assert done.stdout.splitlines() == ["[]", "[]", "1 []"], done.stderr


def test_the_environment_says_where_and_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`GAPLESS_DIR` and `GAPLESS_RUN_ID` stand in for `dir` and `id`; arguments go before them."""
    monkeypatch.setenv("GAPLESS_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("GAPLESS_RUN_ID", "from-env")
    with gapless.init("p") as first, gapless.init("p", id="own", dir=tmp_path / "own") as second:
        assert first.path == tmp_path / "env" / "p" / "from-env"
        assert second.path == tmp_path / "own" / "p" / "own"

    assert header(segments(first.path)[0]).run_id == "from-env"


def test_the_default_folder_is_gapless_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anything said the spool is `./gapless`, and stays there when the training changes its folder."""
    monkeypatch.chdir(tmp_path)
    with gapless.init("p") as run:
        monkeypatch.chdir("/")
        run.log({"x": 1})

    assert run.path.parent == tmp_path / "gapless" / "p"
    assert len(only(run.path, "metrics")) == 1


@pytest.mark.parametrize(
    "name", ["grpo", "GRPO Run", "a/b", "..", ".hidden", "名前", "x" * 200, "a~b", "media", "nul\0"]
)
def test_true_names_are_in_the_header(tmp_path: Path, name: str) -> None:
    """Any text is a project, an id and a writer: folders get safe names, the header keeps the true ones."""
    with gapless.init(name, id=name, writer=name, dir=tmp_path / "s") as run:
        run.log({"x": 1})
    (segment,) = segments(run.path)
    found = header(segment)

    assert (found.project, found.run_id, found.writer) == (name, name, name)
    assert segment.parent == tmp_path / "s" / path_name(name) / path_name(name)
    assert all(part.is_dir() or part.is_file() for part in (tmp_path / "s").rglob("*"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s"]


def test_the_run_record_holds_what_was_said(tmp_path: Path) -> None:
    """Name, group, job type, tags, notes, entity, sinks and config are the first record."""
    with gapless.init(
        "p",
        "qwen",
        dir=tmp_path,
        config={"lr": 0.1, "big": float("inf")},
        group="g",
        job_type="train",
        tags=["a", "b"],
        notes="n",
        entity="e",
        sinks=["wandb"],
    ) as run:
        pass
    first = only(run.path)[0]

    assert first.kind == "run"
    assert first.data == {
        "name": "qwen",
        "group": "g",
        "job_type": "train",
        "tags": ["a", "b"],
        "notes": "n",
        "entity": "e",
        "sinks": ["wandb"],
        "config": {"lr": 0.1, "big": float("inf")},
    }


def test_config_and_summary_are_mappings_that_record(tmp_path: Path) -> None:
    """Setting a key writes a record; reading gives back what was set; dicts merge deeply."""
    with gapless.init("p", dir=tmp_path, config={"a": {"b": 1}}) as run:
        run.config["lr"] = 0.1
        run.config.update({"a": {"c": 2}}, seed=7)
        run.summary["best"] = 0.5
        run.summary.update(last=1)

    assert dict(run.config) == {"a": {"b": 1, "c": 2}, "lr": 0.1, "seed": 7}
    assert run.summary["best"] == 0.5
    assert [r.data for r in only(run.path, "config")] == [{"lr": 0.1}, {"a": {"c": 2}, "seed": 7}]
    assert [r.data for r in only(run.path, "summary")] == [{"best": 0.5}, {"last": 1}]


def test_axes_are_recorded(tmp_path: Path) -> None:
    """`define_axis` names the x-axis of a key or glob and its summary rule; an unknown rule is told and dropped."""
    with gapless.init("p", dir=tmp_path) as run:
        run.define_axis("val/*", "epoch", summary="min")
        run.define_axis("loss", summary="best")  # type: ignore[arg-type]

    assert [r.data for r in only(run.path, "axis")] == [
        {"key": "val/*", "axis": "epoch", "summary": "min"},
        {"key": "loss", "axis": None, "summary": None},
    ]
    assert run.stats().refused == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"project": 3}, TypeError),
        ({"project": ""}, ValueError),
        ({"id": 3}, TypeError),
        ({"id": ""}, ValueError),
        ({"name": 3}, TypeError),
        ({"writer": None}, TypeError),
        ({"durability": "fast"}, ValueError),
        ({"resume": "must"}, ValueError),
        ({"resume_step": True}, ValueError),
        ({"resume_step": -1}, ValueError),
        ({"resume_step": 1.5}, TypeError),
        ({"ring_rows": 0}, ValueError),
    ],
)
def test_arguments_that_mean_nothing_are_refused(tmp_path: Path, arguments: dict[str, Any], error: type) -> None:
    """A caller's mistake raises at once, with the argument's name, and makes nothing."""
    (name,) = arguments
    with pytest.raises(error, match=name.partition("_")[0]):
        gapless.init(**{"project": "p", "dir": tmp_path, **arguments})

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["disabled", "another rank", "is_writer"])
def test_a_run_that_does_not_write_does_nothing(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disabled, on another rank or told not to write, every call of `Run` is there and makes nothing."""
    if how == "disabled":
        monkeypatch.setenv("GAPLESS_MODE", "disabled")
    if how == "another rank":
        monkeypatch.setenv("RANK", "3")
    with gapless.init(
        "p", dir=tmp_path, id="r", config={"a": 1}, is_writer=False if how == "is_writer" else None
    ) as run:
        run.log({"x": 1}, step=1)
        run.log(3)  # type: ignore[arg-type]
        run.config["x"] = 1
        run.summary["x"] = 1
        run.define_axis("x")
        run.console(["line"])
        assert run.flush()
        assert (run.id, run.is_writer, run.stats()) == ("r", False, gapless.Stats())
        assert run.path == tmp_path / "p" / "r"

    assert list(tmp_path.iterdir()) == []


def test_rank_zero_of_an_initialised_process_group_writes(tmp_path: Path) -> None:
    """With torch.distributed initialised its rank decides, whatever `RANK` says; another rank may be told to write."""
    script = """
        import sys, torch.distributed as dist, gapless
        dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meet", rank=int(sys.argv[2]), world_size=2)
        print(gapless.init("p", dir=sys.argv[1]).is_writer)
        print(gapless.init("p", dir=sys.argv[1], is_writer=dist.get_rank() == 1).is_writer)
        dist.destroy_process_group()
        """
    both = [start(script, tmp_path, rank, RANK="5") for rank in (0, 1)]
    told = [process.communicate(timeout=60)[0].split() for process in both]

    assert told == [["True", "False"], ["False", "True"]]


def test_files_follow_the_umask_and_links_are_not_followed(tmp_path: Path) -> None:
    """Files and folders are made with the user's umask; a link where the run's folder should be is refused."""
    script = """
        import os, sys, gapless
        os.umask(0o027)
        with gapless.init("p", dir=sys.argv[1], id="r", finish_timeout=float(sys.argv[2])) as run:
            run.log({"text": gapless.Text("x" * 300_000)})
        """
    run(script, tmp_path / "spool", 60)
    modes = {path.name[-5:]: path.stat().st_mode & 0o777 for path in (tmp_path / "spool").rglob("*")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked" / "p").mkdir(parents=True)
    (tmp_path / "linked" / "p" / "r").symlink_to(elsewhere)
    done = run(script, tmp_path / "linked", 0.2)

    assert modes["jsonl"] == 0o640
    assert modes["media"] == 0o750
    assert "takes no rows" in done.stderr
    assert list(elsewhere.iterdir()) == []


def test_a_segment_that_is_there_already_is_never_touched(tmp_path: Path) -> None:
    """Old segments, and strange files with a segment's name, stay as they are: each attempt makes its own file."""
    with gapless.init("p", dir=tmp_path, id="r") as run:
        run.log({"x": 1})
    (old,) = segments(run.path)
    content = old.read_bytes()
    (run.path / "main-0002-00000000-000000.jsonl").write_bytes(b"")
    (run.path / "main-0003-00000000-000000.jsonl").write_bytes(b'{"kind":"hea')
    for _ in range(3):
        with gapless.init("p", dir=tmp_path, id="r") as run:
            run.log({"x": 2})

    assert old.read_bytes() == content
    assert len(records(run.path)) == 4


def test_the_package_works_under_warnings_as_errors(tmp_path: Path) -> None:
    """With `-W error` and a closed stderr nothing raises, whatever there is to warn about."""
    script = """
import sys, gapless
sys.stderr.close()
with gapless.init("p", dir=sys.argv[1], id="r") as run:
    run.log({"x": object(), "y": [[1]]}, step=-1)
    run.log(None)
run.log({"x": 1})
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path)], env=environment(), cwd=ROOT, timeout=60
    )

    assert done.returncode == 0
    assert len(only(tmp_path / "p" / "r", "metrics")) == 1


def test_the_ring_is_sized_by_arguments_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100,000 rows and 64 MiB, unless the environment or the call says otherwise."""
    sizes = []
    for environment_rows, rows in ((None, None), ("50", None), ("50", 7)):
        if environment_rows:
            monkeypatch.setenv("GAPLESS_RING_ROWS", environment_rows)
        with gapless.init("p", dir=tmp_path, ring_rows=rows) as opened:
            sizes.append((opened._ring.max_rows, opened._ring.max_bytes))

    assert sizes == [(100_000, 64 << 20), (50, 64 << 20), (7, 64 << 20)]


def test_a_job_keeps_its_run_where_no_links_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without hard links the id is kept all the same, and nothing temporary is left."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")

    def no_links(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    ids = []
    for _ in range(2):
        with gapless.init("p", dir=tmp_path, resume="auto") as opened:
            ids.append(opened.id)

    assert ids[0] == ids[1]
    assert [path.name for path in (tmp_path / "p" / ".jobs").iterdir()] == ["slurm-9"]


def test_a_broken_job_file_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's file that stays empty costs the job its run id, not its rows."""
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setattr(jobs, "_TRIES", 2)
    (tmp_path / "p" / ".jobs").mkdir(parents=True)
    (tmp_path / "p" / ".jobs" / "slurm-9").write_bytes(b"")
    with gapless.init("p", dir=tmp_path, resume="auto") as opened:
        opened.log({"x": 1})

    assert len(only(opened.path, "metrics")) == 1
