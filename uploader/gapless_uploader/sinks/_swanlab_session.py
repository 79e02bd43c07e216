"""One run at SwanLab, from its first batch to the count at its end.

1. A session begins on a new experiment, on the one that its memo names, or on one that somebody made already: then it
   learns up to where rows are there before it sends any.
2. A batch: documents, points, end. The end is said when everything before it is acknowledged.
3. A run that the tracker may have closed is taken up again before anything is sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import Any

from gapless_uploader.operations import Config, Gap, Identity, Operation, State, Summary, Superseded, System
from gapless_uploader.sink import Ack, Batch, Memo, Parked, Refusal, Retryable, RunView
from gapless_uploader.sinks._swanlab_audit import audit
from gapless_uploader.sinks._swanlab_delivery import Delivery, Known
from gapless_uploader.sinks._swanlab_documents import (
    config_document,
    cut_names,
    end_state,
    metadata_document,
    moment,
    naming_of,
    plain_summary,
)
from gapless_uploader.sinks._swanlab_http import PROTOCOL, Api, Declined, Missing
from gapless_uploader.sinks._swanlab_names import key_name
from gapless_uploader.sinks._swanlab_run import Experiment, announce, place_of
from gapless_uploader.sinks._swanlab_tally import Tally

_SILENCE_S = 600.0
"""After so long without a request the tracker may have closed the run: it is taken up again."""
_MARK = "rewound-from-step:"
"""How the tag begins that the uploader gives a run whose rewound steps it sends again."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How the sink's sessions behave."""

    settle_s: float
    """Seconds until what was sent can surely be read back."""
    audit: bool
    """Count the points at the tracker when a run has ended."""
    now: Callable[[], float]
    """Monotonic seconds."""


class SwanlabSession:
    """One experiment. Not thread safe."""

    def __init__(
        self, ways: Ways, api: Api, find_project: Callable[[str], tuple[str, str, str]], run: RunView, memo: Memo
    ) -> None:
        self._ways = ways
        self._api = api
        self._run = run
        self._naming = naming_of(run)
        self._opened = self._contact = ways.now()
        self._tally = Tally(memo)
        self._known = Known(memo.get("known_step", -1), memo.get("known_lines", 0))
        self._proven = False
        self._sampled_at = inf
        self._foreign = False
        """Whether the tracker holds rows of the run that our memo does not tell of."""
        self._ended: str | None = memo.get("ended")
        self._own: dict[str, Any] = deepcopy(memo.get("own", {}))
        self._check: dict[str, Any] | None = memo.get("check")
        self._described = bool(memo)
        """Whether the tracker has a config of this run."""
        try:
            if memo:
                place = place_of(memo["place"])
                self._experiment = Experiment(api, place)
                self._running = self._find()
                step, line = self._experiment.marks()
                self._foreign = step > self._tally.top or line > self._tally.lines
            else:
                self._project = find_project(run.project)
                place, new = announce(api, self._project, self._naming)
                self._experiment = Experiment(api, place)
                self._running, self._foreign = True, not new
        except (LookupError, TypeError) as error:
            raise Parked(f"the state of this run is not this sink's ({error}); use another --state") from None
        self._project = (place.user, place.project, place.project_id)
        self._delivery = Delivery(self._experiment, self._tally, self._known, ways.settle_s, ways.now, self._axis_of)

    def write(self, batch: Batch) -> Ack:
        """Store the batch. Raises Retryable or Parked; the same batch then goes on where it stood."""
        operations = batch.operations
        self._run = batch.run
        first_try = self._delivery.begin(operations, batch.uncertain)
        state = next((op for op in reversed(operations) if isinstance(op, State)), None)
        if first_try:
            self._note(operations, state)
        self._adopt()
        refused: list[Refusal] = []
        ends = state is not None and state.state != "running"
        self._prove()
        self._take_up(operations, state, refused)
        self._describe(operations, ends, refused)
        refused += self._delivery.send()
        self._end(batch, state)
        self._delivery.acknowledge()
        self._contact = self._ways.now()
        if self._delivery.sample is not None and self._sampled_at == inf:
            self._sampled_at = self._contact
        self._check = None
        return Ack(len(operations), self._memo(), refused)

    def heartbeat(self, now: float) -> None:
        """The training lives; a run that the tracker may have closed meanwhile is taken up again."""
        self._prove()
        if self._silent() or not self._running:
            self._announce()
        self._experiment.heartbeat()
        self._contact = self._ways.now()

    def flush(self) -> Memo:
        """The memo; after the run's end with the count of its points. Raises Retryable until it can be read."""
        if self._ended is not None and self._ways.audit and self._check is None:
            wait = self._contact + self._ways.settle_s - self._ways.now()
            if wait > 0:
                raise Retryable("the run ended: waits until its points can be counted at the tracker", after_s=wait)
            if "sent_again" in self._own:
                told = f"not counted: steps were sent again ({self._own['sent_again']}), as on_rewind = mark has it"
                self._check = {"ok": True, "text": told}
            else:
                self._check = audit(self._experiment, self._tally)
        return self._memo()

    def close(self) -> None:
        """Let go of connections. May be called twice."""
        self._api.close()

    # the experiment

    def _find(self) -> bool:
        """Whether the experiment that the memo names is running. Raises Parked when it is gone."""
        try:
            return self._experiment.state() == "RUNNING"
        except Missing as error:
            raise Parked(
                f"the run is no longer at SwanLab ({error}); to send it to a fresh one, replay it with another --state"
            ) from None

    def _announce(self, extra_tags: tuple[str, ...] = ()) -> None:
        """Tell the experiment's name again, which sets it running."""
        place, _ = announce(self._api, self._project, naming_of(self._run, extra_tags))
        if place.experiment_id != self._experiment.place.experiment_id:
            raise Parked("the run was deleted at SwanLab and made again by somebody; replay it with another --state")
        self._running = True
        self._contact = self._ways.now()

    def _silent(self) -> bool:
        return self._ways.now() - self._contact > _SILENCE_S

    def _adopt(self) -> None:
        """Learn up to where the tracker holds rows of which our memo does not tell. Raises Retryable."""
        if not self._foreign:
            return
        wait = self._opened + self._ways.settle_s - self._ways.now()
        if wait > 0:
            raise Retryable("the run is at the tracker already: waits until its rows can be read", after_s=wait)
        superseded = self._experiment.own_config().get("superseded_by")
        if superseded is not None:
            raise Parked(
                f"{self._naming.slug} was rewound and its corrected history is in {superseded}, but the state that"
                " knew is lost: delete both at SwanLab, then replay"
            )
        self._known.step, self._known.lines = self._experiment.marks()
        self._foreign = False

    def _prove(self) -> None:
        """A point of the session's first batch can be read back: the protocol is still the one that we speak."""
        sample = self._delivery.sample
        if self._proven or sample is None or self._ways.now() < self._sampled_at + self._ways.settle_s:
            return
        name, step = sample
        if step not in self._experiment.steps([name], step, step)[name]:
            raise Parked(
                f"SwanLab acknowledged {name} at step {step}, and it cannot be read back: is its protocol still that of"
                f" swanlab {PROTOCOL}? Everything is still in the spool"
            )
        self._proven = True

    def _take_up(self, operations: Sequence[Operation], state: State | None, refused: list[Refusal]) -> None:
        """See that the experiment is running and named as the batch says, before anything is sent to it."""
        naming = naming_of(self._run)
        if any(isinstance(op, Identity) for op in operations):
            refused += [Refusal(None, None, reason) for reason in cut_names(self._run)]
        sends = any(not isinstance(op, State | Superseded) for op in operations)
        resumes = state is not None and state.state == "running" and not self._running
        if naming != self._naming or resumes or (sends and (not self._running or self._silent())):
            self._announce()
            self._naming = naming

    def _note(self, operations: Sequence[Operation], state: State | None) -> None:
        """Take up what the config holds beside the training's own."""
        own = self._own
        for operation in operations:
            match operation:
                case Summary(values=values):
                    own.setdefault("summary", {}).update(plain_summary(values))
                case Gap(rows=rows):
                    own["rows_lost_in_training"] = own.get("rows_lost_in_training", 0) + rows
                case Superseded(by=by):
                    own["superseded_by"] = by
        for tag in self._run.tags:
            if tag.startswith(_MARK):
                own["sent_again"] = tag
        if state is not None and state.state == "running":
            for name in ("ended_at", "duration_s", "state", "exit_code"):
                own.pop(name, None)
        elif state is not None:
            own |= {"ended_at": moment(state.t), "duration_s": round(state.runtime, 3)}
            own |= {"state": state.state, "exit_code": state.exit_code}

    def _describe(self, operations: Sequence[Operation], ends: bool, refused: list[Refusal]) -> None:
        documents: dict[str, Any] = {}
        told = (Config, Identity, Summary, Superseded, Gap)
        if ends or not self._described or any(isinstance(op, told) for op in operations):
            documents["config"] = config_document(self._run, self._own)
        if any(isinstance(op, System) for op in operations):
            documents["metadata"] = metadata_document(self._run.system)
        for name, document in documents.items():
            try:
                self._experiment.put_profile(name, document)
            except Declined as error:
                refused.append(Refusal(None, None, f"SwanLab refuses the {name}: {error.code}"))
        self._described = True

    def _end(self, batch: Batch, state: State | None) -> None:
        superseded = next((op.by for op in batch.operations if isinstance(op, Superseded)), None)
        if superseded is not None:
            self._announce((f"superseded-by-{superseded}",))
            self._put_state("ABORTED")
        elif state is not None and state.state != "running":
            self._put_state(end_state(state.state, state.exit_code))
        elif state is not None:
            self._ended = None
        elif self._ended is not None and self._running:
            # Rows that came after the end: the end is said again behind them.
            self._put_state(self._ended)

    def _put_state(self, state: str) -> None:
        try:
            self._experiment.put_state(state)
        except Declined as error:
            raise Parked(f"SwanLab does not take the run's end: {error}") from None
        self._ended, self._running = state, False

    # small things

    def _axis_of(self, name: str) -> str | None:
        for key, (axis, _) in self._run.axes.items():
            if axis is not None and (key == name or fnmatchcase(name, key)) and key_name(axis) != name:
                return key_name(axis)
        return None

    def _memo(self) -> Memo:
        return {
            "host": self._api.account.api_host,
            "place": self._experiment.place.memo(),
            **self._tally.memo(),
            "known_step": self._known.step,
            "known_lines": self._known.lines,
            "ended": self._ended,
            # A copy: the next batch changes ours before it is acknowledged.
            "own": deepcopy(self._own),
            "check": self._check,
        }
