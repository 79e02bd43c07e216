"""A real Lightning Trainer on a tiny model: `python train_lightning.py FOLDER`, the spool under `GAPLESS_DIR`.

Fits 2 epochs of 4 batches, tests, fits a model that fails, and logs once more after that. Writes the metrics that
Lightning's own CSV logger got at the same time to FOLDER/csv.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from gapless.integrations.lightning import GaplessLogger


class Tiny(pl.LightningModule):
    def __init__(self, width: int = 3, api_key: str = "sk-" + "a1B2" * 8, fail_at: int = -1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(width, 1)
        self.fail_at = fail_at

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise RuntimeError("a bad batch")
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        self.log_dict({"half": loss / 2}, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test/loss", self.layer(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(loggers: list[Any], folder: Path) -> pl.Trainer:
    return pl.Trainer(
        max_epochs=2,
        logger=loggers,
        accelerator="cpu",
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )


def main(folder: Path) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=2)
    logger = GaplessLogger("pl", "tiny", id="fitted", sinks=["tensorboard"])
    both = trainer([logger, CSVLogger(folder / "csv", "", "0")], folder)
    both.fit(Tiny(), data)
    both.test(both.lightning_module, data, verbose=False)
    logger.experiment.finish()

    failing = GaplessLogger("pl", id="failed")
    copy = pickle.loads(pickle.dumps(failing))  # noqa: S301  # as Lightning hands a logger to its processes
    assert copy.version == "failed"
    with suppress(RuntimeError):
        trainer([failing], folder).fit(Tiny(fail_at=2), data)
    failing.log_metrics({"after": 1.0}, step=9)
    failing.experiment.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
