"""What the server knows of a run: its fields, its lines by offset, its files, and what a lagging reader sees.

Lines are kept as the text that came and are parsed when somebody looks. Nothing here locks; the server does.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

HISTORY, EVENTS, SUMMARY, OUTPUT = (
    "wandb-history.jsonl",
    "wandb-events.jsonl",
    "wandb-summary.json",
    "output.log",
)
CRASHED_AFTER_S = 300.0
"""A running run without a heartbeat for so long reads as crashed."""
FIELDS = (
    "displayName",
    "description",
    "notes",
    "commit",
    "host",
    "jobProgram",
    "jobRepo",
    "jobType",
    "sweep",
    "tags",
    "debug",
)
"""The fields of `upsertBucket` that are kept as they come; null leaves what is there."""


@dataclass
class Staleness:
    """How old an answer is: the state `seconds` ago, and before the last `requests` requests that changed the run."""

    seconds: float = 0.0
    requests: int = 0


@dataclass
class Lag:
    """The lag of a server's answers, for each thing that it counts."""

    counts: Staleness = field(default_factory=Staleness)
    """`historyLineCount`, `eventsLineCount`, `logLineCount`."""
    tails: Staleness = field(default_factory=Staleness)
    """`historyTail`, `eventsTail`."""
    summaries: Staleness = field(default_factory=Staleness)
    """`summaryMetrics`."""
    history: Staleness = field(default_factory=Staleness)
    """`lastHistoryStep`, `scan_history`, sampled history: lines are indexed late."""


@dataclass(frozen=True)
class Snapshot:
    """What a reader saw after one request; texts are shared with the run, not copied."""

    time: float
    num_lines: tuple[int, int, int]
    tails: tuple[str | None, str | None]
    summary: str


class Run:
    """One run. `lines`, `rows`, `config`, `summary`, `files`, `artifacts` and `requests` are for tests to read."""

    def __init__(self, entity: str, project: str, run_id: str, now: float, serial: int) -> None:
        self.entity, self.project, self.id, self.serial = entity, project, run_id, serial
        self.fields: dict[str, Any] = dict.fromkeys(FIELDS)
        self.group: str | None = None
        self.config_text = "{}"
        self.summary_text = "{}"
        self.streams: dict[str, list[str | None]] = {HISTORY: [], EVENTS: [], OUTPUT: []}
        self.files: dict[str, bytes] = {}
        self.uploaded: list[str] = []
        """Names that the client declared uploaded in its stream, in order."""
        self.artifacts: list[dict[str, Any]] = []
        self.requests: list[Any] = []
        self.request_counts: Counter[str] = Counter()
        """Requests by endpoint, those that a fault hit included."""
        self.base_state = "running"
        self.exit_code: int | None = None
        self.complete = False
        self.created_at = self.heartbeat_at = now
        self.deleted = False
        self.num_upserts = 0
        self.rewound: list[str] = []
        """Lines that a rewind took away, oldest first."""
        self.rewrites = 0
        """Lines that came again with the content they had."""
        self.conflicts: list[tuple[int, str, str]] = []
        """History lines that were overwritten with other content: (line, before, after)."""
        self.replaces_equal_steps = True
        self._snapshots: deque[Snapshot] = deque(maxlen=4096)
        self._index = StepIndex()
        self.snapshot(now)

    @property
    def lines(self) -> list[str | None]:
        """The raw history lines by offset; None is a hole that no request filled."""
        return self.streams[HISTORY]

    @property
    def events(self) -> list[str | None]:
        return self.streams[EVENTS]

    @property
    def output(self) -> list[str | None]:
        return self.streams[OUTPUT]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows as a query shows them: by step, of equal steps the one of the later line."""
        return [json.loads(text) for _, _, text in self.indexed()]

    @property
    def config(self) -> dict[str, Any]:
        """The config as `{key: value}`, without the client's own `_wandb`."""
        wrapped = json.loads(self.config_text)
        return {key: entry["value"] for key, entry in wrapped.items() if key != "_wandb"}

    @property
    def wandb_config(self) -> dict[str, Any]:
        """The client's own block of the config."""
        value: dict[str, Any] = json.loads(self.config_text).get("_wandb", {}).get("value", {})
        return value

    @property
    def summary(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.summary_text)
        return value

    @property
    def holes(self) -> list[int]:
        """Offsets below the line count that no request filled."""
        return [i for i, line in enumerate(self.lines) if line is None]

    def state(self, now: float) -> str:
        """`running`, `crashed`, `finished`, `failed`, or what a client set by hand."""
        if self.base_state == "running" and now - self.heartbeat_at > CRASHED_AFTER_S:
            return "crashed"
        return self.base_state

    def upsert(self, fields: dict[str, Any], now: float, *, revives: bool) -> None:
        """Apply one `upsertBucket`; a field that is null or absent stays as it was."""
        self.num_upserts += 1
        for name in FIELDS:
            if fields.get(name) is not None:
                self.fields[name] = fields[name]
        if fields.get("groupName") is not None:
            self.group = fields["groupName"]
        if fields.get("config") is not None:
            self.config_text = fields["config"]
        if fields.get("summaryMetrics") is not None:
            self.summary_text = fields["summaryMetrics"]
        if fields.get("state") is not None:
            self.base_state = fields["state"]
        elif revives:
            self._alive()
        if revives:
            self.heartbeat_at = now
        self.snapshot(now)

    def stream(self, post: dict[str, Any], now: float, keep: int | None = None) -> None:
        """Apply one file_stream post; with `keep` only its first `keep` history lines are stored."""
        for name, chunk in (post.get("files") or {}).items():
            content, offset = chunk["content"], chunk["offset"]
            if keep is not None:
                if name == HISTORY:
                    self._put(HISTORY, offset, content[:keep])
            elif name == SUMMARY:
                self.summary_text = content[-1]
            else:
                self._put(name, offset, content)
        self.heartbeat_at = now
        if keep is None:
            self.uploaded.extend(post.get("uploaded") or [])
            self._alive()
            if post.get("complete"):
                self.complete = True
                self.exit_code = post.get("exitcode", 0)
                self.base_state = "finished" if self.exit_code == 0 else "failed"
            elif post.get("preempting"):
                self.base_state = "preempting"
        self.snapshot(now)

    def rewind(self, metric: str, value: float, now: float) -> None:
        """Take away the lines whose `metric` is above `value`; what is left keeps its order."""
        kept: list[str | None] = []
        for line in self.lines:
            if line is not None and json.loads(line).get(metric, 0) > value:
                self.rewound.append(line)
            else:
                kept.append(line)
        self.streams[HISTORY] = kept
        self._index = StepIndex()
        self._alive()
        self.snapshot(now)

    def indexed(self, num_lines: int | None = None) -> list[tuple[float, int, str]]:
        """(step, line, text) in step order over the first `num_lines` lines; a line without `_step` has its own."""
        count = len(self.lines) if num_lines is None else min(num_lines, len(self.lines))
        if count < self._index.num_lines:
            index = StepIndex()  # a lagging reader, rare enough to count from the start
            return index.upto(self.lines, count, replace=self.replaces_equal_steps)
        return self._index.upto(self.lines, count, replace=self.replaces_equal_steps)

    def seen(self, staleness: Staleness, now: float) -> Snapshot:
        """What a reader with that staleness is shown."""
        last = len(self._snapshots) - 1 - staleness.requests
        for i in range(max(last, 0), 0, -1):
            if self._snapshots[i].time <= now - staleness.seconds:
                return self._snapshots[i]
        return self._snapshots[0] if staleness.seconds or staleness.requests else self._snapshots[-1]

    def snapshot(self, now: float) -> None:
        """Remember what a reader sees from now on."""
        counts = (len(self.lines), len(self.events), len(self.output))
        tails = (self.lines[-1] if self.lines else None, self.events[-1] if self.events else None)
        self._snapshots.append(Snapshot(now, counts, tails, self.summary_text))

    def _alive(self) -> None:
        self.base_state, self.complete, self.exit_code = "running", False, None

    def _put(self, name: str, offset: int, content: list[str]) -> None:
        stream = self.streams.setdefault(name, [])
        overlap = min(len(stream) - offset, len(content))
        if overlap > 0:
            if name == HISTORY:
                for i in range(overlap):
                    before = stream[offset + i]
                    if before == content[i]:
                        self.rewrites += 1
                    else:
                        self._index = StepIndex()
                        if before is not None:
                            self.conflicts.append((offset + i, before, content[i]))
        elif overlap < 0 and offset > len(stream):
            stream.extend([None] * (offset - len(stream)))
        stream[offset : offset + len(content)] = content


class StepIndex:
    """The lines of a run in step order, made longer as lines are added. A changed line needs a new index."""

    def __init__(self) -> None:
        self.num_lines = 0
        self._entries: dict[int, tuple[float, int, str]] = {}
        self._sorted: list[tuple[float, int, str]] | None = None

    def upto(self, lines: list[str | None], count: int, *, replace: bool) -> list[tuple[float, int, str]]:
        """(step, line, text) of the first `count` lines; with `replace` the last line of each step."""
        for i in range(self.num_lines, count):
            text = lines[i]
            if text is not None:
                step = _step(text, i)
                self._entries[step if replace else i] = (step, i, text)
                self._sorted = None
        self.num_lines = count
        if self._sorted is None:
            self._sorted = sorted(self._entries.values())  # no two entries are of one line
        return self._sorted


_STEP = '"_step":'
_NUMBER = re.compile(r" ?(-?\d+)[,}]")


def _step(text: str, default: int) -> Any:
    """The row's `_step`. A flat row is not parsed for it: a hundred thousand rows are asked for often."""
    if text.find("{", 1) < 0 and text.count(_STEP) == 1:
        found = _NUMBER.match(text, text.find(_STEP) + len(_STEP))
        if found:
            return int(found[1])
    return json.loads(text).get("_step", default)


def sampled(rows: list[Any], samples: int) -> list[Any]:
    """At most `samples` of the rows, evenly spread, the first and the last among them."""
    if samples <= 0 or len(rows) <= samples:
        return rows
    if samples == 1:
        return rows[-1:]
    last = len(rows) - 1
    return [rows[round(i * last / (samples - 1))] for i in range(samples)]
