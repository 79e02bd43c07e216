"""A harness for each kind of sink, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sinks.harness import SinkHarness, harness_kinds, load_harness


@pytest.fixture(params=harness_kinds())
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkHarness]:
    made = load_harness(request.param)(tmp_path)
    yield made
    made.close()
