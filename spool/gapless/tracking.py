"""verl's `Tracking`, into the spool: `from gapless.tracking import Tracking`, or `install()` and no edit at all.

Whichever process builds a `Tracking` writes, as in verl, where the last pipeline stage logs and not rank 0. `console`
prints at once; every other backend is a kind of tracker that the run asks for, and its rows go to the spool once.
"""

from __future__ import annotations

import numbers
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import sha256
from threading import Thread, current_thread
from types import TracebackType
from typing import Any, ClassVar, Final, Protocol, Self

from gapless._fronts.current import Names, closed, left_out, names, opened, tracker_kinds
from gapless._fronts.fields import field
from gapless._fronts.noted import noted_environment, wandb_names
from gapless._fronts.patch import install
from gapless._fronts.samples import DapoFilteredRewardTableLogger, ValidationGenerationsLogger
from gapless.config import read_environment
from gapless.numeric import as_number
from gapless.opening import init
from gapless.payloads import Table
from gapless.run import Run
from gapless.values import as_mapping
from gapless.warn import Warner

__all__ = ["DapoFilteredRewardTableLogger", "Tracking", "ValidationGenerationsLogger", "install"]

_RESUMES: Final = ("auto", "resume_path")
"""The values of verl's `trainer.resume_mode` with which a restarted job goes on from its checkpoint."""


class _Logger(Protocol):
    def log(self, data: Mapping[Any, Any], step: Any) -> None: ...


class Tracking:
    """Logs to the backends named in `default_backend`. Thread safe.

    Raises ValueError for a name that is none of `supported_backend`.
    """

    supported_backend: ClassVar[list[str]] = [
        "wandb",
        "mlflow",
        "swanlab",
        "vemlp_wandb",
        "tensorboard",
        "console",
        "clearml",
        "trackio",
        "file",
        "rl_insight",
    ]

    def __init__(
        self,
        project_name: Any,
        experiment_name: Any,
        default_backend: str | Iterable[str] = "console",
        config: Any = None,
    ) -> None:
        backends = [default_backend] if isinstance(default_backend, str) else [str(name) for name in default_backend]
        for name in backends:
            if name == "tracking":
                warnings.warn("the backend 'tracking' is called 'wandb' now", DeprecationWarning, stacklevel=2)
            elif name not in self.supported_backend:
                raise ValueError(f"{name} is not supported; there are: {', '.join(self.supported_backend)}")
        kinds = tracker_kinds(backends)
        self._names = names(project_name, experiment_name)
        self.run = _open(self._names, kinds, config, is_writer=bool(backends))
        self.logger: dict[str, _Logger] = dict.fromkeys(kinds, self.run)
        """Backend -> what logs to it; the trackers share one run."""
        if "console" in backends:
            self.logger["console"] = _Console()
        # A trainer that returns just lets go of its Tracking, in workers that end without an interpreter's exit.
        self._release = weakref.finalize(self, _let_go, self._names, self.run)
        self._release.atexit = False  # `gapless.exits` ends runs then, and knows of an exception

    def log(self, data: Mapping[Any, Any], step: Any, backend: str | Iterable[str] | None = None) -> None:
        """Log one row: to every backend, or to those named in `backend`."""
        chosen = None if backend is None else {backend} if isinstance(backend, str) else set(backend)
        console = self.logger.get("console")
        if console is not None and (chosen is None or "console" in chosen):
            console.log(as_mapping(data) or {}, step)
        if chosen is None:
            self.run.log(_with_tables(data), step=step)
        elif any(self.logger.get(name) is self.run for name in chosen):
            self.run.log(_with_tables(data), step=step, skip_sinks=left_out(self.run, chosen))

    def finish(self, exit_code: int | None = 0) -> None:
        """End the run, `failed` where `exit_code` is neither 0 nor None. A second call does nothing."""
        if self._release.detach() is not None:
            _finish(self._names, self.run, exit_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._release.detach() is not None:
            closed(self._names, self.run)
            self.run.__exit__(kind, error, traceback)


class _Console:
    """Prints a row's numbers on one line, as verl does."""

    def log(self, data: Mapping[Any, Any], step: Any) -> None:
        parts = [f"step:{step}"]
        for key, value in data.items():
            if isinstance(value, numbers.Number):
                number = as_number(value)
                parts.append(f"{key}:{value if number is None else number!r}")
        with suppress(Exception):  # stdout may be closed, full or of the user's own making
            sys.stdout.write(" - ".join(parts) + "\n")
            sys.stdout.flush()


_seen: Counter[Names] = Counter()


def _open(which: Names, kinds: list[str], config: Any, is_writer: bool) -> Run:
    noted = noted_environment()
    fields = as_mapping(config) or {}
    more: dict[str, Any] = {"gapless": {"front": "verl", "backends": kinds, "environment": noted}}
    if "swanlab" in kinds:
        more["FRAMEWORK"] = "verl"
    _seen[which] += 1
    run = init(
        which[0],
        which[1],
        id=_requeued_id(which, fields),
        config={**fields, **more},
        is_writer=is_writer,
        sinks=kinds,
        **(wandb_names(noted) if "wandb" in kinds else {}),
    )
    opened(which, run, kinds)
    if run.is_writer:
        Warner().say(f"{which[1]} writes to {run.path}, for {', '.join(kinds) or 'whoever asks'}")
    return run


def _requeued_id(which: Names, config: Mapping[Any, Any]) -> str | None:
    """The id that a requeued Slurm job finds again where verl goes on from its checkpoint; None for a new run."""
    environment = read_environment()
    job = environment.slurm_job_id
    if environment.run_id is not None or job is None or field(config, "trainer", "resume_mode") not in _RESUMES:
        return None
    text = "\0".join((job, *which, str(_seen[which])))
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _with_tables(data: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """`data` with data frames as tables, which verl's ClearML backend takes."""
    fields = as_mapping(data)
    if fields is None:
        return data  # the run says what it takes
    frames = {key: Table(dataframe=value) for key, value in fields.items() if _is_frame(value)}
    return {**fields, **frames} if frames else data


def _is_frame(value: Any) -> bool:
    return type(value).__module__.startswith("pandas") and hasattr(value, "itertuples")


def _let_go(which: Names, run: Run) -> None:
    """End the run of a Tracking that nobody holds any more."""
    if not current_thread().daemon:
        _finish(which, run, None)
        return
    # The garbage was collected in a thread of the background, maybe in the run's own writer, which must not wait for
    # itself.
    with suppress(RuntimeError):  # the interpreter is ending, and ends the run itself
        Thread(target=_finish, args=(which, run, None), daemon=True).start()


def _finish(which: Names, run: Run, exit_code: int | None) -> None:
    closed(which, run)
    run.finish(exit_code)
