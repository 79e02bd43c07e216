"""Values and keys: what arrives, what is renamed, what is counted as refused."""

from __future__ import annotations

import json
from hashlib import sha256
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import pytest

from gapless_schemas import encode_row
from gapless_uploader.operations import Amend, Media, MediaItem, Row, Table, Text
from gapless_uploader.plain_records import PlainDecoder, PlainRecord
from gapless_uploader.sink import Ack, RunView
from gapless_uploader.sinks._wandb_draft import Draft
from gapless_uploader.sinks._wandb_lines import careful_body, line, quick_body, split, spool_key, tracker_key
from gapless_uploader.sinks._wandb_progress import Progress
from gapless_uploader.sinks._wandb_proof import same
from tests.servers.wandb_server import Run, WandbServer
from tests.servers.wandb_server.client import run_client
from tests.sinks.harness import T0, batch, row, view
from tests.sinks.wandb.loopback import make_sink

RUN = view()


def send(server: WandbServer, *operations: Any, **options: Any) -> tuple[Run, Ack]:
    """What the server holds after one session."""
    session = make_sink(server, **options).open(RUN, {})
    ack = session.write(batch(RUN, *operations))
    return server.run("grpo", "r-1"), ack


def stored(folder: Path, content: bytes, extension: str) -> Path:
    path = folder / f"{sha256(content).hexdigest()}.{extension}"
    path.write_bytes(content)
    return path


# Keys


@pytest.mark.parametrize(
    "key", ["", "_step", "_timestamp", "_runtime", "_wandb", "_gapless", "~", "~~", "~_step", "~~_step"]
)
def test_a_key_that_wandb_keeps_to_itself_comes_back(key: str) -> None:
    """Every such key has a name of its own at W&B, and the name says which key it was."""
    assert tracker_key(key) != key
    assert spool_key(tracker_key(key)) == key


@pytest.mark.parametrize("key", ["loss", "a/b", "_private", "~tilde", "__step", "a_step", ".", "損失"])
def test_other_keys_stay(key: str) -> None:
    """Nothing else is renamed."""
    assert (tracker_key(key), spool_key(key)) == (key, key)


def test_renamed_keys_arrive_and_are_said_in_the_config(server: WandbServer) -> None:
    """A metric called `_step` arrives beside the step, under a name that the config explains."""
    run, ack = send(server, row(3, _step=9.0, loss=0.5), row(4, **{"": 1.0}))

    assert [(r["_step"], r.get("~_step"), r.get("~")) for r in run.rows] == [(3, 9.0, None), (4, None, 1.0)]
    assert run.config["gapless_renamed_keys"] == {"~_step": "_step", "~": ""}
    assert ack.refused == []


# Numbers


def test_numbers_are_what_they_were(server: WandbServer) -> None:
    """NaN and both infinities, integers to 63 bits, and floats to the last bit."""
    values = {"nan": nan, "up": inf, "down": -inf, "int": 2**63 - 1, "low": -(2**63), "third": 1 / 3, "tiny": 5e-324}
    run, _ = send(server, row(0, **values))
    (held,) = run.rows

    assert isnan(held.pop("nan"))
    assert {key: held[key] for key in values if key != "nan"} == {k: v for k, v in values.items() if k != "nan"}


def test_an_integer_beyond_64_bits_is_the_float_that_the_client_sends(server: WandbServer) -> None:
    """As W&B's client does; one beyond a float is refused by name, and the rest of its row arrives."""
    run, ack = send(server, row(0, big=2**64 + 7, loss=0.5, huge=10**400, deep=[2**70, 1]))
    (held,) = run.rows

    assert (held["big"], held["deep"], held["loss"]) == (float(2**64 + 7), [float(2**70), 1], 0.5)
    assert "huge" not in held
    assert [(refusal.step, refusal.key) for refusal in ack.refused] == [(0, "huge")]


def test_an_integer_beyond_63_bits_is_a_float_and_is_proved(server: WandbServer) -> None:
    """64 bits without a sign are no integer at W&B; the read-back does not take the float for another value."""
    run, ack = send(server, row(0, big=2**64 - 1, loss=0.5), row(1, big=2**63 - 1, loss=0.5))

    assert [held["big"] for held in run.rows] == [float(2**64), 2**63 - 1]
    assert ack.refused == []
    assert same({"a": [2**64 - 1]}, {"a": [float(2**64)]})
    assert not same(2**53 + 1, 2**53)
    assert not same(2**53, float(2**53 - 1))
    assert not same(10**400, inf)


def test_the_quick_and_the_careful_way_agree() -> None:
    """A row that orjson writes alone is the row that Python's json writes."""
    values = {"a": 1, "b": 1 / 3, "c": 1e300, "d": True, "e": 'x "y"', "f": [1, 2.5], "g": -0.0}
    quick = quick_body(values)

    assert quick is not None
    assert json.loads(quick) == json.loads(careful_body(values)) == values
    assert json.loads(line(5, 1.5, 0.25, quick)) == {"_step": 5, "_timestamp": 1.5, "_runtime": 0.25, **values}
    assert json.loads(line(5, 1.5, 0.25, "{}")) == {"_step": 5, "_timestamp": 1.5, "_runtime": 0.25}
    assert [quick_body({key: 1.0}) for key in ("_step", "~", "")] == [None] * 3
    assert quick_body({"a": nan}) is None
    assert quick_body({"a": 2**64 - 1}) is None  # W&B would keep a float


def test_a_split_row_holds_every_key_once() -> None:
    """Parts stay within the limit, keep the order of keys and lose none."""
    values = {f"k{place}": place / 7 for place in range(100)}
    parts = split(values, 200)
    joined = [pair for part in parts for pair in json.loads(part).items()]

    assert joined == list(values.items())
    assert max(map(len, parts)) <= 200
    assert len(parts) < 20


# Text, tables, media


def test_a_text_is_a_text(server: WandbServer) -> None:
    """A Text arrives whole, whatever is in it; a long one is a file and says so."""
    run, _ = send(server, row(0, note=Text("line\n\u2028 \ud800 🚀")), row(1, note=Text("y" * (2 << 20))))

    assert run.rows[0]["note"] == "line\n\u2028 \\ud800 🚀"
    assert run.files[run.rows[1]["note"].rpartition(": ")[2].rstrip("]")] == b"y" * (2 << 20)


def test_verls_generations_are_the_new_rows_of_each_validation(server: WandbServer, tmp_path: Path) -> None:
    """Each validation is a table of its own rows, loaded by W&B's own API; no upload repeats an earlier row."""
    columns = ["step", "input_1", "output_1", "score_1"]
    tables = [Table(columns, [[step, f"q{step}", f"a{step}", step / 10]]) for step in (10, 20, 30)]
    run, _ = send(server, *(row(t.rows[0][0], **{"val/generations": t}) for t in tables))
    script = """
        run = wandb.Api().run("acme/grpo/r-1")
        names = [a.name for a in run.logged_artifacts()]
        report(names=names, data=[a.get("val/generations").data for a in run.logged_artifacts()])
    """
    found = run_client(server.url, tmp_path / "client", script)

    assert found["names"] == [f"run-r-1-valgenerations-{suffix}" for suffix in suffixes(found["names"])]
    assert found["data"] == [table.rows for table in tables]
    assert [value["nrows"] for value in (r["val/generations"] for r in run.rows)] == [1, 1, 1]
    assert sum(len(data) for name, data in run.files.items() if "table" in name) < 3 * 120


def suffixes(names: list[str]) -> list[str]:
    return [name.rpartition("-")[2] for name in names]


def test_an_incremental_table_goes_on_after_a_lost_state(server: WandbServer) -> None:
    """log_mode INCREMENTAL counts its parts through all sessions, each with the new rows alone."""
    sink = make_sink(server)
    for step in (1, 2, 3):
        memo: dict[str, Any] = {}
        if step > 1:
            from gapless_uploader.sink import Resume

            with pytest.raises(Resume) as found:
                sink.open(RUN, {})
            memo = found.value.memo
        table = Table(["dropped"], [[f"prompt {step}"]], "INCREMENTAL")
        sink.open(RUN, memo).write(batch(RUN, row(step, dapo=table)))
    rows = [held["dapo"] for held in server.run("grpo", "r-1").rows]

    assert [held["increment_num"] for held in rows] == [0, 1, 2]
    assert [held["nrows"] for held in rows] == [1, 2, 3]
    assert rows[2]["previous_increments_paths"] == [rows[0]["artifact_path"], rows[1]["artifact_path"]]
    assert [a["state"] for a in server.run("grpo", "r-1").artifacts] == ["COMMITTED"] * 3


def test_a_repeated_request_makes_no_second_version(server: WandbServer) -> None:
    """The same table again, after a lost answer, is the same media file and the same artifact version."""
    session = make_sink(server).open(RUN, {})
    one = batch(RUN, row(1, table=Table(["a"], [[1]])))
    server.arm("file_stream", "reset", when="after")
    with pytest.raises(Exception, match="file_stream"):
        session.write(one)
    assert session.write(one).done == 1
    run = server.run("grpo", "r-1")

    assert len(run.artifacts) == 1
    assert len(run.files) == 1
    assert len(run.lines) == 1


def test_rows_above_a_tables_limit_are_counted(server: WandbServer) -> None:
    """W&B takes 200,000 rows: what is above is said, and stays in the spool."""
    _, ack = send(server, row(1, table=Table(["a"], [[1]] * 200_050)))

    assert [refusal.reason for refusal in ack.refused] == ["50 rows of a table above the 200000"]


def test_media_are_files_with_their_real_types(server: WandbServer, tmp_path: Path) -> None:
    """Image, video, audio, histogram and file have the fields that W&B's own client writes, and their bytes."""
    video, sound, other = (stored(tmp_path, name.encode(), name) for name in ("mp4", "wav", "bin"))
    values = {
        "clip": Media("video", [MediaItem(video, {"caption": "vid", "width": 8, "height": 6})]),
        "say/it": Media("audio", [MediaItem(sound, {"sample_rate": 16_000})]),
        "two": Media("audio", [MediaItem(sound, {"sample_rate": 8_000, "caption": "c"}), MediaItem(sound, {})]),
        "hist": Media("histogram", [MediaItem(None, {"counts": [1, 2], "edges": [0.0, 1.0, 2.0]})]),
        "dump": Media("file", [MediaItem(other, {"name": "core dump.bin"})]),
    }
    run, _ = send(server, row(7, **values))
    (held,) = run.rows
    digest = video.name[:64]

    assert held["clip"] == {
        "_type": "video-file", "sha256": digest, "size": 3, "path": f"media/videos/clip_7_{digest[:20]}.mp4",
        "width": 8, "height": 6, "caption": "vid",
    }  # fmt: skip
    assert held["say/it"]["path"].startswith("media/audio/say/it_7_")
    assert (held["two"]["_type"], held["two"]["count"], held["two"]["captions"]) == ("audio", 2, ["c", None])
    assert held["hist"] == {"_type": "histogram", "values": [1, 2], "bins": [0.0, 1.0, 2.0]}
    assert run.files[held["dump"]] == b"bin"
    assert held["dump"].endswith("/core dump.bin")
    assert {run.files[name] for name in run.uploaded if name.startswith("media/")} == {b"mp4", b"wav", b"bin"}
    assert run.summary["clip"] == held["clip"]


def test_a_name_of_an_untrusted_spool_stays_in_its_folder(server: WandbServer, tmp_path: Path) -> None:
    """Keys and file names with dots and slashes name nothing outside the run's media."""
    path = stored(tmp_path, b"x", "bin")
    run, _ = send(server, row(0, **{"../../up": Media("file", [MediaItem(path, {"name": "../../../etc/passwd"})])}))

    assert [".." in name.split("/") for name in run.files] == [False]


def test_media_of_an_amended_row_are_sent_once(server: WandbServer, tmp_path: Path) -> None:
    """More keys for a step repeat its row, and not its tables."""
    session = make_sink(server).open(RUN, {})
    first = row(3, table=Table(["a"], [[1]], "INCREMENTAL"), loss=0.5)
    session.write(batch(RUN, first))
    puts = sum("storage-put" in request.names for request in server.requests)
    session.write(batch(RUN, Amend(3, T0 + 9, 3.0, {**first.values, "acc": 0.25}, ("acc",))))
    (held,) = server.run("grpo", "r-1").rows

    assert (held["acc"], held["table"]["increment_num"]) == (0.25, 0)
    assert sum("storage-put" in request.names for request in server.requests) == puts


def test_a_payload_that_went_away_costs_its_key_alone(server: WandbServer, tmp_path: Path) -> None:
    """A media file that is not there is refused by name; the row's numbers arrive."""
    gone = Media("image", [MediaItem(tmp_path / f"{'a' * 64}.png", {"format": "png"})])
    run, ack = send(server, Row(1, T0, 0.0, {"loss": 0.5, "image": gone}))

    assert [(refusal.step, refusal.key) for refusal in ack.refused] == [(1, "image")]
    assert run.rows[0]["loss"] == 0.5


@pytest.mark.parametrize("key", ["lr", "a~b", "~b", "_step", "~_step", "é"])
def test_a_row_has_the_same_line_with_and_without_its_text(key: str) -> None:
    """A restart may read it the other way, and a line never gets other content."""
    decoder = PlainDecoder()
    lines = [encode_row(seq, 1.0, 0.5, seq, {key: 1e-05, "loss": 0.5}) for seq in range(1, 100)]
    decoder.decode_lines([line for line in lines if line])
    (record,) = decoder.decode_lines([line for line in lines[-1:] if line])
    assert isinstance(record, PlainRecord)
    made = []
    for one in (Row(99, 1.0, 0.5, None, True, record), Row(99, 1.0, 0.5, record.data, True)):
        draft = Draft(RunView("p", "r", 0.0, "h"), Progress(), "p/r", 1_000_000, 0)
        draft.take([one], 10, 1_000_000)
        made.append(draft.lines)
    assert made[0] == made[1]
