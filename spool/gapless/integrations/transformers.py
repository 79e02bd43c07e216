"""A callback for the `transformers` Trainer and all that is built on it (TRL): `GaplessCallback`.

```python
Trainer(..., args=TrainingArguments(..., report_to="none"), callbacks=[GaplessCallback("grpo")])
```
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from transformers import TrainerCallback

from gapless._fronts.fields import field
from gapless.opening import init
from gapless.run import Run
from gapless.values import as_mapping

_SUMMARY = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")
"""Said once at the end: values of the run, not of its last step."""


class GaplessCallback(TrainerCallback):
    """Logs what the Trainer logs, at its global step, from the main process.

    Opens a run when training begins, with `project`, `name` (else the arguments' `run_name`) and the other arguments of
    `gapless.init`; or writes to `run`, which stays the caller's to finish. The run ends with the process or with
    `callback.run.finish()`: evaluations after `train()` belong to it. Each trial of a hyperparameter search is a run.
    """

    def __init__(
        self, project: str = "huggingface", name: str | None = None, *, run: Run | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.run = run
        """The run being written; None until there is something to write."""
        self._given = run is not None
        self._project = project
        self._name = name
        self._options = options

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        """Open the run, or add this training's config to the open one."""
        del control, more
        if state.is_hyper_param_search and not self._given and self.run is not None:
            self.run.finish()
            self.run = None
        if self.run is None:
            self._open(args, state, model)
        else:
            self.run.config.update(_config(args, model))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **more: Any) -> None:
        """Record one row, named as W&B's own callback names it: `train/loss`, `eval/loss`, `train/global_step`."""
        del control, more
        run = self._open(args, state, model) if self.run is None else self.run
        logs = logs or {}
        summary = {key: logs[key] for key in _SUMMARY if key in logs}
        if summary:
            run.summary.update(summary)
        row = {_grouped(key): value for key, value in logs.items() if key not in summary}
        if row:
            run.log({**row, "train/global_step": state.global_step}, step=state.global_step)

    def _open(self, args: Any, state: Any, model: Any) -> Run:
        options = dict(self._options)
        trial = field(state, "trial_name")
        name = self._name if self._name is not None else field(args, "run_name")
        if trial is not None:
            options.setdefault("group", name or field(args, "output_dir"))
            name = str(trial)
        if state.global_step > 0:
            # Resumed from a checkpoint of this step: what an earlier attempt logged after it is superseded.
            options.setdefault("resume_step", state.global_step + 1)
        options.setdefault("is_writer", bool(state.is_world_process_zero))
        config = {**_config(args, model), **(as_mapping(options.pop("config", None)) or {})}
        self.run = init(self._project, name, config=config, **options)
        return self.run


def _grouped(key: str) -> str:
    for group in ("eval", "test"):
        if key.startswith(f"{group}_"):
            return f"{group}/{key[len(group) + 1 :]}"
    return f"train/{key}"


def _config(args: Any, model: Any) -> dict[str, Any]:
    """The model's config under the training's arguments, as W&B's own callback merges them."""
    config: dict[str, Any] = {}
    adapters: Mapping[Any, Any] | None = as_mapping(field(model, "peft_config"))
    if adapters is not None:
        config["peft_config"] = adapters
    config.update(as_mapping(field(model, "config")) or {})
    config.update(as_mapping(args) or {})
    count = field(model, "num_parameters")
    if callable(count):
        with suppress(Exception):  # a model of the user's own making
            config["model/num_parameters"] = count()
    return config
