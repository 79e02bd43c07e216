"""A logger for Lightning's Trainer: `GaplessLogger`.

```python
Trainer(logger=GaplessLogger("mnist"))
```
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ModuleNotFoundError:  # the package's older name, installed alone
    from pytorch_lightning.loggers.logger import Logger, rank_zero_experiment
    from pytorch_lightning.utilities.rank_zero import rank_zero_only

from gapless.opening import init
from gapless.run import Run
from gapless.values import as_mapping


class GaplessLogger(Logger):
    """Logs what the Trainer logs, at its step, from rank 0.

    Opens a run at first use, with the arguments of `gapless.init`; or writes to `run`, which stays the caller's to
    finish. `fit`, `validate` and `test` write to one run, which ends with the process or `logger.experiment.finish()`;
    a `fit` that failed ends it at once, and what is logged after that is a new attempt of it.
    """

    def __init__(
        self, project: str = "lightning", run_name: str | None = None, *, run: Run | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._project = project
        self._run_name = run_name
        self._options = dict(options)
        self._given = run is not None
        self._run = run
        self._failed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Run:
        """The run, opened if it is not yet; on other ranks an object whose methods do nothing."""
        if self._run is None or self._failed:
            self._failed = False
            self._run = init(self._project, self._run_name, is_writer=True, **self._options)
            self._options = {**self._options, "id": self._run.id or None}
        return self._run

    @property
    def name(self) -> str:
        """The project."""
        return self._project

    @property
    def version(self) -> str | None:
        """The run's id; None before it is opened and on other ranks."""
        return self._options.get("id") if self._run is None else self._run.id or None

    @property
    def save_dir(self) -> str | None:
        """None: Lightning's checkpoints go to its own `default_root_dir`, not into the spool."""
        return None

    @rank_zero_only
    def log_hyperparams(self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Add to the run's config."""
        del args, kwargs
        given = dict(as_mapping(params) or {})
        self.experiment.config.update(given)
        # A later attempt's config replaces the whole: it has to bring these along.
        self._options["config"] = {**(as_mapping(self._options.get("config")) or {}), **given}

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record one row."""
        self.experiment.log(metrics, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run where the Trainer failed; after a success it stays open for what comes next."""
        if status == "failed" and self._run is not None and not self._given:
            self._run.finish(1)
            self._failed = True

    def __getstate__(self) -> dict[str, Any]:
        """Without the run: a process that gets a copy opens an attempt of its own of the same run."""
        return {**vars(self), "_run": None, "_given": False}
