"""The run of a process that does not write: every call of `Run`, and nothing happens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from gapless.run import FOR_ALL, Run
from gapless.settings import Config, Summary
from gapless.tally import Stats


class NoRun(Run):
    """A run whose calls do nothing: another rank's, or a disabled one."""

    def __init__(self, run_id: str, path: Path) -> None:
        self.config = Config(_nothing)
        self.summary = Summary(_nothing)
        self._run_id = run_id
        self._path = path

    @property
    def id(self) -> str:
        """The run id where it was given, else an empty text."""
        return self._run_id

    @property
    def path(self) -> Path:
        """Where the run would be; nothing is made there."""
        return self._path

    @property
    def is_writer(self) -> bool:
        return False

    def log(
        self,
        data: Mapping[Any, Any],
        step: int | None = None,
        *,
        t: float | datetime | None = None,
        skip_sinks: Iterable[str] = FOR_ALL,
    ) -> None:
        """Do nothing."""

    def define_axis(
        self, key: str, axis: str | None = None, *, summary: Literal["last", "min", "max", "mean", "none"] | None = None
    ) -> None:
        """Do nothing."""

    def console(self, lines: Iterable[str], stream: str = "stdout") -> None:
        """Do nothing."""

    def flush(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        """Nothing waits: True."""
        return True

    def finish(self, exit_code: int | None = 0, *, timeout: float | None = None) -> None:
        """Do nothing."""

    def stats(self) -> Stats:
        """All zero."""
        return Stats()


def _nothing(_part: Any) -> None:
    return None
