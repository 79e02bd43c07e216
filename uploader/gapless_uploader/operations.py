"""Operations: what the history asks a tracker to do, in the order to do it.

A tracker that applied all of them holds the merged history of the run, whatever order the spool was read in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Text:
    """A text value of a row."""

    text: str


@dataclass(slots=True)
class Table:
    """A table value of a row: the rows logged at this step, never an accumulation."""

    columns: list[str]
    rows: list[list[Any]]
    log_mode: str | None = None


@dataclass(slots=True)
class MediaItem:
    """One image, video, audio, file or histogram. `path` is inside the run's media folder, None for a histogram."""

    path: Path | None
    info: dict[str, Any] = field(default_factory=dict)
    """What belongs to the type: caption, format, width, height, fps, sample_rate, name, edges, counts."""


@dataclass(slots=True)
class Media:
    """A media value of a row. `type` is image, video, audio, file or histogram."""

    type: str
    items: list[MediaItem]


@dataclass(slots=True)
class Missing:
    """A payload that its line refers to and that is not there, or is not what its name says."""

    reason: str


Value = float | int | bool | str | list[Any] | Text | Table | Media | Missing


@dataclass(slots=True)
class Row:
    """A step seen first, or a row without a step."""

    step: int | None
    t: float
    """Wall clock of the row's last record, unix seconds."""
    runtime: float
    """Seconds of training up to the row, over all surviving attempts of its writer."""
    values: dict[str, Value]
    json: bytes | None = field(default=None, compare=False, repr=False)
    """`values` as a JSON object, where every value is known to be a finite number: nobody has to look at them again."""


@dataclass(slots=True)
class Amend:
    """A step seen before. `values` is the whole merged row."""

    step: int
    t: float
    runtime: float
    values: dict[str, Value]
    changed: tuple[str, ...]
    """The keys that are new or have another value than in the operation before."""
    added: tuple[str, ...] | None = None
    """Of those, the keys that no operation of this step had before; None when that is not known."""


@dataclass(slots=True)
class Rewind:
    """Every row at `step` and above is gone; those that survive follow as rows."""

    step: int


@dataclass(slots=True)
class Identity:
    """What `init` was given: replaces what was known."""

    name: str | None
    group: str | None
    job_type: str | None
    tags: list[str]
    notes: str | None
    entity: str | None
    sinks: list[str] | None


@dataclass(slots=True)
class Config:
    """The whole config as it is now."""

    config: dict[str, Any]


@dataclass(slots=True)
class System:
    """The training's environment, as it recorded itself."""

    data: dict[str, Any]


@dataclass(slots=True)
class Axis:
    """`axis` is the x-axis of the keys that `key`, a name or glob, matches; `summary` the rule of their summary."""

    key: str
    axis: str | None
    summary: str | None


@dataclass(slots=True)
class Summary:
    """Summary values that the training set itself."""

    values: dict[str, Any]


@dataclass(slots=True)
class State:
    """The run's state: running, finished, failed or crashed."""

    state: str
    exit_code: int | None
    t: float
    runtime: float


@dataclass(slots=True)
class Log:
    """Console lines."""

    stream: str
    lines: list[str]
    t: float


@dataclass(slots=True)
class Gap:
    """Rows that the training could not keep."""

    rows: int
    steps: list[int] | None
    reason: str


@dataclass(slots=True)
class Superseded:
    """The run was rewound after its rows were uploaded: its corrected history is in another tracker run."""

    by: str


Operation = Row | Amend | Rewind | Identity | Config | System | Axis | Summary | State | Log | Gap | Superseded
