"""TensorBoard event files, made of the `tensorboard` package's own protocol buffers.

A run is one folder, `<target>/<project>/<name>@<run id>`, with two files: `...rows`, only appended to, and
`...config`, a small file for the hparams plugin that is replaced as a whole.

1. `open` cuts `rows` back to the memo's length; what lies behind it comes again, byte for byte the same. Without a
   memo it removes the files that an earlier session made for this run, which their names tell, and begins again.
2. A row is appended as one event at its own wall clock.
3. A value at or below the last step of its tag (a late record, a changed value) is a purge from that step, a session
   start as TensorBoard's own restarts write it, and then what survives from that step on again, in step order. The
   Python loader obeys the purge; the fast loader, which knows none, takes any step below the last as one.
4. Rows that are taken back leave the file, which is written anew under a name behind the old one, since the fast loader
   would show those of their tags that never come again. A session start at its head makes a live reader read it anew.
5. `fsync`, then the acknowledgement.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from gapless_schemas import path_name
from gapless_uploader.operations import Amend, Config, Log, Rewind, Row, State, Table, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Refusal, RunView
from gapless_uploader.sinks._crc32c import frame
from gapless_uploader.sinks._disk import check_folder, disk, folder_target, replace_durably
from gapless_uploader.sinks._json import as_json
from gapless_uploader.sinks._naming import project_part, run_part
from gapless_uploader.sinks._own_file import OwnFile
from gapless_uploader.sinks._tensorboard_events import (
    MAX_TABLE_ROWS,
    Encoder,
    Unfit,
    flat_config,
)

_FILE = "events.out.tfevents.{:010d}.gapless."
_INDEX_BYTES = 1 << 20


class TensorboardSink:
    """Event files under the folder `target`."""

    kind = "tensorboard"
    needs = "tensorboard"
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

    def __init__(self, target: str = "", *, precision: str = "single") -> None:
        """`precision`: `single` is what every TensorBoard shows, rounded to 32 bits; `double` keeps all bits and is
        shown by `tensorboard --load_fast=false` alone.
        """
        if precision not in ("double", "single"):
            raise Misconfigured(f"sink 'tensorboard': precision is {precision!r}; it is 'double' or 'single'")
        self.target = folder_target(target or "tensorboard")
        self._double = precision == "double"

    def open(self, run: RunView, memo: Memo) -> TensorboardSession:
        """A session that appends behind `memo`'s length. Raises Misconfigured, Retryable or Parked."""
        return TensorboardSession(Path(self.target), run, memo, Encoder(self._double))

    def check(self) -> str:
        """For `doctor`: that the folder can be written. Raises Parked and Retryable."""
        return check_folder(self.target)


class TensorboardSession:
    """One run's event file. Not thread safe."""

    def __init__(self, target: Path, run: RunView, memo: Memo, encoder: Encoder) -> None:
        self._encoder = encoder
        self._tag = sha256(f"{run.project}\0{run.tracker_id}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self._project = target / project_part(run)
        self._folder = self._project / str(memo.get("folder", run_part(run)))
        self._rows = OwnFile(self._folder, f".gapless.{self._tag}", self._name_of, run.generation)
        self._highest: int = memo.get("step", -1)
        self._end: float | None = memo.get("end")
        self._reached = self._highest
        self._below: list[tuple[int, int]] = []
        """Offsets, one a MiB, each with the highest step that was ever written in front of it."""
        self._last: dict[str, int] | None = None if memo else {}
        """Tag -> its highest step; None until a step at or below `_highest` makes us read our own file."""
        with disk("open", self._folder):
            if memo:
                self._rows.resume(memo)
                self._below.append((self._rows.length, self._reached))
            else:
                self._remove_earlier(run)
                self._folder.mkdir(parents=True, exist_ok=True)
                self._rows.begin(self._frames(encoder.file_start(run.created)))

    def write(self, batch: Batch) -> Ack:
        """Append the batch, durable when it returns. Raises Retryable or Parked, with the file as before."""
        highest, last = self._highest, None if self._last is None else dict(self._last)
        with self._rows.whole_or_not():
            try:
                refused = self._apply(batch)
            except BaseException:
                self._highest, self._last, self._below, self._reached = highest, last, [], highest
                raise
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: an event file does not beat."""

    def flush(self) -> Memo:
        """The memo; everything acknowledged is on disk already."""
        return {"folder": self._folder.name, "step": self._highest, "end": self._end, **self._rows.memo()}

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._rows.close()

    def _name_of(self, generation: int) -> str:
        return f"{_FILE.format(generation + 1)}{self._tag}.rows"

    def _remove_earlier(self, run: RunView) -> None:
        folder = f"*{path_name(run.tracker_id)}"
        for suffix in ("rows", "config"):
            for path in self._project.glob(f"{folder}/events.out.tfevents.*.gapless.{self._tag}.{suffix}"):
                path.unlink()
                with suppress(OSError):
                    path.parent.rmdir()

    def _apply(self, batch: Batch) -> list[Refusal]:
        refused: list[Refusal] = []
        rows: list[Any] = []
        for operation in batch.operations:
            match operation:
                case Row(step=int(step), t=t, values=values):
                    self._add(rows, step, t, values, refused)
                case Amend(step=step, t=t, values=values, changed=changed):
                    self._add(rows, step, t, {key: values[key] for key in changed if key in values}, refused)
                case Rewind(step=step):
                    self._append(self._settle(rows))
                    rows = []
                    self._rewind(step)
                case Row():
                    refused.append(Refusal(None, None, "TensorBoard has no row without a step"))
                case Log():
                    refused.append(Refusal(None, None, "TensorBoard has no console lines"))
                case State(t=t, state=state):
                    self._end = None if state == "running" else t
        self._append(self._settle(rows))
        if any(isinstance(operation, (Config, State)) for operation in batch.operations):
            self._describe(batch.run)
        return refused

    def _add(self, rows: list[Any], step: int, t: float, values: dict[str, Value], refused: list[Refusal]) -> None:
        made = []
        for key, value in values.items():
            try:
                made.append(self._encoder.value(key, value, step))
            except Unfit as reason:
                refused.append(Refusal(step, key, str(reason)))
                continue
            if isinstance(value, Table) and len(value.rows) > MAX_TABLE_ROWS:
                lost = Refusal(step, key, f"table rows beyond {MAX_TABLE_ROWS} are not shown")
                refused.extend([lost] * (len(value.rows) - MAX_TABLE_ROWS))
        if made:
            rows.append(self._encoder.row(step, t, made))

    def _settle(self, rows: list[Any]) -> list[Any]:
        """The events that bring `rows` in."""
        late = self._first_late(rows)
        if late is None:
            return rows
        held = _survivors((event for event, _ in self._read(self._offset_below(late))), late)
        merged = _merge(held, [row for row in rows if row.step >= late])
        # The wall clock of a purge is shown nowhere; that of the first event behind it keeps the file reproducible.
        purge = self._encoder.purge(late, merged[0].wall_time)
        return [*(row for row in rows if row.step < late), purge, *merged]

    def _first_late(self, rows: list[Any]) -> int | None:
        """The lowest step at which a row brings a value that is not above its tag's last one."""
        late: int | None = None
        for place, row in enumerate(rows):
            if self._last is None and row.step <= self._highest:
                self._last = _last_steps(chain((event for event, _ in self._read(0)), rows[:place]))
            if self._last is not None:
                for value in row.summary.value:
                    if self._last.get(value.tag, -1) >= row.step and (late is None or row.step < late):
                        late = row.step
                    self._last[value.tag] = max(row.step, self._last.get(value.tag, -1))
            self._highest = max(self._highest, row.step)
        return late

    def _rewind(self, first: int) -> None:
        """The file without the rows at `first` and above."""
        self._rows.rewrite(
            frame
            for event, frame in self._read(0)
            if event.step < first or (event.step == 0 and not event.HasField("summary"))
        )
        self._below, self._reached = [], first - 1
        self._highest = min(self._highest, first - 1)
        self._last = None if self._last is None else {tag: min(last, first - 1) for tag, last in self._last.items()}

    def _append(self, events: list[Any]) -> None:
        if not events:
            return
        self._rows.append(self._frames(events))
        self._reached = max(self._reached, *(event.step for event in events))
        if not self._below or self._rows.length - self._below[-1][0] > _INDEX_BYTES:
            self._below.append((self._rows.length, self._reached))

    def _offset_below(self, step: int) -> int:
        """An offset in front of which every row is below `step`."""
        return max((offset for offset, highest in self._below if highest < step), default=0)

    def _describe(self, run: RunView) -> None:
        """The hparams plugin keeps the first it reads of a run, so config and state are a file of their own."""
        encoder = self._encoder
        values = [encoder.hparams(run.run_id, run.created, flat_config(run.config))]
        if self._end is not None:
            values.append(encoder.session_end(run.state, self._end))
        events = [*encoder.file_start(run.created)[:1], encoder.row(0, run.created, values)]
        if run.config:
            events.append(self._config_text(run))
        path = self._folder / f"{_FILE.format(0)}{self._tag}.config"
        with disk("write", path):
            replace_durably(path, self._frames(events), f".gapless-{self._tag}.tmp")

    def _config_text(self, run: RunView) -> Any:
        text = "\n".join(f"    {line}" for line in as_json(run.config, indent=2).split("\n"))
        # In front of step 0, so that a purge from step 0 on leaves it.
        return self._encoder.row(-1, run.created, [self._encoder.text("config", text)])

    def _frames(self, events: list[Any]) -> bytes:
        return b"".join(frame(event.SerializeToString(deterministic=True)) for event in events)

    def _read(self, start: int) -> Iterator[tuple[Any, bytes]]:
        """The events of our own file from the offset `start` on, each with its bytes in it."""
        with open(self._rows.path, "rb") as file:
            file.seek(start)
            left = self._rows.length - start
            while left > 0:
                head = file.read(12)
                (size,) = struct.unpack_from("<Q", head)
                body = file.read(size + 4)
                left -= len(head) + len(body)
                yield self._encoder.event.Event.FromString(body[:-4]), head + body


def _survivors(events: Iterable[Any], first: int) -> list[Any]:
    """The rows at `first` and above that TensorBoard shows after reading `events`."""
    held: list[Any] = []
    for event in events:
        if event.HasField("session_log"):
            held = [row for row in held if row.step < event.step]
        elif event.HasField("summary") and event.step >= first:
            held.append(event)
    return held


def _last_steps(events: Iterable[Any]) -> dict[str, int]:
    """Tag -> its highest step, or more: what a purge took and nobody brought again counts up to the purge."""
    last: dict[str, int] = {}
    for event in events:
        if event.HasField("session_log"):
            last = {tag: min(step, event.step - 1) for tag, step in last.items()}
        elif event.HasField("summary"):
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
