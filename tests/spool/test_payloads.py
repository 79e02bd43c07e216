"""Tables, texts, histograms, pictures, films, sounds and files, and rows that do not fit a line."""

from __future__ import annotations

import io
import json
import math
import os
import wave
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import orjson
import pandas
import pytest
import torch
from PIL import Image as Pillow

import gapless
import gapless_schemas
from gapless_schemas import MAX_LINE_BYTES, Record, is_media_name
from tests.spool.oracle import only, raw, segments

SCHEMA = json.loads((Path(gapless_schemas.__file__).parent / "record.schema.json").read_text())


def logged(tmp_path: Path, data: Any) -> tuple[list[Record], Path, gapless.Stats]:
    """The records of one call of `log`, all valid by the schema; the run's folder; what was counted."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log(data, step=7)
    for line in raw(run.path):
        jsonschema.validate(line, SCHEMA)
    for segment in segments(run.path):
        assert max(map(len, segment.read_bytes().split(b"\n"))) < MAX_LINE_BYTES
    found = [record for record in only(run.path) if record.kind not in ("run", "system", "finish")]
    return found, run.path, run.stats()


def payload(folder: Path, name: str) -> bytes:
    """The stored file, which has the name of its content."""
    assert is_media_name(name)
    content = (folder / "media" / name).read_bytes()
    assert name.partition(".")[0] == sha256(content).hexdigest()
    return content


def picture(folder: Path, record: Record) -> np.ndarray:
    (item,) = record.data["items"]
    return np.asarray(Pillow.open(io.BytesIO(payload(folder, item["media"]))))


def test_a_row_and_its_payloads_share_step_and_time(tmp_path: Path) -> None:
    """One metrics record, then one record a payload, under their joined keys."""
    found, _, _ = logged(
        tmp_path, {"loss": 1.0, "val": {"t": gapless.Text("hi")}, "tab": gapless.Table(["a"], [[1]]), "n": 2}
    )

    assert [(record.kind, record.step) for record in found] == [("metrics", 7), ("text", 7), ("table", 7)]
    assert len({record.t for record in found}) == 1
    assert found[0].data == {"loss": 1.0, "n": 2}
    assert found[1].data == {"key": "val/t", "text": "hi"}
    assert found[2].data == {"key": "tab", "columns": ["a"], "rows": [[1]]}


def test_a_payload_alone_takes_the_next_step(tmp_path: Path) -> None:
    """A call with nothing but a payload makes no empty row, and counts as a step."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({"x": 1})
        run.log({"t": gapless.Text("hi")})
        run.log({})
        run.log({"x": 2})

    assert [(r.kind, r.step) for r in only(run.path) if r.step is not None] == [
        ("metrics", 0),
        ("text", 1),
        ("metrics", 2),
    ]


def test_small_tables_are_inline_and_keep_their_values(tmp_path: Path) -> None:
    """Cells are any values, marks included; a DataFrame is a table."""
    table = gapless.Table(columns=["a", "b"], log_mode="MUTABLE")
    table.add_data(math.nan, np.float32(0.5))
    table.add_data(2**70, "ok \ud800")
    found, _, _ = logged(tmp_path, {"t": table, "d": gapless.Table(dataframe=pandas.DataFrame({"x": [1, 2]}))})

    assert found[0].data["rows"][0][1] == 0.5
    assert math.isnan(found[0].data["rows"][0][0])
    assert found[0].data["rows"][1] == [2**70, "ok \\ud800"]
    assert found[0].data["log_mode"] == "MUTABLE"
    assert found[1].data == {"key": "d", "columns": ["x"], "rows": [[1], [2]]}


def test_large_tables_and_texts_go_beside_the_spool(tmp_path: Path) -> None:
    """Beyond 256 KiB the line holds a reference; the file has the whole, with marks, under its sha256."""
    rows = [[number, "x" * 100, math.inf if number == 3 else 0.5] for number in range(5000)]
    found, folder, stats = logged(
        tmp_path, {"t": gapless.Table(["n", "s", "f"], rows), "text": gapless.Text("é" * 400_000)}
    )
    table, text = found
    stored = json.loads(payload(folder, table.data["media"]))

    assert (table.data["num_rows"], table.data["columns"]) == (5000, ["n", "s", "f"])
    assert stored["rows"][:3] == rows[:3]
    assert stored["rows"][3][2] is None
    assert stored["marks"] == [[["rows", 3, 2], "inf"]]
    assert len(stored["rows"]) == 5000
    assert payload(folder, text.data["media"]).decode() == "é" * 400_000
    assert stats.refused == 0


@pytest.mark.parametrize("size", [300_000, 900_000, 1_100_000, 64 << 20])
def test_a_text_value_of_any_length_is_whole(tmp_path: Path, size: int) -> None:
    """A text in a row that is too long for a line becomes a text record; the rest of the row stays a row."""
    text = "0123456789abcdef" * (size // 16)
    with gapless.init("p", dir=tmp_path, finish_timeout=120) as run:
        run.log({"loss": 1.0, "output": text})
    found = [record for record in only(run.path) if record.step == 0]
    (whole,) = (r for r in found if r.data.get("key") == "output" or "output" in r.data)

    assert found[0].data["loss"] == 1.0
    if whole.kind == "metrics":
        assert whole.data["output"] == text
    else:
        assert payload(run.path, whole.data["media"]).decode() == text


def test_a_row_too_long_for_a_line_is_split(tmp_path: Path) -> None:
    """40,000 metrics, some of them marked, are records of one step and time, and together the row."""
    data = {f"metric/{number:05d}/of/many": math.nan if number % 100 == 0 else number / 7 for number in range(40_000)}
    found, _, stats = logged(tmp_path, data)
    whole: dict[str, Any] = {}
    for record in found:
        assert (record.kind, record.step, record.t) == ("metrics", 7, found[0].t)
        assert not whole.keys() & record.data.keys()
        whole.update(record.data)

    assert len(found) > 1
    assert whole.keys() == data.keys()
    assert all(whole[k] == v or (math.isnan(v) and math.isnan(whole[k])) for k, v in data.items())
    assert stats.refused == 0


def test_a_config_too_long_for_a_line_is_split(tmp_path: Path) -> None:
    """A config of several MB, nested, is the run record and config records that merge to it."""
    config = {"a": {f"k{n}": "x" * 1000 for n in range(3000)}, "b": {"c": {f"k{n}": [n] * 100 for n in range(3000)}}}
    with gapless.init("p", dir=tmp_path, config=config) as run:
        pass
    merged: dict[str, Any] = {}

    def merge(into: dict[str, Any], part: dict[str, Any]) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                merge(into.setdefault(key, {}), value)
            else:
                into[key] = value

    merge(merged, only(run.path, "run")[0].data["config"])
    for record in only(run.path, "config"):
        merge(merged, record.data)

    assert merged == config
    assert max(len(line) for line in segments(run.path)[0].read_bytes().split(b"\n")) < MAX_LINE_BYTES


def test_what_fits_no_line_is_refused_out_loud(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A list of a million numbers is replaced by a marked note, counted and told; its neighbours are kept."""
    found, _, stats = logged(tmp_path, {"loss": 1.0, "all": list(range(1_000_000)), "k" * 2_000_000: 1})
    whole = {key: value for record in found for key, value in record.data.items()}

    assert whole["loss"] == 1.0
    assert whole["all"].startswith("<refused: ")
    assert stats.refused == 2
    assert "'all' was not kept" in capfd.readouterr().err


def test_histograms_count_their_values(tmp_path: Path) -> None:
    """Counted from lists, arrays and tensors, or given; non-finite values are left out."""
    values = [0.0, 0.1, 0.9, 1.0, math.nan]
    found, _, _ = logged(
        tmp_path,
        {
            "list": gapless.Histogram(values, bins=2),
            "array": gapless.Histogram(np.array(values), bins=2),
            "tensor": gapless.Histogram(torch.tensor(values, requires_grad=True), bins=2),
            "given": gapless.Histogram(counts=[1, 2], edges=[0, 1, 2]),
            "one": gapless.Histogram([5, 5], bins=1),
        },
    )
    items = [(record.data["type"], *record.data["items"]) for record in found]

    assert items[:3] == [("histogram", {"edges": [0.0, 0.5, 1.0], "counts": [2.0, 2.0]})] * 3
    assert items[3][1] == {"edges": [0.0, 1.0, 2.0], "counts": [1.0, 2.0]}
    assert items[4][1] == {"edges": [4.5, 5.5], "counts": [2.0]}


CHESS = (np.indices((6, 9)).sum(axis=0) % 2 * 255).astype(np.uint8)
COLOURS = np.arange(6 * 9 * 3, dtype=np.uint8).reshape(6, 9, 3)


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (CHESS, CHESS),
        (CHESS[:, :, None], CHESS),
        (CHESS / 255.0, CHESS),
        (CHESS > 0, CHESS),
        (CHESS.tolist(), CHESS),
        (COLOURS, COLOURS),
        (COLOURS.transpose(2, 0, 1), COLOURS),
        (torch.from_numpy(COLOURS).permute(2, 0, 1), COLOURS),
        (torch.from_numpy(COLOURS).permute(2, 0, 1).bfloat16() / 255 * 0 + 1, np.full((6, 9, 3), 255)),
        (Pillow.fromarray(COLOURS), COLOURS),
        (Pillow.fromarray(CHESS).convert("1"), np.stack([CHESS] * 3, axis=2)),
        (np.dstack([COLOURS, CHESS]), np.dstack([COLOURS, CHESS])),
    ],
)
def test_images_of_every_make_are_stored_as_they_are(tmp_path: Path, data: Any, pixels: np.ndarray) -> None:
    """Arrays, tensors and PIL images of any layout become a PNG file with the same pixels."""
    found, folder, _ = logged(tmp_path, {"i": gapless.Image(data, caption="c")})

    assert np.array_equal(picture(folder, found[0]), pixels)
    item = found[0].data["items"][0]
    assert (item["width"], item["height"], item["caption"], item["format"]) == (9, 6, "c", "png")


def test_an_image_is_copied_when_it_is_logged(tmp_path: Path) -> None:
    """Changing the array afterwards changes nothing, also while the writer has not come to it."""
    with gapless.init("p", dir=tmp_path) as run:
        array = COLOURS.copy()
        run.log({"i": gapless.Image(array)})
        array[:] = 0

    assert np.array_equal(picture(run.path, only(run.path, "media")[0]), COLOURS)


def test_figures_videos_sounds_and_files(tmp_path: Path) -> None:
    """A matplotlib figure, frames, samples, encoded bytes and paths are stored with what belongs to them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    source = tmp_path / "weights.BIN"
    source.write_bytes(b"abc")
    jpeg = io.BytesIO()
    Pillow.fromarray(COLOURS).save(jpeg, "JPEG")
    found, folder, stats = logged(
        tmp_path / "spool",
        {
            "figure": gapless.Image(figure),
            "video": gapless.Video(np.stack([COLOURS, 255 - COLOURS]), fps=2),
            "tensor video": gapless.Video(torch.zeros(2, 3, 4, 5)),
            "audio": gapless.Audio(np.sin(np.arange(800) / 10), sample_rate=8000, caption="tone"),
            "file": gapless.File(source),
            "bytes": gapless.Image(jpeg.getvalue()),
            "list": [gapless.Image(CHESS), gapless.Image(COLOURS)],
        },
    )
    by_key = {record.data["key"]: record.data for record in found}
    film = Pillow.open(io.BytesIO(payload(folder, by_key["video"]["items"][0]["media"])))
    with wave.open(io.BytesIO(payload(folder, by_key["audio"]["items"][0]["media"]))) as sound:
        assert (sound.getframerate(), sound.getnframes(), sound.getnchannels()) == (8000, 800, 1)

    assert picture(folder, found[0]).shape == (50, 100, 4)
    assert (film.n_frames, film.size, film.info["duration"]) == (2, (9, 6), 500)
    assert by_key["tensor video"]["items"][0]["width"] == 5
    assert by_key["audio"]["items"][0]["caption"] == "tone"
    assert payload(folder, by_key["file"]["items"][0]["media"]) == b"abc"
    assert by_key["file"]["items"][0]["name"] == "weights.BIN"
    assert by_key["file"]["items"][0]["media"].endswith(".bin")
    assert by_key["bytes"]["items"][0]["format"] == "jpg"
    assert payload(folder, by_key["bytes"]["items"][0]["media"]) == jpeg.getvalue()
    assert len(by_key["list"]["items"]) == 2
    assert stats.refused == 0


def test_files_that_cannot_be_copied_are_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A missing file, a folder and a FIFO cost themselves: the record says why, the run goes on."""
    os.mkfifo(tmp_path / "fifo")
    with gapless.init("p", dir=tmp_path / "spool") as run:
        run.log({"missing": gapless.File(tmp_path / "no"), "folder": gapless.File(tmp_path)}, step=7)
        run.log({"fifo": gapless.File(tmp_path / "fifo")}, step=7)
        run.log({"x": 1})
    found = only(run.path, "media")

    assert [record.data["items"] for record in found] == [[], [], []]
    assert all(len(record.data["errors"]) == 1 for record in found)
    assert run.stats().refused == 3
    assert "cannot be opened" in capfd.readouterr().err
    assert len(only(run.path, "metrics")) == 1


def test_the_same_payload_is_stored_once(tmp_path: Path) -> None:
    """A thousand logs of one picture are one file, and nothing temporary is left."""
    with gapless.init("p", dir=tmp_path) as run:
        for _ in range(100):
            run.log({"i": gapless.Image(CHESS), "t": gapless.Text("x" * 300_000)})

    assert len(list((run.path / "media").iterdir())) == 2
    assert len(only(run.path, "media")) == 100


def test_a_long_run_makes_few_files(tmp_path: Path) -> None:
    """10,000 steps with 1,000 small tables: one segment and the claim."""
    with gapless.init("p", dir=tmp_path) as run:
        for step in range(10_000):
            run.log({"x": step, **({"t": gapless.Table(["a"], [[step]])} if step % 10 == 0 else {})})
        assert run._writer.described.wait(60)

    assert len([path for path in run.path.rglob("*") if path.is_file()]) == 2
    assert orjson.loads(segments(run.path)[0].read_bytes().split(b"\n")[-2])["seq"] == 11_003
