"""What the sinks' page says is what the code says."""

import re

from gapless_uploader.sink import Capabilities
from gapless_uploader.sinks import SINKS, list_sinks, make_sink
from tests.sinks.harness_sqlite import DOCS, template
from tests.sinks.versions import SUBJECTS, oldest

HEADINGS = ["amend", "late_steps", "rewind", "non_finite", "text", "tables", "media", "end_state", "original_time"]
TARGETS = {"spool": "spool:/x"}


def tables() -> list[dict[str, list[str]]]:
    """The page's tables: kind -> cells."""
    found: list[dict[str, list[str]]] = [{}]
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found[-1][cells[0].strip("`")] = cells[1:]
        elif found[-1]:
            found.append({})
    return [table for table in found if table]


def test_every_sink_has_its_rows() -> None:
    """Each kind is in the table of what it holds and in the table of how a row arrives once."""
    holds, once, *_ = tables()

    assert set(SINKS) <= set(holds)
    assert set(holds) == set(once)


def test_the_table_says_what_the_sinks_declare() -> None:
    """A capability that a sink declares is no 'no' in its row, and one it lacks is no plain 'yes'."""
    holds, *_ = tables()
    wrong = []
    for kind in SINKS:
        cells = holds[kind]
        can: Capabilities = make_sink(TARGETS.get(kind, kind)).capabilities
        for name, cell in zip(HEADINGS, cells[1:], strict=True):
            declared = getattr(can, name)
            if (declared and cell in ("no", "refused")) or (not declared and cell == "yes"):
                wrong.append((kind, name, cell))

    assert wrong == []


def test_the_versions_that_were_run_are_the_ranges_lower_ends() -> None:
    """The oldest version on the page is the lower bound of the extra, for every kind that `make versions` runs."""
    *_, ran = tables()

    assert {subject.kind: oldest(subject) for subject in SUBJECTS} == {kind: cells[0] for kind, cells in ran.items()}


def test_at_least_once_is_said_where_it_is_so() -> None:
    """Exactly the sinks that promise at least once say so on the page."""
    _, once, *_ = tables()
    promises = {kind: make_sink(TARGETS.get(kind, kind)).capabilities.exactly_once for kind in SINKS}
    declared = {kind for kind, promise in promises.items() if promise.startswith("at least once")}

    assert {kind for kind in SINKS if "at least once" in once[kind][2]} == declared


def test_the_template_is_short() -> None:
    """A sink of one's own is about sixty lines of code."""
    lines = [line for line in template().splitlines() if line.strip()]

    assert len(lines) <= 65


def test_the_list_tells_what_is_missing() -> None:
    """`gapless sinks` has every kind with its promise; one whose package is not there has the line that installs it."""
    listed = {one.kind: one for one in list_sinks()}

    assert set(SINKS) <= set(listed)
    assert all(one.ready or one.hint for one in listed.values())
    assert all(len(one.exactly_once) > 20 for one in listed.values())
    assert listed["vemlp_wandb"].hint == "volcengine_ml_platform is not installed"
    assert listed["file"].ready
    assert not re.search(r"pip install", listed["file"].hint)
