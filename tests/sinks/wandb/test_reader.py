"""Questions to the `wandb` package that are on their way together, over the one child that answers them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from gapless_uploader.sink import Retryable
from gapless_uploader.sinks._wandb_ahead import Asker
from gapless_uploader.sinks._wandb_child_process import ChildProcess
from gapless_uploader.sinks._wandb_http import Credentials
from gapless_uploader.sinks._wandb_reader import LOOKS_AT_ONCE, READER, _where
from gapless_uploader.workers import DaemonThreads
from tests.servers.wandb_server import DEFAULT_KEY, Fault, WandbServer
from tests.sinks.harness import row, view, write
from tests.sinks.wandb.loopback import make_sink


class Looks:
    """Looks at runs of one row each, every run with a loss of its own."""

    def __init__(self, server: WandbServer) -> None:
        self.reader = READER
        self.found = Credentials(server.url, DEFAULT_KEY)
        self._server = server
        self._threads = DaemonThreads(keep=LOOKS_AT_ONCE)
        self._begun: list[Future[dict[str, Any]]] = []
        for number in range(LOOKS_AT_ONCE + 1):
            write(make_sink(server, read_back=False), view(run_id=f"r-{number}"), {}, row(0, loss=number / 2))

    def hold(self, number: int) -> Fault:
        """Let the server keep its answer about a run to itself."""
        return self._server.arm("Run", "delay", run=f"r-{number}", count=None)

    def begin(self, number: int) -> Future[dict[str, Any]]:
        """Look at a run, in a thread."""
        begun = self._threads.submit(self.reader.look, self.found, f"acme/grpo/r-{number}", [(0, 0)])
        self._begun.append(begun)
        return begun

    def begin_held(self, numbers: range) -> list[tuple[Fault, Future[dict[str, Any]]]]:
        """Looks that the server holds, once it holds all of them."""
        begun = [(self.hold(number), self.begin(number)) for number in numbers]
        for held, _ in begun:
            assert held.hit.wait(60)
        return begun

    def loss(self, number: int) -> float:
        return loss_of(self.begin(number))

    def close(self) -> None:
        """Let go of every look and wait for its end: of a server that is gone, it would hold up the next test's."""
        self._server.faults.disarm()
        for begun in self._begun:
            begun.exception(60)
        self._threads.shutdown()


def loss_of(answer: Future[dict[str, Any]]) -> float:
    (shown,) = answer.result(60)["rows"]
    return float(shown["loss"])


@pytest.fixture
def looks(server: WandbServer) -> Iterator[Looks]:
    made = Looks(server)
    yield made
    made.close()


def test_looks_are_at_the_server_together(looks: Looks) -> None:
    """The server holds as many as are asked at once, before it answers any; each gets the answer about its own run."""
    begun = looks.begin_held(range(LOOKS_AT_ONCE))
    for held, _ in reversed(begun):
        held.release()

    assert [loss_of(answer) for _, answer in begun] == [number / 2 for number in range(LOOKS_AT_ONCE)]


def test_a_look_beyond_those_waits_for_its_turn(looks: Looks) -> None:
    """One more is asked once one is answered."""
    begun = looks.begin_held(range(LOOKS_AT_ONCE))
    beyond, answer = looks.hold(LOOKS_AT_ONCE), looks.begin(LOOKS_AT_ONCE)
    assert not looks.reader._looks.acquire(blocking=False)
    begun[3][0].release()
    assert beyond.hit.wait(60)
    assert not any(answer.done() for held, answer in begun if not held.released.is_set())
    beyond.release()

    assert (loss_of(begun[3][1]), loss_of(answer)) == (1.5, LOOKS_AT_ONCE / 2)


def test_a_slow_answer_delays_no_other(looks: Looks, server: WandbServer) -> None:
    """While one look is held, another is answered, and so is a question for credentials."""
    ((held, slow),) = looks.begin_held(range(1))

    assert looks.loss(1) == 0.5
    assert looks.reader.credentials(server.url, False)["base_url"] == server.url
    assert not slow.done()
    held.release()
    assert loss_of(slow) == 0.0


# How questions end without an answer


def kill(looks: Looks) -> None:
    child_of(looks)._process.kill()


def run_out_of_time(looks: Looks) -> None:
    question = {"do": "look", **_where(looks.found), "path": "acme/grpo/r-0", "steps": []}
    with pytest.raises(Retryable, match="gave no answer"):
        child_of(looks).ask(question, within_s=0.0)


def close(looks: Looks) -> None:
    looks.reader.close()


def child_of(looks: Looks) -> ChildProcess:
    assert looks.reader._child is not None
    return looks.reader._child


@pytest.mark.parametrize("end", [kill, run_out_of_time, close])
def test_the_end_of_the_child_is_told_to_all_who_wait(looks: Looks, end: Callable[[Looks], None]) -> None:
    """It died, took too long for somebody's question, or was closed: nobody waits on, and the next has another."""
    begun = looks.begin_held(range(3))
    end(looks)
    for held, answer in begun:
        with pytest.raises(Retryable, match="gave no answer; it is started again"):
            answer.result(60)
        held.release()

    assert [looks.loss(number) for number in range(3)] == [0.0, 0.5, 1.0]


def test_an_error_is_told_to_whom_it_is_about(looks: Looks) -> None:
    """A look that W&B refuses fails alone."""
    ((held, slow),) = looks.begin_held(range(1))
    with pytest.raises(Retryable, match="wandb said"):
        looks.begin(99).result(60)
    held.release()

    assert loss_of(slow) == 0.0


# In the threads of those who do not wait


def test_calls_run_together_and_those_beyond_wait() -> None:
    """As many as are answered at once are begun; one that has not begun can still be cancelled."""
    asker, go = Asker(), threading.Event()
    all_here = threading.Barrier(LOOKS_AT_ONCE + 1)

    def meet() -> dict[str, Any]:
        all_here.wait(60)
        go.wait(60)
        return {}

    begun = [asker.ask(meet) for _ in range(LOOKS_AT_ONCE)]
    all_here.wait(60)
    waits, cancelled = asker.ask(lambda: {"it": "ran"}), asker.ask(dict)

    assert cancelled.cancel()
    assert not waits.running()
    go.set()
    assert [call.result(60) for call in begun] == [{}] * LOOKS_AT_ONCE
    assert waits.result(60) == {"it": "ran"}


def test_what_a_call_raises_comes_out_of_its_answer() -> None:
    """The thread goes on with the next call."""
    asker = Asker()
    with pytest.raises(ZeroDivisionError):
        asker.ask(lambda: {"never": 1 / 0}).result(60)

    assert asker.ask(lambda: {"next": 1}).result(60) == {"next": 1}
