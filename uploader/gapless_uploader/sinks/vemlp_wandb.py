"""Volcengine's ML platform, by its own wandb-shaped module, `volcengine_ml_platform.wandb`, driven as verl drives it.

The package is not on PyPI, so this sink was only ever run against a stand-in; what the real one does is not known.
wandb's own rules are assumed: one run a process, steps that rise, no answer to a log call. So rows come at least once,
late steps and changes are refused, and a run that is opened again may be shown as another of the same name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from gapless_uploader.operations import Amend, Log, Media, Missing, Rewind, Row, State, Table, Text, Value
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Parked, Refusal, Retryable, RunView

_CREDENTIALS = ("VOLC_ACCESS_KEY_ID", "VOLC_SECRET_ACCESS_KEY", "MLP_TRACKING_REGION")


class VemlpWandbSink:
    """Credentials and region are the uploader's environment's, by the names verl uses."""

    kind = "vemlp_wandb"
    needs = "volcengine_ml_platform"
    capabilities = Capabilities(
        exactly_once="at least once: the module answers no log call, so a batch in flight at a crash is logged again",
        amend=False,
        late_steps=False,
        tables=True,
        end_state=True,
        original_time=False,
    )

    def __init__(self, target: str = "", *, region: str = "") -> None:
        """`region`: the platform's region; empty: `MLP_TRACKING_REGION`."""
        if target:
            raise Misconfigured(f"sink 'vemlp_wandb' has no target, and was given {target!r}: use --to vemlp_wandb")
        self.target = ""
        self._region = region
        self._lock = Lock()
        self._current: VemlpWandbSession | None = None
        self._ready = False

    def open(self, run: RunView, memo: Memo) -> VemlpWandbSession:
        """A session, which begins its run when it first writes. Raises Misconfigured, Retryable or Parked."""
        try:
            import volcengine_ml_platform as platform
            from volcengine_ml_platform import wandb
        except ImportError as error:
            hint = "install Volcengine's volcengine_ml_platform, which is not on PyPI (no gapless extra has it)"
            raise Misconfigured(f"sink 'vemlp_wandb' needs volcengine_ml_platform ({error}): {hint}") from None
        access, secret, region = (os.environ.get(name, "") for name in _CREDENTIALS)
        region = self._region or region
        if not (access and secret and region):
            raise Parked(f"sink 'vemlp_wandb' needs {', '.join(_CREDENTIALS)} in its environment", whole_sink=True)
        with self._lock:
            if not self._ready:
                with _translated():
                    platform.init(ak=access, sk=secret, region=region)
                self._ready = True
        return VemlpWandbSession(self, wandb, memo)

    @contextmanager
    def turn_of(self, session: VemlpWandbSession, run: RunView) -> Iterator[None]:
        """Inside the block the process's one run is `run`. Raises Retryable."""
        with self._lock:
            if self._current is not session:
                self._current = None
                session.begin(run)
                self._current = session
            yield
            if run.state != "running":
                self._current = None  # the run was finished: more of it begins it again


class VemlpWandbSession:
    """One run, which is the process's one while it writes. Not thread safe."""

    def __init__(self, sink: VemlpWandbSink, wandb: Any, memo: Memo) -> None:
        self._sink = sink
        self._wandb = wandb
        self._step: int = memo.get("step", -1)

    def begin(self, run: RunView) -> None:
        """Make `run` the process's one. Raises Retryable."""
        with _translated():
            self._wandb.init(project=run.project, name=run.name or run.tracker_id, config=run.config)

    def write(self, batch: Batch) -> Ack:
        """Log the batch's rows. Raises Retryable; what was logged by then is logged again."""
        refused: list[Refusal] = []
        with self._sink.turn_of(self, batch.run):
            for operation in batch.operations:
                match operation:
                    case Row(step=int(step), values=values) if step > self._step:
                        self._log(step, values, refused)
                    case Row(step=step) | Amend(step=step) | Rewind(step=step):
                        refused.append(Refusal(step, None, "wandb takes steps that rise"))
                    case Log():
                        refused.append(Refusal(None, None, "console lines are not sent"))
                    case State(state=state, exit_code=code) if state != "running":
                        with _translated():
                            self._wandb.finish(exit_code=0 if state == "finished" else code or 1)
                    case _:
                        pass
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: the module has its own."""

    def flush(self) -> Memo:
        """The memo."""
        return {"step": self._step}

    def close(self) -> None:
        """Nothing is held; the run's end is said by `State` alone. May be called twice."""

    def _log(self, step: int, values: dict[str, Value], refused: list[Refusal]) -> None:
        data: dict[str, Any] = {}
        for key, value in values.items():
            match value:
                case bool() | int() | float():
                    data[key] = value
                case Table(columns=columns, rows=rows):
                    data[key] = self._wandb.Table(columns=columns, data=rows)
                case Missing(reason=reason):
                    refused.append(Refusal(step, key, reason))
                case str() | list() | Text() | Media():
                    refused.append(Refusal(step, key, "only numbers and tables are sent"))
        if data:
            with _translated():
                self._wandb.log(data, step=step)
        self._step = step


@contextmanager
def _translated() -> Iterator[None]:
    """Whatever the module raises, of which nobody knows more, is tried again."""
    try:
        yield
    except Exception as error:
        raise Retryable(f"volcengine_ml_platform: {type(error).__name__}") from error
