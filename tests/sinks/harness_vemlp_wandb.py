"""The vemlp_wandb sink in the contract suite, against a stand-in for the module that is not on PyPI."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gapless_uploader.sink import RunView
from gapless_uploader.sinks.vemlp_wandb import VemlpWandbSink
from tests.sinks.harness import Point, SinkHarness


class StandIn:
    """Records what verl's calls would do: runs by project and name, rows, tables, ends."""

    def __init__(self) -> None:
        self.runs: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.ends: dict[tuple[str, str], int] = {}
        self.logins: list[dict[str, str]] = []
        self.failures: list[Exception] = []
        self.away = False
        self._current: tuple[str, str] | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        platform, wandb = ModuleType("volcengine_ml_platform"), ModuleType("volcengine_ml_platform.wandb")
        platform.init = lambda **login: self.logins.append(login)  # type: ignore[attr-defined]
        platform.wandb = wandb  # type: ignore[attr-defined]
        wandb.init, wandb.log, wandb.finish = self._init, self._log, self._finish  # type: ignore[attr-defined]
        wandb.Table = lambda columns, data: {"columns": columns, "data": data}  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "volcengine_ml_platform", platform)
        patch.setitem(sys.modules, "volcengine_ml_platform.wandb", wandb)
        for name in ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION"):
            patch.setenv(name, name.lower())

    def _reach(self) -> None:
        if self.away:
            raise ConnectionError("no route to host")

    def _init(self, *, project: str, name: str, config: Any) -> None:
        self._reach()
        self._current = project, name
        self.runs.setdefault(self._current, [])
        self.ends.pop(self._current, None)

    def _log(self, data: dict[str, Any], step: int) -> None:
        self._reach()
        if self.failures:
            raise self.failures.pop(0)
        assert self._current is not None
        self.runs[self._current].append((step, data))

    def _finish(self, exit_code: int) -> None:
        self._reach()
        assert self._current is not None
        self.ends[self._current] = exit_code


class Harness(SinkHarness):
    kind = "vemlp_wandb"
    tells_runs_apart = False
    refusal_is_for_all = True
    way_out = "in its environment"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._patch = pytest.MonkeyPatch()
        self.stand_in = StandIn()
        self.stand_in.install(self._patch)

    def sink(self) -> VemlpWandbSink:
        return VemlpWandbSink()

    @contextmanager
    def outage(self) -> Iterator[None]:
        self.stand_in.away = True
        yield
        self.stand_in.away = False

    @contextmanager
    def refusal(self, run: RunView) -> Iterator[None]:
        """The uploader is started without a credential, as it reads its environment once."""
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("VOLC_SECRET_ACCESS_KEY")
            yield

    def _place(self, run: RunView) -> tuple[str, str]:
        return run.project, run.name or run.tracker_id

    def points(self, run: RunView) -> list[Point]:
        rows = self.stand_in.runs[self._place(run)]
        return [
            Point(step, key, value)
            for step, data in rows
            for key, value in data.items()
            if isinstance(value, (bool, int, float))
        ]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        rows = self.stand_in.runs[self._place(run)]
        return {(step, key): repr(value) for step, data in rows for key, value in data.items()}

    def state(self, run: RunView) -> str | None:
        code = self.stand_in.ends.get(self._place(run))
        return None if code is None else "finished" if code == 0 else "failed"

    def close(self) -> None:
        self._patch.undo()
