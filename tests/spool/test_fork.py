"""Forks, threads, spawned workers, restarts, and many processes at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gapless
from tests.spool.oracle import header, only, records, segments
from tests.spool.scripts import environment, patiently, run, start


def metrics(folder: Path) -> list[list[float]]:
    """Per attempt, the values of `n` in order."""
    return [[r.data["n"] for r in found if r.kind == "metrics"] for found in records(folder).values()]


@pytest.mark.parametrize("durability", ["thread", "write"])
@pytest.mark.parametrize("ending", ["os._exit(0)", "sys.exit(0)", "return"])
def test_a_forked_child_writes_nothing_of_its_parent(tmp_path: Path, durability: str, ending: str) -> None:
    """A child's `log` does nothing and warns once; no row is written twice, however the child ends."""
    done = run(
        f"""
        import os, sys, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r", durability="{durability}")
        for number in range(100):
            run.log({{"n": number}})
        child = os.fork()
        if child == 0:
            run.log({{"n": -1}})
            run.log({{"n": -2}})
            run.config["x"] = 1
            run.flush()
            run.finish()
            print(run.stats().forked, flush=True)
            {"sys.exit(0)" if ending == "return" else ending}
        os.waitpid(child, 0)
        for number in range(100, 200):
            run.log({{"n": number}})
        """,
        tmp_path,
    )

    assert done.stdout == "3\n"
    assert done.stderr.count("a child process logs to run r") == 1
    assert metrics(tmp_path / "p" / "r") == [list(range(200))]
    assert len(only(tmp_path / "p" / "r", "finish")) == 1


def test_a_child_that_opens_a_run_gets_a_file_of_its_own(tmp_path: Path) -> None:
    """After a fork, `init` in the child with the same id is another attempt with another id."""
    run(
        """
        import os, sys, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r")
        run.log({"n": 1})
        child = os.fork()
        if child == 0:
            own = gapless.init("p", dir=sys.argv[1], id="r")
            own.log({"n": 2})
            sys.exit(0)
        os.waitpid(child, 0)
        run.log({"n": 3})
        """,
        tmp_path,
    )

    assert metrics(tmp_path / "p" / "r") == [[1, 3], [2]]
    assert {header(path).attempt for path in segments(tmp_path / "p" / "r")} == {1, 2}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_process_that_returns_without_finish_loses_nothing(tmp_path: Path, method: str) -> None:
    """A multiprocessing worker that logs and returns has all rows and its end on the disk: it needs no atexit."""
    script = tmp_path / "work.py"
    script.write_text(
        f"""
import multiprocessing, sys, gapless

def work(folder):
    run = gapless.init("p", dir=folder, id="r")
    for number in range(10):
        run.log({{"n": number}})

if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=work, args=(sys.argv[1],))
    process.start()
    process.join(30)
    print(process.exitcode)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, env=environment(), timeout=60
    )

    assert done.stdout == "0\n", done.stderr
    assert metrics(tmp_path / "p" / "r") == [list(range(10))]
    assert len(only(tmp_path / "p" / "r", "finish")) == 1


def test_data_loader_workers_leave_the_run_alone(tmp_path: Path) -> None:
    """Forked DataLoader workers hold the run and log to it: the parent's rows are whole and nothing is doubled."""
    done = run(
        """
        import sys, torch, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r")
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 64
            def __getitem__(self, index):
                run.log({"n": -index})
                return index
        for number, batch in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2)):
            run.log({"n": number})
        """,
        tmp_path,
        timeout_s=120,
    )

    assert done.returncode == 0, done.stderr
    assert metrics(tmp_path / "p" / "r") == [list(range(16))]


@pytest.mark.parametrize("durability", ["thread", "write", "sync"])
def test_threads_share_a_run(tmp_path: Path, durability: str) -> None:
    """8 threads log at once: every row is there, each thread's rows in its order, seqs without a hole."""
    rows = 1000 if durability != "sync" else 40
    script = """
        import sys, threading, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r", durability=sys.argv[2])
        def work(worker):
            for number in range(int(sys.argv[3])):
                run.log({"worker": worker, "n": number})
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        """
    done = run(patiently(script), tmp_path, durability, rows)
    found = only(tmp_path / "p" / "r")

    assert done.stderr == ""
    assert [record.seq for record in found] == list(range(1, len(found) + 1))
    assert [r.step for r in found if r.kind == "metrics"] == list(range(8 * rows))
    for worker in range(8):
        mine = [r.data["n"] for r in found if r.kind == "metrics" and r.data["worker"] == worker]
        assert mine == list(range(rows))


def test_two_writers_of_one_run_get_two_files(tmp_path: Path) -> None:
    """Two processes that both believe to be the writer: two attempt ids, two files, all rows of both."""
    script = """
        import sys, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r")
        print("open", flush=True)
        sys.stdin.readline()
        for number in range(500):
            run.log({"n": number})
        """
    both = [start(script, tmp_path) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
    for process in both:
        process.communicate("go\n", timeout=60)

    assert metrics(tmp_path / "p" / "r") == [list(range(500))] * 2
    assert sorted(header(path).attempt for path in segments(tmp_path / "p" / "r")) == [1, 2]


def test_64_processes_open_runs_at_once(tmp_path: Path) -> None:
    """64 processes open runs of one name, half of them of one id, at the same moment: 64 attempts, no row missing."""
    script = """
        import os, sys, gapless
        children = []
        gate_r, gate_w = os.pipe()
        for child in range(64):
            pid = os.fork()
            if pid == 0:
                os.close(gate_w)
                os.read(gate_r, 1)
                run_id = "shared" if child % 2 else None
                run = gapless.init("p", "same name", dir=sys.argv[1], id=run_id, finish_timeout=60)
                run.log({"n": child})
                run.finish()
                os._exit(0 if run.stats().queued == 0 else 1)
            children.append(pid)
        os.close(gate_w)
        print(sum(os.waitpid(pid, 0)[1] for pid in children))
        """
    done = run(patiently(script), tmp_path, timeout_s=120)
    shared = tmp_path / "p" / "shared"

    assert (done.stdout, done.stderr) == ("0\n", "")
    assert sorted(header(path).attempt for path in segments(shared)) == list(range(1, 33))
    assert sorted(n for found in metrics(shared) for n in found) == list(range(1, 64, 2))
    others = [path for path in (tmp_path / "p").iterdir() if path.name not in ("shared", ".jobs")]
    assert sorted(n for path in others for found in metrics(path) for n in found) == list(range(0, 64, 2))


def test_a_torchrun_restart_goes_on_with_its_run(tmp_path: Path) -> None:
    """Under torchrun rank 0 alone writes; killed and restarted with the same job id, it is attempt 2 of its run."""
    script = """
        import os, signal, sys, gapless
        run = gapless.init("p", dir=sys.argv[1], resume="auto", durability="write")
        for _ in range(5):
            run.log({"n": int(sys.argv[2])})
        print(run.is_writer, run.id, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    job = {"TORCHELASTIC_RUN_ID": "job-1", "WORLD_SIZE": "2"}
    starts = ((1, "0"), (2, "1"), (3, "0"))
    first, other, second = (run(script, tmp_path, number, RANK=rank, **job).stdout.split() for number, rank in starts)

    assert first == second
    assert first[0] == "True"
    assert other == ["False"]
    assert metrics(tmp_path / "p" / first[1]) == [[1] * 5, [3] * 5]
    steps = [[r.step for r in found if r.kind == "metrics"] for found in records(tmp_path / "p" / first[1]).values()]
    assert steps == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_racing_ranks_of_one_job_get_one_run(tmp_path: Path) -> None:
    """Sixteen processes of one job that open it with `resume="auto"` at once all get the same id."""
    script = """
        import os, sys, gapless
        gate_r, gate_w = os.pipe()
        out_r, out_w = os.pipe()
        children = []
        for child in range(16):
            pid = os.fork()
            if pid == 0:
                os.close(gate_w)
                os.read(gate_r, 1)
                run = gapless.init("p", dir=sys.argv[1], resume="auto")
                os.write(out_w, (run.id + "\\n").encode())
                run.finish()
                os._exit(0)
            children.append(pid)
        os.close(gate_w)
        [os.waitpid(pid, 0) for pid in children]
        os.close(out_w)
        print(len(set(os.read(out_r, 65536).split())))
        """
    done = run(patiently(script), tmp_path, SLURM_JOB_ID="42")

    assert done.stdout == "1\n", done.stderr
    assert len([path for path in (tmp_path / "p").iterdir() if path.name != ".jobs"]) == 1


def test_several_runs_in_one_process(tmp_path: Path) -> None:
    """Runs opened side by side do not mix, and under one job with `resume="auto"` each name has its own."""
    runs = [gapless.init("p", name, dir=tmp_path) for name in ("a", "b")]
    for number in range(10):
        for place, one in enumerate(runs):
            one.log({"n": number * 10 + place})
    for one in runs:
        one.finish()

    assert [metrics(one.path) for one in runs] == [[[n * 10 + place for n in range(10)]] for place in (0, 1)]


def test_a_requeued_job_finds_its_runs_by_their_order(tmp_path: Path) -> None:
    """A job that opens two runs gets the same two again after a requeue, though their names hold the time."""
    script = """
        import sys, gapless
        ids = []
        for name in sys.argv[2:]:
            run = gapless.init("p", name, dir=sys.argv[1], resume="auto")
            ids.append(run.id)
            run.finish()
        print(*ids)
        """
    first = run(patiently(script), tmp_path, "a-10:00", "b-10:00", SLURM_JOB_ID="7").stdout
    second = run(patiently(script), tmp_path, "a-11:00", "b-11:00", SLURM_JOB_ID="7").stdout

    assert first == second
    assert len(set(first.split())) == 2
