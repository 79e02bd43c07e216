"""The guide says what is there."""

from __future__ import annotations

import re
from inspect import signature
from pathlib import Path

from gapless import stats_tracker
from gapless._stats import reduce

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "statistics.md").read_text()


def test_every_public_name_is_in_the_guide() -> None:
    """And what the guide shows as a call exists, with its parameters."""
    for name in stats_tracker.__all__:
        assert name in GUIDE, name
    shown = re.findall(r"^\| `(\w+)\(([^)]*)\)` \|", GUIDE, re.MULTILINE)

    assert len(shown) == 10
    for name, parameters in shown:
        bare = [str(p).split(":")[0].split(" ")[0] for p in signature(getattr(stats_tracker, name)).parameters.values()]
        assert [part.split("=")[0] for part in parameters.split(", ") if part] == bare, name


def test_every_link_of_the_guide_leads_somewhere() -> None:
    """All of them are pages of this repository."""
    links = re.findall(r"\]\(([^)]+)\)", GUIDE)

    assert links
    assert all((ROOT / "docs" / link).is_file() for link in links)


def test_the_guide_gives_the_limits_of_the_code() -> None:
    """As they are."""
    assert f"at most {reduce._MAX_GATHERED_BYTES // 1024} KiB" in GUIDE
    assert reduce._PATIENCE_S == 1.0
    assert "has waited for a second leaves word" in GUIDE
