"""The sink that ships the spool itself: its copy, read by the uploader's own history as any spool is."""

from contextlib import AbstractContextManager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from gapless_uploader.sink import RunView
from gapless_uploader.sinks.memory import MemorySink
from gapless_uploader.sinks.spool import SpoolSink
from tests.sinks.harness import Point, SinkHarness, moved_away, pipe_in_place_of
from tests.uploader.harness import Turner


class Harness(SinkHarness):
    kind = "spool"
    vendor = "fsspec"
    way_out = "give the uploader's user a folder there that it may write"

    def sink(self) -> SpoolSink:
        return SpoolSink(str(self.folder / "copy"))

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(self.folder / "copy")

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        (segment,) = (self.folder / "copy" / run.project / run.run_id).glob("*.jsonl")
        return pipe_in_place_of(segment)

    def points(self, run: RunView) -> list[Point]:
        """What an uploader that is given the copy makes of it."""
        state = mkdtemp(dir=self.folder)
        memory = MemorySink()
        turner = Turner(self.folder / "copy", Path(state), memory)
        turner.settle()
        turner.uploader.stop()
        rmtree(state)
        held = memory.runs[f"{run.project}/{run.tracker_id}"]
        return [
            Point(step, key, value, held.times[step, key])
            for step, row in held.rows.items()
            for key, value in row.items()
            if isinstance(value, (bool, int, float))
        ]
