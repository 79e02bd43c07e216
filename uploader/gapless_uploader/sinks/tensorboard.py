"""TensorBoard event files, written with the `tensorboard` package's own record writer and protocol buffers.

A run is one folder, `<target>/<project>/<name>@<run id>`, with two files: `...rows`, only appended to, and
`...config`, a small file for the hparams plugin that is replaced as a whole.

1. `open` cuts `rows` back to the memo's length; what lies behind it comes again, byte for byte the same. Without a
   memo it removes the files that an earlier session made for this run, which their names tell, and begins again.
2. A row is appended as one event at its own wall clock.
3. Taking back is TensorBoard's own purge: a session start at a step drops what was read from that step on.
4. A value at or below the last step of its tag (a late record, a changed value) is a purge from that step and what
   survives behind it again, in step order, since TensorBoard's readers want a tag's steps to rise.
5. `fsync`, then the acknowledgement.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from gapless_uploader.operations import Amend, Config, Log, Rewind, Row, State, Table, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Parked, Refusal, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._disk import disk, replace_durably, sync_folder
from gapless_uploader.sinks._naming import project_part, run_part
from gapless_uploader.sinks._tensorboard_events import (
    MAX_TABLE_ROWS,
    Encoder,
    Unfit,
    as_json,
    flat_config,
    is_rounded,
)

_ROWS = "events.out.tfevents.0000000001.gapless."
_CONFIG = "events.out.tfevents.0000000000.gapless."
_INDENT = 2  # orjson.OPT_INDENT_2


class TensorboardSink:
    """Event files under the folder `target`."""

    kind = "tensorboard"
    capabilities = Capabilities(
        settles_intents=False,
        exactly_once="the checkpoint holds the event file's length; a restart cuts our own file back to it",
        rewind=True,
        text=True,
        tables=True,
        media=True,
        end_state=True,
        read_back=True,
    )

    def __init__(self, target: str = "", *, precision: str = "double") -> None:
        """`precision`: `double` keeps all bits; `single` writes 32-bit `simple_value` for older readers."""
        if precision not in ("double", "single"):
            raise Misconfigured(f"sink 'tensorboard': precision is {precision!r}; it is 'double' or 'single'")
        self.target = target or "tensorboard"
        self._single = precision == "single"

    def open(self, run: RunView, memo: Memo) -> TensorboardSession:
        """A session that appends behind `memo`'s length. Raises Misconfigured, Retryable or Parked."""
        return TensorboardSession(Path(self.target), run, memo, Encoder(self._single))


class TensorboardSession:
    """One run's event file. Not thread safe."""

    def __init__(self, target: Path, run: RunView, memo: Memo, encoder: Encoder) -> None:
        self._encoder = encoder
        self._record_writer: Any = need("tensorboard", "tensorboard.summary.writer.record_writer")
        self._tag = sha256(f"{run.project}\0{run.tracker_id}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._project = target / project_part(run)
        self._folder = self._project / str(memo.get("folder", run_part(run)))
        self._path = self._folder / f"{_ROWS}{self._tag}.rows"
        self._length: int = memo.get("length", 0)
        self._highest: int = memo.get("step", -1)
        self._end: float | None = memo.get("end")
        self._last: dict[str, int] | None = None if self._length else {}
        """Tag -> its highest step; None until a step at or below `_highest` makes us read our own file."""
        self._file: BinaryIO | None = None
        with disk("open", self._path):
            if not memo:
                self._remove_earlier()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._begin(run) if not self._length else self._cut_back()

    def write(self, batch: Batch) -> Ack:
        """Append the batch, durable when it returns. Raises Retryable or Parked, with the file as before."""
        refused: list[Refusal] = []
        highest, last = self._highest, None if self._last is None else dict(self._last)
        try:
            rows: list[Any] = []
            chunk: list[Any] = []
            for operation in batch.operations:
                match operation:
                    case Row(step=int(step), t=t, values=values):
                        self._add(rows, step, t, values, refused)
                    case Amend(step=step, t=t, values=values, changed=changed):
                        self._add(rows, step, t, {key: values[key] for key in changed if key in values}, refused)
                    case Rewind(step=step):
                        chunk += self._settle(rows, chunk)
                        rows = []
                        chunk += self._rewind(step, batch.run)
                    case Row():
                        refused.append(Refusal(None, None, "TensorBoard has no row without a step"))
                    case Log():
                        refused.append(Refusal(None, None, "TensorBoard has no console lines"))
                    case State(t=t, state=state):
                        self._end = None if state == "running" else t
            chunk += self._settle(rows, chunk)
            if any(isinstance(operation, (Config, State)) for operation in batch.operations):
                self._describe(batch.run)
            self._append(chunk)
        except BaseException:
            self._highest, self._last = highest, last
            raise
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: an event file does not beat."""

    def flush(self) -> Memo:
        """The memo; everything acknowledged is on disk already."""
        return {"folder": self._folder.name, "length": self._length, "step": self._highest, "end": self._end}

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _remove_earlier(self) -> None:
        for prefix, suffix in ((_ROWS, ".rows"), (_CONFIG, ".config")):
            for path in self._project.glob(f"*/{prefix}{self._tag}{suffix}"):
                path.unlink()
                with suppress(OSError):
                    path.parent.rmdir()

    def _begin(self, run: RunView) -> BinaryIO:
        content = self._frames(self._encoder.file_start(run.created))
        file = open(self._path, "wb+", buffering=0)  # noqa: SIM115 - the session keeps it
        file.write(content)
        os.fsync(file.fileno())
        sync_folder(self._folder)
        self._length = len(content)
        return file

    def _cut_back(self) -> BinaryIO:
        if not self._path.is_file() or self._path.stat().st_size < self._length:
            raise Parked(f"{self._path} lacks events that were acknowledged; put it back, or use another folder")
        file = open(self._path, "rb+", buffering=0)  # noqa: SIM115 - the session keeps it
        file.truncate(self._length)
        return file

    def _add(self, rows: list[Any], step: int, t: float, values: dict[str, Value], refused: list[Refusal]) -> None:
        made = []
        for key, value in values.items():
            try:
                made.append(self._encoder.value(key, value))
            except Unfit as reason:
                refused.append(Refusal(step, key, str(reason)))
                continue
            if is_rounded(value):
                refused.append(Refusal(step, key, "an integer beyond 2^53 is rounded"))
            if isinstance(value, Table) and len(value.rows) > MAX_TABLE_ROWS:
                refused.append(Refusal(step, key, f"table rows beyond {MAX_TABLE_ROWS} are not shown"))
        if made:
            rows.append(self._encoder.row(step, t, made))

    def _settle(self, rows: list[Any], before: list[Any]) -> list[Any]:
        """The events that bring `rows` in, after `before`, which is not in the file yet."""
        if not rows:
            return []
        late = self._first_late(rows, before)
        if late is None:
            return rows
        held = _survivors([*self._read(), *before])
        merged = _merge([event for event in held if event.step >= late], [row for row in rows if row.step >= late])
        # The wall clock of a purge is shown nowhere; that of the first event behind it keeps the file reproducible.
        purge = self._encoder.purge(late, merged[0].wall_time)
        return [*(row for row in rows if row.step < late), purge, *merged]

    def _first_late(self, rows: list[Any], before: list[Any]) -> int | None:
        """The lowest step at which a row brings a value that is not above its tag's last one."""
        late: int | None = None
        for place, row in enumerate(rows):
            if self._last is None and row.step <= self._highest:
                self._last = _last_steps([*self._read(), *before, *rows[:place]])
            if self._last is not None:
                for value in row.summary.value:
                    if self._last.get(value.tag, -1) >= row.step and (late is None or row.step < late):
                        late = row.step
                    self._last[value.tag] = max(row.step, self._last.get(value.tag, -1))
            self._highest = max(self._highest, row.step)
        return late

    def _rewind(self, step: int, run: RunView) -> list[Any]:
        self._highest = min(self._highest, step - 1)
        if self._last is not None:
            self._last = {tag: min(last, step - 1) for tag, last in self._last.items()}
        events = [self._encoder.purge(step, run.created)]
        if step == 0 and run.config:
            events.append(self._config_text(run))
        return events

    def _append(self, events: list[Any]) -> None:
        if self._file is None:
            raise RuntimeError("write to a closed session")
        content = self._frames(events)
        with disk("write", self._path):
            try:
                self._file.seek(self._length)
                _write_all(self._file, content)
                os.fsync(self._file.fileno())
            except BaseException:
                self._file.truncate(self._length)
                raise
        self._length += len(content)

    def _describe(self, run: RunView) -> None:
        """The hparams plugin keeps the first it reads of a run, so config and state are a file of their own."""
        encoder = self._encoder
        values = [encoder.hparams(run.run_id, run.created, flat_config(run.config))]
        if self._end is not None:
            values.append(encoder.session_end(run.state, self._end))
        events = [*encoder.file_start(run.created)[:1], encoder.row(0, run.created, values)]
        if run.config:
            events.append(self._config_text(run))
        path = self._folder / f"{_CONFIG}{self._tag}.config"
        with disk("write", path):
            replace_durably(path, self._frames(events), f".gapless-{self._tag}.tmp")

    def _config_text(self, run: RunView) -> Any:
        text = "\n".join(f"    {line}" for line in as_json(run.config, _INDENT).decode().split("\n"))
        return self._encoder.row(0, run.created, [self._encoder.text("config", text)])

    def _frames(self, events: list[Any]) -> bytes:
        content = BytesIO()
        writer = self._record_writer.RecordWriter(content)
        for event in events:
            writer.write(event.SerializeToString(deterministic=True))
        return content.getvalue()

    def _read(self) -> Iterator[Any]:
        """The events of our own file, up to what was acknowledged."""
        with disk("read", self._path), open(self._path, "rb") as file:
            left = self._length
            while left > 0:
                (size,) = struct.unpack("<Q", file.read(12)[:8])
                event = self._encoder.event.Event.FromString(file.read(size))
                file.seek(4, os.SEEK_CUR)
                left -= size + 16
                yield event


def _write_all(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _survivors(events: list[Any]) -> list[Any]:
    """The rows that TensorBoard shows after reading `events`."""
    held: list[Any] = []
    for event in events:
        if event.HasField("session_log"):
            held = [row for row in held if row.step < event.step]
        elif event.HasField("summary"):
            held.append(event)
    return held


def _last_steps(events: list[Any]) -> dict[str, int]:
    """Tag -> its highest step."""
    last: dict[str, int] = {}
    for event in _survivors(events):
        for value in event.summary.value:
            last[value.tag] = max(event.step, last.get(value.tag, -1))
    return last


def _merge(held: list[Any], rows: list[Any]) -> list[Any]:
    """Both in step order, each (step, tag) once, the newest value winning."""
    newest: dict[tuple[int, str], int] = {}
    events = [*held, *rows]
    for place, event in enumerate(events):
        newest.update(((event.step, value.tag), place) for value in event.summary.value)
    merged = []
    for place, event in enumerate(events):
        kept = [value for value in event.summary.value if newest[event.step, value.tag] == place]
        if kept:
            copy = type(event)(wall_time=event.wall_time, step=event.step)
            copy.summary.value.extend(kept)
            merged.append(copy)
    return sorted(merged, key=lambda event: event.step)
