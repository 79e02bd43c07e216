"""What a run says of itself: names, config, axes, console lines, gaps. `main` and the newest attempts have the word.

An attempt's `run` record replaces what older attempts of its writer said. A newer attempt may be known and unread:
until then the run has the older one's name, as when it was live.
"""

from __future__ import annotations

from typing import Any

from gapless_schemas import Header, Record
from gapless_uploader.merge import attempt_order, bounded, merge_config, writer_order
from gapless_uploader.operations import Axis, Config, Gap, Identity, Log, Operation
from gapless_uploader.sink import RunView

KINDS = frozenset(["run", "config", "axis", "log", "gap"])


class Description:
    """Keeps the view's identity, config and axes. Not thread safe."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._configs: dict[str, dict[str, Any]] = {}
        """Writer -> what it says."""
        self._said_by: dict[str, tuple[int, float, str]] = {}
        """Writer -> the place of its newest attempt whose `run` record was read."""

    def take(self, header: Header, record: Record) -> list[Operation]:
        """The operations that a record of one of `KINDS` makes."""
        data, kind = record.data, record.kind
        if kind == "log":
            lines = data.get("lines")
            return [Log(str(data.get("stream")), [str(x) for x in lines], record.t)] if isinstance(lines, list) else []
        if kind == "gap":
            steps = data.get("steps")
            rows = data.get("rows")
            told = steps if isinstance(steps, list) else None
            return [Gap(rows if type(rows) is int else 0, told, str(data.get("reason")))]
        if kind == "axis":
            return self._axis(data)
        if attempt_order(header) < self._said_by.get(header.writer, (0, 0.0, "")):
            return []
        return self._run(header, data) if kind == "run" else self._config(header.writer, data)

    def to_json(self) -> list[Any]:
        """What `restore` takes."""
        return [self._configs, {writer: list(place) for writer, place in self._said_by.items()}]

    def restore(self, saved: list[Any]) -> None:
        """Go on from what `to_json` gave. Raises LookupError, TypeError or ValueError when it does not fit."""
        self._configs = saved[0]
        self._said_by = {writer: (number, created, name) for writer, (number, created, name) in saved[1].items()}

    def _run(self, header: Header, data: dict[str, Any]) -> list[Operation]:
        writer, view = header.writer, self._view
        self._said_by[writer] = attempt_order(header)
        config = data.get("config")
        self._configs[writer] = bounded(config) if isinstance(config, dict) else {}
        made: list[Operation] = []
        if writer == min(self._said_by, key=writer_order):
            for name in ("name", "group", "job_type", "notes", "entity"):
                value = data.get(name)
                setattr(view, name, value if isinstance(value, str) else None)
            view.tags = _texts(data.get("tags")) or []
            view.sinks = _texts(data.get("sinks"))
            made.append(Identity(view.name, view.group, view.job_type, view.tags, view.notes, view.entity, view.sinks))
        return [*made, self._merged()]

    def _config(self, writer: str, data: dict[str, Any]) -> list[Operation]:
        self._configs[writer] = merge_config(self._configs.get(writer, {}), bounded(data))
        return [self._merged()]

    def _merged(self) -> Config:
        merged: dict[str, Any] = {}
        for writer in sorted(self._configs, key=writer_order, reverse=True):
            merged = merge_config(merged, self._configs[writer])
        self._view.config = merged
        return Config(merged)

    def _axis(self, data: dict[str, Any]) -> list[Operation]:
        key, axis, rule = data.get("key"), data.get("axis"), data.get("summary")
        if not isinstance(key, str):
            return []
        axis = axis if isinstance(axis, str) else None
        rule = rule if isinstance(rule, str) else None
        self._view.axes[key] = (axis, rule)
        return [Axis(key, axis, rule)]


def _texts(value: object) -> list[str] | None:
    return [str(item) for item in value] if isinstance(value, list) else None
