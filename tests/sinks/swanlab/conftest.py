"""A server, and a world round it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.swanlab import SwanLabServer
from tests.sinks.swanlab.world import World


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SwanLabServer]:
    with SwanLabServer() as made:
        for name in ("SWANLAB_WORKSPACE", "SWANLAB_MODE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("SWANLAB_API_HOST", made.url)
        monkeypatch.setenv("SWANLAB_API_KEY", made.api_key)
        yield made


@pytest.fixture
def world(tmp_path: Path, server: SwanLabServer) -> Iterator[World]:
    made = World(tmp_path, server)
    yield made
    made.kill()
