"""Every benchmark in one command: `python -m benchmarks [--quick] [NAME...]`; a full run writes docs/benchmarks.md.

A benchmark is a module here with `run(quick) -> list[dict]`; each dict is a figure with `figure`, `ours`, `peers`
(name -> value), `target` and `unit`, and perhaps a `note`. Values are numbers or texts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these benchmarks")
    parser.add_argument("--quick", action="store_true", help="small inputs: minutes, not hours; writes no page")
    args = parser.parse_args()
    for folder in ("spool", "uploader", "schemas"):
        sys.path.insert(0, str(ROOT / folder))
    found = [path.stem for path in sorted(Path(__file__).parent.glob("*.py")) if not path.stem.startswith("_")]
    unknown = set(args.names) - set(found)
    if unknown:
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(found)}")
    figures: dict[str, list[dict[str, Any]]] = {}
    failed = []
    for name in args.names or found:
        module = importlib.import_module(f"benchmarks.{name}")
        if not hasattr(module, "run"):
            continue
        began = time.monotonic()
        print(f"{name} ...", flush=True)
        try:
            figures[name] = module.run(args.quick)
        except Exception as error:  # one that fails does not cost the figures of the others
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(f"  failed: {failed[-1]}", file=sys.stderr)
            continue
        for row in figures[name]:
            print("  " + as_line(row))
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    if not args.quick and not args.names:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(figures, failed))
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 1 if failed else 0


def as_line(row: dict[str, Any]) -> str:
    """A figure on one line."""
    peers = "".join(f"; {name} {shown(value)}" for name, value in row["peers"].items())
    note = f" ({row['note']})" if row.get("note") else ""
    return f"{row['figure']}: {shown(row['ours'])} {row['unit']} (target {shown(row['target'])}){peers}{note}"


def page(figures: dict[str, list[dict[str, Any]]], failed: list[str]) -> str:
    """All figures as a Markdown page."""
    lines = [
        "# Benchmarks",
        "",
        "Written by `make bench`, which runs ours and the peers one after the other on one machine. "
        "`python -m benchmarks --quick` does the same with small inputs.",
        "",
        f"Machine: {machine()}.",
    ]
    for name, rows in figures.items():
        summary = (importlib.import_module(f"benchmarks.{name}").__doc__ or name).strip().splitlines()[0]
        lines += [
            "",
            f"## {name}",
            "",
            summary,
            "",
            "| figure | ours | target | peers | unit |",
            "|---|---|---|---|---|",
        ]
        for row in rows:
            peers = ", ".join(f"{peer} {shown(value)}" for peer, value in row["peers"].items())
            figure = row["figure"] + (f"; {row['note']}" if row.get("note") else "")
            lines.append(f"| {figure} | {shown(row['ours'])} | {shown(row['target'])} | {peers} | {row['unit']} |")
    if failed:
        lines += ["", "Not measured:", "", *(f"- {text}" for text in failed)]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What the figures depend on, and nothing that names the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    date = time.strftime("%-d %B %Y")
    return f"{cores} cores ({platform.machine()}), {memory:.0f} GiB, Linux, Python {platform.python_version()}, {date}"


def shown(value: Any) -> str:
    """A value with three digits that matter."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value)
    if value and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:,.0f}"


if __name__ == "__main__":
    sys.exit(main())
