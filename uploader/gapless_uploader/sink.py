"""What a tracker's sink is: how it is opened, what it promises when it answers, how it fails.

A sink is one tracker at one target; a session is one run in it. The uploader calls a session from one thread at a
time. A batch may come twice: the process can die between the tracker's yes and the checkpoint. Each sink says in
`Capabilities.exactly_once` by which mechanism that is harmless, or that it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from gapless_uploader.failures import Misconfigured, Parked, Rejected, Retryable
from gapless_uploader.operations import Operation, Value

__all__ = [
    "Ack",
    "Batch",
    "Capabilities",
    "Memo",
    "Misconfigured",
    "Parked",
    "Place",
    "Refusal",
    "Rejected",
    "Resume",
    "Retryable",
    "RunView",
    "Session",
    "Sink",
    "prepared",
]

Memo = dict[str, Any]
"""A session's own checkpoint: small, JSON, kept with the position and given back to `open`."""


@dataclass(frozen=True, slots=True)
class Place:
    """Between which operations of a run a tracker stands, said without files: where the batch begins and ends, and
    how many of its operations were applied. Reading a run again to `at`, then on to `to`, makes the same batch."""

    at: dict[str, list[list[int]]] = field(default_factory=dict)
    """attempt_id -> intervals of the seqs read before the batch."""
    to: dict[str, list[list[int]]] = field(default_factory=dict)
    """The same at the batch's end."""
    done: int = 0
    top: int = -1
    """The highest step that the tracker held when the batch was made."""
    firsts: dict[str, int] = field(default_factory=dict)
    """attempt_id -> first step of attempts that nothing had been read of before the batch: they supersede others."""
    batch_firsts: dict[str, int] = field(default_factory=dict)
    """The same when the batch was made."""


class Resume(Exception):
    """What the tracker holds says that the run goes on elsewhere than the uploader's state does."""

    def __init__(self, reason: str, generation: int, place: Place, memo: Memo) -> None:
        super().__init__(reason)
        self.generation = generation
        self.place = place
        self.memo = memo


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a sink can express. The uploader turns, counts or refuses the rest before the sink sees it."""

    exactly_once: str
    """The mechanism by which a repeated batch is harmless, and what it assumes; or 'at least once: why'."""
    amend: bool = True
    """Takes more or changed keys of a step that was sent."""
    late_steps: bool = True
    """Takes a step below the highest one sent."""
    takes_json: bool = False
    """Sends rows of plain numbers as the text that the spool has of them, and seldom asks for their values."""
    rewind: bool = False
    """Takes back rows that were sent."""
    unstepped: bool = False
    """Takes rows without a step."""
    non_finite: bool = True
    text: bool = False
    tables: bool = False
    media: bool = False
    end_state: bool = False
    original_time: bool = True
    read_back: bool = False
    heartbeat_s: float | None = None
    """`heartbeat` is called this often while the training lives."""
    interval_s: float = 0.0
    """While a run is live and all that is there was sent, the next batch waits so long."""
    settles_intents: bool = True
    """The batch's end is made durable before it is written; after a crash or a lost answer the same batch comes again,
    whole, as `Batch.uncertain`. False only where `open` takes the tracker back to exactly what the memo describes."""
    begins_with_memo: bool = False
    """A session's memo is made durable before its first batch is written: by it `open` knows a run as begun here."""
    max_operations: int = 5_000
    max_bytes: int = 4 << 20
    """Of spool read for one batch."""


@dataclass(slots=True)
class RunView:
    """A run as its history knows it at the end of the batch at hand."""

    project: str
    run_id: str
    created: float
    """Unix seconds at which the run's first attempt began."""
    host: str
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    entity: str | None = None
    sinks: list[str] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    system: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)
    """Key or glob -> (x-axis key, summary rule)."""
    summary: dict[str, Value] = field(default_factory=dict)
    """Last value by step, overridden by what the training set."""
    state: str = "running"
    exit_code: int | None = None
    runtime: float = 0.0
    generation: int = 1
    """Counts the fresh tracker runs that rewinds of uploaded rows made."""
    folder: Path | None = None
    """The run's folder in the spool, to be read only; None for a run that comes from elsewhere."""

    @property
    def tracker_id(self) -> str:
        """The id at the tracker: the run's own, with `-r2` and so on for later generations."""
        return self.run_id if self.generation == 1 else f"{self.run_id}-r{self.generation}"


@dataclass(slots=True)
class Batch:
    """Operations to apply in order."""

    operations: Sequence[Operation]
    run: RunView
    uncertain: bool = False
    """These operations may have been applied before, whole or in part: the answer never came."""
    place: Place = field(default_factory=Place)
    """Where the first of the operations stands; a tracker that can hold it lets a lost state double nothing."""
    meanwhile: Callable[[], None] = lambda: None
    """Work of the uploader's for the time in which the tracker answers. A sink may call it once its request has left,
    in the thread of `write`; it takes as long as reading the next batch, and raises nothing."""


@dataclass(slots=True)
class Refusal:
    """One value or row that the tracker cannot hold. Counted by reason, never silent."""

    step: int | None
    key: str | None
    reason: str


@dataclass(slots=True)
class Ack:
    """The tracker holds the batch's first `done` operations."""

    done: int
    memo: Memo
    refused: list[Refusal] = field(default_factory=list)
    is_proved: bool = True
    """False: the tracker said yes and is still asked to show it. It counts with the next ack that is proved, or with
    `flush`; until then nothing of it is made durable, and later batches may be written."""


class Session(Protocol):
    """One run in a tracker. Not thread safe."""

    def write(self, batch: Batch) -> Ack:
        """Apply operations and return what the tracker acknowledged. Raises Retryable, Rejected, Parked or Resume."""

    def heartbeat(self, now: float) -> None:
        """Tell the tracker that the training lives. Called only with `Capabilities.heartbeat_s`."""

    def flush(self) -> Memo:
        """Make durable, read back, or settle what is open; return the memo that holds from now on."""

    def close(self) -> None:
        """Let go of handles. May be called twice; says nothing to the tracker about the run's end."""


class Sink(Protocol):
    """One tracker at one target, shared by all its runs. `open` is called from several threads.

    It may have a `prepare()`, which `prepared` calls.
    """

    kind: str
    target: str
    """What tells two targets of one kind apart in the state; no secret."""
    capabilities: Capabilities

    def open(self, run: RunView, memo: Memo) -> Session:
        """A session that goes on after what `memo` describes; an empty memo is a first time.

        Raises Retryable, Parked, Misconfigured or Resume.
        """


def prepared(sink: Sink) -> None:
    """Let the sink begin what takes long, before its first run is opened: `prepare` returns at once.

    It may be called more than once, and where nothing is to be uploaded. What it raises is left for `open` to say.
    """
    begin = getattr(sink, "prepare", None)
    if begin is not None:
        with suppress(Exception):
            begin()
