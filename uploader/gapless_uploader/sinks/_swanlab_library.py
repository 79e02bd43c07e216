"""SwanLab's own offline and local modes: the real library, driven in a child process, one a run.

`<target>/<project>/<run id>/part-N/` holds what the library writes: `swanlog/run-...` for `swanlab sync`, in local mode
with the files of `swanlab watch`. The library buffers and never syncs its file, so a journal of ours stands beside it:

1. A batch is appended to `journal.jsonl` and synced before it is acknowledged; the memo holds the journal's length.
2. `open` cuts the journal back to the memo's length, removes what an unfinished child left of the part, and plays the
   journal into a new one. So nothing is lost by a crash, and nothing is doubled.
3. When the run ends the child finishes the library's file. Rows that come later begin a new part and a new journal.

What is lost there: the original time of each point, which `swanlab.log` sets to now. In local mode a NaN, which breaks
the board, is left out and counted.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from gapless_schemas import path_name
from gapless_uploader.operations import Log, Media, State, Table, Text
from gapless_uploader.sink import Ack, Batch, Memo, Parked, Refusal, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._disk import disk, sync_folder
from gapless_uploader.sinks._naming import project_part
from gapless_uploader.sinks._swanlab_documents import config_document, end_state, moment, naming_of
from gapless_uploader.sinks._swanlab_media import MAX_ITEMS, cells_of
from gapless_uploader.sinks._swanlab_names import key_name, project_name
from gapless_uploader.sinks._swanlab_points import Points
from gapless_uploader.sinks._swanlab_portion import NAN, MediaRow, Portion
from gapless_uploader.sinks._swanlab_process import LibraryProcess, LibraryRefused
from gapless_uploader.sinks._swanlab_tally import Tally

MODES = ("offline", "local")
_FINISH = {"FINISHED": "success", "CRASHED": "crashed", "ABORTED": "aborted"}


class LibrarySession:
    """One run in the library's own folders. Not thread safe."""

    def __init__(self, target: Path, mode: str, timeout_s: float, run: RunView, memo: Memo) -> None:
        if find_spec("swanlab") is None:
            need("swanlab", "swanlab")  # says how to install it; importing it here would cost 60 MB
        self._mode = mode
        self._timeout_s = max(timeout_s, 60.0)
        self._folder = target / project_part(run) / path_name(run.tracker_id)
        self._run = run
        self._tally = Tally(memo)
        self._points = Points(self._tally)
        self._part: int = memo.get("part", 1)
        self._length: int = memo.get("length", 0)
        self._child: LibraryProcess | None = None
        self._journal: IO[bytes] | None = None
        with disk("open", self._folder):
            if not memo and self._folder.exists():
                # A lost state: the whole history comes again.
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, batch: Batch) -> Ack:
        """Journal the batch, and give it to the library. Raises Retryable, Parked or Misconfigured."""
        self._run = batch.run
        with disk("write", self._folder):
            self._begin()
        messages = [self._message(portion) for portion in self._points.portions(batch.operations)]
        refused = list(self._points.refused)
        refused += [Refusal(None, None, "console lines") for op in batch.operations if isinstance(op, Log)]
        if self._mode == "local":
            refused += [refusal for message in messages for refusal in self._without_nan(message)]
        ends = [op for op in batch.operations if isinstance(op, State)]
        end = ends[-1] if ends and ends[-1].state != "running" else None
        length, part = self._length, self._part
        try:
            for message in messages:
                if message["rows"] or message["media"]:
                    refused += self._tell(message)
                    self._append(message)
            self._sync()
            if end is not None:
                self._finish(end)
        except BaseException:
            self._length, self._part = length, part
            self._stop()
            raise
        self._tally.commit()
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: nobody listens."""

    def flush(self) -> Memo:
        """The memo; what was acknowledged is on disk."""
        return {"part": self._part, "length": self._length, **self._tally.memo()}

    def close(self) -> None:
        """End the child and leave its part unfinished: the next session makes it again. May be called twice."""
        self._stop()

    # a part

    @property
    def _path(self) -> Path:
        return self._folder / f"part-{self._part}"

    def _begin(self) -> None:
        """A child that holds what the journal holds. Raises OSError, Retryable or Misconfigured."""
        if self._child is not None:
            return
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir()
        journal = self._folder / "journal.jsonl"
        if not journal.exists():
            if self._length:
                raise Parked(f"{journal} lacks rows that were acknowledged; put it back, or use another --state")
            journal.touch()
        self._journal = open(journal, "rb+", buffering=0)  # noqa: SIM115 - the session keeps it
        if os.fstat(self._journal.fileno()).st_size < self._length:
            raise Parked(f"{journal} lacks rows that were acknowledged; put it back, or use another --state")
        self._journal.truncate(self._length)
        sync_folder(self._folder)
        child = LibraryProcess(self._path, self._timeout_s)
        try:
            child.ask(self._init())
            for message in _messages(journal):
                child.ask(message)
        except BaseException:
            child.stop()
            raise
        self._child = child
        self._journal.seek(self._length)

    def _init(self) -> dict[str, Any]:
        naming = naming_of(self._run)
        own = {"ended_at": None} if self._run.state == "running" else {"state": self._run.state}
        config = config_document(self._run, {**own, "duration_s": round(self._run.runtime, 3)})
        arguments = {
            "project": project_name(self._run.project),
            "name": naming.name,
            "description": naming.description or None,
            "tags": list(naming.tags) or None,
            "group": naming.group or None,
            "job_type": naming.job_type or None,
            "id": naming.slug,
            "resume": "allow",
            "mode": self._mode,
            "log_dir": str(self._path / "swanlog"),
            "config": {key: entry["value"] for key, entry in config.items()},
        }
        axes = {key_name(key): key_name(axis) for key, (axis, _) in self._run.axes.items() if axis and "*" not in key}
        return {"init": {key: value for key, value in arguments.items() if value is not None}, "axes": axes}

    def _tell(self, message: dict[str, Any]) -> list[Refusal]:
        """Give a message to the child; what the library would not take of its media."""
        if self._child is None:
            raise RuntimeError("write to a closed session")
        media, message["media"] = message["media"], []
        refused = []
        if message["rows"]:
            self._child.ask(message)
        for item in media:
            try:
                self._child.ask({"rows": [], "media": [item]})
                message["media"].append(item)
            except LibraryRefused as error:
                refused.append(Refusal(item[0], item[1], f"the library: {error}"))
        return refused

    def _append(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if self._journal is None:
            raise RuntimeError("write to a closed session")
        with disk("write", self._folder):
            view = memoryview(line)
            while view:
                view = view[self._journal.write(view) :]
        self._length += len(line)

    def _sync(self) -> None:
        if self._journal is not None:
            with disk("sync", self._folder):
                os.fsync(self._journal.fileno())

    def _finish(self, end: State) -> None:
        """The library writes the run's end and closes its file; the part is whole and stays as it is."""
        if self._child is None:
            raise RuntimeError("write to a closed session")
        note: dict[str, Any] = {"state": end.state, "exit_code": end.exit_code, "started_at": moment(self._run.created)}
        note |= {"ended_at": moment(end.t), "duration_s": round(end.runtime, 3)}
        with disk("write", self._path):
            (self._path / "original.json").write_text(json.dumps(note))
        self._child.ask({"finish": _FINISH[end_state(end.state, end.exit_code)]})
        self._stop()
        self._part, self._length = self._part + 1, 0

    def _stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    # messages

    def _message(self, portion: Portion) -> dict[str, Any]:
        rows = [
            [line.step, {n: json.loads(v) for n, v in zip(line.names, line.values, strict=True)}]
            for line in portion.lines
        ]
        return {"rows": rows, "media": [_media(row) for row in portion.media]}

    def _without_nan(self, message: dict[str, Any]) -> Iterator[Refusal]:
        for step, values in message["rows"]:
            for key in [key for key, value in values.items() if value == json.loads(NAN)]:
                del values[key]
                yield Refusal(step, key, "a NaN breaks the local board: it is left out")
        message["rows"] = [row for row in message["rows"] if row[1]]


def _media(row: MediaRow) -> list[Any]:
    match row.value:
        case Text(text=text):
            return [row.step, row.name, "TEXT", text]
        case Table(columns=columns, rows=rows):
            return [row.step, row.name, "ECHARTS", {"columns": columns, "rows": cells_of(rows)}]
        case Media(type="histogram", items=items):
            edges, counts = list(items[0].info.get("edges") or []), list(items[0].info.get("counts") or [])
            bins = [list(one) for one in zip(edges, edges[1:], counts, strict=False)]
            return [row.step, row.name, "ECHARTS", {"columns": ["from", "to", "count"], "rows": cells_of(bins)}]
        case Media(items=items):
            files = [[str(item.path), str(item.info.get("caption") or "")] for item in items[:MAX_ITEMS]]
            return [row.step, row.name, row.type, files]


def _messages(journal: Path) -> Iterator[dict[str, Any]]:
    with open(journal, "rb") as file:
        for line in file:
            yield json.loads(line)
