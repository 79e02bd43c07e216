"""The uploader's options: defaults, then `gapless.toml`, then flags and `GAPLESS_*`. The only reader of that file.

```toml
to = ["wandb", "tensorboard:/logs/tb"]    # sinks, when no --to is given
state = "/home/me/.local/state/gapless"   # the uploader's own progress
workers = 4                               # steps of one sink that run at once
call_timeout_s = 300                      # a call of a sink that takes longer no longer holds a worker
on_rewind = "new-run"                     # new-run | keep-first | mark
crashed_after_s = 300                     # a silent run without a finish has crashed after so long
slow_scan_s = 60                          # the longest time between two looks at a quiet run
project = ["grpo*"]                       # only these projects
run = ["*"]                               # only these run ids
rate = "200/min"                          # requests that each sink may send
bandwidth = "1MB/s"                       # bytes that each sink may send
metrics_port = 9464                       # Prometheus, on 127.0.0.1 alone
adopt = ["RUN"]                           # append to this run at W&B, though no state of it is left
new_id = { RUN = "ID" }                   # upload the run RUN to W&B under another id

[sinks.wandb]                             # a sink's own options, by its kind, and its own rate and bandwidth
rate = "100/min"
```
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gapless_uploader.budget import Limits, parse_bandwidth, parse_rate
from gapless_uploader.options import REWINDS, SPOOL_CONFIG, UploaderOptions, default_state_folder
from gapless_uploader.sink import Misconfigured, Sink
from gapless_uploader.sinks import known_sinks, make_sink

_LISTS = ("to", "project", "run", "adopt")
_NUMBERS = ("workers", "call_timeout_s", "crashed_after_s", "slow_scan_s", "grace_s")
_LIMITS = ("rate", "bandwidth")
_IDENTIFIES = ("wandb",)
"""Sinks that know `adopt` and `new_id`."""


@dataclass(frozen=True, slots=True)
class UploaderConfig:
    """Everything that a `gapless.toml` may say."""

    to: tuple[str, ...] = ()
    """Sinks, `kind` or `kind:target`, when no --to is given; `spool-config`: those that each run asks for."""
    state: Path = field(default_factory=default_state_folder)
    """Folder of the uploader's own progress."""
    workers: int = 4
    """Steps of one sink that run at once."""
    call_timeout_s: float = 300.0
    """A call of a sink that has not returned after so long no longer counts as one of its workers."""
    on_rewind: str = "new-run"
    """What becomes of rows that were uploaded and rewound: new-run, keep-first or mark."""
    crashed_after_s: float = 300.0
    """A silent run without a finish has crashed after so long, when its process cannot be looked at."""
    slow_scan_s: float = 60.0
    """The longest time between two looks at a quiet run."""
    grace_s: float = 30.0
    """How long NUL bytes inside a segment may be blocks that have not arrived."""
    project: tuple[str, ...] = ()
    """Only projects that match one of these globs."""
    run: tuple[str, ...] = ()
    """Only run ids that match one of these globs."""
    rate: str | None = None
    """Requests that each sink may send, as in 200/min; `[sinks.KIND]` may say another for one kind."""
    bandwidth: str | None = None
    """Bytes that each sink may send, as in 1MB/s; `[sinks.KIND]` may say another for one kind."""
    metrics_port: int | None = None
    """Serve Prometheus metrics on this port of 127.0.0.1."""
    adopt: tuple[str, ...] = ()
    """Runs that are appended to at W&B though no state of them is left."""
    new_id: dict[str, str] = field(default_factory=dict)
    """Run -> the id under which it is uploaded to W&B."""
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options of each kind of sink: its own, and `rate` and `bandwidth`."""

    def __post_init__(self) -> None:
        if self.on_rewind not in REWINDS:
            raise Misconfigured(f"on_rewind is {self.on_rewind!r}; it may be {', '.join(REWINDS)}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise Misconfigured(f"{name} is {value!r}; it must be a number above 0")
        if type(self.workers) is not int:
            raise Misconfigured(f"workers is {self.workers!r}; it must be a whole number")
        port = self.metrics_port
        if port is not None and (type(port) is not int or not 0 <= port < 1 << 16):
            raise Misconfigured(f"metrics_port is {port!r}; it must be a port")
        self.limits("")
        for kind in self.sinks:
            try:
                self.limits(kind)
            except Misconfigured as error:
                raise Misconfigured(f"[sinks.{kind}] {error}") from None

    def limits(self, kind: str) -> Limits:
        """What a sink of this kind may use."""
        own = self.sinks.get(kind, {})
        rate, bandwidth = (own.get(name, getattr(self, name)) for name in _LIMITS)
        for name, value in (("rate", rate), ("bandwidth", bandwidth)):
            if value is not None and not isinstance(value, str):
                raise Misconfigured(f"{name} is {value!r}; it must be a text")
        return Limits(parse_rate(rate) if rate else None, parse_bandwidth(bandwidth) if bandwidth else None)

    def options(self) -> UploaderOptions:
        """The options of the uploader itself."""
        return UploaderOptions(
            workers=self.workers,
            on_rewind=self.on_rewind,
            crashed_after_s=self.crashed_after_s,
            grace_s=self.grace_s,
            projects=self.project,
            runs=self.run,
            slow_scan_s=self.slow_scan_s,
            call_timeout_s=self.call_timeout_s,
            budgets={kind: self.limits(kind) for kind in self._kinds()},
        )

    def make_sinks(self) -> list[Sink]:
        """The sinks that `to` names, with their options. Raises Misconfigured."""
        if not self.to:
            raise Misconfigured("no sink: say --to SINK, for example --to tensorboard:runs")
        if len(set(self.to)) != len(self.to):
            raise Misconfigured(f"one sink twice in {', '.join(self.to)}")
        named = [spec for spec in self.to if spec != SPOOL_CONFIG]
        return [make_sink(spec, self._own_options(spec.partition(":")[0])) for spec in named]

    def offer_sinks(self) -> list[Sink]:
        """With `spool-config` in `to`: a sink of every kind not named there, for the runs that ask for it."""
        if SPOOL_CONFIG not in self.to:
            return []
        from gapless_uploader.wanted import offered_sinks

        named = [spec.partition(":")[0] for spec in self.to]
        return offered_sinks({kind: self._own_options(kind) for kind in self.sinks}, besides=named)

    def _kinds(self) -> set[str]:
        return {spec.partition(":")[0] for spec in self.to} | (
            known_sinks().keys() if SPOOL_CONFIG in self.to else set()
        )

    def _own_options(self, kind: str) -> dict[str, Any]:
        options = {key: value for key, value in self.sinks.get(kind, {}).items() if key not in _LIMITS}
        if kind in _IDENTIFIES:
            if self.adopt:
                options["adopt"] = list(self.adopt)
            if self.new_id:
                options["new_id"] = dict(self.new_id)
        return options


def load_config(path: Path | None, **flags: Any) -> UploaderConfig:
    """The config of `path` (`gapless.toml` in this folder if None and there) with `flags` that are not None above it.

    Raises Misconfigured, which names file and key.
    """
    source = path or Path("gapless.toml")
    values: dict[str, Any] = {}
    if path is not None or source.is_file():
        try:
            values = tomllib.loads(source.read_text())
        except (OSError, ValueError) as error:
            raise Misconfigured(f"read {source}: {error}") from None
    known = {f.name for f in fields(UploaderConfig)}
    for key in values:
        if key not in known:
            raise Misconfigured(f"{source}: no option {key!r}; there are: {', '.join(sorted(known))}")
    for key in _LISTS:
        if key in values:
            listed = values[key]
            if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
                raise Misconfigured(f"{source}: {key} must be a list of texts")
            values[key] = tuple(listed)
    if "state" in values:
        if not isinstance(values["state"], str) or not values["state"]:
            raise Misconfigured(f"{source}: state is {values['state']!r}; it must be a folder's name")
        values["state"] = Path(values["state"]).expanduser()
    new_id = values.get("new_id", {})
    if not isinstance(new_id, dict) or not all(isinstance(item, str) for item in new_id.values()):
        raise Misconfigured(f"{source}: new_id must be a table of run = id")
    sinks = values.get("sinks", {})
    if not isinstance(sinks, dict) or not all(isinstance(options, dict) for options in sinks.values()):
        raise Misconfigured(f"{source}: sinks must be tables, [sinks.KIND]")
    known_kinds = known_sinks() if sinks else {}
    for kind in sinks:
        if kind not in known_kinds:
            raise Misconfigured(f"{source}: no sink named {kind!r}; there are: {', '.join(sorted(known_kinds))}")
    try:
        config = UploaderConfig(**values)
    except (Misconfigured, TypeError) as error:
        raise Misconfigured(f"{source}: {error}") from None
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    for name in _LIMITS:
        if name in given:  # a flag is above every table of the file
            tables = {kind: {k: v for k, v in own.items() if k != name} for kind, own in config.sinks.items()}
            config = replace(config, sinks=tables)
    if "new_id" in given:
        given["new_id"] = {**config.new_id, **_pairs(given["new_id"])}
    try:
        return replace(config, **given)
    except Misconfigured as error:
        raise Misconfigured(f"{error} (a flag or GAPLESS_*)") from None


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    """`RUN=ID` each. Raises Misconfigured."""
    pairs = {}
    for item in given:
        run, is_pair, tracker_id = item.rpartition("=")
        if not is_pair or not run or not tracker_id:
            raise Misconfigured(f"--new-id is {item!r}; it must be RUN=ID")
        pairs[run] = tracker_id
    return pairs
