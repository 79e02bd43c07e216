"""One file a tracker. A new tracker is its file, a line in `SINKS`, an extra and a row in the docs.

Others bring theirs by the entry point group `gapless.sinks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from gapless_uploader.failures import Misconfigured

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from gapless_uploader.sink import Sink

SINKS = {
    "clearml": "gapless_uploader.sinks.clearml:ClearmlSink",
    "console": "gapless_uploader.sinks.console:ConsoleSink",
    "file": "gapless_uploader.sinks.file:FileSink",
    "mlflow": "gapless_uploader.sinks.mlflow:MlflowSink",
    "memory": "gapless_uploader.sinks.memory:MemorySink",
    "prometheus": "gapless_uploader.sinks.prometheus:PrometheusSink",
    "rl_insight": "gapless_uploader.sinks.rl_insight:RlInsightSink",
    "spool": "gapless_uploader.sinks.spool:SpoolSink",
    "swanlab": "gapless_uploader.sinks.swanlab:SwanlabSink",
    "tensorboard": "gapless_uploader.sinks.tensorboard:TensorboardSink",
    "wandb": "gapless_uploader.sinks.wandb:WandbSink",
    "trackio": "gapless_uploader.sinks.trackio:TrackioSink",
    "vemlp_wandb": "gapless_uploader.sinks.vemlp_wandb:VemlpWandbSink",
}

HEAD_STARTS = {"wandb": "gapless_uploader.sinks._wandb_reader:head_start"}
"""Kind -> `module:function` that begins what takes long; it is called before anything else is imported."""


def known_sinks() -> dict[str, str]:
    """Kind -> `module:class` of every sink that is installed, ours and others'."""
    found = {point.name: point.value for point in entry_points(group="gapless.sinks")}
    return {**found, **SINKS}


def entry_points(*, group: str) -> Iterable[EntryPoint]:
    """What installed packages offer. Each package's list is read, which is not done for a sink of ours."""
    from importlib import metadata

    return metadata.entry_points(group=group)


def named(place: str) -> Any:
    """What `module:name` names. Raises ImportError and AttributeError."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def make_sink(spec: str, options: dict[str, Any] | None = None) -> Sink:
    """The sink that `spec` names: `kind` or `kind:target`. Raises Misconfigured for an unknown kind or option."""
    kind, _, target = spec.partition(":")
    known = SINKS if kind in SINKS else known_sinks()
    if kind not in known:
        raise Misconfigured(f"no sink named {kind!r}; there are: {', '.join(sorted(known))}")
    made = named(known[kind])
    if options:
        _check_options(kind, made, options)
    try:
        sink: Sink = made(target, **(options or {}))
    except TypeError as error:
        raise Misconfigured(f"sink {kind!r}: {error}") from None
    return sink


def _check_options(kind: str, made: Any, options: dict[str, Any]) -> None:
    from inspect import Parameter, signature

    known = signature(made).parameters
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in known.values())
    own = list(known)[1:]  # the first is the target, which stands behind `kind:`
    for option in options:
        if option not in own and not (takes_all and option not in known):
            listed = ", ".join(own) or "none"
            raise Misconfigured(f"sink {kind!r} has no option {option!r}; there are: {listed}")


class Listing(NamedTuple):
    """One kind of sink as `gapless sinks` shows it."""

    kind: str
    source: str
    """`module:class`; of another distribution when it came by an entry point."""
    ready: bool
    hint: str
    """What is missing and the line that installs it; empty when nothing is."""
    exactly_once: str
    """The sink's own word on how a row arrives once."""


def list_sinks() -> Iterator[Listing]:
    """Every kind that is installed, ready or not. Imports no tracker's package."""
    for kind, source in sorted(known_sinks().items()):
        try:
            made = named(source)
            # Where the options decide what a sink can express, the defaults speak for it.
            can = getattr(made, "capabilities", None) or made("").capabilities
            promise = can.exactly_once
        except (ImportError, AttributeError, Misconfigured) as error:
            yield Listing(kind, source, False, f"cannot be loaded: {error}", "")
            continue
        package = getattr(made, "needs", None)
        missing = package is not None and find_spec(package) is None
        hint = ""
        if missing:
            hint = f"{package} is not installed"
            if kind in SINKS and kind != "vemlp_wandb":
                hint += f": pip install 'gapless[{kind.replace('_', '-')}]'"
        yield Listing(kind, source, not missing, hint, promise)


def need(kind: str, module: str) -> Any:
    """The vendor's module, or Misconfigured with the line that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise Misconfigured(f"sink {kind!r} needs {module} ({error}): pip install 'gapless[{kind}]'") from None
