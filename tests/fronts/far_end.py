"""Uploads a spool in this process and reads back what the trackers hold."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.util import tensor_util

from gapless_uploader.sinks.file import FileSink
from gapless_uploader.sinks.tensorboard import TensorboardSink
from gapless_uploader.uploader import Inline, Uploader


@dataclass
class FarEnd:
    """What TensorBoard and the file sink hold of one run."""

    scalars: dict[tuple[int, str], tuple[float, float]]
    """(step, tag) -> value and wall time, from TensorBoard's own reader; a tag has one value a step."""
    texts: dict[tuple[int, str], str]
    about: dict[str, Any]
    """The file sink's page about the run: names, config, state, summary."""
    rows: dict[tuple[int, str], Any]
    """(step, key) -> value, from the file sink's lines, the last one of a key winning as documented."""

    @property
    def values(self) -> dict[tuple[int, str], float]:
        """(step, tag) -> value."""
        return {place: value for place, (value, _) in self.scalars.items()}


def upload(root: Path, folder: Path) -> dict[str, FarEnd]:
    """Every run under `root` by its id, uploaded with a new uploader until all of them are over."""
    sinks = [TensorboardSink(str(folder / "tb"), precision="double"), FileSink(str(folder / "file"))]
    uploader = Uploader([root], sinks, folder / "state", executor=Inline(), jitter=lambda: 0.0)
    uploader.start()
    for turn in range(1000):
        uploader.turn(100.0 * turn)
        if uploader.is_over():
            break
    assert uploader.is_over(), uploader.failed
    assert not uploader.failed
    uploader.stop()
    pages = [(path, json.loads(path.read_text())) for path in (folder / "file").rglob("*.json")]
    return {page["id"]: _read(folder, path, page) for path, page in pages}


def _read(folder: Path, page: Path, about: dict[str, Any]) -> FarEnd:
    (events,) = {path.parent for path in (folder / "tb").rglob("*tfevents*") if path.parent.name.endswith(about["id"])}
    held = EventAccumulator(str(events), size_guidance={"tensors": 0}).Reload()
    scalars: dict[tuple[int, str], tuple[float, float]] = {}
    texts: dict[tuple[int, str], str] = {}
    for plugin in ("scalars", "text"):
        for tag in _tags(held, plugin):
            for event in held.Tensors(tag):
                value = tensor_util.make_ndarray(event.tensor_proto).item()
                if plugin == "text":
                    texts[event.step, tag.removesuffix("/text_summary")] = value.decode()
                else:
                    assert (event.step, tag) not in scalars, f"{tag} twice at step {event.step}"
                    scalars[event.step, tag] = (value, event.wall_time)
    rows = {
        (line["step"], key): value
        for line in map(json.loads, page.with_suffix(".jsonl").read_text().splitlines())
        for key, value in line["data"].items()
    }
    return FarEnd(scalars, texts, about, rows)


def _tags(held: EventAccumulator, plugin: str) -> list[str]:
    try:
        return list(held.PluginTagToContent(plugin))
    except KeyError:  # its word for no such values
        return []
