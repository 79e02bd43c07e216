"""AReaL's `StatsLogger`, into the spool: `from gapless.stats_logger import StatsLogger`.

It takes AReaL's experiment config as it is, by its fields, and never imports AReaL. Rank 0 writes, the other ranks do
nothing. Which trackers the config asks for is recorded, with their names and modes; its keys and hosts are not obeyed.
"""

from __future__ import annotations

import getpass
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gapless._fronts.fields import field, text_or_none
from gapless._fronts.stats_table import stats_table
from gapless.config import read_environment
from gapless.opening import init
from gapless.run import Run
from gapless.values import as_mapping

_SUPERSEDED_TIMEOUT_S = 2.0


class StatsLogger:
    """Writes what AReaL's trainers commit. Not thread safe, as there.

    `config` is the whole experiment config, `ft_spec` has `total_train_epochs`, `steps_per_epoch`, `total_train_steps`.
    The spool is `$GAPLESS_DIR`, else `gapless` under `get_log_path`. Raises ValueError where AReaL does: for the
    `stats_logger` part in place of the whole, and without experiment, trial and file root.
    """

    def __init__(self, config: Any, ft_spec: Any) -> None:
        part = field(config, "stats_logger")
        if part is None:
            raise ValueError("StatsLogger takes the whole experiment config, the one that has a 'stats_logger'")
        self.exp_config = config
        self.config = part
        self.ft_spec = ft_spec
        self.run: Run | None = None
        """The run being written; one that does nothing on other ranks, None before `init`."""
        self._log = _logger()
        self._options: dict[str, Any] = {}
        self._recovered = False
        self._last_commit_step = -1
        self.init()

    def init(self) -> None:
        """Open the run; the constructor has done it. A second call does nothing."""
        if self.run is not None:
            return
        self.start_time = time.perf_counter()
        self._options = self._identity()
        self.run = init(**self._options)
        if self.run.is_writer:
            self._say(f"Stats go to {self.run.path}, for {', '.join(self._options['sinks']) or 'whoever asks'}.")

    def commit(
        self, epoch: int, step: int, global_step: int, data: Mapping[Any, Any] | Iterable[Mapping[Any, Any]]
    ) -> None:
        """Log one row, or a list of rows at one step each, from `global_step` on or after the last step committed."""
        if self.run is None or not self.run.is_writer:
            return
        spec = self.ft_spec
        self._say(
            f"Epoch {epoch + 1}/{field(spec, 'total_train_epochs', default='?')} "
            f"Step {step + 1}/{field(spec, 'steps_per_epoch', default='?')} "
            f"Train step {global_step + 1}/{field(spec, 'total_train_steps', default='?')} done."
        )
        items = [data] if isinstance(data, Mapping) else list(data)
        first = max(global_step, self._last_commit_step + 1)
        if self._recovered:
            self._go_on_from(int(first))
        for index, item in enumerate(items):
            row = {key: value for key, value in item.items() if not str(key).endswith("__count")}
            self._say(f"Stats ({index + 1}/{len(items)}):")
            self.print_stats(row)
            self.run.log(row, step=first + index)
        self._last_commit_step = first + len(items) - 1

    def print_stats(self, stats: Mapping[Any, Any]) -> None:
        """Show the statistics as a table, through the logger named `StatsLogger`."""
        self._say("\n" + stats_table(stats))

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: `last_commit_step`."""
        return {"last_commit_step": self._last_commit_step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on after a checkpoint: the next commit supersedes what earlier attempts logged at its step and after."""
        self._last_commit_step = state_dict["last_commit_step"]
        # AReaL saves its checkpoint before it commits that step's row, so `last_commit_step + 1` may be a step whose
        # row is in the spool and is never committed again: only the first commit tells where the run goes on.
        self._recovered = True

    def close(self) -> None:
        """End the run: failed where an exception is on its way, else finished."""
        if self.run is None or not self.run.is_writer:
            return
        self._say(f"Training completes! Total time elapsed {time.perf_counter() - self.start_time:.2f}.")
        self.run.finish(0 if sys.exc_info()[0] is None else 1)

    @staticmethod
    def get_log_path(
        config: Any = None,
        experiment_name: str | None = None,
        trial_name: str | None = None,
        fileroot: str | None = None,
    ) -> str:
        """`{fileroot}/logs/{user}/{experiment_name}/{trial_name}`, made where it can be.

        `config` is the `stats_logger` part; its names go before the others. Raises ValueError if one is missing.
        """
        path = _log_path(config, experiment_name, trial_name, fileroot)
        with suppress(OSError):  # whoever writes there meets the disk's own error
            Path(path).mkdir(parents=True, exist_ok=True)
        return path

    def _identity(self) -> dict[str, Any]:
        part, whole = self.config, self.exp_config
        experiment, trial = field(part, "experiment_name"), field(part, "trial_name")
        log_path = _log_path(part)
        suffix = field(part, "wandb", "id_suffix")
        if suffix == "timestamp":
            suffix = time.strftime("%Y_%m_%d_%H_%M_%S")
        trackers = _trackers(part, str(experiment), str(trial))
        # One run has one name: that of the first tracker asked for, W&B's where none is.
        named = trackers[next((kind for kind, told in trackers.items() if told["asked_for"]), "wandb")]
        told = {"front": "areal", "log_path": log_path, "trackers": trackers}
        tags = field(part, "wandb", "tags")
        return {
            "project": named["project"],
            "name": named["name"],
            "id": f"{experiment}_{trial}_{suffix}",
            "dir": None if read_environment().root else Path(log_path, "gapless"),
            "config": {**(as_mapping(whole) or {}), "version_info": _version_info(), "gapless": told},
            "group": text_or_none(field(part, "wandb", "group")) or f"{experiment}_{trial}",
            "job_type": text_or_none(field(part, "wandb", "job_type")),
            "tags": None if tags is None else [tags] if isinstance(tags, str) else [str(tag) for tag in tags],
            "notes": text_or_none(field(part, "wandb", "notes")),
            "entity": text_or_none(field(part, "wandb", "entity")),
            "sinks": [kind for kind, about in trackers.items() if about["asked_for"]],
        }

    def _go_on_from(self, step: int) -> None:
        self._recovered = False
        before = self.run
        # The newer attempt is there before the older one ends, so that no reader sees the run as finished.
        self.run = init(**self._options, resume_step=step)
        if before is not None:
            before.finish(None, timeout=_SUPERSEDED_TIMEOUT_S)

    def _say(self, text: str) -> None:
        with suppress(Exception):  # a handler is anybody's code
            self._log.info(text)


def _trackers(part: Any, experiment: str, trial: str) -> dict[str, dict[str, Any]]:
    """Each tracker that AReaL knows: its mode, whether it is asked for, and the names that the run has there."""
    told: dict[str, dict[str, Any]] = {}
    for kind, name in (("wandb", trial), ("swanlab", f"{trial}_train"), ("trackio", trial)):
        mode = str(field(part, kind, "mode", default="disabled"))
        told[kind] = {
            "asked_for": mode != "disabled",
            "mode": mode,
            "project": str(text_or_none(field(part, kind, "project")) or experiment),
            "name": str(text_or_none(field(part, kind, "name")) or name),
        }
    folder = field(part, "tensorboard", "path")
    told["tensorboard"] = {
        "asked_for": folder is not None,
        "mode": "disabled" if folder is None else "local",
        "project": experiment,
        "name": trial,
    }
    return told


def _log_path(
    config: Any, experiment_name: str | None = None, trial_name: str | None = None, fileroot: str | None = None
) -> str:
    if config is not None:
        experiment_name = field(config, "experiment_name")
        trial_name = field(config, "trial_name")
        fileroot = field(config, "fileroot")
    if not fileroot or not experiment_name or not trial_name:
        raise ValueError("fileroot, experiment_name and trial_name are needed for a log path")
    return f"{fileroot}/logs/{_user()}/{experiment_name}/{trial_name}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return str(os.getuid())


def _version_info() -> dict[str, Any]:
    """What AReaL says of itself, where the trainer has loaded it."""
    info = getattr(sys.modules.get("areal.version"), "version_info", None)
    names = {
        "commit_id": "commit",
        "branch": "branch",
        "is_dirty": "is_dirty",
        "version": "full_version_with_dirty_description",
    }
    return {told: field(info, name) for told, name in names.items()}


def _logger() -> logging.Logger:
    # AReaL makes its own loggers, with its colours and its log files; only they reach those.
    areal = sys.modules.get("areal.utils.logging")
    with suppress(Exception):
        if areal is not None:
            found: logging.Logger = areal.getLogger("StatsLogger", "system")
            return found
    return logging.getLogger("StatsLogger")
