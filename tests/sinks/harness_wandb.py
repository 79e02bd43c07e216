"""The W&B sink in the contract suite, against the loopback server, read back with the real `wandb.Api`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapless_uploader.operations import Row, Value
from gapless_uploader.sink import Ack, Batch, Memo, Place, Resume, RunView, Session
from gapless_uploader.sinks._wandb_http import Credentials
from gapless_uploader.sinks._wandb_lines import spool_key
from gapless_uploader.sinks._wandb_reader import READER
from gapless_uploader.sinks.wandb import WandbSink
from tests.servers.wandb_server import DEFAULT_KEY, WandbServer
from tests.sinks.harness import Point, SinkHarness
from tests.sinks.wandb.loopback import LoopbackSink


class CountingSink(LoopbackSink):
    """Stands for the pipeline where W&B knows more than the memo: counts operations instead of seqs, and skips them."""

    def open(self, run: RunView, memo: Memo) -> Session:
        start = memo.pop("_count", 0) if (memo := dict(memo)) else 0
        try:
            return CountingSession(super().open(run, memo), start, start)
        except Resume as found:
            known = sum(last for ((_, last),) in found.place.at.values()) + found.place.done
            return CountingSession(super().open(run, found.memo), start, known)


class CountingSession:
    def __init__(self, session: Session, start: int, known: int) -> None:
        self.session, self.at, self.known = session, start, known
        self.heartbeat, self.close = session.heartbeat, session.close

    def write(self, batch: Batch) -> Ack:
        skipped = min(max(0, self.known - self.at), len(batch.operations))
        if skipped:
            self.at += skipped
            return Ack(skipped, self.flush())
        ack = self.session.write(replace(batch, place=Place({"all": [[1, self.at]]}, {})))
        self.at += ack.done
        return Ack(ack.done, {**ack.memo, "_count": self.at}, ack.refused)

    def flush(self) -> Memo:
        return {**self.session.flush(), "_count": self.at}


class Harness(SinkHarness):
    kind = "wandb"
    vendor = "wandb"
    refusal_is_for_all = True
    way_out = "ask the entity's owner"
    random_histories = 12

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = WandbServer()
        self.server.up()

    def sink(self) -> WandbSink:
        return CountingSink(self.server.url)

    def uploading(self) -> WandbSink:
        return LoopbackSink(self.server.url)

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.server.down()
        yield
        self.server.up()

    @contextmanager
    def refusal(self, run: RunView) -> Iterator[None]:
        self.server.arm("*", "status", status=403, count=None)
        yield
        self.server.faults.disarm()

    def expect(self, rows: Iterable[Row]) -> list[Point]:
        """A row at W&B has one time, its last part's."""
        points = super().expect(rows)
        times = {step: max(p.t or 0.0 for p in points if p.step == step) for step in {p.step for p in points}}
        return sorted((replace(point, t=times[point.step]) for point in points), key=repr)

    def rows(self, run: RunView) -> list[dict[str, Any]]:
        held = self.server.runs["acme", self.sink().place(run).project, self.sink().place(run).run]
        assert held.conflicts == []
        if not held.rows:
            return []
        steps = [row["_step"] for row in held.rows]
        answer = READER.look(
            Credentials(self.server.url, DEFAULT_KEY), f"acme/{held.project}/{held.id}", [(min(steps), max(steps))]
        )
        return answer["rows"]

    def points(self, run: RunView) -> list[Point]:
        return [
            Point(row["_step"], spool_key(key), value, row["_timestamp"])
            for row in self.rows(run)
            for key, value in row.items()
            if key not in ("_step", "_timestamp", "_runtime") and isinstance(value, (bool, int, float))
        ]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        held = self.server.runs["acme", run.project, run.tracker_id]
        found = {}
        for row in self.rows(run):
            for key, value in row.items():
                if isinstance(value, str):
                    found[row["_step"], key] = value
                elif isinstance(value, dict) and value["_type"] in ("table-file", "incremental-table-file"):
                    found[row["_step"], key] = held.files[value["path"]].decode()
        return found

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        held = self.server.runs["acme", run.project, run.tracker_id]
        return {
            (row["_step"], key): held.files[value["path"]]
            for row in self.rows(run)
            for key, value in row.items()
            if isinstance(value, dict) and value["_type"] == "image-file"
        }

    def state(self, run: RunView) -> str | None:
        state = self.server.runs["acme", run.project, run.tracker_id].state(self.server.clock())
        return None if state == "running" else state

    def held(self, value: Value) -> Any:
        """W&B's client shows a whole number as an integer."""
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
            return int(value)
        return value

    def close(self) -> None:
        self.server.close()
