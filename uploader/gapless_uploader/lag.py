"""How many bytes of the spool each sink has not acknowledged yet."""

from __future__ import annotations

from collections.abc import Mapping

from gapless_uploader.ledger import Place
from gapless_uploader.reader import RunReader
from gapless_uploader.spool import RunKey, SpoolRun
from gapless_uploader.state import State


class Lag:
    """Counted anew only where something changed. Not thread safe."""

    def __init__(self, runs: Mapping[RunKey, SpoolRun], state: State) -> None:
        self._runs = runs
        self._state = state
        self._known: dict[Place, int] = {}
        self._unknown: set[Place] = set()

    def changed(self, key: RunKey, sink: str) -> None:
        """The run grew, or the sink acknowledged some of it."""
        self._unknown.add((key, sink))

    def forget(self, key: RunKey, sink: str) -> None:
        """The sink has all of a run that is over."""
        self._unknown.discard((key, sink))
        self._known.pop((key, sink), None)

    def all(self) -> Mapping[Place, int]:
        """(run, sink) -> bytes, torn tails included."""
        for key, sink in self._unknown:
            run = self._runs[key]
            cursor = self._state.progress.get((*key, sink), {}).get("cursor", {})
            reader = RunReader(cursor)
            reader.meet({n: h for n, h in run.attempts.items() if n in cursor})
            self._known[(key, sink)] = reader.behind(run.sizes())
        self._unknown.clear()
        return self._known
