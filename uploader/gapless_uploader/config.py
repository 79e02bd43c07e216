"""The uploader's options: defaults, then `gapless.toml`, then flags and `GAPLESS_*`. The only reader of that file.

```toml
to = ["wandb", "tensorboard:/logs/tb"]    # sinks, when no --to is given
state = "/home/me/.local/state/gapless"   # the uploader's own progress
workers = 4                               # steps of one sink that run at once
on_rewind = "new-run"                     # new-run | keep-first | mark
crashed_after_s = 300                     # a silent run without a finish has crashed after so long
slow_scan_s = 60                          # the longest time between two looks at a quiet run
project = ["grpo*"]                       # only these projects
run = ["*"]                               # only these run ids
adopt = ["RUN"]                           # append to this run at W&B, though no state of it is left
new_id = { RUN = "ID" }                   # upload the run RUN to W&B under another id

[sinks.tensorboard]                       # a sink's own options, by its kind
```
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gapless_uploader.pipeline import REWINDS
from gapless_uploader.sink import Misconfigured, Sink
from gapless_uploader.sinks import make_sink
from gapless_uploader.uploader import UploaderOptions, default_state_folder

_LISTS = ("to", "project", "run", "adopt")
_IDENTIFIES = ("wandb",)
"""Sinks that know `adopt` and `new_id`."""
_NUMBERS = ("workers", "crashed_after_s", "slow_scan_s", "grace_s")


@dataclass(frozen=True, slots=True)
class UploaderConfig:
    """Everything that a `gapless.toml` may say."""

    to: tuple[str, ...] = ()
    state: Path = field(default_factory=default_state_folder)
    workers: int = 4
    on_rewind: str = "new-run"
    crashed_after_s: float = 300.0
    slow_scan_s: float = 60.0
    grace_s: float = 30.0
    project: tuple[str, ...] = ()
    run: tuple[str, ...] = ()
    adopt: tuple[str, ...] = ()
    new_id: dict[str, str] = field(default_factory=dict)
    sinks: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_rewind not in REWINDS:
            raise Misconfigured(f"on_rewind is {self.on_rewind!r}; it may be {', '.join(REWINDS)}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise Misconfigured(f"{name} is {value!r}; it must be a number above 0")
        if type(self.workers) is not int:
            raise Misconfigured(f"workers is {self.workers!r}; it must be a whole number")

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
        )

    def make_sinks(self) -> list[Sink]:
        """The sinks that `to` names, with their options. Raises Misconfigured."""
        if not self.to:
            raise Misconfigured("no sink: say --to SINK, for example --to tensorboard:runs")
        if len(set(self.to)) != len(self.to):
            raise Misconfigured(f"one sink twice in {', '.join(self.to)}")
        return [make_sink(spec, self._options_of(spec.partition(":")[0])) for spec in self.to]

    def _options_of(self, kind: str) -> dict[str, Any]:
        options = dict(self.sinks.get(kind, {}))
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
        except (OSError, tomllib.TOMLDecodeError) as error:
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
        values["state"] = Path(str(values["state"])).expanduser()
    new_id = values.get("new_id", {})
    if not isinstance(new_id, dict) or not all(isinstance(item, str) for item in new_id.values()):
        raise Misconfigured(f"{source}: new_id must be a table of run = id")
    sinks = values.get("sinks", {})
    if not isinstance(sinks, dict) or not all(isinstance(options, dict) for options in sinks.values()):
        raise Misconfigured(f"{source}: sinks must be tables, [sinks.KIND]")
    try:
        config = UploaderConfig(**values)
    except Misconfigured as error:
        raise Misconfigured(f"{source}: {error}") from None
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    if "new_id" in given:
        given["new_id"] = {**config.new_id, **_pairs(given["new_id"])}
    return replace(config, **given)


def _pairs(given: tuple[str, ...]) -> dict[str, str]:
    """`RUN=ID` each. Raises Misconfigured."""
    pairs = {}
    for item in given:
        run, is_pair, tracker_id = item.rpartition("=")
        if not is_pair or not run or not tracker_id:
            raise Misconfigured(f"--new-id is {item!r}; it must be RUN=ID")
        pairs[run] = tracker_id
    return pairs
