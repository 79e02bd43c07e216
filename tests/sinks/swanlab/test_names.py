"""Names at SwanLab: what it would trim, cut, drop or join arrives, and no two names become one."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless_uploader.sinks._swanlab_names import key_name, project_name, run_slug, section_of

EDGES = " \t\n\r./"
ODD = ["", " ", "/lead", "lead", "dot.", "dot", ".", "..", "a/", "a", "a\n", "a\tb", "k" * 512, "k" * 513, "k" * 600]
ODD += [
    "__swanlab__.cpu",
    "cpu",
    "x~inf",
    "x~text",
    "x~0123456789abcdef",
    "emoji 🚀",
    "\ud800",
    "A",
    "[/]" * 200,
    "%s%d",
]
names = st.one_of(st.text(), st.sampled_from(ODD), st.text(alphabet="ab./ ~_\n", max_size=6), st.text(min_size=500))


@given(names, names)
def test_two_keys_never_become_one(one: str, other: str) -> None:
    """Different keys have different names."""
    assert (one == other) == (key_name(one) == key_name(other))


@given(names)
def test_a_key_is_one_that_the_library_would_keep(key: str) -> None:
    """What comes out is what the library's own rules leave untouched, with room for our companions."""
    name = key_name(key)

    assert 0 < len(name) <= 506
    assert name.strip(EDGES) == name
    assert not re.search(r"[\x00-\x1f\x7f]", name)
    assert not name.startswith("__swanlab__.")
    assert name.encode("utf-8")


def test_odd_keys_stay_apart() -> None:
    """Each of the keys that people met trouble with has a name of its own; our companions are nobody's."""
    made = {key_name(key) for key in ODD}

    assert len(made) == len(ODD)
    assert not {f"{name}~inf" for name in made} & made


@pytest.mark.parametrize("key", ["loss", "timing(s)/gen", "a//b", "损失", "m@1", "a b", "x~y", "k" * 506])
def test_a_key_that_swanlab_keeps_stays(key: str) -> None:
    """Nothing is changed without need."""
    assert key_name(key) == key


@given(names, names)
def test_projects_and_runs_stay_apart(one: str, other: str) -> None:
    """Different projects and run ids have different names, all of which SwanLab takes."""
    assert (one == other) == (project_name(one) == project_name(other))
    assert (one == other) == (run_slug(one) == run_slug(other))
    assert re.fullmatch(r"[0-9a-zA-Z_\-+.]{1,100}", project_name(one))
    assert 0 < len(run_slug(one)) <= 64
    assert not re.search(r'[<>:"/\\|?*#%\x00-\x1f]', run_slug(one))
    assert not {project_name(one), run_slug(one)} & {".", ".."}


def test_names_that_swanlab_takes_stay() -> None:
    """Projects and ids within the rules are as they were."""
    assert project_name("verl_grpo-1.5+x") == "verl_grpo-1.5+x"
    assert run_slug("a1b2c3-r2") == "a1b2c3-r2"


@pytest.mark.parametrize(("key", "section"), [("a/b/c", "a"), ("a", None), ("a//b", "a")])
def test_a_section_is_what_stands_before_the_first_slash(key: str, section: str | None) -> None:
    """As the library has it."""
    assert section_of(key) == section
