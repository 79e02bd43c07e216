"""Lays out a package `verl` in a folder: the modules that verl 0.9.1 has between its command and its logging."""

from __future__ import annotations

from pathlib import Path

TRACKING = '''
"""Stands for verl's own module: its classes must not be built."""

class Tracking:
    def __init__(self, *args, **kwargs):
        raise AssertionError("verl's own Tracking was built")

class ValidationGenerationsLogger(Tracking):
    pass

class DapoFilteredRewardTableLogger(Tracking):
    pass

class RLInsightLogger:
    @classmethod
    def enabled(cls):
        return False
'''

TRAINER = """
from verl.utils.tracking import DapoFilteredRewardTableLogger, RLInsightLogger, Tracking, ValidationGenerationsLogger

class Trainer:
    def __init__(self, config):
        self.config = config

    def fit(self):
        names = {"project_name": "p", "experiment_name": "e"}
        self.logger = Tracking(**names, default_backend=["console", "wandb"], config=self.config)
        self.generations = ValidationGenerationsLogger(**names)
        self.filtered = DapoFilteredRewardTableLogger(**names)
        assert not RLInsightLogger.enabled()
        self.generations.log(["console", "wandb"], [("in", "out", 1.0)], 0)
        self.logger.log(data={"val/acc": 0.25}, step=0)
        for step in (1, 2):
            self.logger.log(data={"actor/loss": 1.0 / step}, step=step)
            self.filtered.log(["console", "wandb"], {0.0: step}, step)
        if self.config["fail"]:
            raise RuntimeError("a worker died")
"""

MAIN = """
import sys
from verl.trainer.trainer import Trainer

def main():
    trainer = Trainer({"trainer": {"resume_mode": "auto"}, "fail": "fail" in sys.argv[1:]})
    succeeded = False
    try:
        trainer.fit()
        succeeded = True
    finally:
        trainer.logger.finish(exit_code=0 if succeeded else 1)
    print("argv", sys.argv[1:], __name__, __spec__.name)

if __name__ == "__main__":
    main()
"""


def lay_out(folder: Path) -> Path:
    """The folder to put on the path."""
    modules = {"utils/tracking": TRACKING, "trainer/trainer": TRAINER, "trainer/main_ppo": MAIN}
    for name in ("__init__", "utils/__init__", "trainer/__init__"):
        modules[name] = ""
    for name, text in modules.items():
        path = folder / "verl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
