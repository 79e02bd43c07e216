"""Metrics as JSON lines, in the shape of verl's file logger: `{"step": 7, "data": {"loss": 0.5}, "t": 1764493000.25}`.

`<target>/<project>/<run>.jsonl` holds the rows, `<run>.json` beside it what the run is (config, system, summary,
state), `<run>.media/` the media files. A line is strict JSON. What JSON cannot hold is `null` (or text, for an integer
beyond 64 bits) in `data` and named in `marks`, as in the spool: `"marks": [[["loss"], "nan"]]`. `t` is the row's own
wall clock. A changed row is one more line of that step with the keys that changed; a reader merges by step.

The memo holds the file's length, and a restart cuts the file back to it. Taking rows back rewrites the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import chain
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import orjson

from gapless_schemas import path_name
from gapless_uploader.operations import Amend, Log, Media, Missing, Rewind, Row, Table, Text, Value
from gapless_uploader.plain_records import PlainRecord
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Parked, Refusal, RunView
from gapless_uploader.sinks._disk import check_folder, disk, folder_target, regular_file, replace_durably
from gapless_uploader.sinks._naming import project_part, run_part
from gapless_uploader.sinks._own_file import OwnFile


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
        takes_json=True,
    )

    def __init__(self, target: str = "") -> None:
        self.target = folder_target(target or "metrics")

    def open(self, run: RunView, memo: Memo) -> FileSession:
        """A session that appends behind `memo`'s length. Raises Retryable, or Parked for a file that is not ours."""
        return FileSession(Path(self.target), run, memo)

    def check(self) -> str:
        """For `doctor`: that the folder can be written. Raises Parked and Retryable."""
        return check_folder(self.target)


class FileSession:
    """One run's file. Not thread safe."""

    def __init__(self, target: Path, run: RunView, memo: Memo) -> None:
        folder = target / project_part(run)
        with disk("open", folder):
            if not memo:  # with one the folder was there, and is not made anew where a disk is only not mounted
                folder.mkdir(parents=True, exist_ok=True)
            name = str(memo.get("name") or self._earlier_name(folder, run) or run_part(run))
            self._about = folder / f"{name}.json"
            self._media = folder / f"{name}.media"
            self._rows = OwnFile(folder, f".{name}.jsonl", lambda _: f"{name}.jsonl", run.generation)
            if memo:
                self._rows.resume(memo)
            else:
                self._begin(run)

    def write(self, batch: Batch) -> Ack:
        """Append the batch, durable when it returns. Raises Retryable or Parked, with the file as before."""
        with self._rows.whole_or_not():
            refused = self._apply(batch)
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: a file does not beat."""

    def flush(self) -> Memo:
        """The memo; everything acknowledged is on disk already."""
        return {"name": self._about.stem, **self._rows.memo()}

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._rows.close()

    def _apply(self, batch: Batch) -> list[Refusal]:
        refused: list[Refusal] = []
        lines: list[bytes] = []
        described = False
        for operation in batch.operations:
            match operation:
                case Row(step=int() as step, t=t, record=PlainRecord(members=members)):
                    lines.append(b'{"step":%d,"data":{%b},"t":%b}\n' % (step, members, orjson.dumps(t)))
                case Row(step=step, t=t, values=values):
                    lines.append(self._line(step, t, values, refused))
                case Amend(step=step, t=t, values=values, changed=changed):
                    part = {key: values[key] for key in changed if key in values}
                    lines.append(self._line(step, t, part, refused))
                case Rewind(step=step):
                    # `lines` are rows that are not in the file yet.
                    kept = (line for line in chain(self._read(), lines) if not _is_at_or_above(line, step))
                    self._rows.rewrite(kept)
                    lines = []
                case Log():
                    refused.append(Refusal(None, None, "the file sink keeps no console lines"))
                case _:
                    described = True
        if described:
            replace_durably(self._about, about(batch.run), f".{self._about.name}.tmp")
        self._rows.append(b"".join(lines))
        return refused

    def _earlier_name(self, folder: Path, run: RunView) -> str | None:
        """The name under which an earlier session, whose state is lost, wrote this run: its id tells."""
        unique = path_name(run.tracker_id)
        for path in folder.glob(f"*{unique}.json"):
            try:
                with open(path, "rb", opener=regular_file) as file:
                    known = orjson.loads(file.read())
            except (OSError, orjson.JSONDecodeError):
                continue
            if isinstance(known, dict) and known.get("project") == run.project and known.get("id") == run.tracker_id:
                return path.stem
        return None

    def _begin(self, run: RunView) -> None:
        if self._rows.path.exists() and not self._about.exists() and not self._is_ours():
            raise Parked(f"{self._rows.path} is there and is not this sink's; move it away or choose another folder")
        replace_durably(self._about, about(run), f".{self._about.name}.tmp")
        self._rows.begin(b"")

    def _is_ours(self) -> bool:
        with open(self._rows.path, "rb", opener=regular_file) as file:
            first = file.readline(1 << 20)
        try:
            return not first or "t" in orjson.loads(first)
        except orjson.JSONDecodeError:
            return False

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

    def _read(self) -> Iterator[bytes]:
        with open(self._rows.path, "rb") as file:
            left = self._rows.length
            while left > 0:
                line = file.readline()
                left -= len(line)
                yield line


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
