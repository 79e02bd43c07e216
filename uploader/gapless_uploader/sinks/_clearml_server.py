"""One run at a ClearML server, by the `clearml` package's own API session and request classes.

Host and credentials are ClearML's own (`clearml.conf`, `CLEARML_API_HOST`, `CLEARML_API_ACCESS_KEY`, ...). The task is
found again by a tag made of project and run id. An event's id at the server is made of task, iteration, title and
series, so the same event again replaces itself, and a changed value the old one. The server takes no event back.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gapless_uploader.operations import Amend, Config, Identity, Log, Rewind, Row, State, System, Value
from gapless_uploader.sink import Ack, Batch, Memo, Misconfigured, Parked, Refusal, Rejected, Retryable, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._json import as_json

_MAX_EVENTS = 1_000
_RETRIES = {"total": 0, "connect": 0, "read": 0, "redirect": 3}


def connect() -> Any:
    """An API session by ClearML's own configuration. Raises Misconfigured, Parked or Retryable."""
    module = need("clearml", "clearml.backend_api.session.session")
    try:
        session = module.Session(http_retries_config=dict(_RETRIES))
    except module.MissingConfigError as error:
        hint = "run clearml-init, or set CLEARML_API_HOST and its keys"
        raise Misconfigured(f"sink 'clearml': {error}; {hint}") from error
    except module.LoginError as error:
        # The package makes a login error of an outage too; what it was is the error before.
        if isinstance(error.__context__, OSError):
            raise Retryable(f"ClearML: {error}") from error
        raise Parked(f"ClearML: {error}; set CLEARML_API_ACCESS_KEY and _SECRET_KEY", whole_sink=True) from error
    except (OSError, ValueError) as error:
        raise Retryable(f"ClearML: {error}") from error
    return session


class ClearmlServerSession:
    """One task. Not thread safe."""

    def __init__(
        self,
        api: Any,
        run: RunView,
        memo: Memo,
        tag: str,
        event_of: Callable[[Value, dict[str, Any]], Any],
        unfit: type[Exception],
        place_of: Callable[[str], tuple[str, str]],
    ) -> None:
        services = need("clearml", "clearml.backend_api.services")
        self._api = api
        self._events: Any = services.events
        self._tasks: Any = services.tasks
        self._projects: Any = services.projects
        self._event_of, self._unfit, self._place_of = event_of, unfit, place_of
        self._task: str = memo.get("task") or self._find(run, tag)

    def write(self, batch: Batch) -> Ack:
        """Send the batch. Raises Retryable, Rejected or Parked; what was sent by then may be sent again."""
        refused: list[Refusal] = []
        events: list[Any] = []
        described = False
        state: State | None = None
        for operation in batch.operations:
            match operation:
                case Row(step=int(step), t=t, values=values):
                    self._add(events, step, t, values, refused)
                case Amend(step=step, t=t, values=values, changed=changed):
                    self._add(events, step, t, {key: values[key] for key in changed if key in values}, refused)
                case Rewind(step=step):
                    refused.append(Refusal(step, None, "a ClearML server takes nothing back"))
                case Row():
                    refused.append(Refusal(None, None, "ClearML has no row without an iteration"))
                case Log():
                    refused.append(Refusal(None, None, "console lines are not sent"))
                case Identity() | Config() | System():
                    described = True
                case State():
                    state = operation
        for start in range(0, len(events), _MAX_EVENTS):
            requests = [self._events.AddRequest(event=event) for event in events[start : start + _MAX_EVENTS]]
            answer = self._send(self._events.AddBatchRequest(requests=requests))
            if getattr(answer, "errors", 0):
                raise Retryable(f"ClearML did not add {answer.errors} of {len(requests)} events")
        if described:
            self._describe(batch.run)
        if state is not None:
            self._end(state)
        return Ack(len(batch.operations), self.flush(), refused)

    def heartbeat(self, now: float) -> None:
        """Nothing: a task that was started is running until it is said to have ended."""

    def flush(self) -> Memo:
        """The memo; every answer was an acknowledgement."""
        return {"task": self._task}

    def close(self) -> None:
        """Nothing is held. May be called twice."""

    def _find(self, run: RunView, tag: str) -> str:
        found = self._send(self._tasks.GetAllRequest(tags=[tag], only_fields=["id"])).tasks
        if found:
            return str(found[0].id)
        project = self._project(run.project)
        made = self._send(
            self._tasks.CreateRequest(name=run.name or run.tracker_id, type="training", project=project, tags=[tag])
        )
        self._send(self._tasks.StartedRequest(task=made.id, force=True))
        return str(made.id)

    def _project(self, name: str) -> str:
        found = self._send(
            self._projects.GetAllRequest(name=f"^{re.escape(name)}$", only_fields=["id", "name"])
        ).projects
        for project in found or []:
            if project.name == name:
                return str(project.id)
        return str(self._send(self._projects.CreateRequest(name=name, description="")).id)

    def _add(self, events: list[Any], step: int, t: float, values: dict[str, Value], refused: list[Refusal]) -> None:
        for key, value in values.items():
            title, series = self._place_of(key)
            place = {"task": self._task, "iter": step, "timestamp": round(t * 1000), "metric": title, "variant": series}
            try:
                events.append(self._event_of(value, place))
            except self._unfit as reason:
                refused.append(Refusal(step, key, str(reason)))

    def _describe(self, run: RunView) -> None:
        config = {"name": "Hyperparameters", "type": "dictionary", "value": as_json(run.config, indent=2)}
        edit = self._tasks.EditRequest(
            task=self._task,
            force=True,
            name=run.name or run.tracker_id,
            comment=run.notes or "",
            configuration={"Hyperparameters": config},
        )
        self._send(edit)

    def _end(self, state: State) -> None:
        match state.state:
            case "running":
                self._send(self._tasks.StartedRequest(task=self._task, force=True))
            case "finished":
                self._send(self._tasks.CompletedRequest(task=self._task, force=True))
            case _:
                reason = f"{state.state}, exit code {state.exit_code}"
                self._send(self._tasks.FailedRequest(task=self._task, force=True, status_reason=reason))

    def _send(self, request: Any) -> Any:
        """The answer to a request. Raises by its code."""
        try:
            result = self._api.send(request)
        except (OSError, ValueError) as error:
            raise Retryable(f"ClearML: {error}") from error
        if result is not None and result.ok():
            return result.response
        code = result.meta.result_code if result is not None else 0
        reason = f"ClearML answered {code}: {result.meta.result_msg if result is not None else 'nothing'}"
        if code in (401, 403):
            raise Parked(f"{reason}; set CLEARML_API_ACCESS_KEY and _SECRET_KEY", whole_sink=True)
        if code == 413:
            raise Rejected(reason, too_large=True)
        if code == 400 and result.meta.result_subcode == 101:  # invalid task id: it was deleted
            raise Parked(f"{reason}; restore the task, or upload under a new id")
        if code == 400:
            raise Rejected(reason)
        raise Retryable(reason)
