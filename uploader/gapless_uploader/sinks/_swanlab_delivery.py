"""A batch's points, each stored once at a tracker that only appends.

The pipeline makes a batch's end durable before it is written, so a batch that was interrupted comes again whole. Here
is what is known of it:

1. A portion that the tracker acknowledged is done; one that it did not take (`NotStored`) is sent again.
2. After a lost answer the portion is in doubt; after a crash the whole batch is. Then `settle_s` have to go by, until
   what was sent can be read. The points that are there are read back, unsampled, and only the others are sent.
3. When points are missing the reading is done once more, a quarter of the settle time later; only two readings that
   agree are believed.
4. Where the tracker holds rows of which our memo does not tell (a lost state), every point up to the highest step
   there is looked for before it is sent.

What this assumes: the tracker's reads lag less than the settle time behind its writes. Not thread safe.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import is_

from gapless_uploader.intervals import StepSet
from gapless_uploader.operations import Amend, Operation, Row
from gapless_uploader.sink import Refusal, Retryable
from gapless_uploader.sinks._swanlab_http import Unknown
from gapless_uploader.sinks._swanlab_points import Points
from gapless_uploader.sinks._swanlab_portion import LINES_KEY, NAN, Line, Portion
from gapless_uploader.sinks._swanlab_post import Poster
from gapless_uploader.sinks._swanlab_run import Experiment
from gapless_uploader.sinks._swanlab_tally import Tally

_ALL = -1

Held = dict[tuple[str, str], StepSet]
"""(kind, name) -> steps that the tracker shows."""


@dataclass(slots=True)
class _Open:
    """The batch that is on its way."""

    operations: list[Operation]
    done: int = 0
    """Portions that are stored."""
    doubt: int | None = None
    """The portion in doubt, `_ALL` for all that are not done."""
    since: float = 0.0
    """When the last request in doubt may have reached the tracker."""
    seen: int | None = None
    """Points of the doubt that the last reading found."""
    held: Held | None = None
    """What two readings agree on."""


@dataclass(slots=True)
class Known:
    """What has to be looked for whatever batch it comes in: up to where rows were there before our memo."""

    step: int = -1
    lines: int = 0
    held: Held = field(default_factory=dict)


class Delivery:
    """Sends the batches of one session."""

    def __init__(
        self,
        experiment: Experiment,
        tally: Tally,
        known: Known,
        settle_s: float,
        now: Callable[[], float],
        axis_of: Callable[[str], str | None],
    ) -> None:
        self.known = known
        self._experiment = experiment
        self._tally = tally
        self._settle_s = settle_s
        self._now = now
        self._points = Points(tally)
        self._poster = Poster(experiment, self._points, axis_of)
        self._opened = now()
        self._batches = 0
        self._open: _Open | None = None
        self._hidden: list[Refusal] = []
        self.sample: tuple[str, int] | None = None
        """(key, step) of the first number that was stored by this session."""

    def begin(self, operations: Sequence[Operation], uncertain: bool) -> bool:
        """Take up a batch and return True; False for the one that is on its way, which goes on where it stands."""
        known = self._open.operations if self._open is not None else []
        if known and len(known) == len(operations) and all(map(is_, known, operations)):
            return False
        self._open = _Open(list(operations))
        self._poster.begin()
        if uncertain:
            # A session's first batch may have been sent by a process that is gone, up to the session's beginning.
            self._open.doubt = _ALL
            self._open.since = self._now() if self._batches else self._opened
        self._batches += 1
        return True

    def send(self) -> list[Refusal]:
        """Store every point of the batch; what is not held as it was. Raises Retryable or Parked; ask again then."""
        batch = self._open
        if batch is None:
            raise RuntimeError("no batch was begun")
        self._hidden = []
        if batch.doubt is not None and batch.held is None:
            self._read_back(batch)
        for number, portion in enumerate(self._points.portions(batch.operations)):
            if number >= batch.done:
                self._store(batch, number, portion)
                batch.done = number + 1
        refused = [*self._points.refused, *self._hidden]
        for notes in self._poster.notes.values():
            refused += notes
        for (_, name, step), reason in self._poster.dropped.items():
            self._tally.drop(name)
            if reason:
                refused.append(Refusal(step, name, reason))
        return refused

    def acknowledge(self) -> None:
        """The batch is stored, and everything that goes with it."""
        self._tally.commit()
        self._open = None

    def _store(self, batch: _Open, number: int, portion: Portion) -> None:
        portion = self._missing(batch, number, portion)
        if not len(portion):
            return
        try:
            self._poster.post(portion)
        except Unknown as error:
            if batch.doubt != _ALL:
                batch.doubt = number
            batch.since, batch.seen, batch.held = self._now(), None, None
            wait = max(self._settle_s, error.after_s or 0.0)
            raise Retryable(f"{error}: it is read back before it is sent again", after_s=wait or None) from None
        if self.sample is None:
            self.sample = next(
                (
                    (name, line.step)
                    for line in portion.lines
                    for name, value in zip(line.names, line.values, strict=True)
                    if value != NAN and ("scalar", name, line.step) not in self._poster.dropped
                ),
                None,
            )

    # doubt

    def _read_back(self, batch: _Open) -> None:
        wait = batch.since + self._settle_s - self._now()
        if wait > 0:
            raise Retryable("an answer was lost: waits until what was sent can be read back", after_s=wait)
        expected: Counter[tuple[str, str]] = Counter()
        for portion in self._doubtful(batch):
            expected.update((portion.kind, name) for name, _ in portion.places())
        steps = [op.step for op in batch.operations if isinstance(op, Row | Amend) and op.step is not None]
        held = self._read(sorted(expected), min(steps, default=0), max(steps, default=0))
        seen = sum(
            step in held[portion.kind, name] for portion in self._doubtful(batch) for name, step in portion.places()
        )
        before, batch.seen = batch.seen, seen
        if seen < expected.total() and before != seen and self._settle_s > 0:
            batch.since = self._now() - 0.75 * self._settle_s
            raise Retryable("points are missing: reads once more before they are sent", after_s=self._settle_s / 4)
        batch.held = held

    def _doubtful(self, batch: _Open) -> list[Portion]:
        portions = enumerate(self._points.portions(batch.operations))
        return [one for number, one in portions if number >= batch.done and batch.doubt in (_ALL, number)]

    def _read(self, wanted: list[tuple[str, str]], lowest: int, highest: int) -> Held:
        numbers = [name for kind, name in wanted if kind == "scalar"]
        media = [name for kind, name in wanted if kind == "media"]
        found: Held = {("scalar", n): s for n, s in self._experiment.steps(numbers, lowest, highest).items()}
        found.update((("media", n), s) for n, s in self._experiment.media_steps(media).items())
        if ("log", LINES_KEY) in wanted:
            found["log", LINES_KEY] = self._experiment.console_lines()
        return found

    def _missing(self, batch: _Open, number: int, portion: Portion) -> Portion:
        """The portion without the points that are there already."""
        known = self.known
        limit = known.lines if portion.kind == "log" else known.step
        if portion.lowest_step <= limit:
            names = {(portion.kind, name) for name, step in portion.places() if step <= limit}
            known.held.update(self._read(sorted(names - known.held.keys()), 0, limit))
            portion = self._without(portion, known.held, limit)
        if batch.held is not None and batch.doubt in (_ALL, number):
            portion = self._without(portion, batch.held, None)
        return portion

    def _without(self, portion: Portion, held: Held, limit: int | None) -> Portion:
        kind = portion.kind

        def is_there(name: str, step: int) -> bool:
            return (limit is None or step <= limit) and step in held[kind, name]

        left = Portion(kind)
        for line in portion.lines:
            kept = [
                (name, value)
                for name, value in zip(line.names, line.values, strict=True)
                if not is_there(name, line.step)
            ]
            if kept:
                self._note_hidden(line.step, kept)
                left.lines.append(Line(line.step, line.t, tuple(n for n, _ in kept), [v for _, v in kept]))
        left.media = [row for row in portion.media if not is_there(row.name, row.step)]
        left.console = [row for row in portion.console if not is_there(LINES_KEY, row.step)]
        return left

    def _note_hidden(self, step: int, kept: list[tuple[str, bytes]]) -> None:
        """A NaN may be there unseen where an export shows none. It is sent, for no row is lost, and counted."""
        if self._experiment.shows_nan:
            return
        for name, value in kept:
            if value == NAN and self._tally.nans(name):
                self._hidden.append(Refusal(step, name, "a NaN that cannot be read back: it may be there twice"))
