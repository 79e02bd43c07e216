"""The trackio sink in the contract suite, read back with trackio's own storage."""

import atexit
import os
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

# trackio reads its folder once, at its import, so all tests of a process share one.
os.environ["TRACKIO_DIR"] = mkdtemp(prefix="gapless-trackio-")
FOLDER = Path(os.environ["TRACKIO_DIR"])
atexit.register(rmtree, FOLDER, True)

import trackio  # noqa: E402
from trackio.sqlite_storage import SQLiteStorage  # noqa: E402
from trackio.utils import MEDIA_DIR, deserialize_values  # noqa: E402

from gapless_uploader.operations import Value  # noqa: E402
from gapless_uploader.sink import RunView  # noqa: E402
from gapless_uploader.sinks.trackio import TrackioSink  # noqa: E402
from tests.sinks.harness import Point, SinkHarness, foreign_file_in_place_of, moved_away  # noqa: E402

__all__ = ["FOLDER", "Harness", "SQLiteStorage", "trackio"]


class Harness(SinkHarness):
    kind = "trackio"
    vendor = "trackio"
    way_out = "move that file away"
    random_histories = 10

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.close()

    def sink(self) -> TrackioSink:
        return TrackioSink(str(FOLDER))

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(FOLDER)

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        return foreign_file_in_place_of(SQLiteStorage.get_project_db_path(run.project))

    def logs(self, run: RunView) -> list[dict[str, Any]]:
        return [deserialize_values(log) for log in SQLiteStorage.get_logs(run.project, run_id=run.tracker_id)]

    def points(self, run: RunView) -> list[Point]:
        return [
            Point(log["step"], key, value, datetime.fromisoformat(log["timestamp"]).timestamp())
            for log in self.logs(run)
            for key, value in log.items()
            if key not in ("step", "timestamp") and isinstance(value, (bool, int, float))
        ]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        texts = {
            (log["step"], key): value if isinstance(value, str) else repr(value)
            for log in self.logs(run)
            for key, value in log.items()
            if key != "timestamp" and isinstance(value, (str, dict))
        }
        traces = SQLiteStorage.get_traces(run.project, run_id=run.tracker_id)
        for trace in traces:
            place = trace["step"], trace["key"]
            texts[place] = texts.get(place, "") + repr(trace)
        return texts

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        return {
            (log["step"], key): (MEDIA_DIR / value["file_path"]).read_bytes()
            for log in self.logs(run)
            for key, value in log.items()
            if isinstance(value, dict) and "file_path" in value
        }

    def held(self, value: Value) -> Any:
        return value

    def close(self) -> None:
        for path in FOLDER.iterdir():
            rmtree(path) if path.is_dir() else path.unlink()
