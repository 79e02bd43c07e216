"""A SwanLab server and a client of it; the tests of the W&B server have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RawClient


@pytest.fixture
def server() -> Iterator[SwanLabServer]:
    with SwanLabServer() as server:
        yield server


@pytest.fixture
def raw(server: SwanLabServer) -> Iterator[RawClient]:
    """A client that has opened a run."""
    with RawClient(server.url, server.api_key) as raw:
        raw.open_run()
        yield raw
