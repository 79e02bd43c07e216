"""A real Trainer on a tiny random model: `python train_transformers.py FOLDER`, the spool under `GAPLESS_DIR`.

Trains 6 steps with a checkpoint at 4, evaluates, and starts anew from that checkpoint as the same run, each training
evaluating with a metric that names it; then two trials of a hyperparameter search. Writes what the Trainer itself says
it logged to FOLDER/history.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gapless.integrations.transformers import GaplessCallback

WATCHED = {"wandb", "swanlab", "mlflow", "trackio", "clearml", "tensorboard"}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    )


def trainer(folder: Path, callback: GaplessCallback | None, **more: Any) -> Trainer:
    data = [{"input_ids": torch.arange(i, i + 8) % 32, "labels": torch.arange(i, i + 8) % 32} for i in range(16)]
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_steps": 4,
        "report_to": "none",
        "run_name": "tiny",
        "hub_token": "hf_" + "a1B2" * 8,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return Trainer(
        model=None if "model_init" in more else model(),
        args=TrainingArguments(**options),
        train_dataset=data,
        eval_dataset=data[:4],
        callbacks=None if callback is None else [callback],
        **more,
    )


def main(folder: Path) -> None:
    before = WATCHED & set(sys.modules)
    callback = GaplessCallback("hf", id="first", tags=["t"], sinks=["wandb"])
    first = trainer(folder / "a", callback, compute_metrics=lambda _: {"training": 1})
    first.train()
    first.evaluate()
    assert callback.run is not None
    callback.run.finish()

    resumed = GaplessCallback("hf", id="first")
    second = trainer(folder / "a", resumed, compute_metrics=lambda _: {"training": 2})
    second.train(resume_from_checkpoint=str(folder / "a" / "checkpoint-4"))
    assert resumed.run is not None
    resumed.run.finish()

    searched = GaplessCallback("search")
    search = trainer(folder / "b", searched, model_init=model)
    for trial in ("trial-0", "trial-1"):
        search.state.is_hyper_param_search, search.state.trial_name = True, trial
        searched.on_train_begin(search.args, search.state, search.control, model=search.model)
        searched.on_log(search.args, search.state, search.control, logs={"loss": 1.0})
    assert searched.run is not None
    searched.run.finish()

    history = {
        "first": first.state.log_history,
        "second": [entry for entry in second.state.log_history if entry["step"] > 4],
        "imported": sorted(WATCHED & set(sys.modules) - before),
    }
    (folder / "history.json").write_text(json.dumps(history))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
