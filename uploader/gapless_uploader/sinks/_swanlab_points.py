"""From a batch's operations to SwanLab's points, in an order and in portions that are the same at every attempt.

1. Within a batch the newest value of a (step, key) is the one sent. A value changed after an earlier batch sent it
   cannot be expressed: it is counted.
2. Numbers come first, in portions of at most 10,000 points and about 1 MB; then media, then console lines.
3. A NaN is "nan". An infinity is "nan" too, and its sign is 1 or -1 under `KEY~inf` at the same step.
4. A key has one type for ever. A value of another type goes to `KEY~num`, `~text`, `~table`, `~image` or `~audio`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import isfinite, isnan

import orjson

from gapless_uploader.operations import Amend, Log, Media, Missing, Operation, Row, Table, Text, Value
from gapless_uploader.sink import Refusal
from gapless_uploader.sinks._swanlab_names import MAX_STEP, key_name
from gapless_uploader.sinks._swanlab_portion import NAN, ConsoleLine, Line, MediaRow, Portion, Rich
from gapless_uploader.sinks._swanlab_tally import Tally

MAX_POINTS = 10_000
MAX_BYTES = 1_000_000
MAX_MEDIA_ROWS = 50
_EXACT = 1 << 53
_NUMBERS = {float, int, bool}
_MAX_SHAPES = 1_000


class Points:
    """Turns operations into portions. Not thread safe."""

    def __init__(self, tally: Tally, max_points: int = MAX_POINTS) -> None:
        self.tally = tally
        self.max_points = max_points
        self.refused: list[Refusal] = []
        """Of the batch at hand."""
        self._prefixes: dict[tuple[str, ...], list[bytes]] = {}
        """Names -> how their points begin."""
        self._shapes: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Keys as logged -> names, of rows that were all plain numbers."""

    def portions(self, operations: Sequence[Operation]) -> Iterator[Portion]:
        """All points of a batch. May be asked again for the same batch; each time begins anew."""
        self.refused = []
        self.tally.begin()
        media: list[MediaRow] = []
        portion, size = Portion("scalar"), 0
        count = 0
        for step, t, values in self._newest(operations):
            for line in self._lines(step, t, values, media):
                # A point's frame has about 70 bytes beside its key and value.
                size += sum(map(len, line.values)) + sum(map(len, line.names)) + 75 * len(line.names)
                count += len(line.names)
                portion.lines.append(line)
                if count >= self.max_points or size >= MAX_BYTES:
                    yield portion
                    portion, size, count = Portion("scalar"), 0, 0
        if portion.lines:
            yield portion
        for at in range(0, len(media), MAX_MEDIA_ROWS):
            yield Portion("media", media=media[at : at + MAX_MEDIA_ROWS])
        console = self._console(operations)
        for at in range(0, len(console), self.max_points):
            yield Portion("log", console=console[at : at + self.max_points])

    def encode(self, line: Line) -> bytes:
        """The line's points as JSON objects, joined by commas."""
        prefixes = self._prefixes.get(line.names)
        if prefixes is None:
            if len(self._prefixes) >= _MAX_SHAPES:
                self._prefixes.clear()
            prefixes = [b'{"key":' + orjson.dumps(name) + b',"index":' for name in line.names]
            self._prefixes[line.names] = prefixes
        middle = b'%d,"data":' % line.step
        end = b',"create_time":"' + line.t + b'"}'
        return b",".join([prefix + middle + value + end for prefix, value in zip(prefixes, line.values, strict=True)])

    # rows

    def _newest(self, operations: Sequence[Operation]) -> Iterator[tuple[int, float, dict[str, Value]]]:
        """(step, t, values) to send, with what a later operation of this batch changes left to that one."""
        later: dict[int, dict[str, int]] = {}
        fresh: set[tuple[int, str]] = set()
        for place, operation in enumerate(operations):
            if isinstance(operation, Amend):
                later.setdefault(operation.step, {}).update(dict.fromkeys(operation.changed, place))
        for place, operation in enumerate(operations):
            if isinstance(operation, Row):
                if operation.step is None:
                    self.refused.append(Refusal(None, None, "a row without a step"))
                    continue
                values = operation.values
                changes = later.get(operation.step) if later else None
                if changes:
                    fresh.update((operation.step, key) for key in values)
                    values = {key: value for key, value in values.items() if key not in changes}
                yield operation.step, operation.t, values
            elif isinstance(operation, Amend):
                yield operation.step, operation.t, self._changed(operation, place, later[operation.step], fresh)

    def _changed(
        self, amend: Amend, place: int, changes: dict[str, int], fresh: set[tuple[int, str]]
    ) -> dict[str, Value]:
        values = {}
        for key in amend.changed:
            if amend.added is None or key in amend.added:
                fresh.add((amend.step, key))
            elif (amend.step, key) not in fresh:
                self._refuse(amend.step, key, "a changed value: SwanLab keeps the one it was sent first")
                continue
            if changes[key] == place and key in amend.values:
                values[key] = amend.values[key]
        return values

    def _lines(self, step: int, t: float, values: dict[str, Value], media: list[MediaRow]) -> Iterator[Line]:
        if not values:
            return
        if step < 0 or step > MAX_STEP:
            for key in values:
                self._refuse(step, key, "a step beyond 2^48")
            return
        time = self._time(step, t)
        line = self._plain(step, time, values) or self._mixed(step, time, values, media)
        if not line.names:
            return
        if len(line.names) <= self.max_points:
            self.tally.add(step, line.names)
            yield line
            return
        for at in range(0, len(line.names), self.max_points):
            part = slice(at, at + self.max_points)
            self.tally.add(step, line.names[part])
            yield Line(step, time, line.names[part], line.values[part])

    def _plain(self, step: int, t: bytes, values: dict[str, Value]) -> Line | None:
        """The line of a row of plain finite numbers, which nearly all rows are."""
        numbers = list(values.values())
        types = set(map(type, numbers))
        if types != {float}:
            if not types <= _NUMBERS or not all(-_EXACT <= number <= _EXACT for number in numbers):  # type: ignore[operator]
                return None
            numbers = list(map(float, numbers))  # type: ignore[arg-type]
        encoded = orjson.dumps(numbers)
        if b"null" in encoded:
            return None
        keys = tuple(values)
        names = self._shapes.get(keys)
        if names is None:
            names = tuple(key_name(key) for key in keys)
            if any(name in self.tally.media for name in names):
                return None
            for name in names:
                self.tally.note_number(name)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[keys] = names
        return Line(step, t, names, encoded[1:-1].split(b","))

    def _mixed(self, step: int, t: bytes, values: dict[str, Value], media: list[MediaRow]) -> Line:
        names: list[str] = []
        encoded: list[bytes] = []
        for key, value in values.items():
            if isinstance(value, int | float):
                for name, number in self._numbers(step, key, value):
                    names.append(name)
                    encoded.append(number)
            elif isinstance(value, Missing):
                self._refuse(step, key, value.reason)
            else:
                row = self._media(step, t, key, value)
                if row is not None:
                    media.append(row)
                    self.tally.add(step, (row.name,))
        return Line(step, t, tuple(names), encoded)

    def _numbers(self, step: int, key: str, value: float) -> Iterator[tuple[str, bytes]]:
        name = key_name(key)
        if name in self.tally.media:
            name = f"{name}~num"
            self._refuse(step, key, "a number of a key that is no number's: it is at KEY~num")
        if type(value) is int and not -_EXACT <= value <= _EXACT:
            try:
                float(value)
            except OverflowError:
                self._refuse(step, key, "an integer beyond a double")
                return
            self._refuse(step, key, "an integer beyond 2^53 is rounded")
        number = float(value)
        self.tally.note_number(name)
        if isfinite(number):
            yield name, orjson.dumps(number)
            return
        yield name, NAN
        self.tally.add_nan(name)
        if not isnan(number):
            companion = f"{name}~inf"
            self._refuse(step, key, "an infinity is held as NaN, its sign at KEY~inf")
            self.tally.note_number(companion)
            yield companion, b"1.0" if number > 0 else b"-1.0"

    def _media(self, step: int, t: bytes, key: str, value: Value) -> MediaRow | None:
        if isinstance(value, str):
            value = Text(value)
        elif isinstance(value, list):
            value = Text(orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode())
        if not isinstance(value, Text | Table | Media):
            self._refuse(step, key, f"a value of type {type(value).__name__}")
            return None
        column, suffix = _column(value)
        if not column:
            self._refuse(step, key, f"media of type {suffix}")
            return None
        name = key_name(key)
        held = self.tally.media.get(name)
        if held is None and not self.tally.is_number(name):
            self.tally.media[name] = column
        elif held != column:
            name = f"{name}~{suffix}"
            self.tally.media.setdefault(name, column)
            self._refuse(step, key, f"a {suffix} of a key of another type: it is at KEY~{suffix}")
        return MediaRow(step, t, name, column, value)

    def _console(self, operations: Sequence[Operation]) -> list[ConsoleLine]:
        found = []
        for operation in operations:
            if isinstance(operation, Log):
                t = self._time(None, operation.t)
                found += [ConsoleLine(self.tally.next_line(), t, text.rstrip()) for text in operation.lines]
        return found

    # small things

    def _time(self, step: int | None, t: float) -> bytes:
        try:
            return datetime.fromtimestamp(t, UTC).isoformat(timespec="microseconds")[:-6].encode() + b"Z"
        except (ValueError, OverflowError, OSError):
            self._refuse(step, None, "a time that no calendar has: it is held as 1970")
            return b"1970-01-01T00:00:00.000000Z"

    def _refuse(self, step: int | None, key: str | None, reason: str) -> None:
        """Count a value that SwanLab cannot hold as it is."""
        self.refused.append(Refusal(step, key, reason))


def _column(value: Rich) -> tuple[str, str]:
    """Column type and our suffix for it; an empty type for what SwanLab has no place for."""
    if isinstance(value, Text):
        return "TEXT", "text"
    if isinstance(value, Table):
        return "ECHARTS", "table"
    return {
        "image": ("IMAGE", "image"),
        "video": ("IMAGE", "image"),
        "audio": ("AUDIO", "audio"),
        "histogram": ("ECHARTS", "table"),
    }.get(value.type, ("", value.type))
