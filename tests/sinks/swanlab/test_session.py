"""What a session does for a run from its first row to its end, told by what the server then holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.events import RunChecked, RunParked, StateChanged
from gapless_uploader.operations import (
    Amend,
    Config,
    Gap,
    Identity,
    Log,
    Media,
    MediaItem,
    Operation,
    Row,
    State,
    Summary,
    System,
    Table,
    Text,
)
from gapless_uploader.sink import Batch, Memo, Parked, Retryable, RunView, Session
from gapless_uploader.sinks.swanlab import SwanlabSink
from gapless_uploader.status import read_status
from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.model import Experiment
from tests.sinks.harness import T0, amend, row, view, write
from tests.sinks.swanlab.world import RUN, World, raw_points

VIEW = view(config={"lr": 0.1})
END = State("finished", 0, T0 + 9, 9.0)


@pytest.fixture
def send(server: SwanLabServer) -> Callable[..., Experiment]:
    """Sends operations in one session and returns the experiment."""

    def sent(*operations: Operation, run: RunView = VIEW, memo: Memo | None = None) -> Experiment:
        write(SwanlabSink(settle=0), run, memo or {}, *operations)
        return server.experiments[run.tracker_id]

    return sent


def reasons(*operations: Operation, run: RunView = VIEW) -> list[str]:
    """Why something of the operations is not held as it was."""
    return [refusal.reason for refusal in write(SwanlabSink(settle=0), run, {}, *operations).refused]


# One type a key, and what SwanLab cannot hold


def test_a_changed_value_of_a_sent_step_is_counted(server: SwanLabServer) -> None:
    """A value that a later record changes stays as it was sent and is counted; new keys of the step arrive."""
    sink = SwanlabSink(settle=0)
    first = row(3, loss=0.5)
    memo = write(sink, VIEW, {}, first).memo
    change = Amend(3, T0 + 5, 3.0, {"loss": 0.75, "acc": 0.9}, ("loss", "acc"), ("acc",))
    ack = write(sink, VIEW, memo, change)

    assert raw_points(server.experiments["r-1"]) == [(3, "acc", "0.9"), (3, "loss", "0.5")]
    assert [(refusal.key, refusal.reason[:15]) for refusal in ack.refused] == [("loss", "a changed value")]


def test_a_value_changed_before_it_was_sent_is_sent_as_it_is_now(send: Callable[..., Experiment]) -> None:
    """Within one batch the newest value of a step's key goes out, at its own time; nothing is counted."""
    first = row(3, loss=0.5, lr=0.1)
    change = Amend(3, T0 + 50, 3.0, {"loss": 0.75, "lr": 0.1}, ("loss",), ())
    again = Amend(3, T0 + 60, 3.0, {"loss": 0.8, "lr": 0.1, "acc": 1.0}, ("loss", "acc"), ("acc",))
    held = send(first, row(4, loss=1.0), change, again)

    assert raw_points(held) == [(3, "acc", "1.0"), (3, "loss", "0.8"), (3, "lr", "0.1"), (4, "loss", "1.0")]
    assert held.times("loss") == {3: T0 + 60, 4: T0 + 4}
    assert held.times("lr") == {3: T0 + 3}


def test_a_key_keeps_the_type_it_had_first(server: SwanLabServer) -> None:
    """A value of another type goes to a key of its own, also after a restart; no key has rows of two types."""
    sink = SwanlabSink(settle=0)
    memo = write(sink, VIEW, {}, row(0, x=1.0), row(0, t=T0, note=Text("a"))).memo
    ack = write(sink, VIEW, memo, row(1, x=Text("now a text"), note=2.0), row(2, x=Table(["a"], [[1]])))
    held = server.experiments["r-1"]

    assert held.type_conflicts() == set()
    assert {(r.key, r.step) for r in held.raw} == {
        ("x", 0), ("note", 0), ("x~text", 1), ("note~num", 1), ("x~table", 2),
    }  # fmt: skip
    assert len(ack.refused) == 3


def test_infinities_keep_their_sign_beside_them(send: Callable[..., Experiment]) -> None:
    """A NaN is a NaN; an infinity is a NaN with its sign under a key of its own."""
    held = send(row(0, a=inf, b=-inf, c=nan))

    assert raw_points(held) == [
        (0, "a", "'nan'"), (0, "a~inf", "1.0"), (0, "b", "'nan'"), (0, "b~inf", "-1.0"), (0, "c", "'nan'"),
    ]  # fmt: skip


def test_what_is_rounded_or_too_large_is_counted(server: SwanLabServer) -> None:
    """Integers beyond 2^53 arrive rounded and counted, beyond a double or a step of 2^48 they are refused."""
    told = reasons(row(0, big=2**53 + 1, huge=10**400, ok=2**53), Row(2**48 + 1, T0, 0.0, {"loss": 1.0}))

    assert told == ["an integer beyond 2^53 is rounded", "an integer beyond a double", "a step beyond 2^48"]
    assert raw_points(server.experiments["r-1"]) == [(0, "big", repr(2.0**53)), (0, "ok", repr(2.0**53))]


def test_a_list_arrives_as_text(send: Callable[..., Experiment]) -> None:
    """What is no number arrives as a text that shows it."""
    held = send(row(0, shape=[1, 2, 3]))

    assert held.media("shape")[0][0][1] == b"[1,2,3]"


def test_a_row_of_more_points_than_a_request_takes_is_cut(send: Callable[..., Experiment]) -> None:
    """25,000 keys in one row go out in requests of at most 10,000 points and about 1 MB."""
    held = send(Row(0, T0, 0.0, {f"k/{number}": float(number) for number in range(25_000)}))

    assert len(held.raw) == 25_000
    assert max(rows for _, rows, _ in held.batch_sizes) <= 10_000
    assert max(size for _, _, size in held.batch_sizes) < 1_500_000


# Media


def image(folder: Path, name: str, content: bytes = b"\x89PNG", **info: Any) -> MediaItem:
    path = folder / name
    path.write_bytes(content)
    return MediaItem(path, info)


def test_a_row_has_at_most_108_items_of_10_mb(send: Callable[..., Experiment], tmp_path: Path) -> None:
    """Items beyond the 108th and those above 10 MB are left out and counted; the others arrive."""
    many = [image(tmp_path, f"{number:064x}.png", bytes([number])) for number in range(110)]
    large = image(tmp_path, f"{'e' * 64}.png", b"x" * ((10 << 20) + 1))
    ack = write(SwanlabSink(settle=0), VIEW, {}, row(0, many=Media("image", many), large=Media("image", [large])))
    held = send(row(1, loss=1.0), memo=ack.memo)

    assert len(held.media("many")[0]) == 108
    assert [row.key for row in held.raw if row.kind == "media"] == ["many"]
    told = [refusal.reason for refusal in ack.refused]
    assert told == ["media items beyond 108 of one step", "a media item beyond 10 MB"]


def test_files_share_their_request_for_links(server: SwanLabServer, tmp_path: Path) -> None:
    """A text a step costs a file each and no more than that: links are asked for by the hundred, or by 4 MB."""
    write(SwanlabSink(settle=0), VIEW, {}, *[row(step, note=Text(f"text {step}")) for step in range(60)])
    assert (server.count("presign.put"), server.count("object.put"), server.count("metrics")) == (2, 60, 2)

    large = [image(tmp_path, f"{number}.png", bytes([number]) * (3 << 20)) for number in range(4)]
    write(SwanlabSink(settle=0), view(run_id="r-2"), {}, row(0, pics=Media("image", large)))
    assert server.count("presign.put") == 4
    assert len(server.experiments["r-2"].media("pics")[0]) == 4


def test_every_item_has_a_caption_or_none(send: Callable[..., Experiment], tmp_path: Path) -> None:
    """SwanLab counts captions, not items: where one item has a caption, all have one."""
    items = [image(tmp_path, "a.png"), image(tmp_path, "b.png", b"\x89PNG2", caption="second")]
    held = send(row(0, pics=Media("image", items), plain=Media("image", [items[0]])))
    more = {row.key: row.more for row in held.raw if row.kind == "media"}

    assert more == {"pics": [{"caption": ""}, {"caption": "second"}], "plain": []}


def test_sound_and_moving_pictures_arrive_as_the_library_sends_them(
    send: Callable[..., Experiment], tmp_path: Path
) -> None:
    """WAV is audio, GIF an image, a histogram a table; other formats are refused by name."""
    wav, gif = image(tmp_path, "a.wav", b"RIFF"), image(tmp_path, "a.gif", b"GIF89a")
    bars = Media("histogram", [MediaItem(None, {"edges": [0, 1, 2], "counts": [5, 7]})])
    row0 = row(0, sound=Media("audio", [wav]), clip=Media("video", [gif]), bars=bars)
    ack = write(SwanlabSink(settle=0), VIEW, {}, row0, row(1, clip=Media("video", [image(tmp_path, "b.mp4")])))
    held = send(row(2, loss=0.0), memo=ack.memo)
    columns = held.project.columns

    assert {key: columns[key]["type"] for key in ("sound", "clip", "bars")} == {
        "sound": "AUDIO", "clip": "IMAGE", "bars": "ECHARTS",
    }  # fmt: skip
    assert held.media("sound")[0][0][0].startswith("media/audio/000-")
    assert b'"rowData": [{"from": 0, "to": 1, "count": 5}' in held.media("bars")[0][0][1]
    assert [refusal.reason for refusal in ack.refused] == ["video of format mp4: SwanLab takes gif"]


def test_a_link_in_the_media_folder_is_not_followed(server: SwanLabServer, tmp_path: Path) -> None:
    """A payload that became a link sends nothing of what it points at, and holds up nothing."""
    secret = tmp_path / "secret"
    secret.write_text("private")
    (tmp_path / "x.png").symlink_to(secret)
    pics = {name: Media("image", [MediaItem(tmp_path / f"{name}.png", {})]) for name in ("x", "gone")}
    told = reasons(row(0, loss=1.0, **pics))

    assert server.experiments["r-1"].objects == {}
    assert raw_points(server.experiments["r-1"]) == [(0, "loss", "1.0")]
    assert [reason[:28] for reason in told] == ["a payload that cannot be rea"] * 2


def test_table_cells_keep_what_json_cannot_hold(send: Callable[..., Experiment]) -> None:
    """Equal headers stay apart; NaN, infinities and large integers are text."""
    held = send(row(0, t=T0, tab=Table(["a", "a", "b"], [[nan, -inf, 2**60], [1, None, "x"]])))

    assert held.media("tab")[0][0][1] == (
        b'{"_swanLab": "table", "colDefs": [{"field": "a"}, {"field": "a (2)"}, {"field": "b"}],'
        b' "rowData": [{"a": "NaN", "a (2)": "-Infinity", "b": "1152921504606846976"},'
        b' {"a": 1, "a (2)": null, "b": "x"}]}'
    )


def test_console_lines_are_numbered_through_the_run(server: SwanLabServer) -> None:
    """Lines have consecutive numbers over sessions, and their own time."""
    sink = SwanlabSink(settle=0)
    memo = write(sink, VIEW, {}, Log("stdout", ["one", "two  "], T0)).memo
    write(sink, VIEW, memo, Log("stderr", ["three"], T0 + 1))
    held = server.experiments["r-1"]

    assert held.logs() == ["one", "two", "three"]
    assert [row.step for row in held.raw] == [1, 2, 3]


# The run's documents and states


@pytest.mark.parametrize(
    ("state", "code", "shown"),
    [
        ("finished", 0, "FINISHED"),
        ("failed", 1, "CRASHED"),
        ("crashed", None, "CRASHED"),
        ("failed", 130, "ABORTED"),
        ("failed", 143, "ABORTED"),
    ],
)
def test_the_end_is_said_in_swanlabs_words(
    send: Callable[..., Experiment], state: str, code: int | None, shown: str
) -> None:
    """Finished, crashed, or aborted where somebody stopped it; the exit code stands in the config."""
    held = send(row(0), State(state, code, T0 + 5, 4.5))
    own = held.config["_gapless"]

    assert held.state == shown
    assert (own["state"], own["exit_code"], own["duration_s"]) == (state, code, 4.5)


def test_the_end_comes_after_every_point(world: World) -> None:
    """While a point is missing the run is not ended, however often its end is tried."""
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    writer.finish()
    world.server.arm("metrics", "status", status=500, count=3)
    world.run()
    order = [call.endpoint for call in world.server.calls if call.endpoint in ("metrics", "state")]

    assert order == ["metrics"] * 4 + ["state"]


def test_late_rows_of_an_ended_run_arrive_and_the_end_is_said_again(server: SwanLabServer) -> None:
    """The server hides rows that come after the end: the run is taken up again, and ended again."""
    sink = SwanlabSink(settle=0)
    memo = write(sink, VIEW, {}, row(0), END).memo
    late = amend(row(0), **{"eval/acc": 0.5})
    write(sink, replace(VIEW, state="finished"), memo, late)
    held = server.experiments["r-1"]

    assert (held.num_posts, held.state, [state["state"] for state in held.states]) == (2, "FINISHED", ["FINISHED"] * 2)
    assert held.points()["eval/acc"] == {0: 0.5}


def test_the_config_is_always_whole(send: Callable[..., Experiment]) -> None:
    """Every config that is sent has every key: a partial one would erase the others."""
    run = replace(VIEW, config={"lr": 0.1, "model": {"layers": 12}, "big": 10**30, "nan": nan, "none": None})
    held = send(Config(run.config), Summary({"best": 10**30, "at": inf}), Gap(3, None, "full"), row(0), END, run=run)
    configs = [document for name, document in held.profile_puts if name == "config"]

    assert all(set(run.config) <= set(config) for config in configs)
    assert held.config["big"] == 10**30
    assert (held.config["nan"], held.config["none"]) == ("NaN", None)
    assert held.config["_gapless"]["summary"] == {"best": str(10**30), "at": "Inf"}
    assert held.config["_gapless"]["rows_lost_in_training"] == 3


def test_a_config_that_is_refused_stops_no_row(server: SwanLabServer) -> None:
    """When the tracker will not take the config it is counted; the rows and the end arrive."""
    server.arm("profile", "status", status=400, count=None)
    told = reasons(Config({"lr": 0.1}), row(0), END)

    assert told == ["SwanLab refuses the config: HTTP 400 FAULT_400"]
    assert len(server.experiments["r-1"].raw) == 2
    assert server.experiments["r-1"].state == "FINISHED"


def test_a_config_key_of_our_name_stays(send: Callable[..., Experiment]) -> None:
    """A run whose config has `_gapless` keeps it; ours moves aside."""
    held = send(Config({}), row(0), run=replace(VIEW, config={"_gapless": 7}))

    assert held.config["_gapless"] == 7
    assert held.config["_gapless_"]["run_id"] == "r-1"


def test_what_is_too_long_for_a_name_is_in_the_config(send: Callable[..., Experiment]) -> None:
    """Tags beyond 30 and notes beyond 1,024 characters are cut, counted and kept in the config."""
    run = replace(VIEW, tags=[f"t{number}" for number in range(40)], notes="n" * 2_000)
    identity = Identity(run.name, None, None, run.tags, run.notes, None, None)
    held = send(identity, row(0), run=run)

    assert (len(held.labels), len(held.description)) == (30, 1_024)
    assert (held.config["_gapless"]["tags"], held.config["_gapless"]["notes"]) == (run.tags, run.notes)
    other = replace(run, run_id="r-2")
    assert len(reasons(identity, row(0), run=other)) == 2


def test_nothing_of_this_machine_is_recorded_as_the_trainings(send: Callable[..., Experiment]) -> None:
    """Without a system record there is no metadata; with one, only what it says."""
    held = send(Config({}), row(0), END)
    assert "metadata" not in held.profile

    known = {"host": "train-7", "python": "3.12"}
    other = send(System(known), row(0), run=replace(VIEW, run_id="r-2", system=known))
    runtime = other.profile["metadata"]["runtime"]
    assert {name: value for name, value in runtime.items() if value is not None} == {
        "hostname": "train-7",
        "python_version": "3.12",
    }
    assert "requirements" not in other.profile


def test_a_memo_does_not_change_behind_the_uploaders_back(server: SwanLabServer) -> None:
    """A memo that was handed out stays as it was while the next batch is tried: a crash there counts nothing twice."""
    session = SwanlabSink(settle=0).open(VIEW, {})
    memo = session.write(Batch([Gap(3, None, "full"), Summary({"best": 1.0})], VIEW)).memo
    before = repr(memo)
    server.arm("profile", "status", status=500)
    with pytest.raises(Retryable):
        session.write(Batch([Gap(4, None, "full"), Summary({"best": 2.0}), row(0, note=Text("x"))], VIEW))
    session.close()

    assert repr(memo) == before
    assert memo["own"] == {"rows_lost_in_training": 3, "summary": {"best": 1.0}}


# Living and being gone


def test_a_long_step_is_kept_alive(world: World) -> None:
    """While the training works on one step for hours, heartbeats keep the run from being closed."""
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    for _ in range(40):
        for _ in range(4):
            world.turn()
        world.pass_time(310)

    assert world.experiment.state == "RUNNING"
    assert len(world.experiment.heartbeats) >= 30
    assert world.experiment.num_posts == 1


def test_a_run_that_was_closed_in_silence_is_taken_up_again(world: World) -> None:
    """After an outage in which the server closed the run, it runs again and every row can be read."""
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    for _ in range(6):
        world.turn()
    with world.server.refused():
        world.pass_time(4_000)
        world.turn()
    assert world.experiment.state == "CRASHED"
    writer.row(1, loss=2.0)
    writer.finish()
    world.run()

    assert world.experiment.num_posts == 2
    assert world.experiment.state == "FINISHED"
    assert [event.complete for event in world.told(RunChecked)] == [True]  # type: ignore[attr-defined]


def test_a_deleted_run_is_parked_and_not_made_again(server: SwanLabServer) -> None:
    """A run that somebody deleted at SwanLab stays deleted; the text says the way out."""
    sink = SwanlabSink(settle=0)
    memo = write(sink, VIEW, {}, row(0)).memo
    server.state.delete(server.experiments["r-1"])

    with pytest.raises(Parked, match=r"no longer at SwanLab.*another --state"):
        write(sink, VIEW, memo, row(1))
    assert server.experiments == {}


def test_a_run_deleted_under_an_open_session_is_parked(server: SwanLabServer) -> None:
    """The same in the middle of a session."""
    session: Session = SwanlabSink(settle=0).open(VIEW, {})
    session.write(Batch([row(0)], VIEW))
    server.state.delete(server.experiments["r-1"])

    with pytest.raises(Parked, match="404"):
        session.write(Batch([row(1)], VIEW))
    session.close()


def test_another_host_is_not_mixed_up(server: SwanLabServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress made at one server is not taken for progress at another."""
    memo = write(SwanlabSink(settle=0), VIEW, {}, row(0)).memo
    with SwanLabServer() as other:
        monkeypatch.setenv("SWANLAB_API_HOST", other.url)
        with pytest.raises(Parked, match=r"was uploaded to .* another --state"):
            write(SwanlabSink(settle=0), VIEW, memo, row(1))
        assert other.experiments == {}


def test_a_rewind_makes_a_fresh_run_and_ends_the_old_one(world: World) -> None:
    """Rows that were uploaded and rewound stay in the old run, marked; the corrected history is whole in the new."""
    first = world.writer()
    first.begin()
    for step in range(10):
        first.row(step, loss=float(step))
    for _ in range(6):
        world.turn()
    second = world.writer(2, resume_step=5)
    second.begin()
    for step in range(5, 12):
        second.row(step, loss=-float(step))
    second.finish()
    world.run()
    old, new = world.server.experiments[RUN], world.server.experiments[f"{RUN}-r2"]

    assert (old.state, old.config["_gapless"]["superseded_by"]) == ("ABORTED", f"{RUN}-r2")
    assert new.points()["loss"] == {step: float(step if step < 5 else -step) for step in range(12)}
    assert (new.state, new.duplicates.total, old.duplicates.total) == ("FINISHED", 0, 0)


@pytest.mark.parametrize("on_rewind", ["keep-first", "mark"])
def test_what_else_a_rewind_may_do(world: World, on_rewind: str) -> None:
    """`keep-first` keeps what is there and counts the rest; `mark` has the repeated steps twice, with both values."""
    world.on_rewind = on_rewind
    first = world.writer()
    first.begin()
    for step in range(10):
        first.row(step, loss=float(step))
    for _ in range(6):
        world.turn()
    second = world.writer(2, resume_step=5)
    second.begin()
    for step in range(5, 12):
        second.row(step, loss=-float(step))
    second.finish()
    world.run()
    kept = [(step, "loss", repr(float(step))) for step in range(10)]
    added = [(step, "loss", repr(-float(step))) for step in range(10 if on_rewind == "keep-first" else 5, 12)]

    assert sorted(kept + added) == raw_points(world.experiment)
    refused = world.progress()["refused"].get("a rewound step that was uploaded: the first one is kept", 0)
    assert refused == (5 if on_rewind == "keep-first" else 0)
    (check,) = world.told(RunChecked)
    assert check.complete  # type: ignore[attr-defined]
    assert check.result.startswith("all 12" if on_rewind == "keep-first" else "not counted")  # type: ignore[attr-defined]
    assert list(world.server.experiments) == [RUN]


def test_offline_the_merged_history_is_sent(world: World) -> None:
    """Two attempts that overlap, uploaded afterwards: one run, the newer attempt's rows, each once."""
    first = world.writer()
    first.begin()
    for step in range(26):
        first.row(step, loss=float(step))
    second = world.writer(2, resume_step=20)
    second.begin()
    for step in range(20, 41):
        second.row(step, loss=-float(step))
    second.finish()
    world.run()

    assert list(world.server.experiments) == [RUN]
    assert world.experiment.points()["loss"] == {s: float(s if s < 20 else -s) for s in range(41)}
    assert world.experiment.duplicates.total == 0


def test_a_lost_state_after_a_rewind_is_not_guessed(world: World) -> None:
    """When the state that knew of a rewind is lost, the run is parked rather than mixed."""
    test_a_rewind_makes_a_fresh_run_and_ends_the_old_one(world)
    before = raw_points(world.server.experiments[RUN])
    world.kill()
    world.lose_state()
    world.run()

    assert "was rewound" in world.told(RunParked)[-1].reason  # type: ignore[attr-defined]
    assert raw_points(world.server.experiments[RUN]) == before


# The count at the end


def finished_run(world: World) -> None:
    writer = world.writer()
    writer.begin()
    for step in range(10):
        writer.row(step, loss=1.0, lr=nan)
        writer.add("text", {"key": "note", "text": f"t{step}"}, step)
    writer.finish()


def test_the_count_at_the_end_stands_in_status(world: World) -> None:
    """After the end every key is counted at the tracker; `status` says that all is there."""
    finished_run(world)
    world.run()
    (sink,) = read_status([world.spool], world.state).runs[0].sinks

    assert sink.check == {"ok": True, "text": "all 30 points of 3 keys are at the tracker"}
    assert world.uploader is not None
    assert not world.uploader.found_damage


@pytest.mark.parametrize("losing", ["some", "all of a key"])
def test_points_that_the_tracker_lost_are_found(world: World, losing: str) -> None:
    """A server that acknowledged and did not keep is found out by the count: status and exit code say so."""
    finished_run(world)
    while not world.told(StateChanged) or world.told(StateChanged)[-1].state != "finished":  # type: ignore[attr-defined]
        world.turn()
    rows = world.experiment.rows
    rows.all()
    lost = [row for row in rows._rows if row.key == "loss" and (row.step in (3, 4) or losing != "some")]
    rows._rows = [row for row in rows._rows if row not in lost]
    world.run()
    status = read_status([world.spool], world.state)
    check = status.runs[0].sinks[0].check

    assert check is not None
    assert not check["ok"]
    assert check["missing"] == len(lost)
    assert "another --state" in check["text"]
    assert status.damaged
    assert world.uploader is not None
    assert world.uploader.found_damage


def test_a_killed_uploader_counts_later(world: World) -> None:
    """An uploader that dies between the end and its count does it when it is started again."""
    finished_run(world)
    while not world.told(StateChanged) or world.told(StateChanged)[-1].state != "finished":  # type: ignore[attr-defined]
        world.turn()
    assert world.told(RunChecked) == []
    world.kill()
    world.run()

    assert [event.complete for event in world.told(RunChecked)] == [True]  # type: ignore[attr-defined]
    assert world.server.count("state") == 1


def test_what_is_missing_is_sent_by_a_replay_with_another_state(world: World) -> None:
    """The way out that the count names: a fresh state finds what is there and sends only the rest."""
    finished_run(world)
    world.run()
    rows = world.experiment.rows
    rows._rows = [row for row in rows._rows if not (row.key == "loss" and row.step in (3, 4))]
    world.kill()
    world.lose_state()
    world.run()

    assert world.experiment.points()["loss"] == dict.fromkeys(range(10), 1.0)
    assert world.experiment.duplicates.total == 0
    assert world.told(RunChecked)[-1].complete  # type: ignore[attr-defined]


# Drift


def test_a_point_of_each_session_is_read_back(world: World) -> None:
    """A server that acknowledges and keeps nothing is found out after the settle time, long before the run's end."""
    writer = world.writer()
    writer.begin()
    writer.row(0, loss=1.0)
    for _ in range(6):
        world.turn()
    world.experiment.rows.batches.clear()
    world.pass_time(61)
    writer.row(1, loss=1.0)
    for _ in range(6):
        world.turn()

    assert "cannot be read back" in world.told(RunParked)[-1].reason  # type: ignore[attr-defined]
    assert raw_points(world.experiment) == []


def test_a_newer_library_warns_once(server: SwanLabServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version with which the sink was compared is stated, and a newer one installed says so."""
    monkeypatch.setattr("gapless_uploader.sinks.swanlab.version", lambda name: "0.12.0")
    sink = SwanlabSink(settle=0)
    with pytest.warns(RuntimeWarning, match=r"swanlab 0\.12\.0 is newer than 0\.10\.3"):
        sink.open(VIEW, {}).close()
    sink.open(VIEW, {}).close()

    monkeypatch.setattr("gapless_uploader.sinks.swanlab.version", lambda name: "0.10.9")
    SwanlabSink(settle=0).open(VIEW, {}).close()


def test_the_budget_is_asked_before_every_request(server: SwanLabServer) -> None:
    """With the bytes that are about to go out: several requests a step cost so many."""
    asked: list[int] = []
    sink = SwanlabSink(settle=0.1, audit=False)
    sink.meter = asked.append
    write(sink, view(), {}, row(0, loss=1.0))

    assert len(asked) > 3, "login, project, experiment, points"
    assert max(asked) > 50
