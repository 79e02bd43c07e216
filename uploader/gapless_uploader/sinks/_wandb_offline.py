"""W&B's own offline folders, written by the real client, for sites that only allow `wandb sync` and people without a
server.

A run has one child process and one `offline-run-*` folder per session; the position moves when the rows are on disk
there. The client takes no step below its last one, so rows of earlier steps go to a folder beside it: `wandb sync` of
all folders of a run merges them by step, the later one winning. A batch that was on its way when the uploader died is
written again, under the same steps. Of the folders' summaries and ends the newest one remains, so each folder but the
first is given the whole run's, and rows that come after the run's end have it once more behind them. What a folder
cannot hold is refused, each value by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from gapless_uploader.operations import ENDS, Amend, Gap, Log, Row, State, Summary, Superseded
from gapless_uploader.replay import MergedRun
from gapless_uploader.sink import Ack, Batch, Memo, Refusal, Retryable, RunView
from gapless_uploader.sinks._wandb_axes import Rules, fold
from gapless_uploader.sinks._wandb_child_process import ChildProcess
from gapless_uploader.sinks._wandb_describe import (
    changes_of,
    exit_code_of,
    git_of,
    labels_of,
    program_of,
    project_name,
    run_name,
    successor,
    superseded_tag,
    tags_of,
)
from gapless_uploader.sinks._wandb_files import RunPlace
from gapless_uploader.sinks._wandb_lines import TooBig, plain, spool_key, tracker_key
from gapless_uploader.sinks._wandb_offline_rows import note_renamed, unchanged, values_of
from gapless_uploader.sinks._wandb_progress import Progress
from gapless_uploader.sinks._wandb_request import summary_values

_FILE = Path(__file__).with_name("_wandb_offline_child.py")
_ROWS_AT_ONCE = 1_000
_NO_CONSOLE = "an offline folder has no time for console lines"
_NO_STEP = "a row without a step"


class OfflineFolder:
    """One `offline-run-*` folder and the client that writes it."""

    def __init__(self, folder: Path, place: RunPlace, run: RunView, renamed: list[str]) -> None:
        """Start the client; `renamed` are the keys that have another name at W&B. Raises Retryable and OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self._renamed = renamed
        self._child = ChildProcess(_FILE)
        self._said = _said(run)
        self._about = self._about_of(run)
        answer = self._child.ask(
            {
                "do": "start",
                **self._said,
                **self._about,
                "id": place.run,
                "project": place.project,
                "entity": place.entity or None,
                "dir": str(folder),
            }
        )
        self.path = Path(answer["file"]).parent

    def says(self, run: RunView) -> bool:
        """Whether the folder has what the client takes at its start alone as the run has it now."""
        return self._said == _said(run)

    def write(self, rows: Sequence[Row | Amend], known: Mapping[int, Collection[str]] | None = None) -> list[Refusal]:
        """Write rows with rising steps; they are on disk when it returns. What cannot be. Raises Retryable.

        `known`: step -> keys that were written, or refused, before.
        """
        refused: list[Refusal] = []
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            made = [[row.step, row.t, values_of(row, refused)] for row in rows[first : first + _ROWS_AT_ONCE]]
            answer = self._child.ask({"do": "rows", "rows": made})
            refused += [Refusal(step, spool_key(key), reason) for step, key, reason in answer["refused"]]
        return [one for one in refused if one.key not in (known or {}).get(one.step or 0, ())]

    def about(self, run: RunView, summary: Mapping[str, Any]) -> list[Refusal]:
        """Say what changed, and `summary`, which the training set itself. What cannot be. Raises Retryable."""
        refused: list[Refusal] = []
        values: dict[str, Any] = {}
        for key, value in summary.items():
            try:
                values[tracker_key(key)] = plain(value)
            except TooBig as reason:
                refused.append(Refusal(None, key, str(reason)))
        self.tell(run, values)
        return refused

    def tell(self, run: RunView, summary: Mapping[str, Any], tags: Sequence[str] = ()) -> None:
        """The same with a summary as W&B has it, and with more tags. Raises Retryable."""
        about = self._about_of(run, tags)
        if summary or about != self._about:
            self._child.ask({"do": "about", "summary": summary, **about})
            self._about = about

    def settle(self) -> None:
        """Return when what was said is on disk. Raises Retryable."""
        self._child.ask({"do": "settle"})

    def finish(self, exit_code: int) -> None:
        """End the run and the client. Raises Retryable."""
        self._child.ask({"do": "finish", "exit_code": exit_code})
        self.close()

    def close(self) -> None:
        """End the client without a word about the run's end. May be called twice."""
        self._child.close()

    def _about_of(self, run: RunView, tags: Sequence[str] = ()) -> dict[str, Any]:
        """What the client takes at any time."""
        config = {**run.config, **changes_of(run, self._renamed)}
        return {"config": config, "axes": dict(run.axes), "tags": [*tags_of(run), *tags]}


class OfflineSession:
    """One run in W&B's offline folders. Not thread safe."""

    def __init__(self, folder: Path, place: RunPlace, run: RunView, memo: Memo) -> None:
        self._folder = folder
        self._place = place
        self._current: OfflineFolder | None = None
        self._progress = Progress.from_memo(memo)
        self._is_first = not memo
        """No folder of the run was begun."""
        self._late: OfflineFolder | None = None
        """The one of the earlier rows, while their batch is written."""
        self._beside = False
        """Some folder is newer than the one that is written."""

    def write(self, batch: Batch) -> Ack:
        """Write the batch to disk, through W&B's client. Raises Retryable and OSError."""
        folds = deepcopy(self._progress.folds)
        try:
            return self._apply(batch)
        except (Retryable, OSError):
            self._progress.folds = folds  # the rows come again
            raise
        finally:
            self._close_late()

    def heartbeat(self, now: float) -> None:
        """Nobody listens."""

    def flush(self) -> Memo:
        """What was acknowledged is on disk."""
        held = self._progress.to_memo()
        return {name: held[name] for name in ("top", "ended", "folds", "renamed")}

    def close(self) -> None:
        """End the client; the folder can be synced, and another session makes another folder."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def _apply(self, batch: Batch) -> Ack:
        refused: list[Refusal] = []
        rising: list[Row | Amend] = []
        earlier: dict[int, Row | Amend] = {}
        known: dict[int, set[str]] = {}
        summary: dict[str, Any] = {}
        progress, rules = self._progress, Rules(batch.run.axes)
        state, is_superseded, has_news = None, False, False
        for operation in batch.operations:
            match operation:
                case Row(step=None):
                    refused.append(Refusal(None, None, _NO_STEP))
                case Row() | Amend():
                    step = operation.step or 0
                    note_renamed(operation, progress.renamed)
                    before = unchanged(operation)
                    if rules.any:
                        fold(progress.folds, rules, {k: v for k, v in operation.values.items() if k not in before})
                    if step > progress.top and isinstance(operation, Row):
                        progress.top = step
                        rising.append(operation)
                    else:
                        earlier[step] = operation
                        known[step] = known.get(step, before) & before
                case Summary(values=values):
                    summary.update(values)
                case State():
                    state = operation
                case Log():
                    refused.append(Refusal(None, None, _NO_CONSOLE))
                case Superseded():
                    is_superseded = True
                case Gap():
                    pass  # W&B has no place for it
                case _:
                    has_news = True  # of what the run says of itself, which is compared below
        if rising or earlier or summary or state is not None or has_news:
            refused += self._write(batch.run, rising, [earlier[step] for step in sorted(earlier)], known, summary)
        if is_superseded:
            self._supersede(batch.run)
        else:
            self._end(batch.run, state)
        if self._current is not None:
            self._current.settle()
        return Ack(len(batch.operations), self.flush(), refused)

    def _write(
        self,
        run: RunView,
        rising: list[Row | Amend],
        earlier: list[Row | Amend],
        known: Mapping[int, Collection[str]],
        summary: dict[str, Any],
    ) -> list[Refusal]:
        if self._current is not None and not self._current.says(run):
            self.close()
        refused: list[Refusal] = []
        if rising or (self._current is None and not earlier):
            refused += self._going_on(run).write(rising)
        if earlier:
            self._late = self._begun(run)
            refused += self._late.write(earlier, known)
        if self._current is not None:
            refused += self._current.about(run, summary)
        elif self._late is not None:
            refused += self._late.about(run, summary)
        if self._late is not None:
            self._late.tell(run, summary_values(run, self._progress))
            self._late.settle()
        return refused

    def _going_on(self, run: RunView) -> OfflineFolder:
        """The folder of rising rows."""
        if self._current is None:
            self._current, self._beside = self._begun(run), False
        return self._current

    def _begun(self, run: RunView) -> OfflineFolder:
        made = OfflineFolder(self._folder, self._place, run, self._progress.renamed)
        if not self._is_first:
            made.tell(run, summary_values(run, self._progress))
        self._is_first = False
        return made

    def _end(self, run: RunView, state: State | None) -> None:
        """The end goes to the newest folder, so that it is what `wandb sync` of all of them leaves; again where
        something came after it."""
        if state is not None:
            how, code = state.state, state.exit_code
        elif self._progress.ended and (self._current is not None or self._late is not None):
            how, code = run.state, run.exit_code
        else:
            return
        if how in ENDS:
            newest = self._newest(run)
            if how == "crashed":
                newest.settle()  # a folder without an end is what a killed run leaves
            else:
                newest.finish(exit_code_of(how, code))
            self.close()
        if state is not None:
            self._progress.ended = how in ENDS

    def _supersede(self, run: RunView) -> None:
        """Leave the run as it is, ended, with the mark of the one that follows it."""
        newest = self._newest(run)
        newest.tell(run, {}, [superseded_tag(successor(self._place.run, run.generation))])
        newest.finish(0)
        self._current = None

    def _newest(self, run: RunView) -> OfflineFolder:
        if self._late is not None or self._beside:
            self.close()
        if self._late is not None:
            self._current, self._late = self._late, None
        return self._going_on(run)

    def _close_late(self) -> None:
        if self._late is not None:
            self._late.close()
            self._late, self._beside = None, True


def export_offline(merged: MergedRun, folder: Path) -> tuple[Path, list[Refusal]]:
    """Write a run's merged rows into one offline folder under `folder`: its path, and what it cannot hold.

    Raises Retryable and OSError.
    """
    run = merged.view
    place = RunPlace(run.entity or "", project_name(run.project), run_name(run.run_id))
    rows = [merged.rows[step] for step in sorted(merged.rows)]
    renamed: list[str] = []
    for row in rows:
        note_renamed(row, renamed)
    refused = [Refusal(None, None, _NO_STEP) for _ in merged.unstepped]
    refused += [Refusal(None, None, _NO_CONSOLE) for _ in merged.logs]
    made = OfflineFolder(folder, place, run, renamed)
    try:
        refused += made.write(rows)
        refused += made.about(run, merged.summary)
        if run.state in ("finished", "failed"):
            made.finish(exit_code_of(run.state, run.exit_code))
        else:
            made.settle()
    finally:
        made.close()
    return made.path, refused


def _said(run: RunView) -> dict[str, Any]:
    """What the client takes at its start alone."""
    remote, commit = git_of(run)
    return {
        **labels_of(run),
        "notes": run.notes,
        "host": run.host,
        "program": program_of(run.system.get("command")),
        "remote": remote,
        "commit": commit,
    }
