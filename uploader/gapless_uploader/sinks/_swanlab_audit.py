"""Whether everything that was sent is at the tracker: its points per key, read back unsampled, against our counts.

The tracker groups by step, so that a point which is there twice cannot be seen from outside.
"""

from __future__ import annotations

from typing import Any

from gapless_uploader.sinks._swanlab_run import Experiment
from gapless_uploader.sinks._swanlab_tally import Tally

_SHOWN = 5


def audit(experiment: Experiment, tally: Tally) -> dict[str, Any]:
    """`{"ok", "text"}`, and `missing` and `surplus` points where there are some. Raises Retryable."""
    found = experiment.counts(experiment.keys())
    for name, steps in experiment.media_steps(tally.media).items():
        found[name] = sum((last - first) // stride + 1 for first, last, stride in steps.to_json())
    short: dict[str, int] = {}
    surplus = 0
    for name, count in found.items():
        difference = tally.sent(name) - count
        if difference > 0 and not (not experiment.shows_nan and difference <= tally.nans(name)):
            short[name] = difference
        surplus += max(0, -difference)
    absent_keys, absent_points = tally.without(set(found))
    missing = sum(short.values()) + absent_points
    total = tally.points_sent()
    if not missing:
        told = f"all {total} points of {tally.keys_sent()} keys are at the tracker"
        if surplus:
            told += f", and {surplus} more of other origin"
        return {"ok": True, "text": told, **({"surplus": surplus} if surplus else {})}
    named = ", ".join(f"{name}: {count}" for name, count in sorted(short.items())[:_SHOWN])
    told = f"{missing} of {total} points are not at the tracker ({named or 'none of their keys is there'}"
    if absent_keys:
        told += f"; {absent_keys} keys with {absent_points} points are not there at all"
    told += "); replay with another --state sends what is missing"
    return {"ok": False, "text": told, "missing": missing, "surplus": surplus}
