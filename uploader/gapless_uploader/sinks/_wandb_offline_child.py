"""The real `wandb` client in offline mode, one run a process: rows in, W&B's own `offline-run-*` folder out.

It reads one JSON object a line: `start`, `rows`, `about`, `settle`, then `finish` or the end of its input. It answers
each in its turn with one of the same `number`, `rows` when they are in the folder's file on disk, which W&B's client
writes once a second here, and with what of them cannot be there.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

FLUSH_S = 30.0
ENDS_S = 10.0
"""For an end of the client's own, when the parent was killed."""
INTERVAL_S = 1
_BLOCK, _HEADER, _FILE_HEADER = 32_768, 7, 7
_MAGIC = b":W&B"
_GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


class OfflineRun:
    """A run that W&B's client writes to a folder."""

    def __init__(self, given: dict[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(
            mode="offline", silent=True, console="off", host=given["host"] or "", program=given["program"] or "",
            disable_git=True, git_commit=given["commit"], git_remote_url=given["remote"], disable_code=True,
            save_code=False, x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
            x_transaction_log_flush_interval=INTERVAL_S,
        )  # fmt: skip
        # Folders are called by the second of their start, and a second one of that name would write over the first.
        while Path(given["dir"], "wandb", time.strftime(f"offline-run-%Y%m%d_%H%M%S-{given['id']}")).exists():
            time.sleep(0.05)
        names = ("id", "entity", "project", "name", "group", "job_type", "tags", "notes", "config")
        self._run: Any = wandb.init(dir=given["dir"], settings=settings, **{name: given[name] for name in names})
        self._define(given["axes"])
        self.file = Path(self._run.settings.sync_file)
        self._looked_to = 0
        self._told_at: int | None = None
        """How large the file was when something was said that no row follows."""

    def rows(self, rows: list[list[Any]]) -> list[tuple[int, str, str]]:
        """Log (step, time, values) each, and return when they are on disk: step, key and reason of what is not."""
        refused = []
        for step, t, values in rows:
            made = {}
            for key, value in values.items():
                try:
                    made[key] = self._logged(value)
                except (OSError, ValueError, TypeError, LookupError, AssertionError) as error:
                    refused.append((step, key, reason_of(error, value)))
            self._run.log({**made, "_timestamp": t}, step=step, commit=True)
        if rows:
            self._wait_for(rows[-1][0])
            self._told_at = None  # the file has its records in order
        return refused

    def about(self, config: dict[str, Any], summary: dict[str, Any], axes: dict[str, Any], tags: list[str]) -> None:
        """Replace what changed of config, definitions, tags and the summary that the training set itself."""
        self._told_at = self._size()
        self._run.config.update(config, allow_val_change=True)
        self._define(axes)
        self._run.summary.update(summary)
        self._run.tags = tags  # which makes a record in any case

    def settle(self) -> None:
        """Return when what `about` said is on disk: the client is asked for no answer, but writes once a second."""
        if self._told_at is None:
            return
        deadline = time.monotonic() + FLUSH_S
        while self._size() == self._told_at:
            if time.monotonic() > deadline:
                raise TimeoutError(f"W&B's client did not write {self.file.name} within {FLUSH_S:.0f} s")
            time.sleep(0.05)
        time.sleep(1.5 * INTERVAL_S)  # it may have written between two records
        self._told_at = None

    def finish(self, exit_code: int) -> None:
        """End the run."""
        self._run.finish(exit_code=exit_code)

    def _logged(self, value: Any) -> Any:
        """What `run.log` takes for a value. Files have no type there: they are the run's, the row has their names."""
        if not isinstance(value, dict) or value.get("_gapless") != "file":
            return logged(value)
        names = [item["name"] for item in value["items"]]
        for item in value["items"]:
            made = Path(self._run.dir, item["name"])
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item["path"], made)  # `save` would link to it, and say nothing where it is gone
            self._run.save(str(made), base_path=self._run.dir, policy="now", glob=False)
        return names[0] if len(names) == 1 else names

    def _define(self, axes: dict[str, Any]) -> None:
        for key, (axis, rule) in axes.items():
            name = key if key.endswith("*") else key.replace("\\", "\\\\").replace(".", "\\.")
            self._run.define_metric(name, step_metric=axis, step_sync=False if axis else None, summary=rule)

    def _wait_for(self, step: int) -> None:
        deadline = time.monotonic() + FLUSH_S
        while not has_row(unframed(self._tail()), step):
            if time.monotonic() > deadline:
                raise TimeoutError(f"W&B's client did not write {self.file.name} within {FLUSH_S:.0f} s")
            time.sleep(0.05)
        self._looked_to = self.file.stat().st_size

    def _size(self) -> int:
        return self.file.stat().st_size if self.file.exists() else 0

    def _tail(self) -> bytes:
        """The blocks in which the newest rows can be."""
        if not self.file.exists():
            return b""
        start = self._looked_to - self._looked_to % _BLOCK
        with self.file.open("rb") as file:
            file.seek(start)
            return file.read()


def logged(value: Any) -> Any:
    """What `run.log` takes for a value, which is plain or `{"_gapless": kind, ...}`."""
    import wandb

    if not isinstance(value, dict) or "_gapless" not in value:
        return value
    kind = value["_gapless"]
    if kind == "table":
        mode: Any = value["log_mode"] or "IMMUTABLE"
        return wandb.Table(columns=value["columns"], data=value["rows"], log_mode=mode, allow_mixed_types=True)
    if kind == "histogram":
        made = [wandb.Histogram(np_histogram=(item["counts"], item["edges"])) for item in value["items"]]
    else:
        make = {"image": wandb.Image, "video": wandb.Video, "audio": wandb.Audio}[kind]
        made = [make(item["path"], caption=item.get("caption")) for item in value["items"]]
    return made[0] if len(made) == 1 else made


def reason_of(error: Exception, value: Any) -> str:
    """Why a value cannot be logged, ever. Raises `error` where it may be another time."""
    if isinstance(error, _GONE):
        return f"a payload that is missing ({error.strerror})"
    if isinstance(error, OSError) and error.errno is not None:
        raise error
    kind = value["_gapless"] if isinstance(value, dict) else "value"
    return f"{kind} that W&B's client does not take ({type(error).__name__})"


def has_row(records: bytes, step: int) -> bool:
    """Whether a history record of `step` is among the bytes of a `.wandb` file's records.

    Its row names the step as text, and its last field as a number; the summary's record before it only as text.
    """
    text = str(step).encode()
    at = records.find(b"_step\x82\x01" + bytes([len(text)]) + text)
    number = b""
    while step:
        step, low = step >> 7, step & 0x7F
        number += bytes([low | 0x80 if step else low])
    field = b"\x08" + number if number else b""
    return at >= 0 and records.find(b"\x12" + bytes([len(field)]) + field, at) >= 0


def unframed(data: bytes) -> bytes:
    """The records in whole blocks of a `.wandb` file, one after the other, without the headers of its blocks."""
    parts = []
    at = _FILE_HEADER if data.startswith(_MAGIC) else 0
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        parts.append(data[at + _HEADER : at + _HEADER + size])
        at += _HEADER + size
    return b"".join(parts)


def end_with(parent: int) -> None:
    """End some seconds after the parent, whatever the client still waits for: what it had not written comes again."""
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(ENDS_S)
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Serve one run until the parent is gone; one that was killed cannot remove our folder, the first argument."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    for folder in sys.argv[1:]:  # after what the client does at its end: its service listens in there
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    run: OfflineRun | None = None
    for line in requests:
        request = json.loads(line)
        number = request.pop("number")
        found: dict[str, Any] = {}
        try:
            match request.pop("do"):
                case "start":
                    run = OfflineRun(request)
                    found = {"file": str(run.file)}
                case "rows" if run is not None:
                    found = {"refused": run.rows(request["rows"])}
                case "about" if run is not None:
                    run.about(**request)
                case "settle" if run is not None:
                    run.settle()
                case "finish" if run is not None:
                    run.finish(request["exit_code"])
        except Exception as error:  # noqa: BLE001 - whatever a vendor raises is the answer
            found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        answers.write(json.dumps({**found, "number": number}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
