"""A run's metrics in the terminal: last values, and each curve as a line of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from rich.table import Table
from rich.text import Text

from gapless_uploader.events import printable
from gapless_uploader.replay import MergedRun

_BLOCKS = "▁▂▃▄▅▆▇█"


def metrics_table(run: MergedRun, keys: Sequence[str] = (), width: int = 80) -> Table:
    """A table of the run's numbers, `width` columns wide: key, curve, last value, lowest, highest, last step."""
    view = run.view
    title = f"{printable(view.project)}/{printable(view.name or view.run_id)}: {view.state}"
    table = Table(title=title, title_justify="left")
    for name in ("metric", "curve"):
        table.add_column(name, no_wrap=True)
    for name in ("last", "min", "max", "step"):
        table.add_column(name, justify="right")
    shown = {key: points for key, points in sorted(run.series().items()) if not keys or key in keys}
    curve = min(60, max(8, width - max((len(key) for key in shown), default=0) - 50))
    for key, points in shown.items():
        values = [value for _, value in points]
        finite = [value for value in values if isfinite(value)]
        lowest, highest = (f"{min(finite):.5g}", f"{max(finite):.5g}") if finite else ("", "")
        table.add_row(
            Text(printable(key)), sparkline(values, curve), f"{values[-1]:.5g}", lowest, highest, str(points[-1][0])
        )
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as one line of at most `width` blocks, each the mean of its share; `!` where none is finite."""
    if not values:
        return ""
    parts = min(width, len(values))
    means = []
    for part in range(parts):
        share = values[part * len(values) // parts : (part + 1) * len(values) // parts]
        finite = [value for value in share if isfinite(value)]
        means.append(sum(value / len(finite) for value in finite) if finite else None)
    known = [mean for mean in means if mean is not None]
    if not known:
        return "!" * parts
    low, span = min(known), max(known) - min(known)
    if span <= 1e-12 * max(abs(low), abs(low + span)):
        span = 0.0  # a constant, and the rounding of its means
    return "".join(
        "!" if mean is None else _BLOCKS[int((mean - low) / span * 7.999) if span > 0 else 3] for mean in means
    )
