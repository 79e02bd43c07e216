"""An interrupt may come between any two steps of a call: no row is lost, doubled or torn by it."""

from __future__ import annotations

import dis
import errno
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import gapless
from gapless import journal, ring
from tests.spool.disk import Disk
from tests.spool.oracle import only
from tests.spool.scripts import run as run_script

PACKAGE = os.path.dirname(gapless.__file__)


CHECKED = ("RESUME", "CALL", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
"""After these instructions CPython looks for signals, and only then."""


class Interrupt:
    """Calls `act` in this thread at the `at`-th moment at which a signal may come inside the package."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.at = at
        self.act = act
        self.moments = 0
        self._names: dict[CodeType, dict[int, str]] = {}
        self._last: dict[FrameType, str] = {}

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            code = frame.f_code
            if code not in self._names:
                self._names[code] = {step.offset: step.opname for step in dis.get_instructions(code)}
            if self._last.get(frame, "").startswith(CHECKED):
                self.moments += 1
                if self.moments == self.at:
                    self.act()
            self._last[frame] = self._names[code][frame.f_lasti]
        return self.trace


def ctrl_c() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("durability", ["thread", "write"])
@pytest.mark.parametrize("state", ["flowing", "full ring", "failing disk", "short writes"])
def test_ctrl_c_at_every_moment_of_log_loses_nothing(
    tmp_path: Path, durability: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KeyboardInterrupt wherever CPython may raise it within `log`: rows before and after are whole, seqs have no hole.

    The interrupted row is there once or not at all.
    """
    disk = Disk(tmp_path)
    monkeypatch.setattr(journal, "FIRST_BACKOFF_S", 0.0)
    if state == "failing disk":
        disk.fail(errno.ENOSPC, lambda call: call.name in ("write", "fdatasync") and call.number % 3 == 0)
    if state == "short writes":
        disk.short = lambda call, size: max(1, size // 3)
    with disk.in_place():
        interrupted(tmp_path, durability, state)


def interrupted(tmp_path: Path, durability: str, state: str) -> None:
    run = gapless.init("p", dir=tmp_path, durability=durability, ring_rows=20 if state == "full ring" else 100_000)
    odd = {"odd": math.nan} if state in ("failing disk", "short writes") else {}  # rows that take the long way
    at = 0
    done = False
    while not done:
        at += 1
        run.log({"before": at})
        interrupt = Interrupt(at, ctrl_c)
        sys.settrace(interrupt.trace)
        try:
            run.log({"during": at, **odd})
            done = True
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        run.log({"after": at})
        if at % 4 == 0:
            assert run.flush()
    run.finish()
    found = only(run.path)
    gaps = [seq for r in found if r.kind == "gap" for a, b in r.data["ranges"] for seq in range(a, b + 1)]

    assert at > 8
    assert sorted([*(record.seq for record in found), *gaps]) == list(range(1, len(found) + len(gaps) + 1))
    if state != "full ring":
        assert gaps == []
        for key in ("before", "after"):
            assert [r.data[key] for r in found if key in r.data] == list(range(1, at + 1))
        during = [r.data["during"] for r in found if "during" in r.data]
        assert during == sorted(set(during))
        assert during[-1] == at


@pytest.mark.parametrize("durability", ["thread", "write"])
@pytest.mark.parametrize("kind", ["plain rows", "odd rows"])
@pytest.mark.parametrize("state", ["flowing", "full ring"])
def test_a_handler_that_logs_at_every_moment_of_log(tmp_path: Path, durability: str, state: str, kind: str) -> None:
    """Another `log` inside each moment of a `log`: every row is there once, or in a gap; seqs have no hole."""
    run = gapless.init("p", dir=tmp_path, durability=durability, ring_rows=20 if state == "full ring" else 100_000)
    at = 0
    odd = {"odd": math.nan} if kind == "odd rows" else {}
    interrupt = Interrupt(0, ctrl_c)
    while interrupt.moments >= at:
        at += 1
        interrupt = Interrupt(at, lambda at=at: run.log({"inside": at}))
        sys.settrace(interrupt.trace)
        run.log({"outside": at, **odd})
        sys.settrace(None)
    run.finish()
    found = only(run.path)
    gaps = [seq for r in found if r.kind == "gap" for a, b in r.data["ranges"] for seq in range(a, b + 1)]

    assert at > 8
    assert sorted([*(record.seq for record in found), *gaps]) == list(range(1, len(found) + len(gaps) + 1))
    if state == "flowing":
        assert sorted(r.data["outside"] for r in found if "outside" in r.data) == list(range(1, at + 1))
        assert sorted(r.data["inside"] for r in found if "inside" in r.data) == list(range(1, at))


def test_a_signal_handler_may_log(tmp_path: Path) -> None:
    """A handler that interrupts `log` hundreds of times and logs itself: every row once, seqs without a hole."""
    script = """
        import itertools, signal, sys, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r", durability=sys.argv[2])
        handled = itertools.count()
        last = 0
        def handler(number, frame):
            global last
            last = next(handled)
            run.log({"handled": last})
            signal.setitimer(signal.ITIMER_REAL, 0.0003)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.0003)
        for number in itertools.count():
            run.log({"n": number})
            if last >= 300:
                break
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        run.finish()
        print(number, next(handled))
        """
    for durability in ("thread", "write"):
        folder = tmp_path / durability
        done = run_script(script, folder, durability)
        found = only(folder / "p" / "r")
        assert done.returncode == 0, done.stderr
        rows, handled = map(int, done.stdout.split())

        assert [record.seq for record in found] == list(range(1, len(found) + 1))
        assert [r.data["n"] for r in found if "n" in r.data] == list(range(rows + 1))
        assert sorted(r.data["handled"] for r in found if "handled" in r.data) == list(range(handled))


def test_a_signal_handler_may_finish(tmp_path: Path) -> None:
    """A SIGTERM handler of the user's own that calls `finish` and exits: all rows and the end are there."""
    script = """
        import os, signal, sys, gapless
        run = gapless.init("p", dir=sys.argv[1], id="r", finish_timeout=5)
        def handler(number, frame):
            run.finish(143)
            os._exit(143)
        signal.signal(signal.SIGTERM, handler)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        number = 0
        while True:
            run.log({"n": number})
            number += 1
        """
    done = run_script(script, tmp_path)
    found = only(tmp_path / "p" / "r")

    assert done.returncode == 143
    assert done.stderr == ""
    assert [record.seq for record in found] == list(range(1, len(found) + 1))
    assert found[-1].data == {"state": "failed", "exit_code": 143}


def test_an_interrupted_hand_over_is_made_up_for() -> None:
    """A row announced and not confirmed is handed over again with the next one; the taker skips the repeat."""
    one = ring.Ring(10, 10_000)
    one.append("metrics", 0, b"{}")
    one._pending = one.last._replace(seq=2, number=2)
    one.append("metrics", 1, b"{}")

    assert [row.seq for row in one.inbox] == [1, 2, 3]
