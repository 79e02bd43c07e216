"""Names, sizes and times in a few characters, for people."""

from __future__ import annotations


def label(project: str, run_id: str, name: str | None) -> str:
    """A run as people know it: by its name where it has one, and by as much of its id as tells it from another."""
    return f"{project}/{run_id}" if name is None or name == run_id else f"{project}/{name} ({run_id[:8]})"


def size(num_bytes: int) -> str:
    """Bytes in a few characters."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5 or unit == "TB":
            break
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def age(seconds: float) -> str:
    """A time span in a few characters."""
    for unit, of_it in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < of_it:
            return f"{seconds:.0f} {unit}"
        seconds /= of_it if unit != "h" else 24
    return f"{seconds:.0f} d"
