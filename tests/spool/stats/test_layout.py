"""Layouts: digests and merges, without any rank."""

from __future__ import annotations

import ast
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

import gapless
from gapless._stats.layout import DENOMINATOR, SCALAR, Layout, ReduceType, merged

SUM, AVG = ReduceType.SUM.value, ReduceType.AVG.value
X, Y, Z = ("", "x"), ("", "y"), ("other", "x")


def test_a_digest_is_of_names_kinds_and_request() -> None:
    """The order of making does not count; anything else does, though the number of keys be the same."""
    layouts = [
        Layout({}), Layout({X: SUM}), Layout({Y: SUM}), Layout({Z: SUM}), Layout({X: AVG}), Layout({X: DENOMINATOR}),
        Layout({X: SUM, Y: SUM}),
    ]  # fmt: skip
    digests = [layout.digest(request) for layout in layouts for request in ("export()", "export_all()")]

    assert len(set(digests)) == len(digests)
    assert Layout({X: SUM, Y: AVG}).digest("") == Layout({Y: AVG, X: SUM}).digest("")


def test_a_merge_is_the_union_in_any_order() -> None:
    """Merging the empty layout changes nothing, and no input is changed."""
    layouts = [Layout({X: SUM}), Layout({Y: SCALAR, Z: DENOMINATOR}), Layout({}), Layout({X: SUM, Y: SCALAR})]
    payloads = [layout.payload("export()", set(layout.kinds)) for layout in layouts]
    for order in permutations(payloads):
        assert merged(order, range(4)).kinds == {X: SUM, Y: SCALAR, Z: DENOMINATOR}
    assert [len(layout) for layout in layouts] == [1, 2, 0, 2]


def test_padding_does_no_harm() -> None:
    """Proposals travel at the length of the longest; names may hold any character."""
    layout = Layout({("t\n", "ключ/\ud800\x00"): SUM})
    payload = layout.payload("export(key='ü')", set())

    assert len(payload) == layout.num_payload_bytes("export(key='ü')")
    assert merged([payload + b"\0" * 100], [0]).kinds == layout.kinds


def test_only_recordings_since_the_reset_can_conflict() -> None:
    """A kind that was recorded wins over one that is only remembered, whatever the ranks' order."""
    live, stale = Layout({X: SUM}).payload("", {X}), Layout({X: AVG}).payload("", set())

    assert merged([live, stale], [0, 1]).kinds == merged([stale, live], [0, 1]).kinds == {X: SUM}


def test_a_conflict_names_key_tracker_kinds_and_ranks() -> None:
    """All of it in one sentence."""
    payloads = [Layout({Z: kind}).payload("", {Z}) for kind in (DENOMINATOR, SCALAR, SUM, SUM)]
    with pytest.raises(ValueError, match="`x` of tracker 'other' was recorded as a denominator on rank 4, ") as caught:
        merged(payloads, [4, 5, 6, 8])

    assert "reduce type SUM on ranks 6, 8, a scalar on rank 5; one key has one reduce type on all" in str(caught.value)


# Boundaries


def test_only_one_file_knows_torch_distributed() -> None:
    """At run time; an annotation may name a group."""
    root = Path(gapless.__file__).parent
    users = set()
    for path in (root / "stats_tracker.py", *(root / "_stats").glob("*.py")):
        tree = ast.parse(path.read_text())
        hidden = {id(part) for node in ast.walk(tree) if isinstance(node, ast.If) for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) and id(node) not in hidden:
                users |= {path.name for alias in node.names if alias.name.startswith("torch.distributed")}

    assert users == {"reduce.py"}


def test_importing_gapless_does_not_import_torch() -> None:
    """Statistics alone need it, and only when used."""
    code = "import gapless, sys; sys.exit('torch' in sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
