"""Each sink's tests against its package at both ends of its range, in environments made for it: `make versions`.

    python -m tests.sinks.versions [KIND | KIND==VERSION ...]

The lower ends are those of the extras in `pyproject.toml`; the upper end is the newest that pip finds. For each pair of
kind and version: a virtual environment with the base requirements, the extra and the test tools; then the contract and
the outage suite of that kind, and the kind's own tests. Nothing but pip's package index is asked for anything. Exit
status 1 when a test failed somewhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "hypothesis>=6.100")
SUITES = ("tests/sinks/test_contract.py", "tests/sinks/test_outage.py")


@dataclass(frozen=True)
class Subject:
    """A kind of sink, the package it drives, and its own tests."""

    kind: str
    extra: str
    package: str
    tests: tuple[str, ...]
    beside: tuple[str, ...] = ()
    """What the tests need and the extra does not bring."""
    beside_oldest: tuple[str, ...] = ()
    """What the oldest version needs and does not ask for itself."""


SUBJECTS = (
    Subject("tensorboard", "tensorboard", "tensorboard", ("test_tensorboard.py", "test_crc32c.py")),
    Subject("wandb", "wandb", "wandb", ("wandb",), beside=("pillow",)),
    Subject("swanlab", "swanlab", "swanlab", ("swanlab",), beside=("pillow",)),
    Subject("mlflow", "mlflow", "mlflow", ("test_mlflow.py",), beside_oldest=("sqlalchemy<2.1",)),
    Subject("trackio", "trackio", "trackio", ("test_trackio.py",)),
    Subject("clearml", "clearml", "clearml", ("test_clearml.py", "test_clearml_server.py")),
    Subject("prometheus", "prometheus", "prometheus_client", ()),
    Subject("rl_insight", "rl-insight", "rl-insight", ("test_latest.py",)),
    Subject("spool", "spool", "fsspec", ("test_spool.py",)),
)


def project() -> dict[str, object]:
    """The `[project]` table of `pyproject.toml`."""
    held: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return held


def oldest(subject: Subject) -> str:
    """The lower bound of the subject's package in its extra."""
    extras: dict[str, list[str]] = project()["optional-dependencies"]  # type: ignore[assignment]
    (found,) = (line for line in extras[subject.extra] if re.match(rf"{re.escape(subject.package)}\b", line))
    return found.partition(">=")[2]


def requirements(subject: Subject, version: str | None) -> list[str]:
    """What pip installs for one run; no `version` means the newest."""
    held = project()
    extras: dict[str, list[str]] = held["optional-dependencies"]  # type: ignore[assignment]
    base: list[str] = held["dependencies"]  # type: ignore[assignment]
    wanted = [*base, *TOOLS, *extras[subject.extra], *subject.beside]
    return wanted if version is None else [*wanted, f"{subject.package}=={version}", *subject.beside_oldest]


def runs(asked: list[str]) -> Iterator[tuple[Subject, str | None]]:
    """Every pair of subject and version that was asked for."""
    wanted = dict(one.partition("==")[::2] for one in asked)
    for subject in SUBJECTS:
        if wanted.get(subject.kind):
            yield subject, wanted[subject.kind]
        elif not wanted or subject.kind in wanted:
            yield subject, oldest(subject)
            yield subject, None


def install(subject: Subject, version: str | None, folder: Path) -> str:
    """An environment in `folder`; the package's version in it."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *requirements(subject, version)], check=True)
    say = f"from importlib.metadata import version; print(version({subject.package!r}))"
    return subprocess.run([python, "-c", say], check=True, capture_output=True, text=True).stdout.strip()


def passes(subject: Subject, folder: Path) -> bool:
    """Whether every test of the kind passes in the environment."""
    pytest = [folder / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "-rf"]
    passed = subprocess.run([*pytest, *SUITES, "-k", f"[{subject.kind}"], cwd=ROOT).returncode == 0
    if subject.tests:
        own = [f"tests/sinks/{name}" for name in subject.tests]
        passed = subprocess.run([*pytest, *own], cwd=ROOT).returncode == 0 and passed
    return passed


def main() -> int:
    """Run what was asked for, one after the other, and list it; a newest version that is the oldest too runs once."""
    results: dict[tuple[str, str], bool] = {}
    for subject, version in runs(sys.argv[1:]):
        with TemporaryDirectory(prefix=f"gapless-{subject.kind}-") as folder:
            found = install(subject, version, Path(folder))
            if (subject.kind, found) not in results:
                print(f"== {subject.kind}: {subject.package} {found}", flush=True)
                results[subject.kind, found] = passes(subject, Path(folder))
    print()
    for (kind, found), passed in results.items():
        print(kind, found, "passed" if passed else "FAILED")
    return 0 if results and all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
