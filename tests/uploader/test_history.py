"""The merge of a run's attempts, in the contract's own words."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gapless_schemas import seal
from gapless_uploader.operations import Amend, Rewind, Row
from gapless_uploader.replay import MergedRun, merged_run
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.spool import Spool
from gapless_uploader.status import read_status
from tests.uploader.harness import T0, SpoolDir, Turner, rows_of


@pytest.fixture
def spool(tmp_path: Path) -> SpoolDir:
    (tmp_path / "spool").mkdir()
    return SpoolDir(tmp_path / "spool")


@pytest.fixture
def turner(tmp_path: Path, spool: SpoolDir) -> Iterator[Turner]:
    turner = Turner(spool.root, tmp_path / "state")
    yield turner
    turner.uploader.stop()


def merged(spool: SpoolDir) -> MergedRun:
    found = Spool([spool.root])
    found.scan(0.0)
    return merged_run(found.runs[("proj", "run")])


def values(run: MergedRun) -> dict[int, dict[str, Any]]:
    return {step: dict(row.values) for step, row in sorted(run.rows.items())}


def test_records_of_one_step_merge_into_one_row_by_key_in_seq_order(spool: SpoolDir) -> None:
    """The row's time is its last record's."""
    attempt = spool.attempt()
    attempt.log(1, t=T0 + 1, a=1, b=1)
    attempt.log(1, t=T0 + 5, b=2, c=3)

    run = merged(spool)

    assert {1: {"a": 1, "b": 2, "c": 3}} == values(run)
    assert T0 + 5 == run.rows[1].t


def test_what_a_restart_takes_back_is_known_by_when_it_was_logged(tmp_path: Path, spool: SpoolDir) -> None:
    """A row's own time is its caller's: that of an event, or of another zone. It decides nothing."""
    older = spool.attempt()
    older.append("metrics", {"superseded": 1}, 6, t=T0 + 7200, mono=5.0)
    older.append("metrics", {"side_by_side": 1}, 7, t=T0 - 7200, mono=2000.0)
    older.append("metrics", {"superseded": 1}, 8, t=T0 + 7200, mono=6.0)
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    newer = spool.attempt(number=2, created=T0 + 1000, resume_step=0)
    newer.log(0, a=1)
    turner.settle()
    turner.uploader.stop()

    assert {0: {"a": 1}, 7: {"side_by_side": 1}} == rows_of(turner.memory) == values(merged(spool))


def test_a_row_has_the_time_of_its_last_record_whoever_wrote_it(tmp_path: Path, spool: SpoolDir) -> None:
    """An evaluation of an old step, hours later, is not dated when the training was there."""
    turner = Turner(spool.root, tmp_path / "state")
    spool.attempt().log(1, t=T0 + 100, loss=1)
    turner.settle()
    spool.attempt(writer="eval").log(1, t=T0 + 9000, accuracy=2)
    turner.settle()
    turner.uploader.stop()

    assert T0 + 9000 == merged(spool).rows[1].t
    times = turner.memory.runs["proj/run"].times
    assert {(1, "loss"): T0 + 100, (1, "accuracy"): T0 + 9000} == times


def test_a_value_that_another_writer_hides_is_counted(tmp_path: Path, spool: SpoolDir) -> None:
    """On equal keys `main` wins, and status says that a record was replaced."""
    spool.attempt().log(1, t=T0 + 100, loss=1)
    spool.attempt(writer="eval").log(1, t=T0 + 200, loss=5)
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    turner.uploader.stop()

    assert {1: {"loss": 1}} == rows_of(turner.memory)
    assert [1] == [sink.superseded for run in read_status([spool.root], tmp_path / "state").runs for sink in run.sinks]


COMPACT, SPACED = (",", ":"), (", ", ": ")


def log_in_styles(spool: SpoolDir, rows: list[tuple[int, dict[str, int], tuple[str, str]]]) -> None:
    """An attempt of (step, values, JSON's separators), as another program may write it."""
    attempt = spool.attempt()
    for seq, (step, values, separators) in enumerate(rows, 1):
        body = {"seq": seq, "t": T0 + seq, "mono": 1.0, "kind": "metrics", "step": step, "data": values}
        attempt.raw(seal(json.dumps(body, separators=separators).encode()))
        attempt.seq = seq


def test_json_with_spaces_is_merged_like_any(tmp_path: Path, spool: SpoolDir) -> None:
    """Another program's JSON: the format asks for strict JSON and for where the crc stands, and for no more."""
    wide = (" , ", " : ")
    log_in_styles(spool, [(1, {"a": 1}, wide), (2, {"a": 2}, wide), (1, {"b": 3}, wide)])
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    turner.uploader.stop()

    assert {1: {"a": 1, "b": 3}, 2: {"a": 2}} == rows_of(turner.memory)


@pytest.mark.parametrize("compact", [(1, 2), (2,), (1, 3), ()])
def test_one_line_with_spaces_among_others_is_merged_like_any(
    tmp_path: Path, spool: SpoolDir, compact: tuple[int, ...]
) -> None:
    """The step that another writer logs too is in a line that is written otherwise than the rest of its file."""
    log_in_styles(spool, [(step, {"a": step}, COMPACT if step in compact else SPACED) for step in (1, 2, 3)])
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    spool.attempt(writer="eval").log(3, b=4)
    turner.settle()
    turner.uploader.stop()

    assert {1: {"a": 1}, 2: {"a": 2}, 3: {"a": 3, "b": 4}} == rows_of(turner.memory)


def test_a_step_that_is_written_in_two_styles_is_whole(tmp_path: Path, spool: SpoolDir) -> None:
    """Of one step a compact record and one with spaces are known; a third writer's comes late and joins both."""
    log_in_styles(spool, [(1, {"a": 1}, COMPACT), (2, {"a": 2}, COMPACT), (1, {"b": 2}, SPACED)])
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    spool.attempt(writer="eval").log(1, c=3)
    turner.settle()
    turner.uploader.stop()

    assert {1: {"a": 1, "b": 2, "c": 3}, 2: {"a": 2}} == rows_of(turner.memory)


def test_a_run_has_a_name_before_its_newest_attempt_is_read(tmp_path: Path, spool: SpoolDir) -> None:
    """Two long attempts, replayed at once: no tracker makes a nameless run first."""
    for number in (1, 2):
        attempt = spool.attempt(number=number, created=T0 + 10_000 * number, resume_step=0)
        attempt.run({"attempt": number, f"only-{number}": 1}, name=f"name-{number}", tags=[f"t{number}"])
        for step in range(300):
            attempt.log(step, a=step)
    sink = MemorySink()
    sink.capabilities = replace(sink.capabilities, max_operations=50)
    opened = []
    first = sink.open
    sink.open = lambda run, memo: opened.append((run.name, dict(run.config))) or first(run, memo)  # type: ignore[method-assign, func-returns-value]
    turner = Turner(spool.root, tmp_path / "state", sink)
    turner.settle()
    turner.uploader.stop()

    assert ("name-1", {"attempt": 1, "only-1": 1}) == opened[0]
    held = sink.runs["proj/run"]
    assert held.identity is not None
    assert ("name-2", ["t2"]) == (held.identity.name, held.identity.tags)
    assert {"attempt": 2, "only-2": 1} == held.config
    assert 300 == len(held.rows)


def test_a_file_that_was_too_short_for_a_moment_is_read_again(tmp_path: Path, spool: SpoolDir) -> None:
    """A row needs another writer's old row just while that file is seen cut: what is missing is not remembered."""
    other = spool.attempt(writer="eval")
    other.log(1, a=1)
    turner = Turner(spool.root, tmp_path / "state")
    turner.settle()
    whole = other.path.read_bytes()
    other.path.write_bytes(whole[:-20])
    spool.attempt().log(1, b=2)
    turner.turn(1.0)
    assert turner.uploader.failed
    other.path.write_bytes(whole)
    turner.turn(120.0)
    turner.settle()
    turner.uploader.stop()

    assert {1: {"a": 1, "b": 2}} == rows_of(turner.memory)


def test_a_lower_step_inside_an_attempt_is_a_late_record_never_a_rewind(spool: SpoolDir) -> None:
    """An asynchronous evaluation comes back for an old step."""
    attempt = spool.attempt()
    for step in range(10):
        attempt.log(step, loss=step)
    attempt.log(3, accuracy=0.5)
    attempt.log(10, loss=10)

    run = merged(spool)

    assert list(range(11)) == list(values(run))
    assert {"loss": 3, "accuracy": 0.5} == run.rows[3].values


def test_with_a_resume_step_the_older_rows_from_that_step_on_go(spool: SpoolDir) -> None:
    """`resume_step=s`: rows at steps >= s."""
    old, new = spool.attempt(), spool.attempt(number=2, resume_step=20)
    for step in range(26):
        old.log(step, a=step, old=1)
    for step in range(20, 41):
        new.log(step, a=-step)

    run = merged(spool)

    assert {s: {"a": s, "old": 1} if s < 20 else {"a": -s} for s in range(41)} == values(run)
    assert 6 == run.superseded


def test_inferred_from_the_first_metrics_step_rows_above_go_and_that_row_merges(spool: SpoolDir) -> None:
    """Rows at steps > s go, and row s merges by key, the newer winning."""
    old, new = spool.attempt(), spool.attempt(number=2)
    for step in range(10):
        old.log(step, a=step, old=1)
    new.log(5, a=-5)
    new.log(6, a=-6)

    run = merged(spool)

    assert {"a": -5, "old": 1} == run.rows[5].values
    assert {"a": -6} == run.rows[6].values
    assert [0, 1, 2, 3, 4, 5, 6] == list(values(run))


def test_resume_step_false_supersedes_nothing(spool: SpoolDir) -> None:
    """Both attempts' rows stay, merged by step."""
    old, new = spool.attempt(), spool.attempt(number=2, resume_step=False)
    for step in range(6):
        old.log(step, a=step)
    new.log(2, a=-2)

    assert {s: {"a": -2 if s == 2 else s} for s in range(6)} == values(merged(spool))


def test_only_older_attempts_of_the_same_writer_are_superseded(spool: SpoolDir) -> None:
    """An evaluation job's rows stay when the training rewinds."""
    old, evaluation, new = spool.attempt(), spool.attempt(writer="eval"), spool.attempt(number=2)
    for step in range(10):
        old.log(step, loss=step)
    evaluation.log(8, accuracy=0.8)
    new.log(5, loss=-5)

    run = merged(spool)

    assert {"accuracy": 0.8} == run.rows[8].values
    assert [0, 1, 2, 3, 4, 5, 8] == list(values(run))


def test_different_writers_merge_by_step_and_main_wins_then_the_name(spool: SpoolDir) -> None:
    """On equal keys `main` wins, then the writer's name."""
    for writer in ("zeta", "alpha", "main"):
        spool.attempt(writer=writer).log(1, who=writer, **{writer: 1})
    spool.attempt(writer="zeta", number=2, resume_step=False).log(2, who="zeta")
    spool.attempt(writer="alpha", number=2, resume_step=False).log(2, who="alpha")

    run = merged(spool)

    assert {"who": "main", "main": 1, "alpha": 1, "zeta": 1} == run.rows[1].values
    assert {"who": "alpha"} == run.rows[2].values


def test_attempts_order_by_number_then_created_then_id(spool: SpoolDir) -> None:
    """Two processes that took one number are told apart by when they began."""
    spool.attempt(number=1, created=T0 + 50, resume_step=False).log(1, who="second")
    spool.attempt(number=1, created=T0 + 10, resume_step=False).log(1, who="first")

    assert {1: {"who": "second"}} == values(merged(spool))


def test_runtime_is_the_sum_of_monotonic_time_over_surviving_attempts(spool: SpoolDir) -> None:
    """An attempt of which no row survives does not count."""
    first, gone, last = spool.attempt(), spool.attempt(number=2, resume_step=3), spool.attempt(number=3, resume_step=3)
    for step in range(5):
        first.log(step, a=1)  # 5 s by the harness's clock
    gone.log(3, a=2)
    gone.log(4, a=2)
    last.log(3, a=3)

    run = merged(spool)

    assert 6.0 == run.view.runtime
    assert 6.0 == run.rows[3].runtime


def test_the_state_is_that_of_the_newest_attempt_of_main(spool: SpoolDir) -> None:
    """A finished older attempt says nothing about the run, nor does another writer."""
    spool.attempt().finish()
    spool.attempt(writer="eval").finish(exit_code=3)
    newest = spool.attempt(number=2)
    newest.log(1, a=1)
    assert "running" == merged(spool).view.state

    newest.finish(exit_code=7)

    view = merged(spool).view
    assert ("failed", 7) == (view.state, view.exit_code)


def test_the_summary_is_the_last_value_by_step_unless_it_was_set(spool: SpoolDir) -> None:
    """A late record changes it only if no later step has the key."""
    attempt = spool.attempt()
    attempt.log(1, a=1, b=1)
    attempt.log(5, a=5, best=5)
    attempt.log(2, a=2, b=2)
    attempt.append("summary", {"best": 99})
    attempt.log(6, best=6)

    assert {"a": 5, "b": 2, "best": 99} == merged(spool).view.summary


def test_a_rewind_takes_the_summary_back_to_the_newest_surviving_value(spool: SpoolDir, turner: Turner) -> None:
    """A key that only the abandoned branch had goes; others get their older value back."""
    old = spool.attempt()
    for step in range(2000):
        old.log(step, a=step, **({"rare": step} if step == 7 else {}), **({"gone": 1} if step > 1000 else {}))
    old.log(900, late=1)
    turner.settle()
    new = spool.attempt(number=2, resume_step=1000)
    new.append("alive", {})
    turner.settle()

    view = turner.memory.runs["proj/run"].view
    new.log(1000, b=1)
    turner.settle()

    view = turner.memory.runs["proj/run"].view
    assert view is not None
    assert {"a": 999, "rare": 7, "late": 1, "b": 1} == view.summary


def test_the_config_of_a_new_attempt_replaces_the_whole_and_updates_merge_deeply(spool: SpoolDir) -> None:
    """`run` replaces; `config` merges dicts, replaces everything else, and deletes nothing."""
    old = spool.attempt()
    old.run({"lr": 1, "gone": True})
    new = spool.attempt(number=2)
    new.run({"lr": 2, "model": {"size": "7b", "layers": [1, 2]}})
    new.append("config", {"model": {"layers": [3]}, "seed": 1})
    old.append("config", {"stale": 1})

    assert {"lr": 2, "model": {"size": "7b", "layers": [3]}, "seed": 1} == merged(spool).view.config


def test_a_none_is_no_value(spool: SpoolDir) -> None:
    """It neither makes a row nor takes a value back."""
    attempt = spool.attempt()
    attempt.log(1, a=1, b=None)
    attempt.log(1, a=None)
    attempt.log(2, a=None)

    assert {1: {"a": 1}} == values(merged(spool))


def test_values_arrive_as_they_were(spool: SpoolDir) -> None:
    """NaN, infinities and integers beyond 64 bits are in the marks."""
    spool.attempt().append(
        "metrics",
        {"n": None, "i": None, "m": None, "big": "123456789012345678901234567890", "s": "NaN", "f": 0.1, "t": True},
        step=1,
        marks=[[["n"], "nan"], [["i"], "inf"], [["m"], "-inf"], [["big"], "int"]],
    )

    row = merged(spool).rows[1].values

    assert row["n"] != row["n"]
    assert (float("inf"), float("-inf")) == (row["i"], row["m"])
    assert (123456789012345678901234567890, "NaN", 0.1, True) == (row["big"], row["s"], row["f"], row["t"])


def test_one_step_wrong_by_far_holds_up_no_other(spool: SpoolDir) -> None:
    """An outlier is a row like others; steps below it are late rows."""
    attempt = spool.attempt()
    steps = [*range(1, 101), 10**9, *range(101, 201)]
    for step in steps:
        attempt.log(step, a=step)

    assert sorted(steps) == list(values(merged(spool)))


def test_amends_carry_the_whole_row_and_name_the_changed_keys(spool: SpoolDir, turner: Turner) -> None:
    """A tracker that replaces rows of one step loses nothing."""
    attempt = spool.attempt()
    for step in range(3000):
        attempt.log(step, a=step, b=0)
    turner.settle()
    attempt.log(7, c=1, b=0)
    turner.settle()

    last = [op for op in turner.memory.runs["proj/run"].operations if isinstance(op, Row | Amend)][-1]

    assert isinstance(last, Amend)
    assert (7, {"a": 7, "b": 0, "c": 1}, ("c",)) == (last.step, last.values, last.changed)


def test_records_of_a_step_that_are_readable_together_are_one_operation(spool: SpoolDir, turner: Turner) -> None:
    """Nothing waits for a step to be over: what is there is one row, what follows amends it."""
    attempt = spool.attempt()
    attempt.log(1, a=1)
    attempt.log(1, b=2)
    turner.settle()
    attempt.log(1, c=3)
    turner.settle()

    kinds = [type(op) for op in turner.memory.runs["proj/run"].operations if isinstance(op, Row | Amend)]
    assert [Row, Amend] == kinds
    assert {1: {"a": 1, "b": 2, "c": 3}} == rows_of(turner.memory)


def test_a_live_rewind_takes_back_what_was_sent_and_keeps_other_writers_rows(spool: SpoolDir, turner: Turner) -> None:
    """`Rewind`, then the surviving rows again."""
    old, evaluation = spool.attempt(), spool.attempt(writer="eval")
    for step in range(10):
        old.log(step, loss=step)
    evaluation.log(8, accuracy=0.8)
    turner.settle()
    new = spool.attempt(number=2)
    new.log(5, loss=-5)
    turner.settle()

    assert [Rewind(6)] == [op for op in turner.memory.runs["proj/run"].operations if isinstance(op, Rewind)]
    expected: dict[int, dict[str, Any]] = {step: {"loss": step} for step in range(5)}
    assert {**expected, 5: {"loss": -5}, 8: {"accuracy": 0.8}} == rows_of(turner.memory)


def test_attempts_that_are_all_there_need_no_rewind(spool: SpoolDir, turner: Turner) -> None:
    """What a newer attempt supersedes is known before the older one is sent."""
    for number, (first, last) in enumerate([(0, 1000), (800, 1500), (1200, 2000)], start=1):
        attempt = spool.attempt(number=number)
        attempt.run()
        for step in range(first, last):
            attempt.log(step, a=number)
    turner.settle()

    operations = turner.memory.runs["proj/run"].operations
    assert {op.step for op in operations if isinstance(op, Amend)} <= {800, 1200}
    assert not any(isinstance(op, Rewind) for op in operations)
    assert {s: {"a": 1 if s < 800 else 2 if s < 1200 else 3} for s in range(2000)} == rows_of(turner.memory)


def test_the_order_in_which_attempts_are_read_makes_no_difference(tmp_path: Path) -> None:
    """Random spools, seen piece by piece in random order, end as the pure merge of the whole."""
    for seed in range(25):
        rng = random.Random(seed)
        spool = SpoolDir(tmp_path / f"spool{seed}")
        turner = Turner(spool.root, tmp_path / f"state{seed}", MemorySink())
        for number in range(1, 4):
            for writer in rng.sample(["main", "eval"], k=rng.randint(1, 2)):
                attempt = spool.attempt(writer=writer, number=number, resume_step=rng.choice([None, False, 5, 12]))
                for _ in range(rng.randrange(12)):
                    attempt.log(rng.randrange(20), **{rng.choice("abc"): rng.random()})
                    if rng.random() < 0.3:
                        turner.settle()
        turner.settle()

        assert values(merged(spool)) == rows_of(turner.memory), seed
        turner.uploader.stop()


def test_two_processes_that_write_side_by_side_lose_no_row_of_either(spool: SpoolDir, turner: Turner) -> None:
    """Both believed to be the writer: what was logged after the other had begun is no older row; the newer one wins."""
    one, other = spool.attempt(created=T0), spool.attempt(number=2, created=T0 + 50)
    for step in range(20):
        one.log(step, t=T0 + step, before=step)
    turner.settle()
    for step in range(20):
        one.log(100 + step, t=T0 + 60 + step, who="one", one=step)
        other.log(100 + step, t=T0 + 60 + step, who="other", other=step)
        if step == 10:
            turner.settle()
    turner.settle()

    expected: dict[int, dict[str, Any]] = {step: {"before": step} for step in range(20)}
    expected |= {100 + step: {"who": "other", "one": step, "other": step} for step in range(20)}
    assert expected == rows_of(turner.memory) == values(merged(spool))


def test_a_restart_from_the_start_beside_a_zombie_keeps_what_the_zombie_logs_from_then_on(
    spool: SpoolDir, turner: Turner
) -> None:
    """What it had logged before goes; also when the new attempt is found only later."""
    zombie = spool.attempt(created=T0)
    for step in range(10):
        zombie.log(step, t=T0 + step, old=step)
    for step in range(10, 20):
        zombie.log(step, t=T0 + 100 + step, late=step)
    turner.settle()
    spool.attempt(number=2, created=T0 + 50).log(0, t=T0 + 120, new=0)
    turner.settle()
    turner.crash()
    zombie.log(20, t=T0 + 130, late=20)
    turner.settle()

    expected: dict[int, dict[str, Any]] = {0: {"old": 0, "new": 0}, **{s: {"late": s} for s in range(10, 21)}}
    assert expected == rows_of(turner.memory) == values(merged(spool))
