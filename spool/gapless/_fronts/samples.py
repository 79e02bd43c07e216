"""verl's two loggers of tables, into the spool: the rows of this step, once, whatever trackers will show them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gapless._fronts.current import left_out, run_for_tables
from gapless.payloads import Table

_COLUMNS: Final = ("input", "output", "score")
INCREMENTAL: Final = "INCREMENTAL"
"""W&B's word for a table whose rows add to those logged before under its key."""


@dataclass
class ValidationGenerationsLogger:
    """Samples of a validation as rows `step, input, output, score` under `val/generations`."""

    project_name: str | None = None
    experiment_name: str | None = None

    def log(self, loggers: Iterable[str] | str, samples: Iterable[Any], step: int) -> None:
        """Record this step's samples: tuples of input, output and score. Nothing for no loggers or no samples."""
        rows = [_cells(sample) for sample in samples]
        if not loggers or not rows:
            return
        width = max(len(_COLUMNS), *map(len, rows))
        columns = ["step", *_COLUMNS, *(f"value_{place + 1}" for place in range(len(_COLUMNS), width))]
        data = [[step, *row, *[None] * (width - len(row))] for row in rows]
        run = run_for_tables(self.project_name, self.experiment_name, loggers)
        run.log(
            {"val/generations": Table(columns, data, log_mode=INCREMENTAL)},
            step=step,
            skip_sinks=left_out(run, loggers),
        )


@dataclass
class DapoFilteredRewardTableLogger:
    """How many groups DAPO filtered out, by reward: `step, reward_counts` once a step."""

    project_name: str | None = None
    experiment_name: str | None = None

    def log(self, loggers: Iterable[str] | str, reward_counts: Mapping[Any, Any], step: int) -> None:
        """Record this step's counts as one text, `reward:count, ...` by rising reward. Nothing for no loggers."""
        if not loggers:
            return
        counts = sorted((float(reward), int(count)) for reward, count in reward_counts.items())
        row = [step, ", ".join(f"{reward:g}:{count}" for reward, count in counts)]
        run = run_for_tables(self.project_name, self.experiment_name, loggers)
        table = Table(["step", "reward_counts"], [row], log_mode=INCREMENTAL)
        name = "training/filter_groups/filtered_reward_counts"
        run.log({name: table}, step=step, skip_sinks=left_out(run, loggers))


def _cells(sample: Any) -> list[Any]:
    return list(sample) if isinstance(sample, list | tuple) else [sample]
