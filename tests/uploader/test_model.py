"""Random lives of a spool and its uploader against a model of ten lines: no row lost, none doubled, none wrong.

The actions are those that happen to spools: records in every order, torn and completed lines, segments that begin
again, attempts with and without a resume step, a second writer, kills of the uploader before and after its state knows,
failing sinks, lost answers, folders that move, come back or are copied, files that are replaced or seen too short.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gapless_uploader import plain_records
from gapless_uploader.history import History
from gapless_uploader.sink import Retryable
from gapless_uploader.sinks.memory import MemorySink
from tests.uploader.harness import T0, Attempt, SpoolDir, Turner, rows_of

WRITERS = ("main", "eval")
ENOUGH = plain_records._ENOUGH


Logged = tuple[int, dict[str, Any], float]
"""Step, values and time of the call of one record."""


def survives(step: int, at: float, newer: Attempt, first: list[Logged]) -> bool:
    """Whether a row outlives a newer attempt whose first metrics record is `first`, straight from the contract."""
    if newer.resume_step is False or at > newer.created:
        return True
    if newer.resume_step is not None:
        return step < newer.resume_step
    return not first or step <= first[0][0]


def model(attempts: list[Attempt], records: dict[str, list[Logged]]) -> dict[int, dict[str, Any]]:
    """What the history must be, straight from the contract's sentences."""
    merged: dict[int, dict[str, Any]] = {}
    for writer in reversed(WRITERS):
        mine = sorted((a for a in attempts if a.writer == writer), key=lambda a: (a.number, a.created, a.attempt_id))
        for at, attempt in enumerate(mine):
            for step, values, called in records[attempt.attempt_id]:
                if all(survives(step, called, newer, records[newer.attempt_id]) for newer in mine[at + 1 :]):
                    merged.setdefault(step, {}).update(values)
    return merged


_MEMORY = Path("/dev/shm")
"""A disk whose syncs cost nothing: what a sync is for is played by the power losses, not here."""


class SpoolLife(RuleBasedStateMachine):
    """One run, two sinks: one that takes rows back, one that cannot and gets a fresh tracker run instead.

    The latter takes the text of plain rows, with shapes that are built after two rows in place of thirty.
    """

    @initialize()
    def begin(self) -> None:
        plain_records._ENOUGH = 2  # type: ignore[misc]
        self.base = Path(tempfile.mkdtemp(prefix="gapless-model-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self.spool = SpoolDir(self.base / "spool")
        self.spool.root.mkdir()
        self.attempts: list[Attempt] = []
        self.records: dict[str, list[Logged]] = {}
        self.torn: tuple[Attempt, bytes, Logged] | None = None
        self.dead: set[str] = set()
        """Attempts whose process died within a line."""
        self.away: Path | None = None
        self.value = 0
        self.turner = Turner(
            self.spool.root,
            self.base / "state",
            MemorySink("rewinds"),
            MemorySink("appends", rewind=False, late_steps=True, settles_intents=True, takes_json=True),
        )
        self.new_attempt("main", None)

    @rule(writer=st.sampled_from(WRITERS), resume=st.sampled_from([None, None, False, 0, 3, 8]))
    def new_attempt(self, writer: str, resume: int | bool | None) -> None:
        if len(self.attempts) >= 6 or self.away is not None:
            return
        number = 1 + sum(attempt.writer == writer for attempt in self.attempts)
        if self.torn is not None and self.torn[0].writer == writer:
            self.dead.add(self.torn[0].attempt_id)
            self.torn = None  # its process is dead: the line never becomes whole
        attempt = self.spool.attempt(writer=writer, number=number, resume_step=resume)
        attempt.run({"attempt": number})
        self.attempts.append(attempt)
        self.records[attempt.attempt_id] = []

    def alive(self, writer: str) -> Attempt | None:
        """The attempt of this writer that may still write."""
        mine = [attempt for attempt in self.attempts if attempt.writer == writer]
        if not mine or self.away is not None or (self.torn is not None and self.torn[0] is mine[-1]):
            return None
        return mine[-1]

    def made(self, attempt: Attempt, step: int, key: str, mono: float | None = None) -> tuple[bytes, Logged]:
        self.value += 1
        mono = float(attempt.seq + 1) if mono is None else mono
        record = (step, {key: self.value}, attempt.created + mono)
        # The row's own time is its caller's, and decides nothing.
        return attempt.line("metrics", record[1], step, T0 + 7919 * self.value % 100_003, mono=mono), record

    @rule(
        writer=st.sampled_from(WRITERS),
        steps=st.lists(st.integers(0, 12), min_size=1, max_size=6),
        key=st.sampled_from("abc"),
    )
    def append(self, writer: str, steps: list[int], key: str) -> None:
        attempt = self.alive(writer)
        if attempt is None:
            return
        for step in steps:
            line, record = self.made(attempt, step, key)
            attempt.raw(line)
            self.records[attempt.attempt_id].append(record)

    @rule(
        which=st.integers(0, 5),
        steps=st.lists(st.integers(0, 12), min_size=1, max_size=4),
        key=st.sampled_from("abz"),
        late=st.booleans(),
    )
    def an_older_attempt_goes_on(self, which: int, steps: list[int], key: str, late: bool) -> None:
        """A zombie beside a newer attempt. `late`: it logs now; else a network disk shows what it logged before."""
        if which >= len(self.attempts) or self.away is not None:
            return
        attempt = self.attempts[which]
        if attempt.attempt_id in self.dead or (self.torn is not None and self.torn[0] is attempt):
            return
        for step in steps:
            mono = max(a.created for a in self.attempts) + 5000 - attempt.created if late else None
            line, record = self.made(attempt, step, key, mono)
            attempt.raw(line)
            self.records[attempt.attempt_id].append(record)

    @rule(writer=st.sampled_from(WRITERS), step=st.integers(0, 12), cut=st.integers(1, 60))
    def tear(self, writer: str, step: int, cut: int) -> None:
        attempt = self.alive(writer)
        if attempt is None or self.torn is not None:
            return
        line, record = self.made(attempt, step, "t")
        attempt.raw(line[:cut])
        self.torn = (attempt, line[cut:], record)

    @precondition(lambda self: self.torn is not None and self.away is None)
    @rule()
    def complete(self) -> None:
        assert self.torn is not None
        attempt, rest, record = self.torn
        attempt.raw(rest)
        self.records[attempt.attempt_id].append(record)
        self.torn = None

    @precondition(lambda self: self.torn is not None and self.away is None)
    @rule()
    def rotate_over_a_torn_line(self) -> None:
        """The write failed: the writer leaves the file and writes the row again in a new segment."""
        assert self.torn is not None
        attempt, _, record = self.torn
        attempt.rotate(first_seq=attempt.seq)
        attempt.raw(attempt.lines[-1])
        self.records[attempt.attempt_id].append(record)
        self.torn = None

    @rule(writer=st.sampled_from(WRITERS), again=st.integers(0, 4))
    def rotate(self, writer: str, again: int) -> None:
        """A failed sync: the last rows are written again, with their seq."""
        attempt = self.alive(writer)
        if attempt is None:
            return
        again = min(again, len(attempt.lines))
        attempt.rotate(first_seq=attempt.seq + 1 - again)
        for line in attempt.lines[len(attempt.lines) - again :]:
            attempt.raw(line)

    @rule(seconds=st.sampled_from([0.0, 1.0, 70.0]))
    def turn(self, seconds: float) -> None:
        self.turner.turn(seconds)

    @rule()
    def settle(self) -> None:
        self.turner.settle()

    @rule()
    def kill_the_uploader(self) -> None:
        self.turner.crash()

    @rule()
    def kill_between_yes_and_commit(self) -> None:
        self.turner.die_before_commit()

    @rule(which=st.integers(0, 1))
    def sink_fails(self, which: int) -> None:
        self.sink(which).failures.append(Retryable("armed"))

    @rule(which=st.integers(0, 1))
    def answer_is_lost(self, which: int) -> None:
        self.sink(which).lost_answers.append(Retryable("lost"))

    @rule(which=st.integers(0, 1), most=st.sampled_from([None, 1, 2]))
    def partial_accepts(self, which: int, most: int | None) -> None:
        self.sink(which).ack_at_most = most

    @rule()
    def clock_jumps(self) -> None:
        self.turner.wall += 1e8

    @precondition(lambda self: self.away is None)
    @rule()
    def run_goes_away(self) -> None:
        self.away = self.base / "elsewhere"
        self.folder.rename(self.away)

    @precondition(lambda self: self.away is not None)
    @rule()
    def run_comes_back(self) -> None:
        assert self.away is not None
        self.folder.parent.mkdir(exist_ok=True)
        self.away.rename(self.folder)
        self.away = None

    @precondition(lambda self: self.away is None)
    @rule()
    def run_is_copied(self) -> None:
        shutil.copytree(self.folder, self.spool.root / "copies" / "run", dirs_exist_ok=True)

    @precondition(lambda self: self.away is None)
    @rule()
    def files_are_replaced_by_copies(self) -> None:
        """rsync: a new inode under the same name."""
        for path in self.folder.glob("*.jsonl"):
            copy = path.with_suffix(".tmp")
            shutil.copy(path, copy)
            copy.rename(path)

    @precondition(lambda self: self.away is None)
    @rule(size=st.integers(0, 400))
    def a_file_is_seen_too_short(self, size: int) -> None:
        path = self.attempts[-1].path
        data = path.read_bytes()
        path.write_bytes(data[:size])
        self.turner.turn(1.0)
        path.write_bytes(data)

    @property
    def folder(self) -> Path:
        return self.spool.root / "proj" / "run"

    def sink(self, which: int) -> MemorySink:
        sink = self.turner.sinks[which]
        assert isinstance(sink, MemorySink)
        return sink

    @invariant()
    def nothing_is_there_that_was_never_logged(self) -> None:
        if not hasattr(self, "records"):
            return
        known = {value for mine in self.records.values() for _, row, _ in mine for value in row.values()}
        known |= {self.value}
        for which in (0, 1):
            for run in self.sink(which).runs.values():
                assert all(value in known for row in run.rows.values() for value in row.values())

    def teardown(self) -> None:
        plain_records._ENOUGH = ENOUGH  # type: ignore[misc]
        if not hasattr(self, "records"):
            return
        if self.away is not None:
            self.run_comes_back()
        self.sink(0).ack_at_most = self.sink(1).ack_at_most = None
        for _ in range(20):
            self.turner.settle()
            self.turner.turn(400.0)
            if not self.turner.uploader.failed:
                break
        self.turner.settle()
        expected = model(self.attempts, self.records)
        assert expected == rows_of(self.sink(0))
        generations = [name for name in self.sink(1).runs if name.startswith("proj/run")]
        newest = max(generations, key=lambda name: int(name.partition("-r")[2] or 1))
        assert expected == {s: dict(r) for s, r in sorted(self.sink(1).runs[newest].rows.items())}
        self.turner.uploader.stop()
        shutil.rmtree(self.base)


def _run(examples: int) -> None:
    run_state_machine_as_test(
        SpoolLife,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=examples < 100,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_random_life_of_a_spool_ends_as_the_model_says() -> None:
    """Some hundred random sequences; `make torture` runs 5,000."""
    _run(40)


def test_a_life_meets_plain_rows_that_keep_their_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the lives would say nothing about them."""
    met: list[int] = []
    feed = History._feed_plain
    monkeypatch.setattr(
        History, "_feed_plain", lambda self, attempt, records: met.append(len(records)) or feed(self, attempt, records)
    )
    life = SpoolLife()
    life.begin()
    for first in (0, 3, 6, 9):
        life.append("main", [first, first + 1, first + 2], "a")
        life.settle()
    life.teardown()
    assert sum(met) >= 6


def test_an_attempt_that_is_out_of_sight_after_a_kill_supersedes_as_before() -> None:
    """Nothing but its header had been read; a row that it supersedes must not slip out before it is seen again."""
    life = SpoolLife()
    life.begin()
    life.new_attempt("main", 3)
    life.a_file_is_seen_too_short(318)
    life.an_older_attempt_goes_on(which=0, steps=[4], key="b", late=False)
    life.run_goes_away()
    life.kill_the_uploader()
    life.run_comes_back()
    life.a_file_is_seen_too_short(44)
    life.kill_between_yes_and_commit()
    life.teardown()


@pytest.mark.torture
def test_five_thousand_random_lives_of_a_spool_end_as_the_model_says() -> None:
    """No row lost, none doubled, none wrong."""
    _run(5000)
