"""The fronts' pages: their code runs, their lists are the code's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from gapless._fronts.noted import NOTED
from gapless.tracking import Tracking
from tests.spool.oracle import only

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("areal", "verl", "trainers", "differences")


def blocks(page: str) -> list[str]:
    """The page's Python."""
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)


def block(page: str, word: str) -> str:
    (found,) = (code for code in blocks(page) if word in code)
    return found


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(code, names)  # noqa: S102  # our own pages
    return names


@pytest.mark.parametrize("page", PAGES)
def test_code_is_python(page: str) -> None:
    """Every block compiles."""
    for code in blocks(page):
        compile(code, page, "exec")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Links between pages name files that are there."""
    for target in re.findall(r"\]\(([^)#]+)", (DOCS / f"{page}.md").read_text()):
        assert (DOCS / target).is_file(), target


def test_differences_have_their_reason() -> None:
    """Every row of the page of differences says what is theirs, what is ours, and why."""
    rows = [line for line in (DOCS / "differences.md").read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]

    assert len(rows) > 25
    assert [row for row in cells if len(row) != 3 or not all(row)] == []


def test_verls_page_names_what_the_code_knows() -> None:
    """The ten backends, and only variables that are noted."""
    text = (DOCS / "verl.md").read_text()
    (listed,) = re.findall(r"keeps its names: (.*?)\. `console`", text, re.DOTALL)
    variables = set(re.findall(r"`((?:WANDB|SWANLAB|TENSORBOARD|MLFLOW|VERL)_[A-Z_]+)[`=]", text))

    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(Tracking.supported_backend)
    assert len(variables) > 8
    assert variables <= set(NOTED)


def test_areals_page_imports_what_it_says() -> None:
    """The two imports of the page work as they stand."""
    assert {"stats_tracker", "StatsLogger"} <= set(run(block("areal", "StatsLogger"), {}))


def torchtitan_standing_in() -> dict[str, ModuleType]:
    """What the recipe touches of torchtitan 0.3.0, whose builder looks `WandBLogger` up by its name."""
    metrics = ModuleType("torchtitan.components.metrics")
    source = """
class BaseLogger:
    def log(self, metrics, step): ...
    def close(self): ...

class WandBLogger(BaseLogger):
    def __init__(self, log_dir, config_dict=None, tag=None):
        raise AssertionError("torchtitan's own logger was built")

def build(log_dir, config_dict, tag):
    return WandBLogger(log_dir, config_dict=config_dict, tag=tag)
"""
    run(source, vars(metrics))
    components = ModuleType("torchtitan.components")
    components.metrics = metrics  # type: ignore[attr-defined]
    return {
        "torchtitan": ModuleType("torchtitan"),
        "torchtitan.components": components,
        "torchtitan.components.metrics": metrics,
    }


def test_torchtitans_recipe_logs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its builder makes our logger, on a rank that is not 0, with tag, config, and the end as it was."""
    modules = torchtitan_standing_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("RANK", "6")
    run(block("trainers", "torchtitan"), {"__name__": "recipe"})
    logger = modules["torchtitan.components.metrics"].build("/nowhere", {"lr": 0.5}, "titan")
    logger.log({"loss": 1.5, "tps(device)": 2}, 10)
    try:
        raise RuntimeError("a rank died")
    except RuntimeError:
        logger.close()
    (folder,) = (root / "torchtitan").iterdir()

    assert [(r.step, r.data) for r in only(folder, "metrics")] == [(10, {"titan/loss": 1.5, "titan/tps(device)": 2})]
    assert only(folder, "run")[0].data["config"] == {"lr": 0.5}
    assert only(folder, "finish")[0].data["state"] == "failed"


def test_trls_recipe_logs_completions(root: Path, tmp_path: Path) -> None:
    """Each Parquet file that TRL wrote since training began is one table at its step."""
    names = run(block("trainers", "WithCompletions"), {})
    folder = tmp_path / "completions"
    folder.mkdir()

    def write(step: int) -> None:
        frame = pd.DataFrame({"step": [step] * 2, "completion": ["a", "b"], "advantage": [0.5, -0.5]})
        frame.to_parquet(folder / f"completions_{step:05d}.parquet")

    write(1)
    args = SimpleNamespace(output_dir=str(tmp_path), run_name="grpo")
    state = SimpleNamespace(is_hyper_param_search=False, trial_name=None, global_step=1, is_world_process_zero=True)
    callback = names["WithCompletions"]("trl")
    callback.on_train_begin(args, state, None)
    for step in (2, 3):
        write(step)
        callback.on_step_end(args, state, None)
    write(4)
    callback.on_train_end(args, state, None)
    callback.run.finish()
    tables = only(callback.run.path, "table")

    assert [(r.step, r.data["key"], r.data["rows"][0]) for r in tables] == [
        (step, "completions", [step, "a", 0.5]) for step in (2, 3, 4)
    ]
