"""One file a tracker. A new tracker is its file, a line in `SINKS`, an extra and a row in the docs.

Others bring theirs by the entry point group `gapless.sinks`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from gapless_uploader.sink import Misconfigured, Sink

SINKS = {
    "console": "gapless_uploader.sinks.console:ConsoleSink",
    "file": "gapless_uploader.sinks.file:FileSink",
    "memory": "gapless_uploader.sinks.memory:MemorySink",
    "swanlab": "gapless_uploader.sinks.swanlab:SwanlabSink",
    "tensorboard": "gapless_uploader.sinks.tensorboard:TensorboardSink",
}


def known_sinks() -> dict[str, str]:
    """Kind -> `module:class` of every sink that is installed, ours and others'."""
    found = {point.name: point.value for point in entry_points(group="gapless.sinks")}
    return {**found, **SINKS}


def make_sink(spec: str, options: dict[str, Any] | None = None) -> Sink:
    """The sink that `spec` names: `kind` or `kind:target`. Raises Misconfigured for an unknown kind or option."""
    kind, _, target = spec.partition(":")
    known = known_sinks()
    if kind not in known:
        raise Misconfigured(f"no sink named {kind!r}; there are: {', '.join(sorted(known))}")
    module, _, name = known[kind].partition(":")
    made = getattr(import_module(module), name)
    try:
        sink: Sink = made(target, **(options or {}))
    except TypeError as error:
        raise Misconfigured(f"sink {kind!r}: {error}") from None
    return sink


def need(kind: str, module: str) -> Any:
    """The vendor's module, or Misconfigured with the line that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise Misconfigured(f"sink {kind!r} needs {module} ({error}): pip install 'gapless[{kind}]'") from None
