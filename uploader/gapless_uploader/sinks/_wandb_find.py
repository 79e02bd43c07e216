"""What W&B holds of a run before the sink goes on with it, and what follows from it. Nothing is guessed.

1. Our own record and W&B's agree: go on.
2. They do not, or there is no record here: W&B's counts may lag, so it is asked again after a while; only two equal
   answers are believed. An error is no answer.
3. W&B holds the progress that travelled with the lines: go on from there.
4. Neither is left: the run is parked, with the ways out.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless_uploader.sink import Memo, Parked, Place, Resume, Retryable, RunView
from gapless_uploader.sinks import _wandb_queries as queries
from gapless_uploader.sinks._wandb_files import RunPlace
from gapless_uploader.sinks._wandb_http import Http
from gapless_uploader.sinks._wandb_progress import VERSION, Progress, place_of, progress_of

LOST_AFTER_S = 60.0
"""A server that stays behind our record for so long does not lag: it lost lines."""


@dataclass(frozen=True, slots=True)
class Held:
    """A run as W&B's answer shows it."""

    entity: str
    """Whose project it is."""
    lines: int
    events: int
    output: int
    summary: str

    def values(self) -> dict[str, Any]:
        """The summary."""
        try:
            values = json.loads(self.summary or "{}")
        except ValueError:
            return {}
        return values if isinstance(values, dict) else {}

    def progress(self) -> dict[str, Any] | None:
        """`_gapless` of the summary; None where it is not ours, or of a version that nobody here knows."""
        held = self.values().get("_gapless")
        return held if isinstance(held, dict) and held.get("v") == VERSION else None


@dataclass(frozen=True, slots=True)
class Found:
    """Where a run goes on."""

    progress: Progress
    held: Held | None = None
    """What W&B has; None where it has no such run."""


class Finder:
    """Finds runs at one server. `find` of different runs may be called from several threads."""

    def __init__(
        self, http: Http, settle_s: float, clock: Callable[[], float], adopts: Callable[[RunView], bool]
    ) -> None:
        self._http = http
        self._settle_s = settle_s
        self._clock = clock
        self._adopts = adopts
        self._answers: dict[str, tuple[Held | None, float]] = {}
        """Run -> its last answer and when it was first given."""
        self._behind_since: dict[str, float] = {}

    def find(self, place: RunPlace, run: RunView, memo: Memo) -> Found:
        """Where the run goes on. Raises Retryable, Parked and Resume."""
        held = self.look(place)
        if memo.get("lines") or ("lines" in memo and held is not None):
            self._compare(place, run, memo, held)
            return Found(Progress.from_memo(memo), held)
        if held is None:
            self._answers.pop(str(place), None)
            return Found(Progress.from_memo(memo))
        held = self._settled(place, held)
        if held is None:
            return Found(Progress.from_memo(memo))
        ours = held.progress()
        if ours is not None:
            self._resume(run, ours, held)
        if held.lines == 0:
            return Found(Progress.from_memo(memo), held)
        if self._adopts(run):
            return Found(Progress(lines=held.lines, events=held.events, output=held.output), held)
        raise Parked(
            f"W&B has a run {place} with {held.lines} lines that this uploader knows nothing of, and no state of it is"
            f" left here: --adopt {run.run_id} appends to it, --new-id {run.run_id}=ID uploads beside it"
        )

    def look(self, place: RunPlace) -> Held | None:
        """W&B's answer; None when it says that there is no such run. An error is raised, never taken for that."""
        variables = {"project": place.project, "entity": place.entity or None, "name": place.run}
        model = self._http.graphql("RunResumeStatus", queries.STATUS, variables).get("model")
        if not isinstance(model, dict) or model.get("bucket") is None:
            return None
        bucket = model["bucket"]
        lines, events, output = (
            bucket.get(name) or 0 for name in ("historyLineCount", "eventsLineCount", "logLineCount")
        )
        entity = str((model.get("entity") or {}).get("name") or place.entity)
        return Held(entity, lines, events, output, bucket.get("summaryMetrics") or "{}")

    def _compare(self, place: RunPlace, run: RunView, memo: Memo, held: Held | None) -> None:
        mine: int = memo["lines"]
        ours = held.progress() if held else None
        agrees = ours is not None and (ours["lines"], ours["generation"]) == (mine, run.generation)
        if ours is not None and agrees and "superseded_by" not in ours:
            self._behind_since.pop(str(place), None)
            return
        held = self._settled(place, held)
        ours = held.progress() if held else None
        if held is not None and ours is not None and (ours["lines"] > mine or "superseded_by" in ours):
            self._resume(run, ours, held)
        if held is not None and held.lines >= mine:
            return  # the lines are there; somebody else wrote the summary since
        since = self._behind_since.setdefault(str(place), self._clock())
        said = f"{held.lines} lines" if held else "no such run"
        if self._clock() - since < LOST_AFTER_S:
            raise Retryable(f"W&B says {said} of {place}, and took {mine}: asking again", max(self._settle_s, 1.0))
        raise Parked(
            f"W&B took {mine} lines of {place} and now has {said}: it was deleted or restored from a backup;"
            f" --new-id {run.run_id}=ID uploads all of it anew"
        )

    def _resume(self, run: RunView, ours: dict[str, Any], held: Held) -> None:
        if "superseded_by" in ours:
            raise Resume("the run was rewound", int(ours["superseded_by"]), Place(), _only_late(ours))
        memo = progress_of(ours, held.values()).to_memo()
        raise Resume("W&B holds more than the state here", run.generation, place_of(ours), memo)

    def _settled(self, place: RunPlace, held: Held | None) -> Held | None:
        """The answer, once it was given twice with time between. Raises Retryable until then."""
        if self._settle_s <= 0:
            again = self.look(place)
            while again != held:
                held, again = again, self.look(place)
            return held
        now = self._clock()
        known = self._answers.get(str(place))
        if known is None or known[0] != held:
            self._answers[str(place)] = (held, now)
            raise Retryable("W&B's counts may lag behind what it took: asking a second time", self._settle_s)
        if now - known[1] < self._settle_s:
            raise Retryable("W&B's counts may lag behind what it took: waiting", self._settle_s - (now - known[1]))
        return held


def _only_late(ours: dict[str, Any]) -> Memo:
    """A later generation of a run whose server does not replace rows begins with that knowledge."""
    return {"late": "axis"} if ours.get("next_late") == "axis" else {}
