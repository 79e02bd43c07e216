"""The reference sink: keeps what it is given in the object, for tests and for learning what a sink does.

Rows are kept by step and key, so a repeated batch changes nothing; rows without a step are cut back to the memo at
`open`. Sessions of one `MemorySink` see the same runs, so a test "restarts the uploader" by opening again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gapless_uploader.operations import (
    Amend,
    Axis,
    Config,
    Gap,
    Identity,
    Log,
    Missing,
    Operation,
    Rewind,
    Row,
    State,
    Summary,
    System,
    Value,
)
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Refusal, RunView


@dataclass(slots=True)
class MemoryRun:
    """One run as this sink holds it."""

    rows: dict[int, dict[str, Value]] = field(default_factory=dict)
    times: dict[tuple[int, str], float] = field(default_factory=dict)
    """(step, key) -> wall clock of the operation that brought the value."""
    unstepped: list[Row] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    """All that were applied, repeats included, over all sessions."""
    refused: list[Refusal] = field(default_factory=list)
    identity: Identity | None = None
    config: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Axis] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    logs: list[Log] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    state: State | None = None
    heartbeats: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """Number of operations of each batch that was acknowledged."""
    view: RunView | None = None
    """The run's view of the last batch."""
    opened: int = 0
    closed: int = 0


class MemorySink:
    """Keeps runs in `runs`, by `project/tracker_id`. `failures` and `before_write` make it fail."""

    kind = "memory"
    capabilities = Capabilities(
        exactly_once="rows are kept by step and key; rows without a step are cut back to the memo",
        rewind=True,
        unstepped=True,
        text=True,
        tables=True,
        media=True,
        end_state=True,
        read_back=True,
    )

    def __init__(self, target: str = "", **limits: Any) -> None:
        """`limits` are fields of `Capabilities`, to stand for a tracker that can express less."""
        self.target = target
        try:
            self.capabilities = replace(self.capabilities, **limits)
        except TypeError as error:
            raise Misconfigured(f"sink 'memory': {error}") from None
        self.runs: dict[str, MemoryRun] = {}
        self.failures: list[Exception] = []
        """Raised by the next writes, one a write, before anything is applied."""
        self.lost_answers: list[Exception] = []
        """Raised by the next writes after everything was applied: the answer got lost."""
        self.open_failures: list[Exception] = []
        self.refuse: Callable[[int | None, str, Value], str | None] = _takes_all
        """The reason for which a value is refused, or None."""
        self.before_write: Callable[[Batch], None] = _does_nothing
        """Called with each batch before it is applied; may raise or block."""
        self.ack_at_most: int | None = None
        """Apply and acknowledge only so many operations of a batch."""

    def open(self, run: RunView, memo: Memo) -> MemorySession:
        """A session on `runs[project/tracker_id]`. An empty memo begins the run again."""
        if self.open_failures:
            raise self.open_failures.pop(0)
        name = f"{run.project}/{run.tracker_id}"
        held = self.runs.setdefault(name, MemoryRun())
        if not memo:
            held.rows.clear()
            held.times.clear()
        del held.unstepped[memo.get("unstepped", 0) :]
        held.opened += 1
        return MemorySession(self, held)


class MemorySession:
    """One run's session. May be closed twice."""

    def __init__(self, sink: MemorySink, run: MemoryRun) -> None:
        self._sink = sink
        self._run = run
        self._open = True

    def write(self, batch: Batch) -> Ack:
        """Apply the batch. Raises what the sink was told to raise."""
        if not self._open:
            raise RuntimeError("write to a closed session")
        sink, run = self._sink, self._run
        sink.before_write(batch)
        if sink.failures:
            raise sink.failures.pop(0)
        refused: list[Refusal] = []
        done = len(batch.operations) if sink.ack_at_most is None else min(sink.ack_at_most, len(batch.operations))
        for operation in batch.operations[:done]:
            self._apply(operation, refused)
        run.view = batch.run
        run.refused.extend(refused)
        if sink.lost_answers:
            raise sink.lost_answers.pop(0)
        run.batches.append(done)
        return Ack(done, self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Keep the time."""
        self._run.heartbeats.append(now)

    def flush(self) -> Memo:
        """Nothing is open; the memo says how many rows without a step there are."""
        return {"unstepped": len(self._run.unstepped)}

    def close(self) -> None:
        """Count it, once."""
        if self._open:
            self._open = False
            self._run.closed += 1

    def _apply(self, operation: Operation, refused: list[Refusal]) -> None:
        run = self._run
        run.operations.append(operation)
        match operation:
            case Row(step=None):
                values = self._allowed(None, operation.values, refused)
                run.unstepped.append(Row(None, operation.t, operation.runtime, values))
            case Row(step=int(step)):
                self._put(step, operation.t, operation.values, refused)
            case Amend(step=step):
                changed = {key: operation.values[key] for key in operation.changed if key in operation.values}
                self._put(step, operation.t, changed, refused)
            case Rewind(step=first):
                run.rows = {step: row for step, row in run.rows.items() if step < first}
                run.times = {place: t for place, t in run.times.items() if place[0] < first}
            case Identity():
                run.identity = operation
            case Config():
                run.config = operation.config
            case System():
                run.system = operation.data
            case Axis():
                run.axes[operation.key] = operation
            case Summary():
                run.summary.update(operation.values)
            case State():
                run.state = operation
            case Log():
                run.logs.append(operation)
            case Gap():
                run.gaps.append(operation)

    def _put(self, step: int, t: float, values: dict[str, Value], refused: list[Refusal]) -> None:
        allowed = self._allowed(step, values, refused)
        self._run.rows.setdefault(step, {}).update(allowed)
        self._run.times.update(((step, key), t) for key in allowed)

    def _allowed(self, step: int | None, values: dict[str, Value], refused: list[Refusal]) -> dict[str, Value]:
        allowed = {}
        for key, value in values.items():
            reason = value.reason if isinstance(value, Missing) else self._sink.refuse(step, key, value)
            if reason is None:
                allowed[key] = value
            else:
                refused.append(Refusal(step, key, reason))
        return allowed


def _takes_all(_step: int | None, _key: str, _value: Value) -> str | None:
    return None


def _does_nothing(_batch: Batch) -> None:
    return None
