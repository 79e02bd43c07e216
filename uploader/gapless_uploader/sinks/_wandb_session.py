"""One run at W&B. A write is one request with lines, summary and progress together; what it carried counts when W&B
said yes, and for the first of a session and the last of a run when `wandb.Api` shows it.

Requests of new rows may follow the first before it is shown; their acks say so. Whatever else a batch holds waits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any, Protocol
from urllib.parse import quote
from zlib import crc32

from gapless_uploader.operations import ENDS, State
from gapless_uploader.sink import Ack, Batch, Memo, Parked, Place, Refusal, Rejected, Resume, Retryable, RunView
from gapless_uploader.sinks import _wandb_queries as queries
from gapless_uploader.sinks._wandb_ahead import ASKER, Ahead
from gapless_uploader.sinks._wandb_describe import (
    config_text,
    exit_code_of,
    git_of,
    labels_of,
    program_of,
    successor,
    superseded_tag,
    tags_of,
)
from gapless_uploader.sinks._wandb_draft import Draft, Limits
from gapless_uploader.sinks._wandb_files import FileRefused, RunPlace, send_artifact, upload
from gapless_uploader.sinks._wandb_find import Held
from gapless_uploader.sinks._wandb_http import Http
from gapless_uploader.sinks._wandb_lines import careful_body, spool_key
from gapless_uploader.sinks._wandb_progress import Progress, in_summary
from gapless_uploader.sinks._wandb_proof import Proof, Unproved
from gapless_uploader.sinks._wandb_request import end_files, request_body, stream_file, summary_file, summary_text

_FEW = 2
_MAX_PARTS, _MAX_PAIRS = 64, 8
"""In so many parts keys that W&B never took are left out; so many of them in twos, too."""
REFUSED_IN_SUMMARY = "a key of the summary without which W&B took what it had refused"
SUMMARY_FULL = "the largest values of a summary that W&B finds too large"
_SMALL_BYTES = 2_048
"""A line that no server can find too large."""
DOUBTS = 4
DOUBT_S = 2.0
"""A refusal that goes on so long is believed: nothing is left out for a server that is confused for a moment. Once one
was right, the next is asked again once."""
PATIENCE = 20
"""How often a row that W&B shows with other values is looked at again, a second apart, before that is the answer."""


class Shows(Protocol):
    """Whoever asks `wandb.Api`."""

    def look(self, place: RunPlace, steps: list[tuple[int, int]]) -> dict[str, Any]:
        """`rows`, `state` and `progress` of a run. Raises Retryable."""

    def count_lines(self, place: RunPlace) -> int:
        """How many lines of history W&B counts. Raises Retryable."""


@dataclass(slots=True)
class _Sent:
    """A request that W&B took, and that is not delivered before `wandb.Api` shows it."""

    place: Place
    ack: Ack
    proof: Proof
    progress: Progress
    late: bool
    run: RunView = field(repr=False)


class WandbSession:
    """Not thread safe."""

    def __init__(
        self, reads: Shows, http: Http, place: RunPlace, progress: Progress, limits: Limits, version: str
    ) -> None:
        self._reads = reads
        self._http = http
        self._place = place
        self._progress = progress
        self._limits = limits
        self._version = version
        self._max_row_bytes = limits.max_row_bytes
        self._upserted: dict[str, Any] | None = None
        self._check: dict[str, Any] | None = None
        """What the end of the run looked like when it was read back."""
        self._sent: _Sent | None = None
        self._ahead: Ahead | None = None
        self._refused_ahead: list[Refusal] = []
        """Found by the read-back of what was acknowledged before."""
        self._tries = 0
        """How often a request that was sent again had been looked for."""
        self._is_proved = not limits.read_back
        self._late_is_proved = not limits.read_back
        self._taken: set[str] = set()
        """Keys that W&B holds in rows or in the summary."""
        self._doubts, self._was_right = DOUBTS, False
        """How often a refusal is not believed yet, and whether one had to be."""
        self._held_back: set[str] = set()
        """Keys of the summary without which W&B took what it had refused; nobody knows which of them it was."""
        self._refused_files: dict[str, str] = {}
        """Name of a file or artifact that W&B did not take -> why."""
        self._max_summary_bytes = limits.max_row_bytes
        self._summary_bytes = 0
        """Of the summary that was sent last."""
        self._end_proof: Proof | None = None
        """Of an end that W&B was told in an earlier life, of which nobody knows whether it was shown."""

    def go_on_ended(self, state: str, entity: str, memo: Memo) -> None:
        """The run has ended at W&B as `state`: nothing is said of it before there is something new."""
        self._place = replace(self._place, entity=self._place.entity or entity)
        self._check = memo.get("check")
        if self._check is None and state != "crashed" and self._limits.read_back:
            self._end_proof = Proof(state=state, num_lines=self._progress.lines)

    def know(self, held: Held) -> None:
        """Take over what W&B holds of the run."""
        self._taken.update(map(spool_key, held.values()))

    def describe(
        self,
        run: RunView,
        must_be_new: bool = False,
        tags: list[str] | None = None,
        renamed: list[str] | None = None,
    ) -> None:
        """Say what the run is, unless W&B knows it in these words. Raises Retryable and Parked."""
        remote, commit = git_of(run)
        labels = labels_of(run)
        variables = {
            "name": self._place.run,
            "project": self._place.project,
            "entity": self._place.entity or None,
            "groupName": labels["group"],
            "displayName": labels["name"],
            "notes": run.notes,
            "jobType": labels["job_type"],
            "tags": [*tags_of(run), *(tags or [])],
            "host": run.host or None,
            "program": program_of(run.system.get("command")),
            "repo": remote,
            "commit": commit,
            "config": config_text(run, self._progress.late == "axis", self._version, renamed or self._progress.renamed),
        }
        said = _digest({**variables, "name": "", "project": "", "entity": ""})
        # Without an answer of this session's, the run is one that has ended, and stays so as long as nothing is said.
        is_over = self._upserted is None and bool(self._place.entity) and self._progress.ended and run.state in ENDS
        if variables == self._upserted or (is_over and said == self._progress.described):
            return
        try:
            answer = self._http.graphql("UpsertBucket", queries.UPSERT, variables).get("upsertBucket")
        except Rejected as error:
            raise Parked(
                f"{error}: something of what the run is (its name, group, tags, notes or config) W&B does not take;"
                f" the newest start decides it, gapless.init(..., id=); or upload it anew with --new-id {run.run_id}=ID"
            ) from None
        project = ((answer or {}).get("bucket") or {}).get("project") or {}
        entity = (project.get("entity") or {}).get("name")
        if not isinstance(answer, dict) or not entity:
            raise Retryable("UpsertBucket: the answer does not say where the run is")
        if must_be_new and not answer.get("inserted"):
            raise Retryable("W&B made no new run: it has one of this id that it did not show yet; asking again", 2.0)
        self._place = RunPlace(entity, project["name"], self._place.run)
        self._upserted = {**variables, "entity": entity, "project": project["name"]}
        self._progress.described = said

    def write(self, batch: Batch) -> Ack:
        """Send a prefix of the batch in one request. Raises Retryable, Rejected, Parked and Resume.

        Rejected is one operation's own fault: W&B was asked whether it takes anything of the run.
        """
        sent = self._sent
        if sent is not None and sent.place == batch.place and sent.ack.done <= len(batch.operations):
            return self._delivered(sent)
        self._sent = None
        if self._ahead is not None and (self._ahead.answer.done() or self._ahead.proof.tries):
            self._settle()  # what was not shown once is waited for
        while True:
            draft = self._draft(batch)
            if not self._may_run_ahead(draft):
                self._settle()
            try:
                return self._send(batch, draft)
            except FileRefused as error:
                if error.name in self._refused_files:
                    raise Rejected(error.reason) from None
                self._refused_files[error.name] = error.reason
            except Rejected as error:
                largest = max(map(len, draft.lines), default=0)
                if draft.done > 1:
                    raise
                if error.too_large and self._summary_bytes >= max(largest, _SMALL_BYTES):
                    self._max_summary_bytes = self._summary_bytes // 2
                elif error.too_large and largest >= _SMALL_BYTES:
                    self._max_row_bytes = largest // 2
                else:
                    return self._send_the_rest(batch, draft, error)

    def heartbeat(self, now: float) -> None:
        """An empty request: the training lives. Raises Retryable and Parked."""
        try:
            self._http.stream(self._path, b"{}")
        except Rejected as error:
            raise Retryable(str(error)) from None

    def flush(self) -> Memo:
        """Every yes was W&B's own, and is in the memo. Raises Retryable while the first is not shown."""
        self._settle()
        if self._end_proof is not None:
            self._look_at_the_end(self._end_proof)
        return self._memo(self._progress)

    def close(self) -> None:
        """Nothing is open between requests, but a question that nobody waits for any more."""
        if self._ahead is not None:
            self._ahead.answer.cancel()

    @property
    def _path(self) -> str:
        parts = (self._place.entity, self._place.project, self._place.run)
        return "/files/" + "/".join(quote(part, safe="") for part in parts) + "/file_stream"

    def _memo(self, progress: Progress) -> Memo:
        memo = {"run": self._place.run, **progress.to_memo()}
        return {**memo, "check": self._check} if self._check is not None and progress.ended else memo

    def _draft(self, batch: Batch, without: Collection[str] = ()) -> Draft:
        progress = self._progress.copy()
        progress.refused += without
        draft = Draft(
            batch.run,
            progress,
            str(self._place),
            self._max_row_bytes,
            progress.lines,
            refused_files=self._refused_files,
        )
        is_first = not self._is_proved and self._ahead is None
        if is_first:
            draft.take(batch.operations, self._limits.first_rows, self._limits.first_bytes)
        else:
            draft.take(batch.operations, len(batch.operations), self._limits.max_post_bytes)
        return draft

    def _send_the_rest(self, batch: Batch, draft: Draft, error: Rejected) -> Ack:
        """One operation that W&B refused: again, then without keys that W&B never took, few before many.

        1. Keys of the summary that are in no row yet: first one or two, which are refused from then on, then all of
           them, which wait until a row holds them.
        2. Keys of the row itself, in the same way; they are refused from then on.

        Raises Retryable at first, then Rejected where it is the row itself, and Parked where W&B takes nothing of the
        run or the operation is no row.
        """
        self._settle()
        if self._doubts:
            self._doubts -= 1
            raise Retryable(f"{error}: asking again before that is believed", DOUBT_S)
        self._doubts, self._was_right = 1, True
        others = sorted(
            batch.run.summary.keys() - self._taken - draft.keys - self._held_back - {*self._progress.refused}
        )
        for keys in _subsets(others):
            if ack := self._sent_without(batch, [], keys if len(keys) <= _FEW else [], keys):
                return ack
        own = sorted(draft.keys - self._taken - {*self._progress.refused})
        for keys in _subsets(own):
            # Without any key a row says only that it was there: where W&B took rows before, its keys are the reason.
            is_worth_it = len(keys) < len(draft.keys) or self._progress.lines
            if is_worth_it and (ack := self._sent_without(batch, keys, [], others)):
                return ack
        if draft.lines and self._is_let_in(batch.run):
            raise error
        raise Parked(
            f"{error}, and not only of this; see at W&B what the run may not do any more, or upload it anew with"
            f" --new-id {batch.run.run_id}=ID"
        )

    def _sent_without(
        self, batch: Batch, keys: Sequence[str], summary_keys: Sequence[str], held_back: Sequence[str]
    ) -> Ack | None:
        """The ack of the operation as it is, or without `keys` and, of the summary, `summary_keys`, both refused from
        then on, and `held_back`; None where W&B takes neither."""
        before = self._held_back
        for is_whole in (True, False):
            again = self._draft(batch, [] if is_whole else [*keys, *summary_keys])
            self._held_back = before if is_whole else before.union(held_back)
            if not is_whole:
                again.refused += [Refusal(None, key, REFUSED_IN_SUMMARY) for key in summary_keys]
            try:
                return self._send(batch, again)
            except FileRefused as error:
                self._refused_files[error.name] = error.reason
            except Rejected:
                pass
        self._held_back = before
        return None

    def _is_let_in(self, run: RunView) -> bool:
        """Whether W&B takes anything of the run: what it was told already, without a line."""
        ended = self._progress.ended and run.state != "crashed"
        body = b'{"complete":true,"exitcode":%d}' % exit_code_of(run.state, run.exit_code) if ended else b"{}"
        try:
            self._http.stream(self._path, body)
        except Rejected:
            return False
        return True

    def _send(self, batch: Batch, draft: Draft) -> Ack:
        run, progress = batch.run, draft.progress
        if draft.superseded is not None:
            self._supersede(run, "")
            return Ack(draft.done, self._memo(progress), draft.refused)
        names = upload(self._http, self._place, draft.media.uploads) if draft.media.uploads else []
        for artifact in draft.media.artifacts:
            send_artifact(self._http, self._place, artifact)
        if draft.described or (self._upserted is None and run.state not in ENDS):
            self.describe(run, renamed=progress.renamed)
        progress.described = self._progress.described
        end = _end_of(draft, run, self._progress.ended)
        if draft.state is not None or end is not None:
            progress.ended = end is not None
        place = replace(batch.place, done=batch.place.done + draft.done)
        self._held_back = self._held_back - draft.keys
        if end is not None:  # nothing comes that could still tell which of them it was
            unknown = sorted(self._held_back.difference(progress.refused))
            draft.refused += [Refusal(None, key, REFUSED_IN_SUMMARY) for key in unknown]
            progress.refused += unknown
        left_out = self._held_back.union(progress.refused)
        held = in_summary(progress, run.generation, place)
        summary, lost = summary_text(run, progress, held, self._max_summary_bytes, left_out)
        self._summary_bytes = len(summary)
        if end is not None:
            draft.refused += [Refusal(None, key, SUMMARY_FULL) for key in lost]
            try:
                names += upload(self._http, self._place, end_files(run, progress, summary, self._version))
            except Rejected as error:  # the run ends without them
                draft.refused.append(Refusal(None, "files of the run's end", str(error)))
        self._http.stream(self._path, request_body(draft, self._progress, summary, names, end), batch.meanwhile)
        self._taken.update(draft.keys, run.summary.keys() - left_out)
        self._doubts = 1 if self._was_right else DOUBTS
        if end == "crashed":
            with suppress(Rejected):  # W&B sees by itself, 5 minutes later, that nobody writes any more
                self._mark_crashed()
        ack = Ack(draft.done, self._memo(progress), [*self._refused_ahead, *draft.refused])
        self._refused_ahead = []
        if self._ahead is not None:
            self._ahead.summary, ack.is_proved = summary, False
        elif draft.lines and not self._is_proved and self._may_run_ahead(draft):
            self._run_ahead(draft, summary)
            ack.is_proved = False
        else:
            return self._read_back(batch, draft, ack, end)
        self._progress = progress
        return ack

    def _may_run_ahead(self, draft: Draft) -> bool:
        """Whether the draft only adds to the history, so that nothing rests on what W&B shows of earlier rows."""
        return not (draft.late_steps or draft.state or draft.superseded or self._progress.ended)

    def _run_ahead(self, draft: Draft, summary: str) -> None:
        """Ask for the first request's rows, and wait for them when it matters."""
        proof = Proof()
        proof.expect(draft.lines)
        self._ahead = Ahead(proof, draft.lines, draft.first_line, summary, self._ask(proof))

    def _ask(self, proof: Proof) -> Future[dict[str, Any]]:
        return ASKER.ask(partial(self._reads.look, self._place, proof.windows()))

    def _settle(self) -> None:
        """Wait until `wandb.Api` shows the first request, if it was sent. Raises Retryable while it does not."""
        ahead = self._ahead
        if ahead is None:
            return
        try:
            missing = ahead.proof.missing(ahead.answer.result())
        except Exception:
            ahead.answer = self._ask(ahead.proof)
            raise
        if missing is not None:
            ahead.proof.tries += 1
            if not missing.shows_other or ahead.proof.tries < PATIENCE:
                if ahead.proof.tries % 5 == 0:
                    # Again, for a request that a late effect of an older one undid: it writes what it wrote.
                    files = (
                        *stream_file("wandb-history.jsonl", ahead.offset, ahead.lines),
                        summary_file(ahead.summary),
                    )
                    with suppress(Rejected):  # it took the same before
                        self._http.stream(self._path, b'{"files":{%b%b%b,%b}}' % files)
                ahead.answer = self._ask(ahead.proof)
                raise _not_shown(missing)
            self._refused_ahead.append(_shows_other(missing))
        self._ahead, self._is_proved = None, True

    def _read_back(self, batch: Batch, draft: Draft, ack: Ack, end: str | None) -> Ack:
        """The ack at once, or once `wandb.Api` shows what has to be shown."""
        proof = Proof()
        if not self._is_proved and draft.lines:
            proof.expect(draft.lines)
        late = bool(draft.late_steps) and not self._late_is_proved
        if late:
            proof.expect(draft.lines, set(draft.late_steps))
        if end in ("finished", "failed") and self._limits.read_back:
            proof.expect(draft.lines[-200:])
            proof.state, proof.num_lines = end, draft.progress.lines
        if not proof:
            self._progress = draft.progress
            return ack
        proof.tries, self._tries = self._tries, 0
        self._sent = _Sent(batch.place, ack, proof, draft.progress, late, batch.run)
        return self._delivered(self._sent)

    def _delivered(self, sent: _Sent) -> Ack:
        found = self._found(sent.proof)
        if sent.late and sent.proof.shows_both(found["rows"]):
            self._go_by_axis(sent.run)
        missing = sent.proof.missing(found)
        if missing is not None:
            self._wait_for(sent, missing)
        self._note_check(sent.proof, missing)
        self._sent = None
        self._is_proved, self._late_is_proved = True, self._late_is_proved or sent.late
        self._progress = sent.progress
        return sent.ack

    def _look_at_the_end(self, proof: Proof) -> None:
        """Take for the run's check what W&B shows of it now. Raises Retryable while that may still change."""
        missing = proof.missing(self._found(proof))
        proof.tries += 1
        if missing is not None and proof.tries < PATIENCE:
            raise _not_shown(missing)
        self._note_check(proof, missing)
        self._end_proof = None

    def _found(self, proof: Proof) -> dict[str, Any]:
        """What W&B shows of what is to be proved. Raises Retryable."""
        found = self._reads.look(self._place, proof.windows())
        return {**found, "lines": self._reads.count_lines(self._place)} if proof.state is not None else found

    def _note_check(self, proof: Proof, missing: Unproved | None) -> None:
        if proof.state is None:
            return
        said = f"W&B counts {proof.num_lines} lines and wandb.Api shows the state {proof.state}"
        if missing is not None:
            said = f"W&B was sent {proof.num_lines} lines and the state {proof.state}, and does not show {missing.what}"
        self._check = {"ok": missing is None, "text": said}

    def _wait_for(self, sent: _Sent, missing: Unproved) -> None:
        """Raise Retryable while the server may still come to show it; after that say what it shows instead."""
        proof = sent.proof
        proof.tries += 1
        if missing.shows_other and proof.tries >= PATIENCE:
            if sent.late:
                self._go_by_axis(sent.run)
            if missing.step is not None:
                sent.ack.refused.append(_shows_other(missing))
            return
        if proof.tries % 5 == 0:
            # The same request again, for one that a late effect of an older one undid: it writes what it wrote.
            self._sent, self._tries = None, proof.tries
        raise _not_shown(missing)

    def _go_by_axis(self, run: RunView) -> None:
        """This server does not replace a step's row by the one sent later: the history goes to a run without that."""
        self._sent = None
        self._supersede(run, "axis")
        following = run.generation + 1
        raise Resume("this server does not replace the rows of a step", following, Place(), {"late": "axis"})

    def _supersede(self, run: RunView, next_late: str) -> None:
        """Leave the run as it is, ended, with the mark of the one that follows it."""
        following = run.generation + 1
        self.describe(run, tags=[superseded_tag(successor(self._place.run, run.generation))])
        held = in_summary(self._progress, run.generation, Place(), following, next_late)
        summary, _ = summary_text(run, self._progress, held, self._max_summary_bytes, run.summary.keys() - self._taken)
        for text in (summary, careful_body({"_gapless": held})):
            try:
                self._http.stream(self._path, b'{"files":{%b},"complete":true,"exitcode":0}' % summary_file(text))
            except Rejected as error:
                refused = error
            else:
                return
        raise Parked(f"{refused}, and a corrected run is to follow it; upload it anew with --new-id {run.run_id}=ID")

    def _mark_crashed(self) -> None:
        variables = {"name": self._place.run, "project": self._place.project, "entity": self._place.entity}
        self._http.graphql("UpsertBucket", queries.UPSERT, {**variables, "state": "crashed"})


def _subsets(keys: list[str]) -> Iterator[Sequence[str]]:
    """Each by itself, or where they are many a few neighbours at once; each pair, where they are not many; then all."""
    size = -(-len(keys) // _MAX_PARTS)
    if len(keys) > size:
        yield from (keys[at : at + size] for at in range(0, len(keys), size))
    if _FEW < len(keys) <= _MAX_PAIRS:
        yield from combinations(keys, 2)
    yield keys


def _digest(said: dict[str, Any]) -> str:
    return f"{crc32(json.dumps(said).encode()):08x}"


def _not_shown(missing: Unproved) -> Retryable:
    return Retryable(f"W&B took the request, and wandb.Api does not show it yet: {missing.what}", 1.0)


def _shows_other(missing: Unproved) -> Refusal:
    return Refusal(missing.step, missing.key, "W&B shows another value than it was sent")


def _end_of(draft: Draft, run: RunView, was_ended: bool) -> str | None:
    """How the run ends with this request; None while it goes on."""
    state: State | None = draft.state
    if state is not None:
        return state.state if state.state in ENDS else None
    return run.state if was_ended and run.state in ENDS else None
