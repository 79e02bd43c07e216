"""A row of statistics as a table for people: four pairs of name and value a line, read down the columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gapless.numeric import as_number
from gapless.values import key_text

PAIRS = 4


def stats_table(stats: Mapping[Any, Any]) -> str:
    """The table's lines, numbers as `1.2345e+00`; an empty text for no statistics."""
    cells = [(key_text(key), *_cell(value)) for key, value in stats.items()]
    if not cells:
        return ""
    height = -(-len(cells) // PAIRS)
    columns = [cells[start : start + height] for start in range(0, len(cells), height)]
    widths = [(max(len(name) for name, *_ in column), max(len(text) for _, text, _ in column)) for column in columns]
    flat = [width for pair in widths for width in pair]
    lines = [_rule("╒", "╤", "╕", "═", flat)]
    for row in range(height):
        if row:
            lines.append(_rule("├", "┼", "┤", "─", flat))
        parts = []
        for column, (name_width, value_width) in zip(columns, widths, strict=True):
            name, text, is_number = column[row] if row < len(column) else ("", "", False)
            parts += [name.ljust(name_width), text.rjust(value_width) if is_number else text.ljust(value_width)]
        lines.append("│ " + " │ ".join(parts) + " │")
    lines.append(_rule("╘", "╧", "╛", "═", flat))
    return "\n".join(lines)


def _cell(value: Any) -> tuple[str, bool]:
    number = as_number(value)
    if number is None:
        return key_text(value), False
    try:
        return f"{number:.4e}", True
    except OverflowError:  # an integer beyond a float
        return str(number), True


def _rule(left: str, cross: str, right: str, line: str, widths: list[int]) -> str:
    return left + cross.join(line * (width + 2) for width in widths) + right
