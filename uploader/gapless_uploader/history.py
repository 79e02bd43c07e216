"""From records in the order of the spool to operations in the order of the merged history.

The state is a function of which records were read, not of when. It is small: steps as runs of one stride, an index
entry a MiB, one row. What a row needs from earlier is read again from the spool. `merge.py` has the rules.

1. A record at a step above all others is a `Row`; at a step that was seen, an `Amend` with the whole merged row.
2. An attempt's first metrics step lowers the limit of its writer's older attempts: rows above it go by `Rewind`, and
   what survives there from other writers follows again.
3. Records above their attempt's limit are superseded: counted, not sent.

Not thread safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter, lt
from pathlib import Path
from typing import Any, cast

from gapless_schemas import Header, Record
from gapless_uploader.attempt import Taken
from gapless_uploader.description import KINDS as DESCRIBED
from gapless_uploader.description import Description
from gapless_uploader.index import SparseIndex
from gapless_uploader.intervals import Intervals, StepSet
from gapless_uploader.last_values import LastValues
from gapless_uploader.merge import NO_LIMIT, Cut, bounded, cuts, merge_row, same, survives, writer_order
from gapless_uploader.merge import attempt_order as order_of
from gapless_uploader.operations import (
    Amend,
    Config,
    Operation,
    Rewind,
    Row,
    State,
    Summary,
    System,
    Value,
)
from gapless_uploader.payload import payload_of
from gapless_uploader.plain_records import AnyRecord, PlainRecord
from gapless_uploader.sink import RunView

COMPACT_BYTES = 8 << 10
_ATTEMPT_BYTES = 400
_STEPS_BYTES = 16
"""About what an attempt and one run of its steps take in `compact`."""

Paths = Mapping[str, Mapping[int, Path]]


class _Attempt:
    __slots__ = (
        "base",
        "exit_code",
        "finished",
        "first_step",
        "header",
        "index",
        "last_t",
        "limit",
        "mono",
        "newer",
        "obeyed",
        "seen",
        "steps",
    )

    def __init__(self, header: Header, seen: Intervals) -> None:
        self.header = header
        self.seen = seen
        self.steps = StepSet()
        """Surviving steps that were read."""
        self.first_step: int | None = None
        """Of its first metrics record."""
        self.newer: tuple[Cut, ...] = ()
        """What newer attempts of its writer leave of it."""
        self.limit = NO_LIMIT
        """The lowest of their cuts: up to it every row survives, whenever it was logged."""
        self.obeyed: tuple[Cut, ...] = ()
        """The cuts that `steps` was brought in line with."""
        self.base = 0.0
        """Seconds of training before it."""
        self.mono = 0.0
        self.last_t = header.created
        self.finished: str | None = None
        self.exit_code: int | None = None
        self.index = SparseIndex()

    def logged_at(self, record: Record) -> float:
        """When `log` was called, unix seconds; a row's `t` may be any time that its caller gave."""
        return self.header.created + record.mono


class History:
    """The merge of one run's attempts, as far as it was read."""

    def __init__(self, view: RunView, kind: str | None = None) -> None:
        self.view = view
        self._kind = kind
        """The tracker's: records that skip it have no values here. None: every record is taken."""
        self.attempts: dict[str, _Attempt] = {}
        self.operations: list[Operation] = []
        """Made since somebody last took them."""
        self.superseded = 0
        """Records that a newer attempt, or on equal keys another writer, replaced before they were sent."""
        self.rows = 0
        """Records that belong to a row, so far."""
        self.last_step: int | None = None
        """The step of the newest row that was read."""
        self._top = -1
        self._description = Description(view)
        self._last = LastValues()
        view.summary = self._last.values
        self._paths: Paths = {}
        self._tip: tuple[str, int, Row | Amend] | None = None
        """The last row made, the only attempt that is in it and its newest seq: amends of it need no disk."""

    def meet(self, header: Header, seen: Intervals, first_step: int | None = None) -> None:
        """An attempt was found; `seen` is the reader's live set of its seqs. `first_step` if it is known ahead."""
        attempt = self.attempts.get(header.attempt_id)
        if attempt is None:
            attempt = self.attempts[header.attempt_id] = _Attempt(header, seen)
            if self.view.created == 0.0 or header.created < self.view.created:
                self.view.created = header.created
            if self._newest_main() is attempt:
                self.view.host = header.host or self.view.host
        if first_step is not None and attempt.first_step is None:
            attempt.first_step = first_step

    def unread(self) -> dict[str, int]:
        """attempt_id -> first step of attempts of which no more than that is known: it was looked up ahead."""
        return {
            attempt_id: attempt.first_step
            for attempt_id, attempt in self.attempts.items()
            if attempt.first_step is not None and not attempt.seen
        }

    def apply_limits(self, paths: Paths) -> None:
        """Let newly met attempts supersede older ones. After `meet`, before `feed`. Raises OSError."""
        self._paths = paths
        self._relimit()

    def feed(self, attempt_id: str, taken: Taken, paths: Paths) -> None:
        """Turn records into operations. Raises OSError when old rows cannot be read again."""
        self._paths = paths
        attempt = self.attempts[attempt_id]
        attempt.index.note(taken.segment, taken.start, taken.end, taken.records)
        self._rebase(attempt)
        at = 0
        for kind, group in groupby(taken.records, type):
            part = list(group)
            if kind is Record or not self._feed_plain(attempt, cast(list[PlainRecord], part)):
                self._feed_each(attempt, [r if isinstance(r, Record) else r.opened() for r in part], taken, at)
            at += len(part)
        self._last.fold()
        if taken.records:
            last = taken.records[-1]
            attempt.last_t = max(attempt.last_t, last.t)
            attempt.mono = max(attempt.mono, max(map(_mono_of, taken.records)))
            self.view.runtime = self._runtime()
            self._state()

    def _feed_plain(self, attempt: _Attempt, records: list[PlainRecord]) -> bool:
        """Turn records of one shape into rows at once, if each is at a step above all before it; whether it is so."""
        steps = [record.step for record in records]
        is_known = attempt.first_step is not None
        if not (is_known and self._top < steps[0] and steps[-1] <= attempt.limit and all(map(lt, steps, steps[1:]))):
            return False
        base = attempt.base
        rows = [Row(r.step, r.t, base + r.mono, None, True, r) for r in records]
        self.operations += rows
        self.rows += len(rows)
        self.last_step = self._top = steps[-1]
        attempt.steps.add_rising(steps)
        self._tip = (attempt.header.attempt_id, records[-1].seq, rows[-1])
        self._last.note_newest(steps[-1], rows[-1].values)
        return True

    def _feed_each(self, attempt: _Attempt, records: list[Record], taken: Taken, at: int) -> None:
        """Turn records into operations one by one. They are those from `at` on in `taken`."""
        paths, attempt_id = self._paths, attempt.header.attempt_id
        limit, base, is_known = attempt.limit, attempt.base, attempt.first_step is not None
        add_step, add_operation, note_newest = attempt.steps.add, self.operations.append, self._last.note_newest
        for place, record in enumerate(records, at):
            seq, t, mono, kind, step, data, skip_sinks = record
            if kind == "metrics":
                values = data
                try:
                    # The sum says of all values that they are numbers, and none of them NaN or infinite.
                    total = sum(data.values())
                    is_plain = total - total == 0
                except (TypeError, OverflowError):
                    is_plain = False
                if skip_sinks or (not is_plain and None in data.values()):
                    values, is_plain = self._metrics_of(record), False
                # Nearly every record is the next step of a known attempt: no call for it that is not needed.
                if step is not None and self._top < step <= limit and values and is_known:
                    self.rows += 1
                    self.last_step = self._top = step
                    add_step(step)
                    row = Row(step, t, base + mono, values, is_plain)
                    add_operation(row)
                    self._tip = (attempt_id, seq, row)
                    note_newest(step, values)
                else:
                    self._row(attempt, record, taken.records, place, values)
                    limit, base, is_known = attempt.limit, attempt.base, attempt.first_step is not None
            elif kind in ("table", "text", "media"):
                folder = paths[attempt_id][taken.segment].parent / "media"
                found = payload_of(record, folder)
                if found is not None and self._kind not in record.skip_sinks:
                    self._row(attempt, record, taken.records, place, {found[0]: found[1]})
            else:
                self._last.fold()
                self._meta(attempt, record)

    def take(self) -> list[Operation]:
        """The operations made since the last call."""
        taken, self.operations = self.operations, []
        return taken

    def conclude(self, crashed: bool) -> None:
        """Say whether the newest attempt of `main`, unfinished, still has somebody who writes it."""
        self._state(crashed)

    @property
    def last_t(self) -> float:
        """Wall clock of that attempt's newest record."""
        attempt = self._newest_main()
        return attempt.last_t if attempt else 0.0

    def lost(self) -> int:
        """Seqs missing below the newest one read, all attempts together; they may still come while an attempt lives."""
        return sum(last - first + 1 for a in self.attempts.values() for first, last in a.seen.holes())

    def compact(self) -> dict[str, Any] | None:
        """Per attempt what its rows are known by: enough to take back rows whose files are out of sight.

        None where that is too much to go with every progress: many attempts, or steps without a stride.
        """
        if sum(_ATTEMPT_BYTES + _STEPS_BYTES * a.steps.num_runs for a in self.attempts.values()) > COMPACT_BYTES:
            return None
        return {
            attempt_id: [asdict(a.header), a.steps.to_json(), a.first_step, a.mono, a.last_t, a.finished, a.exit_code]
            for attempt_id, a in self.attempts.items()
        }

    def adopt(self, saved: dict[str, Any], seen: Mapping[str, Intervals]) -> None:
        """Take from `compact` the attempts of which not everything could be read again."""
        for attempt_id, (header, steps, first_step, mono, last_t, finished, exit_code) in saved.items():
            if attempt_id not in seen:
                continue
            attempt = self.attempts.setdefault(attempt_id, _Attempt(Header(**header), seen[attempt_id]))
            attempt.steps, attempt.first_step, attempt.mono = StepSet(steps), first_step, mono
            attempt.last_t, attempt.finished, attempt.exit_code = last_t, finished, exit_code
        self._limit()
        self._obeyed_all()
        self._top = max((a.steps.last for a in self.attempts.values()), default=-1)

    def to_json(self) -> dict[str, Any]:
        """What `restore` takes. NaN and infinities are in it: for Python's own json."""
        return {
            "attempts": {
                attempt_id: [
                    a.steps.to_json(), a.first_step, a.mono, a.last_t, a.finished, a.exit_code, a.index.to_json(),
                ]
                for attempt_id, a in self.attempts.items()
            },
            "view": {name: getattr(self.view, name) for name in _VIEW_FIELDS},
            "counts": [self.superseded, self.rows, self.last_step],
            "description": self._description.to_json(),
            "summary": self._last.to_json(),
        }  # fmt: skip

    def restore(self, saved: dict[str, Any], headers: Mapping[str, Header], seen: Mapping[str, Intervals]) -> None:
        """Go on from what `to_json` gave. Raises LookupError, TypeError or ValueError when it does not fit."""
        for attempt_id, (steps, first_step, mono, last_t, finished, exit_code, blocks) in saved["attempts"].items():
            attempt = self.attempts[attempt_id] = _Attempt(headers[attempt_id], seen[attempt_id])
            attempt.steps, attempt.index = StepSet(steps), SparseIndex(blocks)
            attempt.first_step, attempt.mono, attempt.last_t = first_step, mono, last_t
            attempt.finished, attempt.exit_code = finished, exit_code
        for name in _VIEW_FIELDS:
            setattr(self.view, name, saved["view"][name])
        self.view.axes = {key: (axis, rule) for key, (axis, rule) in self.view.axes.items()}
        self.superseded, self.rows, self.last_step = saved["counts"]
        self._description.restore(saved["description"])
        self._last.restore(saved["summary"])
        self.view.summary = self._last.values
        self._limit()
        self._obeyed_all()
        self._top = max((a.steps.last for a in self.attempts.values()), default=-1)

    # rows

    def _row(
        self, attempt: _Attempt, record: Record, records: Sequence[AnyRecord], at: int, values: dict[str, Value]
    ) -> None:
        """`record` is at `at` in `records`, those that were read with it."""
        self.rows += 1
        step = record.step
        if step is None:
            if values:
                self.operations.append(Row(None, record.t, attempt.base + record.mono, values))
            return
        if attempt.first_step is None and record.kind == "metrics":
            attempt.first_step = step
            self._relimit()
        if step > attempt.limit and not survives(step, attempt.logged_at(record), attempt.newer):
            self.superseded += 1
            return
        if not values:
            return
        self.last_step = step
        runtime = attempt.base + record.mono
        if step > self._top:
            self._top = step
            attempt.steps.add(step)
            self._new_row(attempt, record, runtime, values)
        elif not any(step in other.steps for other in self.attempts.values()):
            attempt.steps.add(step)
            self._new_row(attempt, record, runtime, values)
        else:
            attempt.steps.add(step)
            self._amend(attempt, record, records, at, runtime, values)

    def _new_row(self, attempt: _Attempt, record: Record, runtime: float, values: dict[str, Value]) -> None:
        step = record.step or 0
        row = Row(step, record.t, runtime, values)
        self.operations.append(row)
        self._tip = (attempt.header.attempt_id, record.seq, row)
        self._summarise(step, values)

    def _amend(
        self,
        attempt: _Attempt,
        record: Record,
        records: Sequence[AnyRecord],
        at: int,
        runtime: float,
        values: dict[str, Value],
    ) -> None:
        step = record.step or 0
        tip = self._tip
        if tip is not None and tip[0] == attempt.header.attempt_id and tip[1] < record.seq and tip[2].step == step:
            before, t = tip[2].values, record.t
            after = {**before, **values}
            alone = True
        else:
            unread = {later.seq for later in records[at + 1 :] if later.step == step}
            now = [p for p in self._parts_at(step) if not (p[0] is attempt.header and p[1] in unread)]
            held = merge_row(p for p in now if not (p[0] is attempt.header and p[1] == record.seq))
            merged = merge_row(now)
            if merged is None:
                return
            before = held.values if held else {}
            after, t, runtime = merged.values, merged.t, merged.runtime
            alone = False
            # A newer attempt or `main` has said something else of these keys.
            self.superseded += any(not same(after[key], value) for key, value in values.items())
        changed = tuple(key for key in after if key not in before or not same(before[key], after[key]))
        if not changed:
            return
        added = tuple(key for key in changed if key not in before)
        last = self.operations[-1] if self.operations else None
        if isinstance(last, Row | Amend) and last.step == step:
            last.values, last.t, last.runtime = after, t, runtime
            if isinstance(last, Amend):
                last.changed = tuple(dict.fromkeys((*last.changed, *changed)))
                last.added = (*(last.added or ()), *added)
            made: Row | Amend = last
        else:
            made = Amend(step, t, runtime, after, changed, added)
            self.operations.append(made)
        self._tip = (attempt.header.attempt_id, record.seq, made) if alone else None
        self._summarise(step, {key: after[key] for key in changed})

    def _parts_at(self, step: int) -> Iterable[tuple[Header, int, float, float, dict[str, Value]]]:
        """Every surviving record of `step` that was read, from the spool."""
        for attempt_id, attempt in self.attempts.items():
            if step not in attempt.steps:
                continue
            done: set[int] = set()
            for record in attempt.index.records_at(step, self._paths.get(attempt_id, {})):
                if record.seq in done or record.seq not in attempt.seen:
                    continue
                done.add(record.seq)
                if step > attempt.limit and not survives(step, attempt.logged_at(record), attempt.newer):
                    continue
                values = self._values_of(record, self._paths[attempt_id])
                if values:
                    yield attempt.header, record.seq, record.t, attempt.base + record.mono, values
            if not done:
                raise OSError(
                    f"step {step} of attempt {attempt.header.attempt} cannot be read again: a segment is gone"
                )

    def _values_of(self, record: Record, paths: Mapping[int, Path]) -> dict[str, Value]:
        if record.kind == "metrics":
            return self._metrics_of(record)
        if record.kind in ("table", "text", "media") and self._kind not in record.skip_sinks:
            found = payload_of(record, next(iter(paths.values())).parent / "media")
            return {found[0]: found[1]} if found else {}
        return {}

    def _metrics_of(self, record: Record) -> dict[str, Value]:
        if self._kind in record.skip_sinks:
            return {}
        return {key: value for key, value in record.data.items() if value is not None}

    # attempts

    def _limit(self) -> None:
        found = cuts(
            [attempt.header for attempt in self.attempts.values()],
            {attempt_id: attempt.first_step for attempt_id, attempt in self.attempts.items()},
        )
        for attempt_id, attempt in self.attempts.items():
            attempt.newer = found[attempt_id]
            attempt.limit = min((cut for cut, _ in attempt.newer), default=NO_LIMIT)

    def _relimit(self) -> None:
        self._limit()
        self._last.fold()
        dropped = [self._obey(attempt) for attempt in self.attempts.values() if attempt.newer != attempt.obeyed]
        lowest = min((step for step in dropped if step is not None), default=None)
        if lowest is None:
            return
        self._tip = None
        self._top = max((attempt.steps.last for attempt in self.attempts.values()), default=-1)
        self.operations.append(Rewind(lowest))
        again = sorted({step for a in self.attempts.values() for step in a.steps.from_step(lowest)})
        gone = self._last.take_back(lowest)
        for step in again:
            merged = merge_row(self._parts_at(step))
            if merged is not None:
                self.operations.append(Row(step, merged.t, merged.runtime, merged.values))
                self._summarise(step, merged.values)
        self._last.fold()
        self._find_summaries(self._last.without(gone), lowest)

    def _obeyed_all(self) -> None:
        """Steps that were saved are in line with the cuts of their time."""
        for attempt in self.attempts.values():
            attempt.obeyed = attempt.newer

    def _obey(self, attempt: _Attempt) -> int | None:
        """Take out of the attempt's steps what newer ones supersede; the lowest step that lost a row."""
        attempt.obeyed = attempt.newer
        if attempt.steps.last <= attempt.limit:
            return None
        if all(attempt.header.created + attempt.mono <= began for _, began in attempt.newer):
            return attempt.steps.drop_above(attempt.limit)
        # It went on beside a newer one: only its records tell which of its rows are older.
        kept: set[int] = set()
        lost: set[int] = set()
        paths = self._paths.get(attempt.header.attempt_id, {})
        for record in attempt.index.records_above(attempt.limit, paths):
            step = record.step
            if step is not None and record.seq in attempt.seen and self._values_of(record, paths):
                (kept if survives(step, attempt.logged_at(record), attempt.newer) else lost).add(step)
        attempt.steps.drop_above(attempt.limit)
        for step in sorted(kept):
            attempt.steps.add(step)
        return min(lost, default=None)

    def _find_summaries(self, keys: set[str], below: int) -> None:
        """The newest surviving values of `keys` at steps below `below`, read backwards until all are found."""
        if not keys:
            return
        winners_first = sorted(self.attempts.values(), key=lambda a: order_of(a.header), reverse=True)
        winners_first.sort(key=lambda a: writer_order(a.header.writer))
        for attempt in winners_first:
            paths = self._paths.get(attempt.header.attempt_id, {})
            for records, remaining in attempt.index.blocks_below(below, paths):
                for record in records:
                    step = record.step
                    if step is None or not step < below or record.seq not in attempt.seen:
                        continue
                    if step > attempt.limit and not survives(step, attempt.logged_at(record), attempt.newer):
                        continue
                    found = self._values_of(record, paths)
                    self._last.note(step, {key: found[key] for key in keys & found.keys()}, older=True)
                if self._last.settled(keys, remaining):
                    break

    def _rebase(self, attempt: _Attempt) -> None:
        """Seconds of training before this attempt: its writer's older attempts of which a row survives."""
        me = order_of(attempt.header)
        attempt.base = sum(
            other.mono
            for other in self.attempts.values()
            if other.header.writer == attempt.header.writer and order_of(other.header) < me and other.steps
        )

    def _runtime(self) -> float:
        newest = self._newest_main()
        if newest is None:
            return 0.0
        self._rebase(newest)
        return newest.base + newest.mono

    def _newest_main(self) -> _Attempt | None:
        writers = {attempt.header.writer for attempt in self.attempts.values()}
        if not writers:
            return None
        first = min(writers, key=writer_order)
        return max(
            (attempt for attempt in self.attempts.values() if attempt.header.writer == first),
            key=lambda attempt: order_of(attempt.header),
        )

    # everything that is no row

    def _meta(self, attempt: _Attempt, record: Record) -> None:
        data, kind = record.data, record.kind
        if kind in DESCRIBED:
            for operation in self._description.take(attempt.header, record):
                if isinstance(operation, Config) and self.operations and isinstance(self.operations[-1], Config):
                    self.operations.pop()
                self.operations.append(operation)
        elif kind == "system":
            if attempt is self._newest_main() or not self.view.system:
                self.view.system = bounded(data)
                self.operations.append(System(self.view.system))
        elif kind == "summary":
            data = bounded(data)
            self._last.put(data)
            self.operations.append(Summary(data))
        elif kind == "finish":
            state = data.get("state")
            exit_code = data.get("exit_code")
            attempt.finished = state if state in ("finished", "failed") else "failed"
            attempt.exit_code = exit_code if type(exit_code) is int else None

    def _summarise(self, step: int, values: Mapping[str, Value]) -> None:
        if step >= self._top:
            self._last.note_newest(step, values)
        else:
            self._last.note(step, values)

    def _state(self, crashed: bool = False) -> None:
        newest = self._newest_main()
        if newest is None:
            return
        state, exit_code = newest.finished, newest.exit_code
        if state is None:
            state, exit_code = ("crashed" if crashed else "running"), None
        view = self.view
        if (state, exit_code) != (view.state, view.exit_code):
            view.state, view.exit_code = state, exit_code
            self.operations.append(State(state, exit_code, newest.last_t, view.runtime))


_mono_of = attrgetter("mono")

_VIEW_FIELDS = (
    "created", "host", "name", "group", "job_type", "tags", "notes", "entity", "sinks", "config", "system", "axes",
    "state", "exit_code", "runtime",
)  # fmt: skip
