"""W&B's own offline folders, written by the real client, for sites that only allow `wandb sync` and people without a
server.

A run has one child process and one `offline-run-*` folder per session; the position moves when the rows are on disk
there. The client takes no step below its last one, so rows of earlier steps go to a folder beside it: `wandb sync` of
all folders of a run merges them by step, the later one winning. A batch that was on its way when the uploader died is
written again, under the same steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gapless_uploader.operations import Amend, Axis, Config, Media, Missing, Row, State, Summary, Table, Text
from gapless_uploader.replay import MergedRun
from gapless_uploader.sink import Ack, Batch, Memo, Refusal, RunView
from gapless_uploader.sinks._wandb_child_process import ChildProcess
from gapless_uploader.sinks._wandb_describe import git_of, program_of, project_name, run_name
from gapless_uploader.sinks._wandb_files import RunPlace
from gapless_uploader.sinks._wandb_lines import TooBig, plain

_FILE = Path(__file__).with_name("_wandb_offline_child.py")
_ROWS_AT_ONCE = 1_000


class OfflineFolder:
    """One `offline-run-*` folder and the client that writes it."""

    def __init__(self, folder: Path, place: RunPlace, run: RunView) -> None:
        """Start the client. Raises Retryable and OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._child = ChildProcess(_FILE)
        remote, commit = git_of(run)
        names = ("name", "group", "job_type", "tags", "notes", "config", "axes", "host")
        self.top = -1
        answer = self._child.ask(
            {
                "do": "start",
                **{name: getattr(run, name) for name in names},
                "id": place.run,
                "project": place.project,
                "entity": place.entity or None,
                "program": program_of(run.system.get("command")),
                "remote": remote,
                "commit": commit,
                "dir": str(folder),
            }
        )
        self.path = Path(answer["file"]).parent

    def write(self, rows: list[list[Any]]) -> None:
        """Write rows with rising steps; they are on disk when it returns. Raises Retryable."""
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            self._child.ask({"do": "rows", "rows": rows[first : first + _ROWS_AT_ONCE]})
        if rows:
            self.top = rows[-1][0]

    def about(self, run: RunView, summary: dict[str, Any]) -> None:
        """Say what changed. Raises Retryable."""
        self._child.ask({"do": "about", "config": run.config, "summary": summary, "axes": run.axes})

    def finish(self, exit_code: int) -> None:
        """End the run and the client. Raises Retryable."""
        self._child.ask({"do": "finish", "exit_code": exit_code})
        self.close()

    def close(self) -> None:
        """End the client without a word about the run's end. May be called twice."""
        self._child.close()


class OfflineSession:
    """One run in W&B's offline folders. Not thread safe."""

    def __init__(self, folder: Path, place: RunPlace, run: RunView, memo: Memo) -> None:
        self._folder = folder
        self._place = place
        self._current: OfflineFolder | None = None
        self._top: int = memo.get("top", -1)
        self._beside: bool = memo.get("beside", False)
        """Some folder is newer than the one that is written."""

    def write(self, batch: Batch) -> Ack:
        """Write the batch to disk, through W&B's client. Raises Retryable and OSError."""
        refused: list[Refusal] = []
        rising: list[list[Any]] = []
        earlier: dict[int, list[Any]] = {}
        summary: dict[str, Any] = {}
        changed, state = False, None
        for operation in batch.operations:
            match operation:
                case Row(step=None):
                    refused.append(Refusal(None, None, "a row without a step"))
                case Row() | Amend():
                    row = [operation.step, operation.t, _values(operation, refused)]
                    step = operation.step or 0
                    if step > self._top and isinstance(operation, Row):
                        self._top = step
                        rising.append(row)
                    else:
                        earlier[step] = row
                case Config() | Axis():
                    changed = True
                case Summary(values=values):
                    summary.update(values)
                    changed = True
                case State():
                    state = operation
                case _:
                    pass
        self._write(batch.run, rising, [earlier[step] for step in sorted(earlier)])
        if changed and self._current is not None:
            self._current.about(batch.run, summary)
        if state is not None and state.state in ("finished", "failed", "crashed"):
            self._end(batch.run, state)
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nobody listens."""

    def flush(self) -> Memo:
        """What was acknowledged is on disk."""
        return {"top": self._top, "beside": self._beside}

    def close(self) -> None:
        """End the client; the folder can be synced, and another session makes another folder."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def _write(self, run: RunView, rising: list[list[Any]], earlier: list[list[Any]]) -> None:
        if self._current is None:
            self._current = OfflineFolder(self._folder, self._place, run)
        self._current.write(rising)
        if earlier:
            beside = OfflineFolder(self._folder, self._place, run)
            try:
                beside.write(earlier)
            finally:
                beside.close()
            self._beside = True

    def _end(self, run: RunView, state: State) -> None:
        """The end goes to the newest folder, so that it is what `wandb sync` of all of them leaves."""
        if self._beside or self._current is None:
            self.close()
            self._current = OfflineFolder(self._folder, self._place, run)
        if state.state == "crashed":
            self.close()  # a folder without an end is what a killed run leaves
            return
        code = state.exit_code or 0
        self._current.finish(code if state.state == "finished" else code or 1)
        self._current = None


def export_offline(merged: MergedRun, folder: Path) -> Path:
    """Write a run's merged rows into one offline folder under `folder`; its path. Raises Retryable and OSError."""
    run = merged.view
    place = RunPlace(run.entity or "", project_name(run.project), run_name(run.run_id))
    made = OfflineFolder(folder, place, run)
    try:
        refused: list[Refusal] = []
        made.write([[step, row.t, _values(row, refused)] for step, row in sorted(merged.rows.items())])
        made.about(run, {})
        if run.state in ("finished", "failed"):
            code = run.exit_code or 0
            made.finish(code if run.state == "finished" else code or 1)
    finally:
        made.close()
    return made.path


def _values(row: Row | Amend, refused: list[Refusal]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in row.values.items():
        match value:
            case Text(text=text):
                values[key] = text
            case Table(columns=columns, rows=rows, log_mode=mode):
                values[key] = {"_gapless": "table", "columns": columns, "rows": rows, "log_mode": mode}
            case Media(type=kind, items=items):
                made = [{**item.info, "path": str(item.path)} for item in items]
                values[key] = {"_gapless": kind, "items": made}
            case Missing(reason=reason):
                refused.append(Refusal(row.step, key, reason))
            case _:
                try:
                    values[key] = plain(value)
                except TooBig as reason_of:
                    refused.append(Refusal(row.step, key, str(reason_of)))
    return values
