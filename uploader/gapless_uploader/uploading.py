"""What `gapless watch` and `gapless replay` do once their sinks are made: an uploader, what it says, its end.

Each gives the exit status. Raises click's exceptions for what the caller can put right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from gapless_uploader import collector
from gapless_uploader.absent import Absent, find_absent
from gapless_uploader.config import UploaderConfig
from gapless_uploader.events import Event, LineListener, Listener, ServingMetrics, SpoolProblem, printable
from gapless_uploader.lease import Held
from gapless_uploader.replay_progress import ReplayProgress
from gapless_uploader.run_name import is_asked_for
from gapless_uploader.sink import Misconfigured, Sink
from gapless_uploader.spool import SpoolRun
from gapless_uploader.status import read_status
from gapless_uploader.uploader import Uploader
from gapless_uploader.watch import watch
from gapless_uploader.wording import label, size

if TYPE_CHECKING:
    from gapless_uploader.live_table import LiveTable
    from gapless_uploader.metrics_port import Metrics, MetricsServer

# What only one of them needs is imported there: a replay starts sooner without rich and an HTTP server.

REPLAY_GRACE_S = 2.0


def follow(
    root: Path, sinks: Sequence[Sink], config: UploaderConfig, *, exit_when_done: bool, use_events: bool, as_json: bool
) -> int:
    """Upload what comes under `root` until stopped, or until everything is over."""
    table = _live_table() if not as_json and sys.stderr.isatty() else None
    lines: LiveTable | LineListener = table or LineListener(sys.stdout if as_json else sys.stderr, as_json)
    metrics = _metrics() if config.metrics_port is not None else None
    listener = _both(lines, metrics) if metrics else lines
    with ExitStack() as stack:
        if metrics and config.metrics_port is not None:
            stack.callback(_serve(metrics, config.metrics_port, listener).close)
        uploader = _started([root], sinks, config, listener)
        if table is not None:
            table.follow(uploader)
            stack.enter_context(table)
        on_turn = _each_turn(uploader, lines.refresh, metrics)
        _run(uploader, listener, _all_over if exit_when_done else _never, on_turn, use_events)
        absent = _absent(uploader, config).problems(_names(sinks)) if exit_when_done else []
        _tell(absent, listener)
    if isinstance(lines, LineListener):
        lines.flush()
    if not exit_when_done:
        return 1 if uploader.failed else 0
    return 1 if uploader.failed or uploader.spool.problems or uploader.found_damage or absent else 0


def replay(
    paths: Sequence[Path], sinks: Sequence[Sink], config: UploaderConfig, *, patience_s: float, as_json: bool
) -> int:
    """Upload what is there now; what could not be uploaded is listed."""
    lines = LineListener(sys.stdout if as_json else sys.stderr, as_json, quiet=not as_json)
    # What is there now is all there is: blocks that a network disk still owes come soon or not at all.
    config = replace(config, grace_s=min(config.grace_s, REPLAY_GRACE_S))
    uploader = _started(paths, sinks, config, lines)
    with ReplayProgress(uploader, sys.stderr, lines, plain=as_json, patience_s=patience_s) as progress:
        stopped = _run(uploader, lines, progress.is_done, progress.refresh, use_events=False)
    lines.flush()
    if stopped:
        progress.left = uploader.behind()
    left = progress.left
    progress.absent = _absent(uploader, config)
    progress.problems = progress.absent.problems(_names(sinks))
    _tell(progress.problems, lines)
    click.echo(orjson.dumps(progress.to_json()).decode() if as_json else progress.summary())
    for (project, run), sink in left:
        reason = uploader.failed.get(((project, run), sink)) or _reason_of(uploader, sink)
        click.echo(f"{project}/{run} -> {sink.removesuffix(':')}: {printable(reason)}", err=True)
    for name in _unknown(uploader, config):
        click.echo(f"--adopt or --new-id names {printable(name)}, and no such run is there", err=True)
    return 1 if left or stopped or uploader.spool.problems or uploader.found_damage or progress.problems else 0


def say_plan(paths: Sequence[Path], sinks: Sequence[Sink], config: UploaderConfig, as_json: bool) -> None:
    """What would go where."""
    found = read_status(list(paths), config.state, config.crashed_after_s, _wanted(config))
    for run in found.runs:
        for sink in sinks:
            name = f"{sink.kind}:{sink.target}".removesuffix(":")
            held = next((s for s in run.sinks if s.sink == name), None)
            left = held.behind_bytes if held else run.size
            if as_json:
                plan = {"project": run.project, "run": run.run, "name": run.name, "state": run.state}
                click.echo(orjson.dumps({**plan, "records": run.records, "sink": name, "bytes": left}).decode())
            else:
                name_of_run = printable(label(run.project, run.run, run.name))
                click.echo(f"{name_of_run} ({run.state}, {run.records} records) -> {name}: {size(left)} to upload")
    for problem in found.problems:
        click.echo(printable(problem), err=True)


def _started(paths: Sequence[Path], sinks: Sequence[Sink], config: UploaderConfig, listener: Listener) -> Uploader:
    try:
        offered = config.offer_sinks()
    except Misconfigured as error:
        raise click.UsageError(str(error)) from None
    uploader = Uploader(paths, sinks, config.state, config.options(), listener, offered=offered)
    try:
        uploader.start()
    except Held as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"state {config.state}: {error.strerror}; choose another with --state") from None
    return uploader


def _run(
    uploader: Uploader,
    listener: Listener,
    until: Callable[[Uploader, float], bool],
    on_turn: Callable[[float], None],
    use_events: bool,
) -> str | None:
    collector.calm()
    try:
        return watch(uploader, listener, until, on_turn, use_events)
    except Held as error:
        raise click.ClickException(str(error)) from None


def _absent(uploader: Uploader, config: UploaderConfig) -> Absent:
    return find_absent(uploader.spool, uploader.state.progress, _wanted(config))


def _wanted(config: UploaderConfig) -> Callable[[SpoolRun], bool]:
    return partial(is_asked_for, projects=config.project, runs=config.run)


def _names(sinks: Sequence[Sink]) -> list[str]:
    return [f"{sink.kind}:{sink.target}" for sink in sinks]


def _tell(absent: Sequence[tuple[Path, str]], listener: Listener) -> None:
    for path, reason in absent:
        listener(SpoolProblem(str(path), reason))


def _unknown(uploader: Uploader, config: UploaderConfig) -> list[str]:
    """Names that were to be treated differently, of runs that are not there: a slip of the pen, most likely."""
    known = {name for project, run_id in uploader.spool.runs for name in (run_id, f"{project}/{run_id}")}
    return [name for name in (*config.adopt, *config.new_id) if name not in known]


def _reason_of(uploader: Uploader, sink: str) -> str:
    """Why a sink takes nothing, told by another of its runs."""
    return next((why for (_, name), why in uploader.failed.items() if name == sink), "not done")


def _live_table() -> LiveTable | None:
    from gapless_uploader.live_table import LiveTable

    return LiveTable.on(sys.stderr)


def _metrics() -> Metrics:
    from gapless_uploader.metrics_port import Metrics

    return Metrics()


def _serve(metrics: Metrics, port: int, listener: Listener) -> MetricsServer:
    from gapless_uploader.metrics_port import MetricsServer

    try:
        server = MetricsServer(metrics, port)
    except OSError as error:
        raise click.ClickException(f"--metrics-port {port}: {error.strerror}; choose another, or 0") from None
    listener(ServingMetrics(f"http://127.0.0.1:{server.port}/metrics"))
    return server


def _both(one: Listener, other: Listener) -> Listener:
    def listen(event: Event) -> None:
        one(event)
        other(event)

    return listen


def _each_turn(
    uploader: Uploader, refresh: Callable[[float], None], metrics: Metrics | None
) -> Callable[[float], None]:
    due = 0.0

    def on_turn(now: float) -> None:
        nonlocal due
        refresh(now)
        if metrics is not None and now >= due:
            due = now + 1.0
            metrics.observe(uploader)

    return on_turn


def _all_over(uploader: Uploader, now: float) -> bool:
    del now
    return uploader.is_over()


def _never(uploader: Uploader, now: float) -> bool:
    del uploader, now
    return False
