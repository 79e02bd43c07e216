"""What became of each run at each sink: rows, failures, refusals, damage. It tells, and keeps dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from gapless_uploader import events
from gapless_uploader.events import Event
from gapless_uploader.operations import Amend, Row
from gapless_uploader.spool import RunKey
from gapless_uploader.state import State
from gapless_uploader.steps import Outcome

Place = tuple[RunKey, str]
"""(run, sink)."""


class Ledger:
    """Outcomes as events and as the current trouble. Not thread safe."""

    def __init__(self, state: State, listener: Callable[[Event], None]) -> None:
        self.rows = 0
        """Rows acknowledged since the start, all sinks together."""
        self.failed: dict[Place, str] = {}
        """(run, sink) -> why it is behind or parked."""
        self.parked: set[Place] = set()
        """Of those, the ones that wait for somebody to act."""
        self.rejected = 0
        """Operations that a tracker rejected for good."""
        self.incomplete = 0
        """Ended runs of which a tracker turned out not to hold all."""
        self._state = state
        self._listen = listener
        self._letters: set[tuple[str, int, int]] = set()

    @property
    def found_damage(self) -> bool:
        """Whether a record was found damaged, rejected, or missing at the tracker."""
        return bool(self._letters) or self.rejected > 0 or self.incomplete > 0

    def note(self, key: RunKey, sink: str, outcome: Outcome) -> None:
        """Take a step's outcome into account, and tell it. Raises OSError when a dead letter cannot be kept."""
        run = name_of(key)
        self._keep_letters(key, outcome)
        if outcome.rows:
            self.rows += outcome.rows
            step = outcome.progress.get("top") if outcome.progress else None
            self._listen(events.Uploaded(run, sink, outcome.rows, step))
        if outcome.new_state:
            self._listen(events.StateChanged(run, sink, outcome.new_state))
        for reason, count in Counter(refusal.reason for refusal in outcome.refused).items():
            self._listen(events.RecordsRefused(run, sink, count, reason))
        if outcome.check is not None:
            self.incomplete += not outcome.check["ok"]
            self._listen(events.RunChecked(run, sink, outcome.check["ok"], outcome.check["text"]))
        self._note_trouble((key, sink), outcome)

    def _note_trouble(self, place: Place, outcome: Outcome) -> None:
        run, sink = name_of(place[0]), place[1]
        reason = outcome.crashed or outcome.failed or outcome.parked
        if reason is None:
            if outcome.more and not outcome.rows and not outcome.recovered_after:
                return  # on its way: whether the trouble is over, the next step tells
            self.failed.pop(place, None)
            self.parked.discard(place)
            if outcome.recovered_after:
                self._listen(events.SinkRecovered(run, sink, outcome.recovered_after))
            return
        self.failed[place] = reason
        if outcome.parked is None:
            self.parked.discard(place)  # it is tried again, so it waits for nobody any more
            self._listen(events.SinkFailed(run, sink, reason, round(outcome.retry_in_s or 0.0, 2)))
        else:
            self.parked.add(place)
            self._listen(events.RunParked(run, sink, reason))

    def _keep_letters(self, key: RunKey, outcome: Outcome) -> None:
        for attempt_id, damage in outcome.damage:
            at = (attempt_id, damage.segment, damage.offset)
            if at in self._letters:
                continue  # another sink read it too
            self._letters.add(at)
            self._state.dead_letter(
                key,
                {
                    "attempt_id": attempt_id,
                    "segment": damage.segment,
                    "offset": damage.offset,
                    "length": damage.length,
                    "reason": damage.reason,
                    "bytes": damage.sample.decode("utf-8", "backslashreplace"),
                },
            )
            segment = f"{attempt_id[:8]}-{damage.segment:06d}"
            self._listen(events.DamageFound(name_of(key), segment, damage.offset, damage.length, damage.reason))
        self.rejected += len(outcome.dead)
        for operation, reason in outcome.dead:
            line: dict[str, object] = {"reason": reason, "operation": type(operation).__name__}
            if isinstance(operation, Row | Amend):
                line["step"], line["keys"] = operation.step, list(operation.values)
            self._state.dead_letter(key, line)


def name_of(key: RunKey) -> str:
    """The run as people see it."""
    return f"{key[0]}/{key[1]}"
