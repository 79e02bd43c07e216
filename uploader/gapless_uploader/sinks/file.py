"""Metrics as JSON lines, in the shape of verl's file logger: `{"step": 7, "data": {"loss": 0.5}, "t": 1764493000.25}`.

`<target>/<project>/<run>.jsonl` holds the rows, `<run>.json` beside it what the run is (config, system, summary,
state), `<run>.media/` the media files. A line is strict JSON. What JSON cannot hold is `null` (or text, for an integer
beyond 64 bits) in `data` and named in `marks`, as in the spool: `"marks": [[["loss"], "nan"]]`. `t` is the row's own
wall clock. A changed row is one more line of that step with the keys that changed; a reader merges by step.

The memo holds the file's length, and a restart cuts the file back to it. Taking rows back rewrites the file under a
new generation; the one before stays as a hard link until a memo of the new one is seen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from math import isfinite, isnan
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from gapless_schemas import path_name
from gapless_uploader.operations import Amend, Log, Media, Missing, Rewind, Row, Table, Text, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Parked, Refusal, RunView
from gapless_uploader.sinks._disk import disk, replace_durably, sync_folder
from gapless_uploader.sinks._naming import project_part, run_part


class FileSink:
    """JSON lines under the folder `target`."""

    kind = "file"
    capabilities = Capabilities(
        settles_intents=False,
        exactly_once="the checkpoint holds the file's length; a restart cuts our own file back to it",
        rewind=True,
        unstepped=True,
        text=True,
        tables=True,
        media=True,
        end_state=True,
        read_back=True,
    )

    def __init__(self, target: str = "") -> None:
        self.target = target or "metrics"

    def open(self, run: RunView, memo: Memo) -> FileSession:
        """A session that appends behind `memo`'s length. Raises Retryable, or Parked for a file that is not ours."""
        return FileSession(Path(self.target), run, memo)


class FileSession:
    """One run's file. Not thread safe."""

    def __init__(self, target: Path, run: RunView, memo: Memo) -> None:
        folder = target / project_part(run)
        name = str(memo.get("name") or self._earlier_name(folder, run) or run_part(run))
        self._path = folder / f"{name}.jsonl"
        self._about = folder / f"{name}.json"
        self._media = folder / f"{name}.media"
        self._length: int = memo.get("length", 0)
        self._generation: int = memo.get("generation", 0)
        self._file: BinaryIO | None = None
        with disk("open", self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._cut_back() if memo else self._begin(run)

    def write(self, batch: Batch) -> Ack:
        """Append the batch, durable when it returns. Raises Retryable or Parked, with the file as before."""
        before = self._generation, self._length
        try:
            with disk("write", self._path):
                refused = self._apply(batch)
        except BaseException:
            with disk("restore", self._path):
                self._restore(*before)
            raise
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: a file does not beat."""

    def flush(self) -> Memo:
        """The memo; everything acknowledged is on disk already."""
        return {"name": self._path.stem, "length": self._length, "generation": self._generation}

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _apply(self, batch: Batch) -> list[Refusal]:
        refused: list[Refusal] = []
        lines: list[bytes] = []
        described = False
        for operation in batch.operations:
            match operation:
                case Row(step=step, t=t, values=values):
                    lines.append(self._line(step, t, values, refused))
                case Amend(step=step, t=t, values=values, changed=changed):
                    part = {key: values[key] for key in changed if key in values}
                    lines.append(self._line(step, t, part, refused))
                case Rewind(step=step):
                    self._rewrite(step, lines)
                    lines = []
                case Log():
                    refused.append(Refusal(None, None, "the file sink keeps no console lines"))
                case _:
                    described = True
        if described:
            replace_durably(self._about, about(batch.run), f".{self._about.name}.tmp")
        self._append(b"".join(lines))
        return refused

    def _earlier_name(self, folder: Path, run: RunView) -> str | None:
        """The name under which an earlier session, whose state is lost, wrote this run: its id tells."""
        unique = path_name(run.tracker_id)
        for path in folder.glob(f"*{unique}.json"):
            try:
                known = orjson.loads(path.read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue
            if isinstance(known, dict) and known.get("project") == run.project and known.get("id") == run.tracker_id:
                return path.stem
        return None

    def _begin(self, run: RunView) -> BinaryIO:
        if self._path.exists() and not self._is_ours():
            raise Parked(f"{self._path} is there and is not this sink's; move it away or choose another folder")
        for before in self._earlier_generations():
            before.unlink()
        replace_durably(self._about, about(run), f".{self._about.name}.tmp")
        file = open(self._path, "wb+", buffering=0)  # noqa: SIM115 - the session keeps it
        os.fsync(file.fileno())
        sync_folder(self._path.parent)
        return file

    def _is_ours(self) -> bool:
        with open(self._path, "rb") as file:
            first = file.readline(1 << 20)
        try:
            return not first or "t" in orjson.loads(first)
        except orjson.JSONDecodeError:
            return False

    def _cut_back(self) -> BinaryIO:
        for before in self._earlier_generations():
            # What was rewritten after the memo was made is undone: the old file comes back, and the batch with it.
            if _generation_of(before) == self._generation:
                before.replace(self._path)
            elif _generation_of(before) < self._generation:
                before.unlink()
        for before in self._earlier_generations():
            before.unlink()
        if not self._path.is_file() or self._path.stat().st_size < self._length:
            raise Parked(f"{self._path} lacks lines that were acknowledged; put it back, or use another folder")
        file = open(self._path, "rb+", buffering=0)  # noqa: SIM115 - the session keeps it
        file.truncate(self._length)
        return file

    def _earlier_generations(self) -> list[Path]:
        hidden = f".{self._path.name}."
        paths = [path for path in self._path.parent.iterdir() if path.name.startswith(hidden)]
        return [path for path in paths if path.name[len(hidden) :].isdigit()]

    def _line(self, step: int | None, t: float, values: dict[str, Value], refused: list[Refusal]) -> bytes:
        data: dict[str, Any] = {}
        for key, value in values.items():
            match value:
                case Text(text=text):
                    data[key] = text
                case Table(columns=columns, rows=rows):
                    data[key] = {"columns": columns, "rows": rows}
                case Media(type=kind, items=items):
                    data[key] = {"type": kind, "items": [self._item(item.path, item.info) for item in items]}
                case Missing(reason=reason):
                    refused.append(Refusal(step, key, reason))
                case _:
                    data[key] = value
        marks: list[Any] = []
        line: dict[str, Any] = {"step": step, "data": marked(data, [], marks), "t": t}
        if marks:
            line["marks"] = marks
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def _item(self, payload: Path | None, info: dict[str, Any]) -> dict[str, Any]:
        if payload is None:
            return info
        copy = self._media / payload.name
        if not copy.exists():
            self._media.mkdir(exist_ok=True)
            beside = copy.with_name(f".{copy.name}.tmp")
            shutil.copyfile(payload, beside, follow_symlinks=False)
            beside.replace(copy)
        return {**info, "media": payload.name}

    def _rewrite(self, step: int, pending: list[bytes]) -> None:
        """The file without the rows at `step` and above; `pending` lines are rows that are not in it yet."""
        kept = [line for line in [*self._read(), *pending] if not _is_at_or_above(line, step)]
        before = self._path.with_name(f".{self._path.name}.{self._generation}")
        before.unlink(missing_ok=True)
        before.hardlink_to(self._path)
        content = b"".join(kept)
        replace_durably(self._path, content, f".{self._path.name}.tmp")
        self.close()
        self._file = open(self._path, "rb+", buffering=0)  # noqa: SIM115 - the session keeps it
        self._generation += 1
        self._length = len(content)

    def _read(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            left = self._length
            while left > 0:
                line = file.readline()
                left -= len(line)
                yield line

    def _append(self, content: bytes) -> None:
        if self._file is None:
            raise RuntimeError("write to a closed session")
        self._file.seek(self._length)
        view = memoryview(content)
        while view:
            view = view[self._file.write(view) :]
        os.fsync(self._file.fileno())
        self._length += len(content)

    def _restore(self, generation: int, length: int) -> None:
        """The file as it was before a write that failed, so that its batch can come again."""
        if self._file is None:
            return
        if self._generation != generation:
            self._path.with_name(f".{self._path.name}.{generation}").replace(self._path)
            self.close()
            self._file = open(self._path, "rb+", buffering=0)  # noqa: SIM115 - the session keeps it
        self._generation, self._length = generation, length
        self._file.truncate(length)


def about(run: RunView) -> bytes:
    """What `<run>.json` holds."""
    fields: dict[str, Any] = {
        "project": run.project,
        "id": run.tracker_id,
        **{name: getattr(run, name) for name in ("name", "group", "job_type", "tags", "notes", "created", "host")},
        **{name: getattr(run, name) for name in ("state", "exit_code", "runtime", "config", "system")},
        "summary": {key: value for key, value in run.summary.items() if isinstance(value, (bool, int, float, str))},
    }
    marks: list[Any] = []
    fields = marked(fields, [], marks)
    if marks:
        fields["marks"] = marks
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_INDENT_2)


def marked(value: Any, path: list[str | int], marks: list[Any]) -> Any:
    """`value` as strict JSON holds it; what it cannot hold is added to `marks` with its path."""
    if isinstance(value, dict):
        return {str(key): marked(inner, [*path, str(key)], marks) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [marked(inner, [*path, place], marks) for place, inner in enumerate(value)]
    if isinstance(value, float) and not isfinite(value):
        marks.append([path, "nan" if isnan(value) else "inf" if value > 0 else "-inf"])
        return None
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        marks.append([path, "int"])
        return str(value)
    return value


def _is_at_or_above(line: bytes, step: int) -> bool:
    held = orjson.loads(line)["step"]
    return held is not None and held >= step


def _generation_of(path: Path) -> int:
    return int(path.name.rpartition(".")[2])
