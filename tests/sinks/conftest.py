"""A harness for each kind of sink, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sinks.harness import SinkHarness, find_harnesses

HARNESSES = find_harnesses()


@pytest.fixture(params=sorted(HARNESSES))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkHarness]:
    made = HARNESSES[request.param](tmp_path)
    yield made
    made.close()
