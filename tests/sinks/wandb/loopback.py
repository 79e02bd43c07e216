"""The W&B sink as tests make it: at a loopback server, with its key, and without waiting."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

from gapless_uploader.sink import Retryable
from gapless_uploader.sinks._wandb_ahead import ASKER
from gapless_uploader.sinks._wandb_http import Credentials
from gapless_uploader.sinks._wandb_reader import LOOKS_AT_ONCE, READER
from gapless_uploader.sinks.wandb import WandbSink
from tests.servers.wandb_server import DEFAULT_KEY, WandbServer


class LoopbackSink(WandbSink):
    """Credentials come from the test, whatever this machine is logged in to."""

    def __init__(self, url: str, key: str = DEFAULT_KEY, **options: Any) -> None:
        super().__init__(**{"mode": "online", "settle_s": 0.0, "timeout_s": 60.0, "upload_interval": 0.0, **options})
        self.found = Credentials(url, key)

    def _ask(self, anew: bool) -> Credentials:
        return self.found


def make_sink(server: WandbServer, **options: Any) -> LoopbackSink:
    return LoopbackSink(server.url, **options)


def let_questions_end() -> None:
    """Wait for read-backs on their way: asked of a server that is gone, they would hold up the next test's."""
    meet = threading.Barrier(LOOKS_AT_ONCE)
    for met in [ASKER.ask(lambda: {"met": meet.wait()}) for _ in range(LOOKS_AT_ONCE)]:
        met.result()  # all its threads are there, with nothing before this to do
    with suppress(Retryable):
        # Answered behind a `connect`, which has no answer of its own.
        READER.credentials("http://127.0.0.1:9", False)
