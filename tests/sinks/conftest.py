"""A harness for each kind of sink, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sinks.harness import SinkHarness, harness_kinds, load_harness

# A kind's tests run in one process, since some of them make a server or a database once.
KINDS = [pytest.param(kind, marks=pytest.mark.xdist_group(f"sink-{kind}")) for kind in harness_kinds()]


@pytest.fixture(params=KINDS)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkHarness]:
    made = load_harness(request.param)(tmp_path)
    yield made
    made.close()
