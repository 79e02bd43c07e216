"""The `gapless` command: parse, call, print. Exit status 0 done, 1 something failed or is damaged, 2 misuse."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import Any

import click
import orjson

from gapless_uploader.budget import live_runs_carried
from gapless_uploader.config import UploaderConfig, load_config
from gapless_uploader.export import FORMATS, export_run
from gapless_uploader.options import PATIENCE_S
from gapless_uploader.sink import Misconfigured, Retryable, Sink, prepared

# What a command needs is imported in it: a sink prepares itself meanwhile, and `--help` comes at once.

_PATH = click.Path(exists=True, path_type=Path)


def _upload_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = [
        click.option("--to", "to", multiple=True, metavar="SINK", help="kind or kind:target; may be given again"),
        click.option("--state", type=click.Path(path_type=Path), help="the uploader's own progress"),
        click.option("--config", type=click.Path(path_type=Path), help="a gapless.toml; default: the one here"),
        click.option("--project", multiple=True, metavar="GLOB", help="only these projects"),
        click.option("--run", multiple=True, metavar="GLOB", help="only these run ids"),
        click.option("--workers", type=int, help="steps of one sink that run at once"),
        click.option("--call-timeout", "call_timeout_s", type=float, help="seconds a call of a sink may take"),
        click.option("--on-rewind", help="new-run, keep-first or mark"),
        click.option("--rate", help="requests that each sink may send, as in 200/min"),
        click.option("--bandwidth", help="bytes that each sink may send, as in 1MB/s"),
        click.option("--adopt", multiple=True, metavar="RUN", help="append to this run at W&B, whoever wrote it"),
        click.option("--new-id", multiple=True, metavar="RUN=ID", help="upload the run to W&B under another id"),
        click.option("--dry-run", is_flag=True, help="say what would go where, and do nothing"),
        click.option("--json", "as_json", is_flag=True, help="one JSON object a line"),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group(context_settings={"auto_envvar_prefix": "GAPLESS", "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gapless")
def main() -> None:
    """Training metrics from a spool to the trackers, every row once.

    Example: gapless watch /shared/spool --to tensorboard:runs
    """


@main.command()
@click.argument("root", type=_PATH)
@_upload_options
@click.option("--exit-when-done", is_flag=True, help="end when every run has ended and is uploaded")
@click.option("--no-events", is_flag=True, help="do not ask for file events; scan only")
@click.option("--metrics-port", type=int, help="serve Prometheus metrics on this port of 127.0.0.1; 0: a free one")
def watch(root: Path, exit_when_done: bool, no_events: bool, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Follow every run under ROOT until stopped.

    Example: gapless watch /shared/spool --to wandb --to tensorboard:runs
    """
    config = _config(flags)
    sinks = _sinks(config)
    if dry_run:
        _say_plan([root], sinks, config, as_json)
        return
    from gapless_uploader.uploading import follow

    status = follow(root, sinks, config, exit_when_done=exit_when_done, use_events=not no_events, as_json=as_json)
    sys.exit(status)


@main.command()
@click.argument("paths", type=_PATH, nargs=-1, required=True, metavar="PATH...")
@_upload_options
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    default=PATIENCE_S,
    show_default=True,
    help="seconds to try again what fails, when nothing else is left",
)
def replay(paths: tuple[Path, ...], patience: float, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Upload what is there now, then exit. PATH is a root, project, run or segment.

    Example: gapless replay ./gapless --to tensorboard:runs
    """
    config = _config(flags)
    if isnan(patience):
        raise click.BadParameter("nan is no number of seconds", param_hint="--patience")
    sinks = _sinks(config)
    if dry_run:
        _say_plan(paths, sinks, config, as_json)
        return
    for sink in sinks:
        prepared(sink)  # while the rest is imported
    from gapless_uploader.uploading import replay as replay_now

    sys.exit(replay_now(paths, sinks, config, patience_s=patience, as_json=as_json))


@main.command()
@click.argument("root", type=_PATH)
@click.option("--state", type=click.Path(path_type=Path), help="the uploader's own progress")
@click.option("--config", type=click.Path(path_type=Path), help="a gapless.toml; default: the one here")
@click.option("--json", "as_json", is_flag=True, help="as JSON")
def status(root: Path, as_json: bool, **flags: Any) -> None:
    """Runs x sinks: state, last step, rows, what was refused and why, what is left.

    Example: gapless status /shared/spool
    """
    from rich.console import Console

    from gapless_uploader.display import status_table
    from gapless_uploader.status import read_status

    config = _config(flags)
    found = read_status([root], config.state, config.crashed_after_s)
    found.notes.extend(_budget_notes(config, sum(run.state == "running" for run in found.runs)))
    if as_json:
        click.echo(orjson.dumps(found.to_json(), option=orjson.OPT_INDENT_2).decode())
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 200
        console.print(status_table(found))
    sys.exit(1 if found.damaged else 0)


@main.command()
@click.argument("path", type=_PATH)
@click.argument("keys", nargs=-1)
@click.option("--run", "name", help="the run's id, when PATH holds several; default: the newest")
@click.option("--follow", is_flag=True, help="show it again every 2 s")
@click.option("--json", "as_json", is_flag=True, help="the last values as JSON")
def show(path: Path, keys: tuple[str, ...], name: str | None, follow: bool, as_json: bool) -> None:
    """A run's metrics in the terminal, with sparklines.

    Example: gapless show ./gapless train/loss
    """
    from rich.console import Console

    from gapless_uploader.events import printable
    from gapless_uploader.replay import find_run, merged_run
    from gapless_uploader.show import metrics_table
    from gapless_uploader.spool import Spool

    console = Console()
    while True:
        spool = Spool([path])
        spool.scan(time.monotonic())
        run = find_run(spool.runs, name)
        if run is None:
            raise click.ClickException(f"no run{f' {name}' if name else ''} under {path}; see: gapless status {path}")
        if run.unsupported:
            raise click.ClickException(run.unsupported)
        try:
            merged = merged_run(run)
        except (OSError, ValueError) as error:
            raise click.ClickException(f"read {run.key[1]}: {error}") from None
        unknown = [key for key in keys if key not in merged.series()]
        if unknown and not follow:
            raise click.ClickException(f"no such key in {run.key[1]}: {', '.join(map(printable, unknown))}")
        if as_json:
            last = {key: points[-1] for key, points in merged.series().items() if not keys or key in keys}
            click.echo(json.dumps(last))
        else:
            console.print(metrics_table(merged, keys, console.width))
            if merged.unstepped:
                console.print(f"{len(merged.unstepped)} rows without a step are not shown")
        if not follow:
            return
        time.sleep(2.0)


@main.command()
@click.argument("path", type=_PATH)
@click.option("--format", "kind", type=click.Choice(sorted(FORMATS)), required=True, help="what to write")
@click.option("--run", "name", help="the run's id, when PATH holds several; default: the newest")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=Path(), help="the folder to write into")
def export(path: Path, kind: str, name: str | None, out: Path) -> None:
    """Write a run's merged history in another tool's format; what that cannot hold is counted by reason.

    Example: gapless export ./gapless --format wandb-offline -o ~/sync && wandb sync ~/sync/wandb/offline-run-*
    """
    from collections import Counter

    from gapless_uploader.events import printable
    from gapless_uploader.replay import find_run
    from gapless_uploader.spool import Spool

    spool = Spool([path])
    spool.scan(time.monotonic())
    run = find_run(spool.runs, name)
    if run is None:
        raise click.ClickException(f"no run {name or ''} under {path}; see: gapless status {path}")
    try:
        made, refused = export_run(run, kind, out)
    except (Misconfigured, Retryable, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(made)
    for reason, count in Counter(refusal.reason for refusal in refused).items():
        click.echo(printable(f"{count} refused: {reason}"), err=True)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="as JSON")
def sinks(as_json: bool) -> None:
    """Every kind of sink: ready or what is missing, and how a row arrives once.

    Example: gapless sinks
    """
    from rich.console import Console
    from rich.table import Table

    from gapless_uploader.sinks import list_sinks

    found = list(list_sinks())
    if as_json:
        click.echo(orjson.dumps([one._asdict() for one in found], option=orjson.OPT_INDENT_2).decode())
        return
    table = Table("sink", "ready", "each row once by", box=None)
    for one in found:
        table.add_row(one.kind, "yes" if one.ready else f"no: {one.hint}", one.exactly_once)
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)


@main.command()
@click.argument("root", type=_PATH, required=False)
@click.option("--to", "to", multiple=True, metavar="SINK", help="kind or kind:target; may be given again")
@click.option("--state", type=click.Path(path_type=Path), help="the uploader's own progress")
@click.option("--config", type=click.Path(path_type=Path), help="a gapless.toml; default: the one here")
@click.option("--json", "as_json", is_flag=True, help="as JSON")
def doctor(root: Path | None, as_json: bool, **flags: Any) -> None:
    """What would fail, and the way out: spool, state, packages, credentials, reachability.

    Example: gapless doctor /shared/spool --to wandb --to swanlab
    """
    from gapless_uploader.doctor import examine
    from gapless_uploader.events import printable

    config = _config(flags)
    found = list(examine(root, config.state, _sinks(config) if config.to else []))
    if as_json:
        click.echo(orjson.dumps([asdict(one) for one in found], option=orjson.OPT_INDENT_2).decode())
    else:
        for one in found:
            click.echo(f"{one.grade:4}  {one.what}: {printable(one.text)}")
    sys.exit(1 if any(one.grade == "bad" for one in found) else 0)


@main.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("demo"), help="where it writes")
@click.option("--steps", type=click.IntRange(min=1), default=300, help="training steps")
def demo(folder: Path, steps: int) -> None:
    """Two training ranks on this machine, their spool, a live upload to TensorBoard files. No account, no network.

    Example: gapless demo
    """
    from gapless_uploader.demo import run_demo

    sys.exit(run_demo(folder, steps))


def _config(flags: dict[str, Any]) -> UploaderConfig:
    flags = dict(flags)
    path = flags.pop("config", None)
    try:
        return load_config(path, **flags)
    except Misconfigured as error:
        raise click.UsageError(str(error)) from None


def _sinks(config: UploaderConfig) -> list[Sink]:
    try:
        return config.make_sinks()
    except Misconfigured as error:
        raise click.UsageError(str(error)) from None


def _say_plan(paths: Sequence[Path], sinks: list[Sink], config: UploaderConfig, as_json: bool) -> None:
    from gapless_uploader.uploading import say_plan

    say_plan(paths, sinks, config, as_json)


def _budget_notes(config: UploaderConfig, live_runs: int) -> list[str]:
    """How many live runs each configured sink's budget carries."""
    try:
        sinks = config.make_sinks() if config.to else []
    except Misconfigured as error:
        return [str(error)]
    notes = []
    for sink in sinks:
        carried = live_runs_carried(config.limits(sink.kind), sink.capabilities.heartbeat_s)
        if carried is not None:
            enough = "enough" if live_runs <= carried else "too few: raise its rate"
            notes.append(f"{sink.kind}: its rate carries {carried} live runs' heartbeats; now {live_runs}: {enough}")
    return notes
