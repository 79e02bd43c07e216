"""A run as the training sees it: `init` opens one, `Run` takes what is logged.

No call here raises for a reason outside the caller's own code. In a forked child, on another rank and with
`GAPLESS_MODE=disabled` the same calls do nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from os import getpid
from pathlib import Path
from time import monotonic, sleep, time
from types import TracebackType
from typing import Any, Final, Literal, Self

import orjson

from gapless import exits
from gapless.encode import Part, encode_config, encode_metrics, encode_plain
from gapless.numeric import Refused, as_number
from gapless.place import Place
from gapless.redact import scrub_text
from gapless.ring import AUTO, Ring
from gapless.settings import Config, Summary
from gapless.tally import Stats, Tally
from gapless.values import as_mapping, carefully, encodable, told
from gapless.warn import Warner
from gapless.writer import Writer
from gapless_schemas import MAX_STEP, MAX_TIME

FINISH_TIMEOUT_S: Final = 10.0
LONGEST_WAIT_S: Final = 1e6
"""Locks take no longer limit."""
OPEN_TIMEOUT_S: Final = 2.0
"""`init` waits this long for a disk at most, and goes on without it."""
FOR_ALL: Final[tuple[str, ...]] = ()
"""Known by identity: `log` asks nothing of an object that it does not know."""
DESCRIBE_TIMEOUT_S: Final = 1.5
"""`finish` waits this long at most for the `system` record of a run that has just begun."""


class Run:
    """A run that is being written. Thread safe. `init` makes one."""

    def __init__(
        self, ring: Ring, writer: Writer, place: Place, tally: Tally, warner: Warner, finish_timeout: float
    ) -> None:
        self.config = Config(self._put_config)
        self.summary = Summary(self._put_summary)
        self._ring = ring
        self._writer = writer
        self._place = place
        self._warner = warner
        self._finish_timeout = finish_timeout
        self._pid = getpid()
        self._finished = False
        """Nothing more is taken."""
        self._end_said = False
        self._ended = False
        self._tally = tally
        self._report = tally.report

    @property
    def id(self) -> str:
        """The run id."""
        return self._place.settle_id()

    @property
    def path(self) -> Path:
        """The run's folder in the spool."""
        self._place.settle_id()
        return self._place.folder

    @property
    def is_writer(self) -> bool:
        """Whether this run writes; false for the one that does nothing."""
        return True

    def log(
        self,
        data: Mapping[Any, Any],
        step: int | None = None,
        *,
        t: float | datetime | None = None,
        skip_sinks: Iterable[str] = FOR_ALL,
    ) -> None:
        """Record one row of values: numbers, texts, nested dicts, `Table` and the other payloads.

        Without a step the row gets the one after the largest so far. `t` is the row's time in unix seconds, now
        unless given. Trackers of the kinds in `skip_sinks` do not get the row. What cannot be kept is counted and
        warned about; nothing is raised.
        """
        if (self._finished or self._pid != getpid()) and not self._open():
            return
        at = None if t is None else self._time(t)
        number = AUTO if step is None else step
        plain = type(data) is dict and data and type(number) is int and (0 <= number <= MAX_STEP or step is None)
        if plain and skip_sinks is FOR_ALL and self._ring.append_plain(number, data, at):  # type: ignore[arg-type]
            writer = self._writer
            if writer.inline or writer.parked:
                writer.nudge()
        else:
            self._log_any(data, step, at, skip_sinks)

    def define_axis(
        self, key: str, axis: str | None = None, *, summary: Literal["last", "min", "max", "mean", "none"] | None = None
    ) -> None:
        """Say that `axis` is the x-axis of `key` (a name or a glob), and which value stands for it in the summary."""
        if not self._open():
            return
        if summary not in (None, "last", "min", "max", "mean", "none"):
            self._report("refused", "axis", f"summary rule {summary!r} is none of last, min, max, mean, none")
            summary = None
        data = {
            "key": encodable(str(key)),
            "axis": None if axis is None else encodable(str(axis)),
            "summary": summary,
        }
        self._put("axis", encode_plain(data, self._report))

    def console(self, lines: Iterable[str], stream: str = "stdout") -> None:
        """Record lines of console output, or one text of them; what looks like a credential is taken out."""
        if not self._open():
            return
        try:
            given = lines.splitlines() if isinstance(lines, str) else [str(line) for line in lines]
        except Exception:  # noqa: BLE001  # lines are anybody's objects
            self._report("refused", "console", f"console({told(lines)}) has no lines: not kept")
            return
        batch: list[str] = []
        size = 0
        for line in [*given, None]:
            if line is not None:
                batch.append(encodable(scrub_text(line.rstrip("\n"))))
                size += 6 * len(batch[-1])
            if batch and (line is None or size > 400_000):
                self._put("log", encode_plain({"stream": str(stream), "lines": batch}, self._report))
                batch, size = [], 0

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was logged so far is on the disk, `timeout` seconds at most (10); whether it is."""
        if self._pid != getpid():
            return False
        upto = self._ring.last.number
        deadline = monotonic() + self._seconds(timeout)
        while self._writer.journal.synced < upto or (
            self._ring.last.gap is not None and not self._writer.done.is_set()
        ):
            if monotonic() >= deadline:
                return False
            if self._writer.threaded:
                self._writer.sync()
            else:
                self._writer.turn_inline()
            sleep(0.001)
        return True

    def finish(self, exit_code: int | None = 0, *, timeout: float | None = None) -> None:
        """End the attempt: `finished`, or `failed` where `exit_code` is neither 0 nor None.

        Waits for the disk `timeout` seconds at most (`init`'s `finish_timeout`) and says what it could not write by
        then. A second call does nothing, unless the first was interrupted: then it goes on with it.
        """
        if self._ended or self._pid != getpid():
            return
        self._finished = True
        code = None if exit_code is None else int(exit_code)
        state = "failed" if code else "finished"
        deadline = monotonic() + self._seconds(timeout)
        self._writer.close()
        if self._writer.threaded:
            self._writer.described.wait(min(DESCRIBE_TIMEOUT_S, max(0.0, deadline - monotonic())))
        if not self._end_said:
            self._ring.append("finish", None, orjson.dumps({"state": state, "exit_code": code}), always=True)
            self._end_said = True
        self._writer.end()
        if self._writer.threaded:
            self._writer.done.wait(max(0.0, deadline - monotonic()))
        else:
            while not self._writer.turn_inline() and monotonic() < deadline:
                sleep(0.01)
        self._ended = True
        if self._writer.done.is_set():
            exits.forget(self)
        else:
            left = self._ring.last.number - self._writer.journal.written
            unsynced = self._writer.journal.written - self._writer.journal.synced
            self._warner.say(
                f"run {self.id} ended with {left} records not written and {unsynced} not synced to {self._place.folder}"
            )

    def stats(self) -> Stats:
        """What was written, waits, and was lost so far."""
        counts, journal = self._tally, self._writer.journal
        last = self._ring.last
        return Stats(
            written=journal.written,
            synced=journal.synced,
            queued=last.number - journal.written,
            dropped=self._ring.dropped + journal.lost,
            refused=counts.refused,
            clashes=counts.clashes,
            bad_steps=counts.bad_steps,
            late=counts.late,
            forked=counts.forked,
            failing=journal.failing,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        code: int | None = 0
        if isinstance(error, SystemExit):
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        elif error is not None:
            code = 1
        self.finish(code)

    def end_at_exit(self) -> None:
        """What `exits` calls when the process ends without `finish`."""
        failed = not hasattr(sys, "ps1") and getattr(sys, "last_value", None) is not None
        self.finish(1 if failed else None)
        self._warner.quiet = True

    def _begin(self, identity: dict[str, Any], config: Any) -> None:
        given: Mapping[Any, Any] | None = {}
        if config is not None:
            try:
                given = carefully(lambda: as_mapping(config), config)
                if given is None:
                    raise Refused(f"a mapping or an object with fields is one, {type(config).__name__} is not")
            except Refused as why:
                self._report("refused", "config", f"the config was not kept: {why}")
        given = given or {}
        self.config.take(given)
        parts = encode_config(given, self._report)
        scrubbed = {name: _scrubbed(value) for name, value in identity.items()}
        self._ring.append("run", None, *_run_data(scrubbed, parts[0] if parts else Part(b"{}", None)), always=True)
        for part in parts[1:]:
            self._ring.append("config", None, part.data, part.marks)
        exits.remember(self)
        self._writer.start()
        if not self._writer.opened.wait(OPEN_TIMEOUT_S):
            self._warner.warn(
                "open", f"{self._place.folder} did not answer for {OPEN_TIMEOUT_S:.0f} s; training goes on without it"
            )
        self._place.settle_id()

    def _open(self) -> bool:
        if self._pid != getpid():
            self._tally.forked += 1
            self._warner.warn_once(
                "fork",
                f"a child process logs to run {self.id}, which its parent writes: nothing is kept; "
                "open a run of its own with another writer= to log from it",
            )
            return False
        if self._finished:
            self._tally.late += 1
            self._warner.warn("late", f"run {self.id} has finished: this is not kept")
            return False
        return True

    def _log_any(self, data: object, step: Any, at: float | None, skip_sinks: Iterable[str]) -> None:
        try:
            fields = carefully(lambda: as_mapping(data), data)
            if fields is None:
                raise Refused(f"log() takes a dict, not {type(data).__name__}")
            parts, media = encode_metrics(fields, self._report)
        except Refused as why:
            self._report("refused", "data", f"a row was not kept: {why}")
            return
        if parts == [Part(b"{}", None)]:
            parts = []
        if not parts and not media:
            return
        actual = self._step(self._ring.last.next_step if step is None else step)
        if step is None and actual is not None:
            actual = AUTO
        at = time() if at is None else at
        skip = self._kinds(skip_sinks)
        for part in parts:
            actual = self._ring.append("metrics", actual, part.data, part.marks, t=at, skip_sinks=skip)
        for one in media:
            actual = self._ring.append(
                one.kind, actual, one.data, one.marks, t=at, payload=one.payload, skip_sinks=skip
            )
        self._writer.nudge()

    def _step(self, step: Any) -> int | None:
        number: Any = step
        if type(number) is not int and not isinstance(number, bool):
            with suppress(Exception):  # a step is anybody's object
                number = as_number(step)
            if type(number) is float and number.is_integer():
                number = int(number)
        if type(number) is int and 0 <= number <= MAX_STEP:
            return number
        self._report(
            "bad_steps", "step", f"step {told(step)} is no integer from 0 to 2**53 - 1: the row is kept without a step"
        )
        return None

    def _time(self, t: float | datetime) -> float | None:
        number = None
        with suppress(Exception):  # a time is anybody's object
            number = t.timestamp() if isinstance(t, datetime) else as_number(t)
        if number is not None and not isinstance(number, bool) and 0 <= number < MAX_TIME:
            return float(number)
        self._report("refused", "time", f"t={told(t)} is no time in unix seconds: the row gets the present one")
        return None

    def _kinds(self, skip_sinks: Iterable[str]) -> bytes | None:
        """The kinds of tracker that a row is not for, as JSON; None for none."""
        try:
            given = [skip_sinks] if isinstance(skip_sinks, str) else list(skip_sinks)
            kinds = [encodable(str(kind)) for kind in given]
        except Exception:  # noqa: BLE001  # kinds are anybody's object
            self._report("refused", "skip_sinks", f"skip_sinks={told(skip_sinks)} names no kinds: the row is for all")
            return None
        return orjson.dumps(kinds) if kinds else None

    def _seconds(self, timeout: object) -> float:
        """A caller's time limit; what is none is `init`'s."""
        number = None
        with suppress(Exception):  # a limit is anybody's object
            number = as_number(timeout)
        if number is None or isinstance(number, bool) or number != number:
            return self._finish_timeout
        return float(min(max(number, 0.0), LONGEST_WAIT_S))

    def _put(self, kind: str, parts: list[Part]) -> None:
        for part in parts:
            self._ring.append(kind, None, part.data, part.marks)
        self._writer.nudge()

    def _put_config(self, part: Any) -> None:
        if self._open():
            self._put_careful("config", part)

    def _put_summary(self, part: Any) -> None:
        if self._open():
            self._put_careful("summary", part)

    def _put_careful(self, kind: str, part: Any) -> None:
        try:
            fields = carefully(lambda: as_mapping(part), part)
            if fields is None:
                raise Refused(f"{type(part).__name__} is no mapping")
            self._put(kind, encode_config(fields, self._report))
        except Refused as why:
            self._report("refused", kind, f"a part of the {kind} was not kept: {why}")


def _scrubbed(value: Any) -> Any:
    if isinstance(value, str):
        return encodable(scrub_text(value))
    return [encodable(scrub_text(item)) for item in value] if isinstance(value, list) else value


def _run_data(identity: dict[str, Any], config: Part) -> tuple[bytes, bytes | None]:
    marks = None
    if config.marks is not None:
        marks = orjson.dumps([[["config", *path], kind] for path, kind in orjson.loads(config.marks)])
    return b'%b,"config":%b}' % (orjson.dumps(identity)[:-1], config.data), marks
