"""One seeded life of a run under kills, faults, lags, restarts and lost states, and what must be left of it."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
from math import inf, nan
from typing import Any

from gapless_uploader.replay import merged_run
from gapless_uploader.sinks._swanlab_http import Api
from gapless_uploader.sinks._swanlab_names import run_slug
from gapless_uploader.sinks.swanlab import SwanlabSink
from gapless_uploader.spool import Spool
from tests.sinks.swanlab.world import PROJECT, RUN, SpoolWriter, World, expected

KEYS = ["loss", "lr", "acc/train", "odd", "a b", "reward."]
ENDPOINTS = ["metrics", "metrics", "metrics", "scalar.export", "presign.*", "object.*", "marks", "profile", "series"]
ENDPOINTS += ["experiment.post", "experiment.get", "state", "login", "keys", "media.all", "log"]
KINDS = ["status", "status", "reset", "html", "truncated", "cut"]


class Killed(BaseException):
    """SIGKILL, as far as one process can play it."""


class Killer:
    """Kills at a step: before a request goes out, after its answer came, before and after a commit of the state."""

    def __init__(self, chance: random.Random, probability: float) -> None:
        self.chance, self.probability = chance, probability
        self.kills: Counter[str] = Counter()

    def step(self, name: str) -> None:
        if self.chance.random() < self.probability:
            self.kills[name] += 1
            raise Killed(name)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.step(f"before {name}")
            answer = call(*args, **kwargs)
            self.step(f"after {name}")
            return answer

        return wrapped

    def watch(self, world: World) -> None:
        """Put the steps into a started uploader."""
        assert world.uploader is not None
        world.uploader.state.commit = self.around("commit", world.uploader.state.commit)  # type: ignore[method-assign]
        (sink,) = world.uploader.sinks.values()
        assert isinstance(sink, SwanlabSink)
        make = sink.api

        def api() -> Api:
            made = make()
            if not hasattr(made, "watched"):
                made.watched = True  # type: ignore[attr-defined]
                made._send = self.around("request", made._send)  # type: ignore[method-assign]
            return made

        sink.api = api  # type: ignore[method-assign]


def play(world: World, seed: int) -> Killer:
    """Train and upload at once, everything going wrong that can, until all is delivered. Raises AssertionError."""
    chance = random.Random(seed)
    flavour = ("lost state", "older state", "rewinds")[seed % 3]
    world.max_bytes = chance.choice([400, 2_000, 2 << 20])
    world.server.settings.update(
        {"read_lag_s": chance.choice([0.0, 5.0, 40.0]), "summary_lag_s": chance.choice([0.0, 5.0, 40.0])}
    )
    if flavour == "older state":
        world.server.settings.summary_lag_s = 0.0
    killer = Killer(chance, chance.choice([0.02, 0.08, 0.2]))
    writer, step, attempt = world.writer(), 0, 1
    writer.begin(seed=seed)
    copy = world.folder / "older"
    for _ in range(chance.randint(4, 10)):
        for _ in range(chance.randint(1, 12)):
            step = _train(writer, chance, step, late=flavour != "older state")
        if flavour == "rewinds" and chance.random() < 0.3 and step > 3:
            attempt += 1
            step = chance.randint(0, step)
            writer = world.writer(attempt, resume_step=step)
            writer.begin(seed=seed, attempt=attempt)
        if chance.random() < 0.6:
            _arm(world, chance)
        if chance.random() < 0.15 and flavour == "lost state":
            world.kill()
            world.lose_state()
        if flavour == "older state" and chance.random() < 0.3:
            world.kill()
            if copy.exists() and chance.random() < 0.5:
                world.lose_state()
                shutil.copytree(copy, world.state)
            elif world.state.exists():
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(world.state, copy)
        if chance.random() < 0.1:
            with world.server.refused():
                _turns(world, killer, chance.randint(1, 6))
        _turns(world, killer, chance.randint(1, 25))
    writer.finish()
    world.server.faults.clear()
    killer.probability = 0.0
    world.kill()
    for _ in range(3):
        world.run()
        world.pass_time(400)
    check(world, seed)
    return killer


def check(world: World, seed: int) -> None:
    """Every point of the merged history is at the tracker, once."""
    spool = Spool([world.spool])
    spool.scan(0.0)
    merged = merged_run(spool.runs[PROJECT, RUN])
    generation = world.progress()["generation"]
    slug = run_slug(RUN if generation == 1 else f"{RUN}-r{generation}")
    held = world.server.experiments[slug]
    numbers = [
        (step, {key: value for key, value in row.values.items() if isinstance(value, float)})
        for step, row in merged.rows.items()
    ]
    texts = sorted((step, key) for step, row in merged.rows.items() for key in row.values if key == "note")
    stored = sorted((row.step, row.key, repr(row.data)) for row in held.raw if row.kind == "scalar")
    wanted = expected(numbers)
    doubled = [place for place, count in Counter((s, k) for s, k, _ in stored).items() if count > 1]

    assert doubled == [], f"seed {seed}: doubled"
    assert wanted == stored, f"seed {seed}: {set(wanted) ^ set(stored)}"
    assert texts == sorted((row.step, row.key) for row in held.raw if row.kind == "media"), f"seed {seed}: texts"
    lines = [row.step for row in held.raw if row.kind == "log"]
    assert sorted(lines) == list(range(1, len(lines) + 1)), f"seed {seed}: console lines"
    assert held.state == "FINISHED", f"seed {seed}"
    assert world.progress()["memo"]["check"]["ok"], f"seed {seed}: {world.progress()['memo']['check']}"


def _train(writer: SpoolWriter, chance: random.Random, step: int, late: bool) -> int:
    """One act of the training; the next step."""
    act = chance.random()
    if late and act < 0.1 and step > 2:
        writer.row(chance.randint(0, step - 1), **{f"eval/{chance.randint(0, 10**6)}": chance.random()})
    elif act < 0.15:
        writer.add("text", {"key": "note", "text": f"text of {step}"}, step)
        step += 1
    elif act < 0.25:
        writer.add("log", {"stream": "stdout", "lines": [f"line at {step}", "and one more"]})
    else:
        values = {key: chance.random() for key in chance.sample(KEYS, chance.randint(1, len(KEYS)))}
        if chance.random() < 0.2:
            values["odd"] = chance.choice([nan, inf, -inf])
        writer.row(step, **values)
        step += chance.choice([1, 1, 1, 5])
    return step


def _arm(world: World, chance: random.Random) -> None:
    kind = chance.choice(KINDS)
    options: dict[str, Any] = {"when": chance.choice(["before", "after", "half"]), "count": chance.randint(1, 3)}
    if kind == "status":
        options["status"] = chance.choice([500, 502, 503, 408, 202])
    world.server.arm(chance.choice(ENDPOINTS), kind, skip=chance.randint(0, 3), **options)


def _turns(world: World, killer: Killer, count: int) -> None:
    for _ in range(count):
        try:
            if world.uploader is None:
                world.start()
                killer.watch(world)
            if not world.turn():
                assert world.uploader is not None
                world.pass_time(min(max(world.uploader.next_due(world.clock), 0.01), 90.0))
        except Killed:
            world.kill()
            world.pass_time(random.Random(count).choice([0.1, 30.0]))
