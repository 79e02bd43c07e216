"""Which runs go to which sinks: those of `--to`, and those that a run asks for, of the runs that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gapless_uploader import events
from gapless_uploader.events import Event
from gapless_uploader.lane import Lane
from gapless_uploader.ledger import name_of
from gapless_uploader.run_name import is_asked_for
from gapless_uploader.spool import RunKey, SpoolRun
from gapless_uploader.wanted import Wishes


@dataclass(frozen=True, slots=True)
class Filters:
    """Globs; empty means all."""

    projects: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


class Routes:
    """The lanes of every run. Not thread safe."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        by_wish: Iterable[str],
        filters: Filters,
        listener: Callable[[Event], None],
    ) -> None:
        """`by_wish` names the lanes that serve only runs which ask for their kind."""
        self.undecided: set[RunKey] = set()
        """Runs that have not said yet what they ask for."""
        self._lanes = lanes
        self._by_wish = frozenset(by_wish)
        self._wishes = Wishes({lanes[name].sink.kind for name in self._by_wish})
        self._filters = filters
        self._listen = listener
        self._wanted: dict[RunKey, bool] = {}
        self._lanes_of: dict[RunKey, list[Lane]] = {}

    def is_wanted(self, run: SpoolRun) -> bool:
        """Whether the run can be read and passes the filters."""
        if run.unsupported is not None:
            return False
        if not self._filters.projects and not self._filters.runs:
            return True
        wanted = self._wanted.get(run.key)
        if wanted is None:
            wanted = self._wanted[run.key] = is_asked_for(run, self._filters.projects, self._filters.runs)
        return wanted

    def choose(self, run: SpoolRun, now: float) -> list[Lane]:
        """The lanes that the run goes through, by what it asks for now."""
        wanted = self._wishes.of(run, now) if self._by_wish else None
        kinds = wanted.kinds if wanted is not None else ()
        if self._by_wish and wanted is None:
            self.undecided.add(run.key)
        else:
            self.undecided.discard(run.key)
        chosen = [lane for name, lane in self._lanes.items() if name not in self._by_wish or lane.sink.kind in kinds]
        if wanted is not None and wanted.unmet and self._lanes_of.get(run.key) != chosen:
            self._listen(events.WishUnmet(name_of(run.key), ", ".join(wanted.unmet)))
        self._lanes_of[run.key] = chosen
        return chosen

    def lanes_of(self, key: RunKey) -> list[Lane]:
        """What `choose` said last."""
        return self._lanes_of.get(key, [])
