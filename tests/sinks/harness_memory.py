"""The reference sink in the contract suite. Its object outlives the "processes" that open it, as a tracker would."""

from pathlib import Path

from gapless_uploader.operations import Media, Table, Text
from gapless_uploader.sink import RunView
from gapless_uploader.sinks.memory import MemoryRun, MemorySink
from tests.sinks.harness import Point, SinkHarness


class Harness(SinkHarness):
    kind = "memory"
    never_away = "an object of this process"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sink = MemorySink()

    def sink(self) -> MemorySink:
        return self._sink

    def _run(self, run: RunView) -> MemoryRun:
        return self._sink.runs[f"{run.project}/{run.tracker_id}"]

    def points(self, run: RunView) -> list[Point]:
        held = self._run(run)
        return [
            Point(step, key, value, held.times[step, key])
            for step, row in held.rows.items()
            for key, value in row.items()
            if isinstance(value, (bool, int, float))
        ]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        rows = self._run(run).rows.items()
        return {
            (step, key): value.text if isinstance(value, Text) else repr(value)
            for step, row in rows
            for key, value in row.items()
            if isinstance(value, (str, Text, Table))
        }

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        rows = self._run(run).rows.items()
        return {
            (step, key): value.items[0].path.read_bytes()
            for step, row in rows
            for key, value in row.items()
            if isinstance(value, Media) and value.items[0].path
        }

    def state(self, run: RunView) -> str | None:
        state = self._run(run).state
        return None if state is None or state.state == "running" else state.state
