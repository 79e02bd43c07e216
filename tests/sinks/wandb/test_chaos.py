"""Kills of the uploader and the server, faults at every endpoint, lag and lost state: every row once, none wrong.

The suite plays 20 seeds of a few thousand rows with the server in this process, `make torture` 500 of 12,000.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.sinks._wandb_http import Credentials
from gapless_uploader.sinks._wandb_reader import READER
from tests.servers.wandb_server import DEFAULT_KEY, ServerProcess, Staleness, WandbServer
from tests.sinks.wandb.lives import Clock, Lives, some
from tests.sinks.wandb.loopback import let_questions_end
from tests.wandb_spool import Attempt

FAULTS: list[dict[str, Any]] = [
    {"kind": "status", "status": 500},
    {"kind": "status", "status": 500, "when": "after"},
    {"kind": "status", "status": 503, "headers": {"Retry-After": "3"}},
    {"kind": "status", "status": 429, "headers": {"Retry-After": "2"}},
    {"kind": "status", "status": 429, "headers": {"Retry-After": "999999999"}},
    {"kind": "status", "status": 401},
    {"kind": "reset"},
    {"kind": "reset", "when": "after"},
    {"kind": "hang", "seconds": 0.3},
    {"kind": "hang", "seconds": 0.3, "when": "after"},
    {"kind": "html"},
    {"kind": "html", "when": "after"},
    {"kind": "truncated"},
    {"kind": "cut"},
    {"kind": "half", "lines": 7, "status": 502},
    {"kind": "status", "status": 400},
    {"kind": "status", "status": 403},
    {"kind": "status", "status": 404},
    {"kind": "status", "status": 413},
]


class Chaos:
    """A seed's spool, server and uploader, and what the training logged."""

    def __init__(self, folder: Path, seed: int, num_rows: int) -> None:
        self.chance = random.Random(seed)
        self.clock = Clock()
        self.num_rows = num_rows
        self.folder = folder
        self.server = WandbServer(clock=self.clock)
        self.server.up()
        self.attempts = [Attempt(folder)]
        self.evaluation = Attempt(folder, writer="eval") if some(self.chance, 0.4) else None
        self.model: dict[int, dict[str, Any]] = {}
        self.evaluated: dict[int, dict[str, Any]] = {}
        """What another writer logged: a restart of the training supersedes none of it."""
        self.step = self.logged = 0
        self.can_rewind = some(self.chance, 0.3)
        lag = self.chance.choice([0.0, 0.0, 1.0, 3.0])
        for name in ("counts", "tails", "summaries"):
            setattr(self.server.lag, name, Staleness(seconds=lag))
        self.attempts[0].add("run", {"name": "chaos", "config": {"seed": seed}})
        self.lives = Lives(folder, self.server.url, self.clock, max_operations=self.chance.choice([60, 200, 500]))

    def train(self) -> None:
        """Some more rows: new steps, more keys of old ones, late ones, now and then a restart that goes back."""
        chance, attempt = self.chance, self.attempts[-1]
        rows = []
        for _ in range(min(chance.choice([3, 40, 300]), self.num_rows - self.logged)):
            self.logged += 1
            values: dict[str, Any] = {"loss": chance.random(), "n": self.logged}
            kind = chance.random()
            if kind < 0.04 and self.step > 10:
                at = chance.randint(max(0, self.step - 50), self.step)
                values = {f"late/{chance.choice('abc')}": chance.random()}
            else:
                self.step += chance.choice([1, 1, 1, 5])
                at = self.step
                if kind > 0.97:
                    values["text"] = "x\u2028 \"'🚀" * chance.randint(1, 3)
            rows.append((at, values))
            self.model.setdefault(at, {}).update(values)
        attempt.add_rows(rows)
        if self.evaluation is not None and some(chance, 0.5):
            at = chance.randint(max(0, self.step - 30), self.step + 2)
            values = {"eval/acc": chance.random()}
            self.evaluation.add_rows([(at, values)])
            self.evaluated.setdefault(at, {}).update(values)
        if self.can_rewind and self.step > 60 and some(chance, 0.03) and self.logged < self.num_rows * 0.8:
            self.step -= chance.randint(1, 50)
            self.attempts.append(Attempt(self.folder, len(self.attempts) + 1, resume_step=self.step + 1))
            self.model = {at: row for at, row in self.model.items() if at <= self.step}

    def disturb(self) -> None:
        """Perhaps something goes wrong."""
        chance, lives = self.chance, self.lives
        what = chance.random()
        if what < 0.10:
            lives.dies_in, lives.dies_after = chance.randint(1, 4), some(chance, 0.5)
        elif what < 0.14:
            lives.kill()
        elif what < 0.17:
            lives.lose_state()
        elif what < 0.30:
            fault = dict(chance.choice(FAULTS))
            endpoint = chance.choice(["file_stream", "file_stream", "UpsertBucket", "RunResumeStatus", "graphql"])
            if fault["kind"] == "half":
                endpoint = "file_stream"
            # Not those of `wandb.Api`, which waits long before it tries again.
            ours = lambda request: request.headers.get("user-agent") == "gapless"  # noqa: E731
            # A row that is refused for long is one that W&B never takes.
            count = 1 if fault.get("status") == 400 else chance.randint(1, 3)
            self.server.arm(endpoint, **fault, count=count, predicate=ours)
        elif what < 0.32:
            let_questions_end()  # `wandb.Api` would wait for 30 s
            self.server.down()
            lives.step()
            self.server.up()

    def play(self) -> None:
        for _ in range(self.chance.randint(0, 4)):  # names and config alone may be all there is for a while
            self.disturb()
            self.lives.step()
        while self.logged < self.num_rows:
            self.train()
            for _ in range(self.chance.randint(1, 4)):
                self.disturb()
                self.lives.step(commits=not some(self.chance, 0.05))
        self.attempts[-1].add("finish", {"state": "finished", "exit_code": 0})
        self.server.faults.disarm()
        if some(self.chance, 0.5):
            self.lives.dies_in, self.lives.dies_after = self.chance.randint(1, 12), some(self.chance, 0.5)
        self.lives.run()
        if some(self.chance, 0.2):
            self.lives.lose_state()
            self.lives.run()
        self.clock.now += 400  # W&B calls a running run crashed that was silent for so long

    def check(self) -> None:
        generation = self.lives.committed["generation"]
        held = self.server.run("grpo", "r-1" if generation == 1 else f"r-1-r{generation}")
        assert self.lives.rewritten == []
        assert self.lives.committed["refused"] == {}
        assert held.holes == []
        assert held.state(self.clock()) == "finished"
        found = Credentials(self.server.url, DEFAULT_KEY)
        model = {at: {**self.evaluated.get(at, {}), **self.model.get(at, {})} for at in {*self.evaluated, *self.model}}
        last = max(model)
        rows = READER.look(found, f"acme/grpo/{held.id}", [(at, at + 9_999) for at in range(0, last + 1, 10_000)])[
            "rows"
        ]
        own = [{k: v for k, v in row.items() if k not in ("_step", "_timestamp", "_runtime")} for row in rows]
        assert [row["_step"] for row in rows] == sorted(model)
        assert own == [model[step] for step in sorted(model)]
        assert held.summary["_gapless"]["lines"] == len(held.lines)


def play(folder: Path, seed: int, num_rows: int) -> Chaos:
    chaos = Chaos(folder, seed, num_rows)
    try:
        chaos.play()
        chaos.check()
    finally:
        chaos.server.faults.disarm()
        let_questions_end()
        chaos.server.close()
    return chaos


@pytest.mark.parametrize("seed", range(20))
def test_every_row_arrives_once_whatever_happens(tmp_path: Path, seed: int) -> None:
    """Whatever is killed, lost, delayed or answered, W&B holds each step once with its values, and no line changed."""
    play(tmp_path, seed, 2_000)


@pytest.mark.torture
@pytest.mark.parametrize("block", range(50))
def test_every_row_arrives_once_500_times(tmp_path: Path, block: int) -> None:
    """The same, 500 times with 12,000 rows."""
    for seed in range(1_000 + 10 * block, 1_010 + 10 * block):
        play(tmp_path / str(seed), seed, 12_000)


def test_a_server_that_is_killed_comes_back_with_what_it_answered(tmp_path: Path, clock: Clock) -> None:
    """SIGKILL of the server's process at every fifth request, the uploader with it at times: every row once."""
    attempt = Attempt(tmp_path / "spool")
    with ServerProcess(tmp_path / "server-state") as server:
        lives = Lives(tmp_path / "spool", server.url, clock, settle_s=0.0)
        for part in range(8):
            attempt.add_rows([(step, {"loss": step + 0.5}) for step in range(50 * part, 50 * part + 50)])
            lives.step()
            server.kill()
            lives.step()
            if part % 3 == 0:
                lives.kill()
            server.start()
            lives.step()
        attempt.add("finish", {"state": "finished", "exit_code": 0})
        lives.run()
        held = server.run("grpo", "r-1")

    assert held is not None
    assert [json.loads(line)["loss"] for line in held["lines"]] == [step + 0.5 for step in range(400)]
    assert lives.rewritten == []
    assert any("Connection" in failure for failure in lives.failures)
