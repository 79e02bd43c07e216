"""`--to spool-config`: each run goes to the sinks whose kind it asked for itself.

The spool chooses by kind and by nothing else. A wish that names a target, a host or a path is the name of no kind and
stays unmet; where a kind's data goes is the uploader's own configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless_schemas import Header
from gapless_uploader.attempt import AttemptReader
from gapless_uploader.merge import attempt_order
from gapless_uploader.sink import Misconfigured, Sink
from gapless_uploader.sinks import known_sinks, make_sink
from gapless_uploader.spool import RunKey, SpoolRun

_NOT_OFFERED = frozenset({"memory"})
"""Kinds that keep nothing."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of a run's wishes are met here."""

    kinds: tuple[str, ...]
    """Kinds to upload to, in the run's order."""
    unmet: tuple[str, ...]
    """Wishes for which there is no sink here."""


def wanted_sinks(run_sinks: Sequence[str] | None, kinds_available: Collection[str]) -> Wanted:
    """What becomes of a run's `sinks`: each name once, met where it is exactly a kind available here."""
    wishes = dict.fromkeys(run_sinks or ())
    return Wanted(
        tuple(name for name in wishes if name in kinds_available),
        tuple(name for name in wishes if name not in kinds_available),
    )


def asked_for(run: SpoolRun, now: float) -> list[str] | None:
    """The kinds that the run asks for: those of `main`'s newest attempt, else of the newest of any writer.

    None while no attempt's `run` record can be read; an empty list where the run asks for nothing.
    """
    paths = run.paths()
    for header in _newest_first(run):
        kinds = _kinds_of(header, paths.get(header.attempt_id, {}), now)
        if kinds is not None:
            return kinds
    return None


class Wishes:
    """What the runs ask for; each newest attempt is read until it has said so. Not thread safe."""

    def __init__(self, kinds_available: Collection[str]) -> None:
        self._available = frozenset(kinds_available)
        self._known: dict[RunKey, tuple[str, Wanted]] = {}
        """Run -> the newest attempt when it had said, and what it said."""

    def of(self, run: SpoolRun, now: float) -> Wanted | None:
        """What is wanted for `run`; None while it is not known. A new attempt that is silent changes nothing."""
        newest = next(iter(_newest_first(run)), None)
        known = self._known.get(run.key)
        if newest is None or (known is not None and known[0] == newest.attempt_id):
            return None if known is None else known[1]
        own = _kinds_of(newest, run.paths().get(newest.attempt_id, {}), now)
        if own is not None:
            wanted = wanted_sinks(own, self._available)
            self._known[run.key] = (newest.attempt_id, wanted)
            return wanted
        if known is not None:
            return known[1]
        before = asked_for(run, now)
        return None if before is None else wanted_sinks(before, self._available)


def offered_sinks(options: Mapping[str, Mapping[str, Any]], besides: Collection[str] = ()) -> list[Sink]:
    """A sink of every kind that can be made here, with its own options, but for the kinds in `besides`.

    `target` among a kind's options is what stands behind `kind:` in `--to`. A kind whose options are missing or wrong
    is not offered, unless it has options: then Misconfigured is raised.
    """
    offered = []
    for kind in sorted(known_sinks().keys() - _NOT_OFFERED - set(besides)):
        given = dict(options.get(kind, {}))
        target = given.pop("target", "")
        try:
            offered.append(make_sink(f"{kind}:{target}" if target else kind, given))
        except Misconfigured:
            if options.get(kind):
                raise
    return offered


def _newest_first(run: SpoolRun) -> list[Header]:
    headers = [header for header in run.attempts.values() if header.writer == "main"] or run.attempts.values()
    return sorted(headers, key=attempt_order, reverse=True)


def _kinds_of(header: Header, paths: Mapping[int, Path], now: float) -> list[str] | None:
    """What one attempt asks for; None where its `run` record, its first, cannot be read."""
    try:
        record = AttemptReader(header).head(paths, now)
    except OSError:  # gone or unreadable, which the pipelines say
        return None
    if record is None or record.kind != "run":
        return None
    sinks = record.data.get("sinks")
    return [name for name in sinks if isinstance(name, str)] if isinstance(sinks, list) else []
