"""How far a replay is, where no bar can be drawn: an event every half a minute of the caller's clock."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest

from gapless_uploader.events import Event, LineListener, Replaying
from gapless_uploader.options import UploaderOptions
from gapless_uploader.replay_progress import EVERY_S, ReplayProgress
from gapless_uploader.sink import Retryable
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.uploader import Inline, Uploader
from tests.uploader.spool_made import MadeRun


@pytest.fixture
def uploader(tmp_path: Path) -> Uploader:
    """Two runs; the sink fails at once for the first, which waits while the time stands still."""
    MadeRun(tmp_path / "spool", "r-1").rows(0, 3).finish()
    MadeRun(tmp_path / "spool", "r-2").rows(0, 2).finish()
    sink = MemorySink()
    sink.failures = [Retryable("down")]
    made = Uploader([tmp_path / "spool"], [sink], tmp_path / "state", UploaderOptions(), executor=Inline())
    made.start()
    return made


def test_one_event_every_half_minute(uploader: Uploader) -> None:
    """None at the start, one when the time is over however many turns there were, and the next one as much later."""
    told: list[Event] = []
    progress = ReplayProgress(uploader, io.StringIO(), told.append)
    counts = []
    for now in (100.0, 100.0 + EVERY_S / 2, 100.0 + EVERY_S, 101.0 + EVERY_S, 100.0 + 2 * EVERY_S):
        progress.refresh(now)
        counts.append(len(told))

    assert counts == [0, 0, 1, 1, 2]


def test_it_says_rows_bytes_and_runs(uploader: Uploader) -> None:
    """Of all there is; a run is done when every sink has all of it."""
    told: list[Event] = []
    progress = ReplayProgress(uploader, io.StringIO(), told.append, plain=True)
    progress.refresh(0.0)
    for _ in range(5):
        uploader.turn(0.0)
    progress.refresh(EVERY_S)
    sizes = {key[1]: run.size for key, run in uploader.spool.runs.items()}

    assert told == [Replaying(2, sizes["r-2"], sizes["r-1"] + sizes["r-2"], 1, 2)]


@pytest.mark.parametrize("as_json", [False, True])
def test_it_is_a_line_like_any_other(as_json: bool) -> None:
    """Plain or JSON, also where a bar's events are left out."""
    stream = io.StringIO()
    LineListener(stream, as_json, quiet=not as_json)(Replaying(60, 500, 1000, 2, 3))
    line = stream.getvalue()
    if as_json:
        fields = {"rows": 60, "bytes": 500, "bytes_total": 1000, "runs": 2, "runs_total": 3}

        assert orjson.loads(line) == {"event": "replaying", **fields, "times": 1}
    else:
        assert line[9:] == "replaying rows=60 bytes=500 bytes_total=1000 runs=2 runs_total=3\n"
