"""The template of a third party's sink in `docs/sinks.md`, run as it stands there and found by its entry point."""

import re
import sqlite3
import sys
from contextlib import AbstractContextManager, closing
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from gapless_uploader.operations import Value
from gapless_uploader.sink import RunView, Sink
from gapless_uploader.sinks import make_sink
from tests.sinks.harness import Point, SinkHarness, foreign_file_in_place_of, moved_away

DOCS = Path(__file__).parents[2] / "docs" / "sinks.md"


class Harness(SinkHarness):
    kind = "sqlite"
    refusal_is_for_all = True
    way_out = "move it away"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._disk = folder / "disk"
        self._disk.mkdir(exist_ok=True)
        self._file = self._disk / "values.sqlite"
        self._patch = pytest.MonkeyPatch()
        module = ModuleType("sqlite_sink_of_the_docs")
        self._patch.setitem(sys.modules, module.__name__, module)
        exec(compile(template(), str(DOCS), "exec"), module.__dict__)  # noqa: S102 - our own page
        point = EntryPoint("sqlite", f"{module.__name__}:SqliteSink", "gapless.sinks")
        self._patch.setattr("importlib.metadata.entry_points", lambda group: [point])

    def sink(self) -> Sink:
        return make_sink(f"sqlite:{self._file}")

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(self._disk)

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        return foreign_file_in_place_of(self._file)

    def points(self, run: RunView) -> list[Point]:
        with closing(sqlite3.connect(self._file)) as database:
            query = "select step, key, value, t from v where run = ?"
            return [Point(*row) for row in database.execute(query, [f"{run.project}/{run.tracker_id}"])]

    def state(self, run: RunView) -> str | None:
        with closing(sqlite3.connect(self._file)) as database:
            query = "select state from runs where run = ? and state != 'running'"
            found = database.execute(query, [f"{run.project}/{run.tracker_id}"]).fetchone()
        return found[0] if found else None

    def held(self, value: Value) -> int | float:
        """SQLite has no booleans."""
        return int(value) if isinstance(value, bool) else value  # type: ignore[return-value]

    def close(self) -> None:
        self._patch.undo()


def template() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return code
