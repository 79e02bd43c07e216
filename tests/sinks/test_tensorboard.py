"""TensorBoard itself reads what the sink wrote: its two loaders behind a real server, and its hparams plugin."""

import html
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gapless_uploader.operations import Config, Media, MediaItem, Rewind, State, Table, Text
from gapless_uploader.sink import Parked, Retryable
from gapless_uploader.sinks.tensorboard import TensorboardSink
from tests.sinks.harness import T0, amend, batch, row, view, write

RUN = view(config={"lr": 0.1, "model": {"layers": 12, "name": "qwen", "dims": [1, 2]}})
FOLDER = "grpo/Qwen-7B@r-1"


class Server:
    """A TensorBoard at a free port."""

    def __init__(self, logdir: Path, loader: str) -> None:
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
        command += ["--load_fast", {"fast": "true", "python": "false"}[loader], "--reload_interval", "1"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"at (http://\S+)/", line)
            if found:
                self.url = found[1]
                return
        raise AssertionError("TensorBoard did not start")

    def read(self, path: str) -> bytes:
        with urlopen(f"{self.url}/data/{path}", timeout=20) as answer:
            content: bytes = answer.read()
            return content

    def get(self, path: str, **query: str) -> Any:
        return json.loads(self.read(f"{path}?{urlencode(query)}"))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = Request(f"{self.url}/data/{path}", json.dumps(body).encode(), {"content-type": "application/json"})
        with urlopen(request, timeout=20) as answer:
            return json.load(answer)

    def scalars(self, tag: str, plugin: str = "scalars/scalars") -> list[tuple[int, float]]:
        if tag not in self.get("plugin/scalars/tags").get(FOLDER, {}):
            return []
        return [(step, value) for _, step, value in self.get(f"plugin/{plugin}", run=FOLDER, tag=tag)]

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 40
        while not holds():
            assert time.monotonic() < deadline, "TensorBoard never showed it"
            time.sleep(0.1)

    def close(self) -> None:
        self._process.terminate()
        assert self._process.stderr is not None
        self._process.stderr.close()
        self._process.wait(20)


@pytest.fixture
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Callable[[str], Server]]]:
    servers = []

    def serve(loader: str) -> Server:
        servers.append(Server(tmp_path, loader))
        return servers[-1]

    yield tmp_path, serve
    for server in servers:
        server.close()


@pytest.mark.parametrize("loader", ["fast", "python"])
def test_a_real_tensorboard_shows_the_merged_history(served: tuple[Path, Callable[[str], Server]], loader: str) -> None:
    """Rows, a changed value, a late step and a rewind: both of TensorBoard's loaders show what survives, live and anew.

    The fast loader keeps, until TensorBoard is started again, what it read of a tag that never comes again.
    """
    folder, serve = served
    rows = [row(step, loss=step + 0.5) for step in range(16)]
    memo = write(TensorboardSink(str(folder)), RUN, {}, Config(RUN.config), *rows, row(16, only_old=1.0)).memo
    live = serve(loader)
    live.until(lambda: len(live.scalars("loss")) == 16 and live.scalars("only_old") == [(16, 1.0)])
    memo = write(TensorboardSink(str(folder)), RUN, memo, amend(rows[3], loss=99.0)).memo
    changed = [(step, 99.0 if step == 3 else step + 0.5) for step in range(16)]
    live.until(lambda: live.scalars("loss") == changed)

    new = [row(step, t=T0 + 1000 + step, loss=-float(step)) for step in range(10, 13)]
    write(TensorboardSink(str(folder)), RUN, memo, Rewind(10), *new, row(12, late=1.0))
    expected = [*changed[:10], (10, -10), (11, -11), (12, -12)]
    live.until(lambda: live.scalars("loss") == expected)
    fresh = serve(loader)
    fresh.until(lambda: fresh.scalars("loss") == expected)

    assert fresh.scalars("only_old") == []


def test_a_real_tensorboard_shows_text_tables_media_and_hparams(
    served: tuple[Path, Callable[[str], Server]],
) -> None:
    """Texts and tables are rendered, markup in cells is shown as it is, images, histograms and sounds are served."""
    folder, serve = served
    image = folder / "a.png"
    image.write_bytes(b"\x89PNG not looked into")
    sound = folder / "a.wav"
    sound.write_bytes(b"RIFF not looked into")
    values: dict[str, Any] = {
        "note": Text("is **bold**"),
        "samples": Table(["input", "output"], [["a|b <script>alert(1)</script>", "*two*\nlines"]]),
        "val/generations": Table(["step", "input", "output", "score"], [[4, "2+2?", "*four*\n<b>4</b>", 1.0]]),
        "picture": Media("image", [MediaItem(image, {"width": 3, "height": 2})]),
        "sound": Media("audio", [MediaItem(sound, {"sample_rate": 8000, "caption": "hi"})]),
        "weights": Media("histogram", [MediaItem(None, {"edges": [0.0, 1.0, 4.0], "counts": [3, 5]})]),
        "clip": Media("video", [MediaItem(sound, {"format": "mp4"})]),
    }
    ended = State("finished", 0, T0 + 99, 99.0)
    ack = write(TensorboardSink(str(folder)), RUN, {}, Config(RUN.config), row(4, loss=1.0, **values), ended)
    server = serve("fast")
    server.until(lambda: server.scalars("loss") == [(4, 1.0)])

    assert [(refusal.key, refusal.reason) for refusal in ack.refused] == [("clip", "TensorBoard has no video")]
    (note,) = server.get("plugin/text/text", run=FOLDER, tag="note/text_summary")
    assert "<strong>bold</strong>" in note["text"]
    (table,) = server.get("plugin/text/text", run=FOLDER, tag="samples/text_summary")
    assert "<script>" not in table["text"]
    assert "<td>a|b <script>alert(1)</script></td>\n<td>*two* lines</td>" in html.unescape(table["text"])
    (page,) = server.get("plugin/text/text", run=FOLDER, tag="val/generations/text_summary")
    assert "<strong>Generation Results - Step 4</strong>" in page["text"]
    assert "<h3>Sample 1</h3>" in page["text"]
    assert "<strong>Output:</strong> *four*<br />\n<b>4</b>" in html.unescape(page["text"]).replace("<br>", "<br />\n")
    (shown,) = server.get("plugin/images/images", run=FOLDER, tag="picture", sample="0")
    assert (shown["step"], shown["wall_time"]) == (4, T0 + 4)
    assert server.read(f"plugin/images/individualImage?{shown['query']}") == image.read_bytes()
    (heard,) = server.get("plugin/audio/audio", run=FOLDER, tag="sound", sample="0")
    assert heard["contentType"] == "audio/wav"
    ((_, step, buckets),) = server.get("plugin/histograms/histograms", run=FOLDER, tag="weights")
    assert (step, buckets[0][:1], sum(count for *_, count in buckets)) == (4, [0.0], 8.0)
    query = {"experimentName": "", "startIndex": 0, "sliceSize": 9, "colParams": []}
    query["allowedStatuses"] = ["STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING", "STATUS_UNKNOWN"]
    (group,) = server.post("plugin/hparams/session_groups", query)["sessionGroups"]
    assert group["hparams"] == {"lr": 0.1, "model.layers": 12.0, "model.name": "qwen", "model.dims": "[1, 2]"}
    assert [one["status"] for one in group["sessions"]] == ["STATUS_SUCCESS"]
    assert [one["endTimeSecs"] for one in group["sessions"]] == [T0 + 99]


def test_the_classic_reader_reads_scalars(tmp_path: Path) -> None:
    """`EventAccumulator.Scalars`, which most scripts use, gives steps, values and wall clocks."""
    write(TensorboardSink(str(tmp_path)), RUN, {}, row(0, loss=0.5), row(7, loss=0.25))
    events = EventAccumulator(str(tmp_path / FOLDER)).Reload().Scalars("loss")

    assert [(event.wall_time, event.step, event.value) for event in events] == [(T0, 0, 0.5), (T0 + 7, 7, 0.25)]


def test_double_precision_keeps_all_bits(tmp_path: Path) -> None:
    """`precision="double"` holds what 32 bits would round."""
    sink = TensorboardSink(str(tmp_path), precision="double")
    write(sink, RUN, {}, row(0, tokens=16_777_217, third=1 / 3))
    held = EventAccumulator(str(tmp_path / FOLDER)).Reload()

    assert [held.Tensors(tag)[0].tensor_proto.double_val[0] for tag in ("tokens", "third")] == [16_777_217.0, 1 / 3]


def test_a_number_that_would_become_infinite_is_refused(tmp_path: Path) -> None:
    """A finite number beyond 32 bits is counted, never shown as infinity."""
    ack = write(TensorboardSink(str(tmp_path)), RUN, {}, row(0, huge=1e300, loss=1.0))

    assert [(one.step, one.key, one.reason) for one in ack.refused] == [(0, "huge", "a number beyond a 32-bit float")]


# Crashes and the disk


def rows_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.rows")
    return path


def test_every_torn_write_is_cut_back(tmp_path: Path) -> None:
    """Wherever a write was torn, opening with the memo and the same batch leave the bytes of an undisturbed run."""
    sink = TensorboardSink(str(tmp_path))
    memo = write(sink, RUN, {}, row(0), row(1)).memo
    write(sink, RUN, memo, row(2), row(3))
    path = rows_file(tmp_path)
    whole = path.read_bytes()
    for length in range(memo["length"], len(whole)):
        path.write_bytes(whole[:length])
        write(sink, RUN, memo, row(2), row(3))

        assert whole == path.read_bytes()


def test_a_crash_in_a_rewind_is_undone(tmp_path: Path) -> None:
    """Between the new file and the checkpoint the old one stays hidden, and comes back with the old memo."""
    sink = TensorboardSink(str(tmp_path))
    memo = write(sink, RUN, {}, row(0), row(1), row(2)).memo
    before = rows_file(tmp_path).read_bytes()
    later = write(sink, RUN, memo, Rewind(1), row(1, loss=9.0)).memo

    sink.open(RUN, memo).close()
    assert before == rows_file(tmp_path).read_bytes()

    again = write(sink, RUN, memo, Rewind(1), row(1, loss=9.0)).memo
    assert again == later

    sink.open(RUN, again).close()
    assert [path.name for path in rows_file(tmp_path).parent.iterdir()] == [rows_file(tmp_path).name]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails is taken back and asked for again; then every row is there once."""
    session = TensorboardSink(str(tmp_path)).open(RUN, {})
    session.write(batch(RUN, row(0)))
    before = rows_file(tmp_path).read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(Retryable, match="No space left on device"):
            session.write(batch(RUN, row(1), amend(row(0), loss=2.0)))
    assert before == rows_file(tmp_path).read_bytes()

    session.write(batch(RUN, row(1), amend(row(0), loss=2.0)))
    session.close()
    events = EventAccumulator(str(tmp_path / FOLDER)).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(0, 2.0), (1, 1.5)]


def test_a_folder_that_may_not_be_written_parks_the_run(tmp_path: Path) -> None:
    """What only a person can mend is said with the way out, and not tried for ever."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Parked, match="give the uploader's user a folder"):
        TensorboardSink(str(tmp_path / "file")).open(RUN, {})


def test_a_file_that_somebody_removed_parks_the_run(tmp_path: Path) -> None:
    """Acknowledged rows that are gone are not silently missing."""
    memo = write(TensorboardSink(str(tmp_path)), RUN, {}, row(0)).memo
    rows_file(tmp_path).unlink()
    with pytest.raises(Parked, match="lacks what was acknowledged"):
        TensorboardSink(str(tmp_path)).open(RUN, memo)


def test_nothing_but_its_own_files_is_removed(tmp_path: Path) -> None:
    """Beginning again after a lost state leaves other programs' event files and other runs alone."""
    sink = TensorboardSink(str(tmp_path))
    write(sink, RUN, {}, row(0))
    write(sink, replace(RUN, run_id="x-r-1"), {}, row(0))
    foreign = tmp_path / FOLDER / "events.out.tfevents.1.theirs"
    foreign.write_bytes(b"theirs")
    write(sink, RUN, {}, row(0), row(1))

    assert foreign.read_bytes() == b"theirs"
    assert len(list(tmp_path.rglob("*.rows"))) == 2


def test_late_rows_read_only_the_end_of_a_long_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late row near the end of a long file reads back its last part, not the whole."""
    monkeypatch.setattr("gapless_uploader.sinks.tensorboard._INDEX_BYTES", 2_000)
    session = TensorboardSink(str(tmp_path)).open(RUN, {})
    for start in range(0, 1000, 10):
        session.write(batch(RUN, *(row(step) for step in range(start, start + 10))))
    starts: list[int] = []
    read = session._read
    monkeypatch.setattr(session, "_read", lambda start: starts.append(start) or read(start))
    session.write(batch(RUN, amend(row(985), loss=2.0)))
    session.close()

    assert len(starts) == 1
    assert rows_file(tmp_path).stat().st_size - starts[0] < 8_000 < starts[0]
