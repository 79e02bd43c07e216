"""Operations: what the history asks a tracker to do, in the order to do it.

A tracker that applied all of them holds the merged history of the run, whatever order the spool was read in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from gapless_uploader.plain_records import PlainRecord


class Text(msgspec.Struct):
    """A text value of a row."""

    text: str


class Table(msgspec.Struct):
    """A table value of a row: the rows logged at this step, never an accumulation."""

    columns: list[str]
    rows: list[list[Any]]
    log_mode: str | None = None


class MediaItem(msgspec.Struct):
    """One image, video, audio, file or histogram. `path` is inside the run's media folder, None for a histogram."""

    path: Path | None
    info: dict[str, Any] = msgspec.field(default_factory=dict)
    """What belongs to the type: caption, format, width, height, fps, sample_rate, name, edges, counts."""


class Media(msgspec.Struct):
    """A media value of a row. `type` is image, video, audio, file or histogram."""

    type: str
    items: list[MediaItem]


class Missing(msgspec.Struct):
    """A payload that its line refers to and that is not there, or is not what its name says."""

    reason: str


Value = float | int | bool | str | list[Any] | Text | Table | Media | Missing


class Row(msgspec.Struct, gc=False, eq=False):
    """A step seen first, or a row without a step."""

    step: int | None
    t: float
    """Wall clock of the row's last record, unix seconds."""
    runtime: float
    """Seconds of training up to the row, over all surviving attempts of its writer."""
    given: dict[str, Value] | None = None
    """The values; None while they are only in `record`."""
    is_plain: bool = False
    """Every value is known to be a finite number: nobody has to look at them again."""
    record: PlainRecord | None = None
    """Whose values these are, and no others: their text can go on as it stands."""

    @property
    def values(self) -> dict[str, Value]:
        """Key -> value; plain ones are decoded when somebody asks."""
        if self.given is None:
            self.given = self.record.data if self.record is not None else {}
        return self.given

    @values.setter
    def values(self, values: dict[str, Value]) -> None:
        self.given, self.is_plain, self.record = values, False, None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        mine, others = (self.step, self.t, self.runtime), (other.step, other.t, other.runtime)
        return mine == others and self.values == other.values

    __hash__ = None  # type: ignore[assignment]


class Amend(msgspec.Struct):
    """A step seen before. `values` is the whole merged row."""

    step: int
    t: float
    runtime: float
    values: dict[str, Value]
    changed: tuple[str, ...]
    """The keys that are new or have another value than in the operation before."""
    added: tuple[str, ...] | None = None
    """Of those, the keys that no operation of this step had before; None when that is not known."""


class Rewind(msgspec.Struct):
    """Every row at `step` and above is gone; those that survive follow as rows."""

    step: int


class Identity(msgspec.Struct):
    """What `init` was given: replaces what was known."""

    name: str | None
    group: str | None
    job_type: str | None
    tags: list[str]
    notes: str | None
    entity: str | None
    sinks: list[str] | None


class Config(msgspec.Struct):
    """The whole config as it is now."""

    config: dict[str, Any]


class System(msgspec.Struct):
    """The training's environment, as it recorded itself."""

    data: dict[str, Any]


class Axis(msgspec.Struct):
    """`axis` is the x-axis of the keys that `key`, a name or glob, matches; `summary` the rule of their summary."""

    key: str
    axis: str | None
    summary: str | None


class Summary(msgspec.Struct):
    """Summary values that the training set itself."""

    values: dict[str, Any]


ENDS = ("finished", "failed", "crashed")
"""States of a run that is over."""


class State(msgspec.Struct):
    """The run's state: running, finished, failed or crashed."""

    state: str
    exit_code: int | None
    t: float
    runtime: float


class Log(msgspec.Struct):
    """Console lines."""

    stream: str
    lines: list[str]
    t: float


class Gap(msgspec.Struct):
    """Rows that the training could not keep."""

    rows: int
    steps: list[int] | None
    reason: str


class Superseded(msgspec.Struct):
    """The run was rewound after its rows were uploaded: its corrected history is in another tracker run."""

    by: str


Operation = Row | Amend | Rewind | Identity | Config | System | Axis | Summary | State | Log | Gap | Superseded
