"""A harness for each kind of sink, in a folder of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sinks.harness import SHIPS_FILES, SinkHarness, harness_kinds, load_harness


def kinds(left_out: frozenset[str] = frozenset()) -> list[Any]:
    """Parameters, one a kind; a kind's tests run in one process, since some make a server or a database once."""
    return [
        pytest.param(kind, marks=pytest.mark.xdist_group(f"sink-{kind}"))
        for kind in harness_kinds()
        if kind not in left_out
    ]


@pytest.fixture(params=kinds(left_out=SHIPS_FILES))
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkHarness]:
    """Of the kinds that take operations."""
    made = load_harness(request.param)(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=kinds())
def any_harness(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SinkHarness]:
    """Of all kinds; the tracker has a folder of its own beside the test's."""
    (tmp_path / "tracker").mkdir()
    made = load_harness(request.param)(tmp_path / "tracker")
    yield made
    made.close()
