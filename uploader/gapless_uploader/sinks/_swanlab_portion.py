"""What one request to SwanLab carries, before it is JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from gapless_uploader.operations import Media, Table, Text

LINES_KEY = "LOG"
"""SwanLab's own name for the series of console lines."""
NAN = b'"nan"'
"""A NaN as SwanLab takes it."""
Rich = Text | Table | Media


@dataclass(slots=True)
class Line:
    """The numbers of one step, encoded. `t` is the JSON of their time."""

    step: int
    t: bytes
    names: tuple[str, ...]
    values: list[bytes]


@dataclass(slots=True)
class MediaRow:
    """Texts, images and the like of one key at one step, not encoded yet."""

    step: int
    t: bytes
    name: str
    type: str
    value: Rich


@dataclass(slots=True)
class ConsoleLine:
    """One line of the terminal; `step` is its number in the run, from 1."""

    step: int
    t: bytes
    text: str


@dataclass(slots=True)
class Portion:
    """What one request carries: numbers, media rows or console lines."""

    kind: str
    """scalar, media or log: SwanLab's own names."""
    lines: list[Line] = field(default_factory=list)
    media: list[MediaRow] = field(default_factory=list)
    console: list[ConsoleLine] = field(default_factory=list)

    def places(self) -> Iterator[tuple[str, int]]:
        """(name, step) of each point."""
        for line in self.lines:
            for name in line.names:
                yield name, line.step
        for row in self.media:
            yield row.name, row.step
        for entry in self.console:
            yield LINES_KEY, entry.step

    @property
    def lowest_step(self) -> int:
        """Of all its points."""
        parts: list[Line | MediaRow | ConsoleLine] = [*self.lines, *self.media, *self.console]
        return min(part.step for part in parts)

    def __len__(self) -> int:
        return sum(len(line.names) for line in self.lines) + len(self.media) + len(self.console)
