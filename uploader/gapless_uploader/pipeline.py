"""One run on its way to one sink: read, merge, write, and only then move the position.

`step` is one turn of it and returns what became of it; the position it reports is durable only once the state has
committed it. Each pipeline has its own reader and history, so a sink that is slow or dead holds up nobody. Only one
thread at a time uses a pipeline.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gapless_schemas import decode_lines
from gapless_uploader.adapt import adapt
from gapless_uploader.history import History
from gapless_uploader.operations import ENDS, Amend, Log, Operation, Row, State, Superseded
from gapless_uploader.plain_records import PlainDecoder
from gapless_uploader.position import Position, is_read, meet, seqs_of
from gapless_uploader.reader import RunReader
from gapless_uploader.rejoin import cursor_at
from gapless_uploader.sink import (
    Batch,
    Memo,
    Misconfigured,
    Parked,
    Place,
    Refusal,
    Rejected,
    Resume,
    Retryable,
    RunView,
    Session,
    Sink,
)
from gapless_uploader.spool import RunKey
from gapless_uploader.steps import Files, Outcome, PipelineOptions

SNAPSHOT_BYTES = 16 << 20
BACKOFF_FIRST_S = 1.0
BACKOFF_CAP_S = 60.0
PARKED_S = 300.0
REST_S = 60.0
_MARK = "rewound-from-step:"


class Pipeline:
    """Reads one run for one sink."""

    def __init__(
        self,
        key: RunKey,
        sink: Sink,
        saved: dict[str, Any] | None = None,
        snapshot: Callable[[], dict[str, Any] | None] = lambda: None,
        save_snapshot: Callable[[dict[str, Any]], None] | None = None,
        options: PipelineOptions | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.key = key
        self.sink = sink
        self._snapshot = snapshot
        self._save_snapshot = save_snapshot
        self._options = options or PipelineOptions()
        self._jitter = jitter
        self._session: Session | None = None
        self._failures = 0
        self._parks = 0
        self._slice = sink.capabilities.max_operations
        self._grows = False
        """A smaller slice is for a refused row in it, and not because W&B takes no more at once."""
        self._decode_lines = PlainDecoder().decode_lines if sink.capabilities.takes_json else decode_lines
        self._heartbeat_at = 0.0
        self._active_at = 0.0
        self.not_before = 0.0
        """Monotonic seconds before which a step is of no use."""
        self._stand_at(saved or {})

    def _stand_at(self, saved: dict[str, Any]) -> None:
        """Go on from `saved`, which is durable; nothing else is known."""
        self.saved = saved
        """The progress that is durable, or will be with the next commit, or with the proof of what runs ahead."""
        self._durable = saved
        """What was last handed out to be made durable."""
        self._is_ahead = False
        """The tracker said yes to more than what is proved: the progress is kept back until it is."""
        self._rows_ahead = 0
        self._reader: RunReader | None = None
        self._history: History | None = None
        self._pending: list[Operation] = []
        self._done = 0
        self._end: dict[str, Any] | None = None
        self._uncertain = False
        self._intent_saved = False
        self._memo: Memo = dict(self.saved.get("memo", {}))
        self._generation: int = self.saved.get("generation", 1)
        self._acked_top: int = self.saved.get("top", -1)
        self._batch_top: int = self.saved.get("batch_top", -1)
        """`_acked_top` when the batch at hand was formed."""
        self._counts: Counter[str] = Counter(self.saved.get("counts", {}))
        self._refused: Counter[str] = Counter(self.saved.get("refused", {}))
        self._state: str | None = self.saved.get("state")
        self._exit_code: int | None = self.saved.get("exit_code")
        self._batch_firsts: dict[str, int] = self.saved.get("batch_firsts", {})
        """The first steps that were known ahead when the batch at hand was formed."""
        self._batch_state: list[Any] = self.saved.get("batch_state", [None, None])
        """State and exit code that the tracker held when the batch at hand was formed."""
        self._is_state_known = True
        """False from when the tracker said where the run goes on until the history has said how it stood there."""
        self._since_snapshot = 0
        self._flush_due: bool = self.saved.get("flush", False)
        self._rewound: int | None = None
        """A step from which uploaded rows were rewound, until a fresh generation has begun."""
        self._rewinds: list[list[int]] = [*self.saved.get("rewinds", [])]
        """[from, to] of the steps that were uploaded and rewound in this generation, where the tracker keeps them."""
        self._is_behind = False
        """The last reading left something for the next one."""
        self._is_full = False
        """The last reading ended at a limit, and not where the spool does."""
        self._looked_at: Mapping[str, Mapping[int, int]] | None = None

    def idle(self, files: Files) -> bool:
        """Whether a step would find nothing to do, known without reading anything."""
        if self._pending or self._flush_due or self._is_ahead or self._rewound is not None or self.saved.get("end"):
            return False
        if self._looked_at is not None and files.sizes == self._looked_at:
            return not files.crashed or self._state in ENDS
        if files.crashed and self._state not in ENDS:
            return False
        if self._reader is not None:
            return all(
                name in self._reader.attempts and self._reader.attempts[name].idle(sizes)
                for name, sizes in files.sizes.items()
            )
        cursor = self.saved.get("cursor", {})
        return all(is_read(cursor.get(name), sizes) for name, sizes in files.sizes.items())

    def step(self, files: Files, now: float) -> Outcome:
        """Read and write one batch. Raises nothing that the tracker or the disk can cause."""
        outcome = Outcome()
        try:
            self._step(files, now, outcome)
        except Retryable as error:
            self._failed(outcome, str(error), now, error.after_s)
        except OSError as error:
            if not self._pending:
                # What was being read is only half merged: the next step reads it again from the saved position.
                self._reader = self._history = self._end = None
            self._failed(outcome, _os_error(error), now, None)
        except Resume as found:
            self._rejoin(found, files, now, outcome)
        except (Parked, Misconfigured, Rejected) as error:  # Rejected: what is no batch is nothing to set aside
            outcome.parked = str(error)
            outcome.parked_sink = isinstance(error, Misconfigured) or (isinstance(error, Parked) and error.whole_sink)
            outcome.retry_in_s = PARKED_S
            self._parks += 1
            self.not_before = now + PARKED_S
            self._close_session()
            if self._is_ahead:
                # Nobody proves what ran ahead any more: the next session finds out from the tracker where it stands.
                self._stand_at(self._durable)
                outcome.progress, outcome.rows = None, 0
        else:
            # A batch whose end was only made durable has not gone through yet.
            went_through = outcome.rows or (outcome.progress and not self._pending)
            if (self._failures or self._parks) and went_through:
                outcome.recovered_after, self._failures, self._parks = self._failures + self._parks, 0, 0
        self._note_trouble(outcome)
        self._keep_back(outcome)
        return outcome

    def _keep_back(self, outcome: Outcome) -> None:
        """Let out of a step only what is proved."""
        if not self._is_ahead:
            outcome.rows, self._rows_ahead = outcome.rows + self._rows_ahead, 0
            self._durable = outcome.progress or self._durable
            return
        self._rows_ahead, outcome.rows = self._rows_ahead + outcome.rows, 0
        trouble = self.saved.get("trouble")
        is_told = trouble == self._durable.get("trouble")
        outcome.progress = None if is_told else {**self._durable, "trouble": trouble}
        self._durable = outcome.progress or self._durable

    def _note_trouble(self, outcome: Outcome) -> None:
        """Keep with the progress why it does not move, for whoever asks from outside."""
        trouble = outcome.failed or outcome.parked
        moved = outcome.progress is not None
        if trouble != self.saved.get("trouble") and (trouble is not None or moved):
            self.saved = {**self.saved, "trouble": trouble}
            outcome.progress = {**(outcome.progress or self._progress()), "trouble": trouble}

    def troubled(self, why: str) -> dict[str, Any]:
        """The durable progress, with why it does not move: for a pipeline that is of no use any more."""
        place = {"project": self.key[0], "run": self.key[1], "sink": f"{self.sink.kind}:{self.sink.target}"}
        return {"cursor": {}, **self._durable, **place, "trouble": why}

    def heartbeat_due(self, now: float) -> bool:
        """Whether the tracker has to hear that the training lives."""
        every = self.sink.capabilities.heartbeat_s
        return every is not None and now >= self._heartbeat_at and self._state in (None, "running") and self._begun

    @property
    def _begun(self) -> bool:
        return bool(self.saved.get("cursor"))

    def rest(self, now: float) -> None:
        """Close the session of a run that was quiet for `REST_S`: 1,000 quiet runs hold no file and no connection.

        The next row opens it again. A tracker that wants heartbeats keeps its session while the run lives. Raises what
        a session's close raises.
        """
        open_ends = self._pending or self._flush_due or self._is_ahead or self._rewound is not None
        quiet = self._session is not None and not open_ends
        lives = self.sink.capabilities.heartbeat_s is not None and self._state in (None, "running")
        if quiet and not lives and now - self._active_at >= REST_S:
            self._close_session()

    def close(self) -> dict[str, Any] | None:
        """Let go of everything; progress to commit, if any. Raises what a session's flush raises."""
        try:
            if self._session is not None:
                self._memo = self._session.flush()
                self._is_ahead = False
                return self._progress()
            return None
        finally:
            self._close_session()
            if self._reader is not None:
                self._reader.rest()

    def settled(self, files: Files) -> bool:
        """Whether the run is over and the tracker knows all of it: nothing of the pipeline is needed any more."""
        return self._state in ENDS and self.idle(files)

    # one step

    def _step(self, files: Files, now: float, outcome: Outcome) -> None:
        reader, history = self._load(files, now)
        history.view.folder = _folder_of(files.paths)
        if self._rewound is not None:
            self._begin_generation(outcome)
            return
        if not self._pending:
            self._read(reader, history, files, now, outcome)
            if self._reader is None:
                return  # a fresh generation begins with the next step
        if self._pending:
            if not self._write(reader, history, files, now, outcome):
                return
        elif self._is_ahead:
            self._prove(outcome)
        elif self._flush_due:
            if self._session is None:
                self._session = self.sink.open(self._view(history), self._memo)
            self._memo = self._session.flush()
            self._flush_due = False
            outcome.progress = self.saved = self._progress()
            outcome.check = self._memo.get("check")
        elif self.heartbeat_due(now) and not files.crashed:
            self._heartbeat(history, now)
            if self.saved.get("trouble") is not None:
                outcome.progress = self._progress()  # it is over
        elif self.saved.get("cursor", {}) != self._durable.get("cursor", {}):
            outcome.progress = self._progress()  # all that the tracker said it has; it need not say so again
        if self._end is not None and not self._pending:
            self._settle(history, outcome)
        if not outcome.more:
            reader.rest()
        elif not self._pending and not self._is_behind and history.view.state == "running":
            self.not_before = max(self.not_before, now + self.sink.capabilities.interval_s)

    def _heartbeat(self, history: History, now: float) -> None:
        if self._session is None:
            self._session = self.sink.open(self._view(history), self._memo)
        self._heartbeat_at = now + (self.sink.capabilities.heartbeat_s or 0.0)
        self._session.heartbeat(now)

    def _read(self, reader: RunReader, history: History, files: Files, now: float, outcome: Outcome) -> None:
        can = self.sink.capabilities
        meet(reader, history, files, now)
        self._batch_firsts = history.unread()
        count = 0
        for attempt_id, taken in reader.read(files.paths, files.sizes, now, can.max_bytes):
            history.feed(attempt_id, taken, files.paths)
            self._since_snapshot += taken.end - taken.start
            outcome.num_bytes += taken.end - taken.start
            count += len(taken.records)
            if count >= can.max_operations:
                break
        self._is_full = count >= can.max_operations or outcome.num_bytes >= can.max_bytes
        self._is_behind = any(not a.idle(files.sizes.get(name, {})) for name, a in reader.attempts.items())
        history.conclude(files.crashed and not count and not reader.waits_for_blocks)
        outcome.damage.extend(reader.take_damage())
        self._counts["damaged"] += len(outcome.damage)
        self._batch_top, self._batch_state = self._acked_top, [self._state, self._exit_code]
        self._take_operations(history, outcome)
        if self._history is None:
            return  # a fresh generation: everything is read again, from the beginning
        self._end = reader.cursor()
        outcome.more = count > 0
        self._looked_at = None
        if not count and reader.waits_for_blocks:
            outcome.look_again_s = 1.0
        elif not count:
            self._looked_at = files.sizes

    def _take_operations(self, history: History, outcome: Outcome) -> None:
        operations, refused, rewound = adapt(history.take(), self.sink.capabilities, self._batch_top)
        if rewound is not None and self._options.on_rewind == "new-run":
            self._rewound = rewound
            self._begin_generation(outcome)
            return
        if rewound is not None:
            self._rewinds.append([rewound, self._batch_top])
        if self._options.on_rewind == "keep-first" and self._rewinds:
            refused.extend(
                Refusal(_step_of(op), None, "a rewound step that was uploaded: the first one is kept")
                for op in operations
                if self._is_kept(op)
            )
            operations = [op for op in operations if not self._is_kept(op)]
        self._note_refused(refused, outcome)
        self._pending, self._done = operations, 0

    def _is_kept(self, operation: Operation) -> bool:
        """Whether the tracker's first row of this step stays, so that the operation is refused."""
        step = _step_of(operation)
        return any(first <= step <= last for first, last in self._rewinds)

    def _write(self, reader: RunReader, history: History, files: Files, now: float, outcome: Outcome) -> bool:
        """Write one slice; False when the step ends here."""
        can = self.sink.capabilities
        if self._is_ahead and not self._intent_saved and not self._is_full:
            # Only a batch that is made the same when it is read again may run ahead without a durable end: one of
            # full size, or the one whose end was made durable before. What reaches the spool's end may grow.
            self._prove(outcome)
            return False
        is_first = can.begins_with_memo and self._session is None and not self._begun
        if is_first:
            self._session = self.sink.open(self._view(history), self._memo)
            memo, self._memo = self._memo, self._session.flush()
            is_first = memo != self._memo
        wants_intent = can.settles_intents and not self._is_ahead and _has_rows(self._pending)
        if is_first or (wants_intent and not self._intent_saved):
            self._intent_saved = True
            outcome.progress = self._progress()
            outcome.more = True
            return False
        if self._session is None:
            self._session = self.sink.open(self._view(history), self._memo)
        self._active_at = now
        part = self._pending[: self._slice]
        batch = Batch(part, self._view(history), self._uncertain, self._place())
        if self._is_behind:
            batch.meanwhile = partial(reader.read_ahead, files.paths, files.sizes, now, can.max_bytes)
        try:
            ack = self._session.write(batch)
        except Rejected as error:
            self._rejected(error, outcome)
            return True
        except (Retryable, Parked, Misconfigured, OSError):
            self._uncertain = True
            raise
        self._is_ahead = not ack.is_proved
        self._acknowledge(part[: ack.done], ack.memo, ack.refused, outcome)
        self._heartbeat_at = now + (can.heartbeat_s or 0.0)
        return True

    def _note_state(self, operation: Operation) -> str | None:
        """Take over the state that the tracker was told, and return it, if the operation is one."""
        if type(operation) is not State:
            return None
        self._state, self._exit_code = operation.state, operation.exit_code
        self._flush_due = operation.state != "running"
        return operation.state

    def _prove(self, outcome: Outcome) -> None:
        """Wait until the tracker shows what it said yes to. Raises what a session's flush raises."""
        if self._session is not None:
            self._memo = self._session.flush()
        self._is_ahead = False
        outcome.progress = self._progress()
        outcome.more = True

    def _acknowledge(self, done: list[Operation], memo: Memo, refused: list[Refusal], outcome: Outcome) -> None:
        self._memo = memo
        self._done += len(done)
        self._pending = self._pending[len(done) :]
        self._note_refused(refused, outcome)
        rows = [operation for operation in done if type(operation) is Row or type(operation) is Amend]
        outcome.rows += max(0, len(rows) - sum(refusal.key is None for refusal in refused))
        self._acked_top = max([self._acked_top, *(row.step for row in rows if row.step is not None)])
        for operation in done if len(rows) < len(done) else ():
            outcome.new_state = self._note_state(operation) or outcome.new_state
        self._counts["rows"] += outcome.rows
        outcome.more = True
        outcome.progress = self._progress()
        most = self.sink.capabilities.max_operations
        if not self._pending:
            self._slice = most
        elif self._grows:  # what was wrong may be behind it: one bad row makes no small requests of all that follow
            self._slice = min(2 * self._slice, most)

    def _settle(self, history: History, outcome: Outcome) -> None:
        """Everything up to the reader's position was acknowledged: it becomes the saved position."""
        cursor = self._end or {}
        self._end, self._done, self._uncertain, self._intent_saved = None, 0, False, False
        if cursor == self.saved.get("cursor") and not outcome.progress and not self._refused:
            return
        self.saved = {**self.saved, "cursor": cursor, "firsts": history.unread()}
        outcome.progress = self._progress()
        outcome.progress["step"] = history.last_step
        outcome.progress["lost"] = history.lost()
        outcome.progress["superseded"] = history.superseded
        outcome.progress["read"] = history.rows
        outcome.progress["t"] = history.last_t
        outcome.progress["attempts"] = history.compact()
        self.saved = outcome.progress
        if self._since_snapshot >= SNAPSHOT_BYTES and self._save_snapshot is not None and not self._is_ahead:
            self._since_snapshot = 0
            self._save_snapshot({"cursor": cursor, "generation": self._generation, "history": history.to_json()})

    def _rejected(self, error: Rejected, outcome: Outcome) -> None:
        part = self._pending[: self._slice]
        if len(part) > 1:
            # A batch that was refused whole is never sent again unchanged: smaller ones find what is wrong in it.
            self._slice, self._grows = max(1, len(part) // 2), not error.too_large
            outcome.more = True
            return
        operation = part[0]
        outcome.dead.append((operation, str(error)))
        step = operation.step if isinstance(operation, Row | Amend) else None
        self._acknowledge([], self._memo, [Refusal(step, None, str(error))], outcome)
        self._pending = self._pending[1:]
        self._done += 1
        outcome.progress = self._progress()

    def _begin_generation(self, outcome: Outcome) -> None:
        """Leave the tracker run as it is, tagged, and send the whole corrected history to a fresh one.

        When the tracker does not answer, the next step tries again.
        """
        old = self._view(self._history) if self._history else None
        # The operations at hand are of no use to either run: if saying so fails, they are read and made again.
        self._reader = self._history = None
        if old is not None:
            fresh = f"{self.key[1]}-r{self._generation + 1}"
            if self._session is None:
                self._session = self.sink.open(old, self._memo)
            self._session.write(Batch([Superseded(fresh)], old))
        self._close_session()
        self._is_ahead = False
        self._generation += 1
        self._memo, self._acked_top, self._state, self._exit_code = {}, -1, None, None
        self._pending, self._done, self._end, self._since_snapshot, self._rewinds = [], 0, None, 0, []
        self.saved = {**self.saved, "cursor": {}, "end": None, "firsts": {}}
        self._counts["rewinds"] += 1
        outcome.progress = self._progress()
        outcome.progress["rewound_at"], self._rewound = self._rewound, None
        outcome.more = True

    def _rejoin(self, found: Resume, files: Files, now: float, outcome: Outcome) -> None:
        """Stand where the tracker stands. Until the next step went through, it says so again."""
        self._close_session()
        self._is_ahead = False
        self._reader = self._history = None
        self._pending, self._done, self._end, self._since_snapshot = [], 0, None, 0
        self._memo, self._generation, self._state, self._exit_code = found.memo, found.generation, None, None
        self._batch_state, self._is_state_known = [None, None], False
        self._acked_top = self._batch_top = found.place.top
        try:
            cursor = cursor_at(files.paths, found.place.at, now)
            end = cursor_at(files.paths, found.place.to, now, cursor) if found.place.done else None
        except OSError as error:
            self._failed(outcome, _os_error(error), now, None)
            return
        self._batch_firsts = found.place.batch_firsts
        place = {
            "cursor": cursor,
            "end": end,
            "done": found.place.done,
            "batch_top": found.place.top,
            "firsts": found.place.firsts,
            "batch_firsts": found.place.batch_firsts,
        }
        self.saved = {**self.saved, **place, "memo": found.memo, "generation": found.generation}
        outcome.more = True

    # loading

    def _load(self, files: Files, now: float) -> tuple[RunReader, History]:
        """The reader and history at the saved position; after a start they are read up to it, without writing."""
        if self._reader is None or self._history is None:
            snapshot = self._snapshot() if self.saved.get("cursor") else None
            at = Position(self.key, self.sink.kind, self._options.grace_s, self._decode_lines)
            if snapshot is not None and snapshot.get("generation") == self._generation:
                at.restore(snapshot, files)
            try:
                self._go_to(at, files, now)
            except Retryable as error:
                if self._is_state_known:
                    raise
                self._stand_at(self._durable)  # the tracker is asked again, with the files of then
                raise Parked(
                    f"{error}; the tracker has them, and there is no state of this run here: bring back the spool files"
                    f" or the state folder of then, or upload what is here beside it with --new-id {self.key[1]}=ID"
                ) from None
            self._is_state_known = True
            self._reader, self._history = at.reader, at.history
        return self._reader, self._history

    def _go_to(self, at: Position, files: Files, now: float) -> None:
        """Read up to the saved position, and form the batch that was being sent. Raises Retryable and OSError."""
        cursor, end = self.saved.get("cursor", {}), self.saved.get("end")
        if cursor:
            at.go_to(cursor, files, now, self.saved.get("attempts"), self.saved.get("firsts", {}))
        view = at.history.view
        if not self._is_state_known:
            self._take_state_of(view)
        state, exit_code = self._batch_state if end else (self._state, self._exit_code)
        view.state, view.exit_code = state or "running", exit_code
        if end:
            at.read_on(end, files, now, self._batch_firsts)
            self._form_again(end, at.history)

    def _take_state_of(self, view: RunView) -> None:
        """The tracker holds what the run's records say up to the cursor, its end among it."""
        if view.state in ENDS:
            self._state, self._exit_code = view.state, view.exit_code
            self._batch_state = [view.state, view.exit_code]

    def _form_again(self, end: dict[str, Any], history: History) -> None:
        """Form the batch that was being sent, without what was applied of it."""
        refused = self._refused.copy()
        self._take_operations(history, Outcome())
        self._refused = refused
        done = min(self.saved.get("done", 0), len(self._pending))
        self._acked_top = max(self._acked_top, *(_step_of(operation) for operation in self._pending[:done]), -1)
        for operation in self._pending[:done]:
            self._note_state(operation)
        self._pending, self._done, self._end = self._pending[done:], done, end
        self._uncertain = self._intent_saved = True
        if not self._pending:  # all of the batch was applied: what is read next begins behind it
            self.saved = {**self.saved, "cursor": end, "end": None, "done": 0, "firsts": history.unread()}
            self._end, self._done, self._uncertain, self._intent_saved = None, 0, False, False

    # small things

    def _view(self, history: History) -> RunView:
        view = history.view
        view.generation = self._generation
        if self._options.on_rewind == "mark":
            given = [tag for tag in view.tags if not tag.startswith(_MARK)]
            view.tags = given + [f"{_MARK}{first}" for first, _ in self._rewinds]
        return view

    def _place(self) -> Place:
        return Place(
            seqs_of(self.saved.get("cursor", {})),
            seqs_of(self._end or {}),
            self._done,
            self._batch_top,
            self.saved.get("firsts", {}),
            self._batch_firsts,
        )

    def _progress(self) -> dict[str, Any]:
        open_end = self._end if (self._pending and (self._intent_saved or self._done)) else None
        done = self._done
        if self._history is None:  # nothing is loaded: what is open is as it was saved
            open_end, done = self.saved.get("end"), self.saved.get("done", 0)
        return {
            **self.saved,
            "project": self.key[0],
            "run": self.key[1],
            "sink": f"{self.sink.kind}:{self.sink.target}",
            "cursor": self.saved.get("cursor", {}),
            "end": open_end,
            "done": done if open_end else 0,
            "memo": self._memo,
            "generation": self._generation,
            "top": self._acked_top,
            "batch_top": self._batch_top,
            "counts": dict(self._counts),
            "refused": dict(self._refused),
            "state": self._state,
            "exit_code": self._exit_code,
            "batch_state": self._batch_state,
            "batch_firsts": self._batch_firsts,
            "rewinds": [*self._rewinds],
            "flush": self._flush_due,
        }

    def _note_refused(self, refused: list[Refusal], outcome: Outcome) -> None:
        outcome.refused.extend(refused)
        self._refused.update(refusal.reason for refusal in refused)

    def _failed(self, outcome: Outcome, reason: str, now: float, after_s: float | None) -> None:
        self._failures += 1
        ceiling = min(BACKOFF_CAP_S, BACKOFF_FIRST_S * 2 ** min(self._failures - 1, 16))
        wait = max(self._jitter() * ceiling, 0.05) if after_s is None else min(max(after_s, 0.05), 3600.0)
        outcome.failed, outcome.retry_in_s = reason, wait
        self.not_before = now + wait

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def is_settled(saved: Mapping[str, Any], files: Files) -> bool:
    """What `Pipeline.settled` says of a pipeline made of this progress: most runs of a large spool need none."""
    return (
        saved.get("state") in ENDS
        and not saved.get("flush")
        and not saved.get("end")
        and all(is_read(saved["cursor"].get(name), sizes) for name, sizes in files.sizes.items())
    )


def _step_of(operation: Operation) -> int:
    return operation.step if isinstance(operation, Row | Amend) and operation.step is not None else -1


def _folder_of(paths: Mapping[str, Mapping[int, Path]]) -> Path | None:
    return next((path.parent for found in paths.values() for path in found.values()), None)


def _has_rows(operations: list[Operation]) -> bool:
    return any(isinstance(operation, Row | Amend | Log) for operation in operations)


def _os_error(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)
