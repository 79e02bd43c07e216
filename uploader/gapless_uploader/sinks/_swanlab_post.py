"""One portion into requests: columns first, then the rows, in smaller requests where the tracker asks for that.

A request that is too large is halved. One that the tracker refuses (400, 422) is divided by key, then by step, until
the rows that it will not take stand alone: they are refused, the others arrive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import orjson

from gapless_uploader.sink import Parked, Refusal
from gapless_uploader.sinks._swanlab_http import Declined, NotStored, Unknown
from gapless_uploader.sinks._swanlab_media import encode_media
from gapless_uploader.sinks._swanlab_names import section_of
from gapless_uploader.sinks._swanlab_points import Points
from gapless_uploader.sinks._swanlab_portion import LINES_KEY, Line, Portion
from gapless_uploader.sinks._swanlab_run import Experiment

_HOPELESS = 16
"""So many rows refused, each alone, and none taken in this session: it is not the rows."""
_MAX_SHAPES = 1_000
_FILES = 100
_FILES_BYTES = 4 << 20
"""Files and their bytes that one request for links is about."""
_PATIENCE = 8
"""So many rows of one key refused, each alone: the key's others are not tried."""

Single = tuple[str, int, bytes]
"""(name, step, the point as JSON)."""


class Poster:
    """Posts portions of one experiment. Not thread safe."""

    def __init__(self, experiment: Experiment, points: Points, axis_of: Callable[[str], str | None]) -> None:
        self._experiment = experiment
        self._points = points
        self._axis_of = axis_of
        self._columns: set[str] = set()
        self._shapes: set[tuple[str, ...]] = set()
        """Rows' names of which all have their column."""
        self._refused_keys: dict[str, str] = {}
        self._alone: Counter[str] = Counter()
        self._taken = False
        self._declined: Declined | None = None
        """The last refusal."""
        self._stored = False
        """Whether a part of the portion at hand is stored."""
        self._largest = 1 << 62
        """Points that a request may have, as the tracker's 413s tell."""
        self.dropped: dict[tuple[str, str, int], str] = {}
        """(kind, name, step) -> why the tracker does not hold it; of the batch at hand."""
        self.notes: dict[tuple[str, str, int], list[Refusal]] = {}
        """What arrives in part only; of the batch at hand."""

    def begin(self) -> None:
        """A new batch."""
        self.dropped.clear()
        self.notes.clear()

    def post(self, portion: Portion) -> None:
        """Store the portion. Raises Unknown when it may be stored in part, NotStored when nothing is, or Parked."""
        self._stored = False
        made: list[Single] = []
        try:
            self._define_columns(portion)
            if portion.kind == "media":
                made = self._media(portion)
        except Unknown as error:
            # Columns and files may be put again, and the rows were not sent yet.
            raise NotStored(str(error), error.after_s) from None
        if portion.kind == "scalar":
            portion = self._without_refused(portion)
            if len(portion) <= self._largest:
                rows = b",".join(map(self._points.encode, portion.lines))
                if portion.lines and not self._try("scalar", rows, len(portion)):
                    self._divide("scalar", self._singles(portion.lines))
            else:
                self._divide("scalar", self._singles(portion.lines))
        elif portion.kind == "media":
            self._send("media", made)
        else:
            self._send(
                "log", [(LINES_KEY, entry.step, _console(entry.step, entry.t, entry.text)) for entry in portion.console]
            )

    def _try(self, kind: str, rows: bytes, count: int) -> bool:
        """Whether the tracker took the `count` rows; False when it declined them, which is remembered."""
        try:
            self._experiment.post(kind, rows)
        except Declined as error:
            self._declined = error
            if error.too_large:
                self._largest = max(1, count // 2)
            return False
        except NotStored as error:
            if self._stored:
                # The portion is stored in part: what of it, only reading back can tell after the next failure too.
                raise Unknown(str(error), error.after_s) from None
            raise
        self._stored = self._taken = True
        return True

    def _send(self, kind: str, rows: list[Single]) -> None:
        if not rows:
            return
        if len(rows) > self._largest:
            self._divide(kind, rows)
        elif not self._try(kind, b",".join(body for _, _, body in rows), len(rows)):
            if len(rows) > 1:
                self._divide(kind, rows)
            else:
                self._refuse(kind, *rows[0][:2])

    def _divide(self, kind: str, rows: list[Single]) -> None:
        """Two halves, each with as few keys as can be."""
        rows = [row for row in rows if not (kind == "scalar" and self._drop_if_refused(row[0], row[1]))]
        rows.sort(key=lambda row: row[:2])
        half = (len(rows) + 1) // 2
        self._send(kind, rows[:half])
        self._send(kind, rows[half:])

    def _refuse(self, kind: str, name: str, step: int) -> None:
        declined = self._declined
        reason = f"SwanLab refuses the row: {declined.code if declined else ''}"
        self.dropped[kind, name, step] = reason
        self._alone[name] += 1
        if not self._taken and self._alone.total() >= _HOPELESS:
            raise Parked(f"SwanLab takes no row of this run ({declined}); mend it there, then start the uploader again")
        if self._alone[name] >= _PATIENCE:
            self._refused_keys[name] = reason

    def _singles(self, lines: list[Line]) -> list[Single]:
        encode = self._points.encode
        return [
            (name, line.step, encode(Line(line.step, line.t, (name,), [value])))
            for line in lines
            for name, value in zip(line.names, line.values, strict=True)
        ]

    def _media(self, portion: Portion) -> list[Single]:
        """The portion's rows, when their files are stored; a few megabytes of files are held at a time."""
        made: list[Single] = []
        files: list[tuple[str, bytes, str]] = []

        def put(path: str, content: bytes, content_type: str) -> None:
            files.append((path, content, content_type))
            if len(files) >= _FILES or sum(len(held) for _, held, _ in files) >= _FILES_BYTES:
                self._experiment.put_media(files)
                files.clear()

        for row in portion.media:
            place = ("media", row.name, row.step)
            if row.name in self._refused_keys:
                self.dropped[place] = self._refused_keys[row.name]
                continue
            told: list[str] = []
            body = encode_media(row, put, told.append)
            self.notes[place] = [Refusal(row.step, row.name, reason) for reason in told]
            if body is None:
                self.dropped[place] = ""
            else:
                made.append((row.name, row.step, body))
        if files:
            self._experiment.put_media(files)
        return made

    # columns and keys that the tracker does not take

    def _define_columns(self, portion: Portion) -> None:
        types: dict[str, str] = {}
        for names in {line.names for line in portion.lines} - self._shapes:
            types.update((name, "FLOAT") for name in names if name not in self._columns)
            if len(self._shapes) < _MAX_SHAPES:
                self._shapes.add(names)
        types.update((row.name, row.type) for row in portion.media if row.name not in self._columns)
        try:
            self._put_columns([self._column(name, kind) for name, kind in types.items()])
        except BaseException:
            self._shapes.clear()
            raise
        self._columns.update(types)

    def _put_columns(self, columns: list[dict[str, Any]]) -> None:
        if not columns:
            return
        try:
            self._experiment.put_columns(columns)
        except Declined as error:
            if len(columns) == 1:
                self._refused_keys[columns[0]["key"]] = f"SwanLab refuses the key: {error.code}"
                return
            half = len(columns) // 2
            self._put_columns(columns[:half])
            self._put_columns(columns[half:])

    def _column(self, name: str, kind: str) -> dict[str, Any]:
        column: dict[str, Any] = {"key": name, "type": kind}
        section, axis = section_of(name), self._axis_of(name)
        if section is not None:
            column["sectionName"] = section
        if axis is not None:
            column["xAxis"] = axis
        return column

    def _without_refused(self, portion: Portion) -> Portion:
        if not self._refused_keys:
            return portion
        left = Portion(portion.kind)
        for line in portion.lines:
            kept = [
                (name, value)
                for name, value in zip(line.names, line.values, strict=True)
                if not self._drop_if_refused(name, line.step)
            ]
            if kept:
                left.lines.append(Line(line.step, line.t, tuple(n for n, _ in kept), [v for _, v in kept]))
        return left

    def _drop_if_refused(self, name: str, step: int) -> bool:
        reason = self._refused_keys.get(name)
        if reason is None:
            return False
        self.dropped["scalar", name, step] = reason
        return True


def _console(number: int, t: bytes, text: str) -> bytes:
    text = text.encode("utf-8", "replace").decode()
    return orjson.dumps({"level": "INFO", "epoch": number, "message": text, "create_time": t.decode()})
