"""The benchmarks' page: what it shows, and what it must not name."""

from __future__ import annotations

import importlib
import inspect
import platform
import socket
from pathlib import Path

import pytest

from benchmarks.__main__ import as_line, page, shown

BENCHMARKS = sorted(
    path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py") if not path.stem.startswith("_")
)
FIGURE = {"figure": "read", "ours": 123.456, "peers": {"json": 45.67}, "target": 100, "unit": "MB/s a core"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_can_be_run_by_the_command(name: str):
    """Each module has `run(quick)` and a first line that says what it measures."""
    module = importlib.import_module(f"benchmarks.{name}")

    assert list(inspect.signature(module.run).parameters) == ["quick"]
    assert (module.__doc__ or "").strip()


def test_a_page_has_figures_peers_and_the_machine():
    """The page has a row a figure, says on what machine it was, and what could not be measured."""
    text = page({"uploader": [{**FIGURE, "note": "warm"}]}, ["wandb: RuntimeError: no server"])

    assert "| read; warm | 123 | 100 | json 45.7 | MB/s a core |" in text
    assert "cores" in text
    assert "- wandb: RuntimeError: no server" in text
    assert as_line(FIGURE) == "read: 123 MB/s a core (target 100); json 45.7"


def test_a_page_names_no_machine(monkeypatch: pytest.MonkeyPatch):
    """The page says what figures depend on, and no host, user or path."""
    names = platform.uname()._replace(node="a-secret-host")
    monkeypatch.setattr(platform, "uname", lambda: names)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-secret-host")
    text = page({"uploader": [FIGURE]}, [])

    assert "a-secret-host" not in text
    assert str(Path(__file__).parents[1]) not in text
    assert str(Path.home()) not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.05567, "0.0557"), (9.996, "10"), (1234567.0, "1,234,567"), ("reported", "reported")],
)
def test_values_are_short(value: object, text: str):
    """A value has the three digits that matter."""
    assert shown(value) == text
