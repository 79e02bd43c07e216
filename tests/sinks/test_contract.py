"""What every sink keeps, played over every sink there is.

A test that needs what a sink does not declare is skipped for it, and the declaration itself is tested.
"""

import random
import sys
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from gapless_uploader.operations import (
    Amend,
    Config,
    Gap,
    Identity,
    Log,
    Media,
    MediaItem,
    Missing,
    Operation,
    Rewind,
    Row,
    State,
    Summary,
    System,
    Table,
    Text,
)
from gapless_uploader.sink import Misconfigured
from gapless_uploader.sinks import SINKS, known_sinks, make_sink
from tests.sinks.harness import T0, SinkHarness, amend, batch, harness_kinds, row, view, write

RUN = view(config={"lr": 0.1, "model": {"layers": 12, "name": "qwen"}})
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c63f8cfc0f01f0005000201"
    "ff5c86a5890000000049454e44ae426082"
)


def needs(harness: SinkHarness, *names: str) -> None:
    can = harness.sink().capabilities
    for name in names:
        if not getattr(can, name):
            pytest.skip(f"{harness.kind} declares no {name}")


def needs_history(harness: SinkHarness) -> None:
    if not harness.keeps_history:
        pytest.skip(f"{harness.kind} shows the last value alone")


def needs_exactly_once(harness: SinkHarness) -> None:
    if harness.sink().capabilities.exactly_once.startswith("at least once"):
        pytest.skip(f"{harness.kind} promises at least once")


# What arrives


def test_rows_arrive_with_their_steps_and_times(harness: SinkHarness) -> None:
    """Rows arrive with the values, steps and wall clocks they were logged with."""
    rows = [row(step, t=T0 + 10 * step + 0.125) for step in range(5)]
    write(harness.sink(), RUN, {}, *rows)

    assert harness.expect(rows) == harness.actual(RUN)


def test_lives_follow_each_other(harness: SinkHarness) -> None:
    """A session opened with the last memo goes on where the one before stopped."""
    rows = [row(step) for step in range(9)]
    memo = write(harness.sink(), RUN, {}, *rows[:4]).memo
    memo = write(harness.sink(), RUN, memo, *rows[4:5]).memo
    write(harness.sink(), RUN, memo, *rows[5:])

    assert harness.expect(rows) == harness.actual(RUN)


def test_batches_of_one_session_follow_each_other(harness: SinkHarness) -> None:
    """Many writes of one session arrive as one history."""
    rows = [row(step) for step in range(0, 60, 3)]
    session = harness.sink().open(RUN, {})
    for one in rows:
        assert session.write(batch(RUN, one)).done == 1
    session.flush()
    session.close()

    assert harness.expect(rows) == harness.actual(RUN)


def test_runs_of_one_name_stay_apart(harness: SinkHarness) -> None:
    """Two runs that share a name, and two projects that share a run id, never mix."""
    runs = [RUN, view(run_id="r-2"), view(project="other")]
    rows = [[row(step, loss=float(place)) for step in range(3)] for place in range(3)]
    if not harness.tells_runs_apart:
        pytest.skip(f"{harness.kind} knows runs by less than their ids")
    for run, own in zip(runs, rows, strict=True):
        write(harness.sink(), run, {}, *own)

    for run, own in zip(runs, rows, strict=True):
        assert harness.expect(own) == harness.actual(run)


def test_a_later_generation_is_a_run_of_its_own(harness: SinkHarness) -> None:
    """The fresh run that a rewind makes at a tracker without rewind leaves the old one as it is."""
    if not harness.tells_runs_apart:
        pytest.skip(f"{harness.kind} knows runs by less than their ids")
    second = replace(RUN, generation=2)
    write(harness.sink(), RUN, {}, row(0, loss=1.0))
    write(harness.sink(), second, {}, row(0, loss=2.0))

    assert harness.expect([row(0, loss=1.0)]) == harness.actual(RUN)
    assert harness.expect([row(0, loss=2.0)]) == harness.actual(second)


def test_more_keys_of_a_step_join_its_row(harness: SinkHarness) -> None:
    """Keys that come later for a step are added; those that were there are not sent again."""
    needs(harness, "amend")
    first = row(3, loss=0.5)
    memo = write(harness.sink(), RUN, {}, first).memo
    write(harness.sink(), RUN, memo, amend(first, acc=0.9))

    assert harness.expect([first, row(3, t=first.t + 2, acc=0.9)]) == harness.actual(RUN)


def test_late_step_of_other_keys_arrives(harness: SinkHarness) -> None:
    """A step below the highest one, of a key of its own (an asynchronous evaluation), arrives at its own step."""
    needs(harness, "late_steps")
    rows = [row(step) for step in range(8)]
    late = row(5, t=T0 + 100, **{"eval/acc": 0.25})
    memo = write(harness.sink(), RUN, {}, *rows).memo
    write(harness.sink(), RUN, memo, Amend(5, late.t, 5.0, {**rows[5].values, **late.values}, ("eval/acc",)))

    assert harness.expect([*rows, late]) == harness.actual(RUN)


def test_late_step_of_the_same_keys_arrives(harness: SinkHarness) -> None:
    """A step that nobody wrote yet, below the highest one, arrives and disturbs no other step."""
    needs(harness, "late_steps")
    rows = [row(step) for step in (0, 1, 3, 4)]
    memo = write(harness.sink(), RUN, {}, *rows).memo
    memo = write(harness.sink(), RUN, memo, row(2, t=T0 + 50)).memo
    write(harness.sink(), RUN, memo, row(5))

    assert harness.expect([*rows, row(2, t=T0 + 50), row(5)]) == harness.actual(RUN)


def test_a_changed_value_replaces_the_old_one(harness: SinkHarness) -> None:
    """The newest value of a step's key is the only one held."""
    needs(harness, "amend", "rewind")
    rows = [row(step) for step in range(4)]
    memo = write(harness.sink(), RUN, {}, *rows).memo
    write(harness.sink(), RUN, memo, amend(rows[1], loss=9.0))

    assert harness.expect([*rows, row(1, t=T0 + 3, loss=9.0)]) == harness.actual(RUN)


def test_rewind_takes_back_what_was_sent(harness: SinkHarness) -> None:
    """Steps 0-15, a resume at 10, steps 10-20: the steps rise strictly, from 10 on they are the new attempt's."""
    needs(harness, "rewind")
    needs_history(harness)
    old = [row(step) for step in range(16)]
    new = [row(step, t=T0 + 1000 + step, loss=-1.0) for step in range(10, 21)]
    memo = write(harness.sink(), RUN, {}, *old).memo
    write(harness.sink(), RUN, memo, Rewind(10), *new)

    assert harness.expect([*old[:10], *new]) == harness.actual(RUN)


def test_rewind_to_nothing_leaves_nothing(harness: SinkHarness) -> None:
    """A rewind to step 0 leaves no row, and the run goes on."""
    needs(harness, "rewind")
    memo = write(harness.sink(), RUN, {}, Config(RUN.config), row(0), row(7)).memo
    memo = write(harness.sink(), RUN, memo, Rewind(0)).memo

    assert harness.actual(RUN) == []

    write(harness.sink(), RUN, memo, row(2, loss=3.0))

    assert harness.expect([row(2, loss=3.0)]) == harness.actual(RUN)


def test_rewinds_within_one_batch_apply_in_order(harness: SinkHarness) -> None:
    """Rows before a rewind in the same batch go with it, those behind it stay."""
    needs(harness, "rewind")
    needs_history(harness)
    operations = [row(0), row(1), Rewind(1), row(1, loss=5.0), row(2), Rewind(2), row(2, loss=6.0)]
    write(harness.sink(), RUN, {}, *operations)

    assert harness.expect([row(0), row(1, loss=5.0), row(2, loss=6.0)]) == harness.actual(RUN)


# A row arrives once


def test_a_batch_repeated_after_a_crash_changes_nothing(harness: SinkHarness) -> None:
    """The process dies between the tracker's yes and the checkpoint: the same batch on the old memo, every row once."""
    needs_exactly_once(harness)
    rows = [row(step) for step in range(12)]
    memo = write(harness.sink(), RUN, {}, *rows[:5]).memo
    write(harness.sink(), RUN, memo, *rows[5:9])
    memo = write(harness.sink(), RUN, memo, *rows[5:9], uncertain=True).memo
    write(harness.sink(), RUN, memo, *rows[9:])

    assert harness.expect(rows) == harness.actual(RUN)


def test_the_first_batch_repeated_changes_nothing(harness: SinkHarness) -> None:
    """The same with the run's very first batch, whose memo was never kept."""
    needs_exactly_once(harness)
    rows = [row(step) for step in range(4)]
    write(harness.sink(), RUN, {}, Config(RUN.config), *rows)
    write(harness.sink(), RUN, {}, Config(RUN.config), *rows, uncertain=True)

    assert harness.expect(rows) == harness.actual(RUN)


def test_a_crash_with_changes_in_flight_is_harmless(harness: SinkHarness) -> None:
    """A repeated batch that amends, goes back and takes back leaves what one application of it leaves."""
    needs_exactly_once(harness)
    needs(harness, "rewind", "amend", "late_steps")
    needs_history(harness)
    rows = [row(step) for step in (0, 1, 2, 4, 5, 6)]
    memo = write(harness.sink(), RUN, {}, *rows).memo
    change = [
        amend(rows[1], acc=0.5),
        row(3, t=T0 + 30),
        Rewind(4),
        row(4, t=T0 + 40, loss=7.0),
        amend(rows[2], loss=8.0),
        row(5, t=T0 + 50, loss=9.0),
    ]
    expected = [*rows[:3], row(1, t=T0 + 3, acc=0.5), row(2, t=T0 + 4, loss=8.0), row(3, t=T0 + 30)]
    expected += [row(4, t=T0 + 40, loss=7.0), row(5, t=T0 + 50, loss=9.0)]
    for _ in range(3):
        last = write(harness.sink(), RUN, memo, *change)

    assert harness.expect(expected) == harness.actual(RUN)

    write(harness.sink(), RUN, last.memo, row(6, loss=1.0))

    assert harness.expect([*expected, row(6, loss=1.0)]) == harness.actual(RUN)


def test_a_lost_state_doubles_nothing(harness: SinkHarness) -> None:
    """The uploader's state is lost: the whole history again on an empty memo, under another name, every row once."""
    needs_exactly_once(harness)
    rows = [row(step) for step in range(10)]
    memo = write(harness.sink(), RUN, {}, Config(RUN.config), *rows[:6]).memo
    write(harness.sink(), RUN, memo, *rows[6:8])
    renamed = replace(RUN, name="renamed since")
    write(harness.sink(), renamed, {}, Config(RUN.config), *rows)

    assert harness.expect(rows) == harness.actual(RUN)


def test_random_histories_with_crashes_match_a_model(harness: SinkHarness) -> None:
    """Any mix of rows, changes, late steps, rewinds and crashes leaves what a dictionary leaves."""
    needs_exactly_once(harness)
    for seed in range(harness.random_histories):
        play(harness, seed)


@pytest.mark.torture
def test_many_random_histories_with_crashes_match_a_model(harness: SinkHarness) -> None:
    """The same, twenty times as many."""
    needs_exactly_once(harness)
    for seed in range(1_000, 1_000 + 20 * harness.random_histories):
        play(harness, seed)


def play(harness: SinkHarness, seed: int) -> None:
    """One random history against its model."""
    can = harness.sink().capabilities
    rewinds = can.rewind and harness.keeps_history
    run = view(run_id=f"random-{seed}")
    chance = random.Random(seed)
    model: dict[tuple[int, str], Row] = {}
    memo, highest, clock = {}, 0, T0
    for _ in range(chance.randint(1, 6)):
        operations: list[Operation] = []
        for _ in range(chance.randint(1, 8)):
            clock += 1
            kind = chance.random()
            if kind < 0.12 and rewinds:
                step = chance.randint(0, highest)
                operations.append(Rewind(step))
                model = {place: one for place, one in model.items() if place[0] < step}
                continue
            step = chance.randint(0, highest) if kind < 0.4 and can.late_steps else highest + chance.randint(1, 3)
            highest = max(highest, step)
            values = {key: float(chance.randint(0, 99)) for key in chance.sample("abcd", chance.randint(1, 3))}
            held = {key: one.values[key] for (at, key), one in model.items() if at == step}
            if held and not can.rewind:
                values = {key: value for key, value in values.items() if key not in held}
            changed = {key: value for key, value in values.items() if held.get(key) != value}
            if not changed:
                continue
            if held:
                operations.append(Amend(step, clock, 0.0, {**held, **changed}, tuple(changed)))
            else:
                operations.append(Row(step, clock, 0.0, changed))
            model.update(((step, key), Row(step, clock, 0.0, {key: value})) for key, value in changed.items())
        for place in range(chance.choice((1, 1, 2, 3))):
            done = write(harness.sink(), run, memo, *operations, uncertain=place > 0) if operations else None
        memo = memo if done is None else done.memo

    if model:
        assert harness.expect(model.values()) == harness.actual(run), f"seed {seed}"


# Values


def test_numbers_arrive_as_they_were(harness: SinkHarness) -> None:
    """Integers, booleans, the largest and the smallest float arrive as far as the tracker's own number holds them."""
    values = {"int": 123_456_789, "big": 2**53, "yes": True, "no": False, "max": 1.7976931348623157e308, "min": 5e-324}
    values |= {"third": 1 / 3, "zero": 0.0, "minus": -0.0, "tokens": 16_777_217}
    write(harness.sink(), RUN, {}, row(0, **values))

    assert harness.expect([row(0, **values)]) == harness.actual(RUN)


def test_non_finite_numbers_arrive(harness: SinkHarness) -> None:
    """NaN and both infinities arrive as themselves, and the row's other keys with them."""
    needs(harness, "non_finite")
    values = {"nan": nan, "up": inf, "down": -inf, "loss": 0.5}
    write(harness.sink(), RUN, {}, row(0, **values), row(1, loss=nan))

    assert harness.expect([row(0, **values), row(1, loss=nan)]) == harness.actual(RUN)


def test_what_cannot_be_held_is_counted_and_the_rest_arrives(harness: SinkHarness) -> None:
    """A value that is nowhere to be had is refused with its step, key and reason; the row's numbers arrive."""
    ack = write(harness.sink(), RUN, {}, row(0, loss=0.5, image=Missing("media/x.png is not there")), row(1))

    assert ack.done == 2
    assert [(refusal.step, refusal.key) for refusal in ack.refused] == [(0, "image")]
    assert harness.expect([row(0, loss=0.5), row(1)]) == harness.actual(RUN)


def test_a_huge_integer_is_held_or_counted(harness: SinkHarness) -> None:
    """An integer beyond a float's range is held whole or refused; it stops nothing."""
    huge = 10**400
    ack = write(harness.sink(), RUN, {}, row(0, loss=0.5, huge=huge))

    held = {point.key: point.value for point in harness.points(RUN)}
    assert held.pop("loss") == 0.5
    assert (held, len(ack.refused)) in [({"huge": huge}, 0), ({}, 1)]


def test_odd_keys_arrive_each_for_itself(harness: SinkHarness) -> None:
    """Keys with every sort of character, and pairs that a careless mapping would join, arrive as so many series."""
    keys = ["timing(s)/gen", "val/mean@1", "m@1", "m_at_1", "a b", "a:b", "损失", "x" * 300, "a//b", "a/b", "A/B"]
    keys += ["quote\"'`", "back\\slash", "percent%2F", "dot.", ".dot", "$x{y}", "<b>&amp;", "emoji 🚀", "tail/"]
    values = {key: float(place) for place, key in enumerate(keys)}
    write(harness.sink(), RUN, {}, Row(0, T0, 0.0, values))

    assert harness.expect([Row(0, T0, 0.0, values)]) == harness.actual(RUN)
    assert len({point.key for point in harness.points(RUN)}) == len(keys)


def test_text_arrives(harness: SinkHarness) -> None:
    """A text and a text value of a row arrive at their step, beside the row's numbers."""
    needs(harness, "text")
    write(harness.sink(), RUN, {}, row(4, loss=0.5, note=Text("first line"), phase="warm-up"))
    texts = harness.texts(RUN)

    assert "first line" in texts[4, "note"]
    assert "warm-up" in texts[4, "phase"]
    assert harness.expect([row(4, loss=0.5)]) == harness.actual(RUN)


def test_tables_arrive(harness: SinkHarness) -> None:
    """Every cell of a table is there, at the table's step."""
    needs(harness, "tables")
    table = Table(["input", "output", "score"], [["what is 2+2", "four", 1.0], ["and 3+3", "seven", 0.25]])
    write(harness.sink(), RUN, {}, row(2, loss=0.5, samples=table))
    shown = harness.texts(RUN)[2, "samples"]

    assert [cell for line in table.rows for cell in line if str(cell) not in shown.replace("&#43;", "+")] == []


def test_images_arrive(harness: SinkHarness) -> None:
    """An image's bytes arrive unchanged at its step."""
    needs(harness, "media")
    path = harness.folder / f"{'a' * 64}.png"
    path.write_bytes(PNG)
    image = Media("image", [MediaItem(path, {"width": 1, "height": 1, "format": "png", "caption": "c"})])
    write(harness.sink(), RUN, {}, row(2, loss=0.5, sample=image))

    assert harness.media(RUN)[2, "sample"] == PNG


# The run


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1)])
def test_the_end_state_arrives(harness: SinkHarness, state: str, code: int) -> None:
    """A run that ended shows how; said twice it is said once."""
    needs(harness, "end_state")
    memo = write(harness.sink(), RUN, {}, row(0), State(state, code, T0 + 9, 9.0)).memo
    write(harness.sink(), RUN, memo, State(state, code, T0 + 9, 9.0))

    assert harness.state(RUN) == state


def test_an_open_run_has_no_end_state(harness: SinkHarness) -> None:
    """Closing a session says nothing about the run."""
    needs(harness, "end_state")
    write(harness.sink(), RUN, {}, Config(RUN.config), row(0))

    assert harness.state(RUN) is None


def test_a_resumed_run_is_running_again(harness: SinkHarness) -> None:
    """A run that crashed and was resumed has no end state until it ends again."""
    needs(harness, "end_state")
    if harness.kind == "console":
        pytest.skip("a terminal takes nothing back")
    memo = write(harness.sink(), RUN, {}, row(0), State("failed", 1, T0 + 9, 9.0)).memo
    memo = write(harness.sink(), RUN, memo, State("running", None, T0 + 20, 9.0), row(1)).memo

    assert harness.state(RUN) is None

    write(harness.sink(), RUN, memo, State("finished", 0, T0 + 30, 19.0))

    assert harness.state(RUN) == "finished"


def test_every_kind_of_operation_is_taken(harness: SinkHarness) -> None:
    """No operation stops a sink, whether it can express it or not."""
    operations = [
        Identity("n", "g", "train", ["a", "b"], "notes", "team", ["wandb"]),
        Config({"lr": 0.1, "nan": nan, "deep": {"list": [1, 2], "none": None}, "big": 10**30}),
        System({"host": "train-7", "gpus": ["H200"]}),
        Summary({"best": 0.9}),
        Row(0, T0, 0.0, {"loss": 0.5}),
        Log("stdout", ["hello"], T0),
        Gap(3, [1, 2], "ring overflow"),
        State("finished", 0, T0 + 1, 1.0),
    ]
    run = replace(RUN, config=operations[1].config, system=operations[2].data, tags=["a", "b"], summary={"best": 0.9})

    assert write(harness.sink(), run, {}, *operations).done == len(operations)
    assert harness.expect([row(0, T0, loss=0.5)]) == harness.actual(RUN)


def test_a_session_may_be_closed_twice(harness: SinkHarness) -> None:
    """Closing a closed session does nothing."""
    session = harness.sink().open(RUN, {})
    session.write(batch(RUN, row(0)))
    session.close()
    session.close()

    assert harness.expect([row(0)]) == harness.actual(RUN)


def test_names_of_an_untrusted_spool_stay_inside(harness: SinkHarness, tmp_path: Path) -> None:
    """A project, id or name of dots, slashes and control characters puts nothing outside the sink's place."""
    around = set(tmp_path.parent.iterdir())
    for place, bad in enumerate(["../../escape", "/etc/passwd", "..", ".", "a\0b", "\x1b[31m", "x" * 600, "-rf", "~"]):
        run = view(project=bad, run_id=f"{bad}{place}", name=bad)
        write(harness.sink(), run, {}, row(0))

    assert around == set(tmp_path.parent.iterdir())


# The kind


def test_every_listed_sink_is_in_this_suite() -> None:
    """A sink is in when it is in the contract suite; one that copies files is in the outage suite alone."""
    assert set(SINKS) | {"sqlite"} == set(harness_kinds())


def test_the_sink_says_how_a_row_arrives_once(harness: SinkHarness) -> None:
    """The declaration names a mechanism, or says that there is none."""
    sink = harness.sink()

    assert len(sink.capabilities.exactly_once) > 20
    assert sink.kind == harness.kind
    assert isinstance(sink.target, str)


def test_a_kind_is_made_from_its_name(harness: SinkHarness) -> None:
    """`kind` alone makes the sink, and an unknown option is named."""
    assert make_sink(harness.kind).kind == harness.kind
    assert harness.kind in known_sinks()
    with pytest.raises(Misconfigured, match=f"sink '{harness.kind}'.*no_such_option"):
        make_sink(harness.kind, {"no_such_option": 1})


def test_a_missing_package_says_what_to_install(harness: SinkHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the vendor's package, opening says the line that installs it."""
    if harness.vendor is None:
        pytest.skip(f"{harness.kind} needs no package")
    sink = harness.sink()
    for name in [name for name in sys.modules if name.startswith(f"{harness.vendor}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, harness.vendor, None)

    with pytest.raises(Misconfigured, match=rf"pip install 'gapless\[{harness.extra or harness.kind}\]'"):
        sink.open(RUN, {})
