"""Workers: bounded calls in daemon threads, each with a time limit."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest

from gapless_uploader.workers import DaemonThreads, Workers


class Held:
    """An executor whose calls return when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Future[str]] = []

    def submit(self, fn, /, *args, **kwargs) -> Future[str]:
        self.calls.append(Future())
        return self.calls[-1]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


def make(size: int = 2, limit: float = 300.0, max_stuck: int = 2) -> tuple[Workers[str, str], Held]:
    held = Held()
    return Workers(size, limit, max_stuck, held), held


def test_no_more_calls_than_workers():
    """A pool has room for as many calls as it has workers, and again when one returns."""
    workers, held = make(size=2)
    workers.start("a", 0.0, str)
    assert workers.has_room
    workers.start("b", 0.0, str)
    assert not workers.has_room
    held.calls[0].set_result("done")

    assert workers.take() == [("a", "done")]
    assert workers.has_room


def test_a_key_has_one_call():
    """A second call for a key that has one on its way is a mistake of the caller."""
    workers, _ = make()
    workers.start("a", 0.0, str)
    with pytest.raises(RuntimeError, match="on its way"):
        workers.start("a", 1.0, str)


def test_overdue_once():
    """A call is overdue once, when its limit is reached and not before."""
    workers, _ = make(limit=300.0)
    workers.start("a", 10.0, str)

    assert workers.overdue(309.9) == []
    assert workers.overdue(310.0) == ["a"]
    assert workers.overdue(400.0) == []


def test_stuck_call_frees_its_worker():
    """A call that ran over no longer counts as a worker, but its key stays taken."""
    workers, _ = make(size=1)
    workers.start("a", 0.0, str)
    workers.overdue(300.0)

    assert workers.has_room
    assert "a" in workers
    assert workers.stuck == 1


def test_late_result_is_taken():
    """What a stuck call returns in the end is handed out, and it is stuck no more."""
    workers, held = make(size=1)
    workers.start("a", 0.0, str)
    workers.overdue(300.0)
    held.calls[0].set_result("late")

    assert workers.take() == [("a", "late")]
    assert workers.stuck == 0


def test_stuck_calls_are_bounded():
    """With `max_stuck` stuck calls there is no room, until one returns."""
    workers, held = make(size=4, max_stuck=2)
    for name in "ab":
        workers.start(name, 0.0, str)
    workers.overdue(300.0)
    assert workers.parked
    assert not workers.has_room
    held.calls[1].set_result("late")
    workers.take()

    assert not workers.parked
    assert workers.has_room


def test_finished_call_is_never_overdue():
    """A call that returned before anybody took its result did not run over."""
    workers, held = make()
    workers.start("a", 0.0, str)
    held.calls[0].set_result("done")

    assert workers.overdue(1000.0) == []


def test_threads_are_daemons_and_reused():
    """Calls one after the other share one daemon thread; calls beside each other have one each."""
    threads = DaemonThreads(keep=1)
    seen: list[threading.Thread] = []
    both, go = threading.Barrier(3), threading.Event()

    def note() -> None:
        seen.append(threading.current_thread())

    def meet() -> None:
        note()
        both.wait()
        go.wait()

    calls = [threads.submit(meet) for _ in range(2)]
    both.wait()
    go.set()
    for call in calls:
        call.result()

    assert all(thread.daemon for thread in seen)
    assert len(set(seen)) == 2
    threads.shutdown()


def test_an_error_comes_out_of_its_call():
    """What a call raises is raised to whoever takes its result."""
    threads = DaemonThreads(keep=1)
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result()
    threads.shutdown()


def test_hanging_call_does_not_keep_the_process():
    """A process ends at once though a call of its sink never returns."""
    program = (
        "import threading\n"
        "from gapless_uploader.workers import Workers\n"
        "workers, began = Workers(1), threading.Event()\n"
        "def hang():\n    began.set()\n    threading.Event().wait()\n"
        "workers.start('a', 0.0, hang)\n"
        "began.wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": "uploader:schemas"}, timeout=60)

    assert ended.returncode == 0
