"""The TensorBoard sink in the contract suite, read back with TensorBoard's own EventAccumulator."""

import struct
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util

from gapless_uploader.operations import Value
from gapless_uploader.sink import RunView
from gapless_uploader.sinks.tensorboard import TensorboardSink
from tests.sinks.harness import Point, SinkHarness, moved_away, pipe_in_place_of


class Harness(SinkHarness):
    kind = "tensorboard"
    vendor = "tensorboard"
    way_out = "put it back, or choose another folder"

    def sink(self) -> TensorboardSink:
        return TensorboardSink(str(self.folder / "tb"))

    def outage(self) -> AbstractContextManager[None]:
        return moved_away(self.folder / "tb")

    def refusal(self, run: RunView) -> AbstractContextManager[None]:
        (rows,) = self.folder_of(run).glob("*.rows")
        return pipe_in_place_of(rows)

    def folder_of(self, run: RunView) -> Path:
        found = {path.parent for path in (self.folder / "tb" / run.project).rglob("*tfevents*")}
        (folder,) = (path for path in found if path.name.rpartition("@")[2] == run.tracker_id)
        return folder

    def load(self, run: RunView) -> EventAccumulator:
        accumulator = EventAccumulator(str(self.folder_of(run)), size_guidance={"tensors": 0})
        return accumulator.Reload()

    def _values(self, run: RunView, plugin: str) -> list[tuple[str, Any, Any]]:
        held = self.load(run)
        return [
            (tag, event, tensor_util.make_ndarray(event.tensor_proto))
            for tag in held.PluginTagToContent(plugin)
            for event in held.Tensors(tag)
        ]

    def points(self, run: RunView) -> list[Point]:
        try:
            values = self._values(run, "scalars")
        except KeyError:
            return []
        return [Point(event.step, tag, value.item(), event.wall_time) for tag, event, value in values]

    def texts(self, run: RunView) -> dict[tuple[int, str], str]:
        return {
            (event.step, tag.removesuffix("/text_summary")): value.item().decode()
            for tag, event, value in self._values(run, "text")
        }

    def media(self, run: RunView) -> dict[tuple[int, str], bytes]:
        return {(event.step, tag): value[2] for tag, event, value in self._values(run, "images")}

    def state(self, run: RunView) -> str | None:
        content = self.load(run).PluginTagToContent("hparams").get(hparams.SESSION_END_INFO_TAG)
        if content is None:
            return None
        status = hparams.parse_session_end_info_plugin_data(content).status
        return {1: "finished", 2: "failed"}[status]

    def held(self, value: Value) -> float | None:
        """32 bits; what is beyond them is refused."""
        try:
            return struct.unpack("<f", struct.pack("<f", value))[0]
        except OverflowError:
            return None
