"""What was looked for and holds no data: run folders without a segment, and paths in which no run lies.

A folder is known to be a run's by its writers' claims, by its payloads, by the uploader's state, or, when it is empty
and no new one, by lying beside a run. An empty folder of which nothing says so is none of ours, or a spool or project
in which no run has begun: no problem. Nor is a run that was uploaded to its end before its segments were removed.
Links are not followed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gapless_schemas import CLAIMS, SegmentName, is_media_name, path_name
from gapless_uploader.ledger import name_of
from gapless_uploader.pipeline import is_settled
from gapless_uploader.spool import Folder, RunKey, Spool, SpoolRun
from gapless_uploader.state import Key
from gapless_uploader.steps import Files

BEGINS_S = 60.0
"""An attempt that was claimed so lately may have no segment yet, a folder that was made so lately no attempt."""
_MAX_NEIGHBOURS = 100
_NO_FILES = Files({}, {}, {})


@dataclass(frozen=True, slots=True)
class AbsentRun:
    """A run whose folder holds no segment."""

    key: RunKey
    """The true names where the state has them, else those of the folders."""
    folder: Path
    progress: list[dict[str, Any]]
    """Of each sink that has some of it, as the state knows it."""

    def is_whole(self, sinks: Collection[str] = ()) -> bool:
        """Whether it is uploaded to its end at each of `sinks`; when none is named, at each that has some of it."""
        ended = {str(entry["sink"]) for entry in self.progress if _is_whole(entry)}
        return bool(ended) and ended.issuperset(sinks or [str(entry["sink"]) for entry in self.progress])

    def reason(self) -> str:
        """What is known of it, and the way out."""
        told = "".join(
            f"; {entry.get('counts', {}).get('rows', 0)} rows of it were uploaded to"
            f" {str(entry['sink']).removesuffix(':')}{', with its end' if _is_whole(entry) else ''}"
            for entry in self.progress
        )
        return f"{name_of(self.key)}: no segment lies in {self.folder}{told}: put its .jsonl files there, or remove it"


@dataclass(frozen=True, slots=True)
class Absent:
    """What holds no data."""

    runs: list[AbsentRun]
    paths: list[tuple[Path, str]]
    """Of the paths that were given, those in which no run lies though they are not simply empty; why."""

    def problems(self, sinks: Collection[str] = ()) -> list[tuple[Path, str]]:
        """Path and reason of what somebody has to act on, when the runs are to be at `sinks`."""
        return [*self.paths, *((run.folder, run.reason()) for run in self.runs if not run.is_whole(sinks))]


def find_absent(
    spool: Spool,
    progress: Mapping[Key, dict[str, Any]],
    wanted: Callable[[SpoolRun], bool] = lambda run: True,  # noqa: ARG005
) -> Absent:
    """What under the spool's paths holds no data, as its last scan saw it; of the runs, those that are `wanted`.

    `wanted` is given a run without attempts. Raises nothing that a damaged spool can cause.
    """
    homes = {folder.path for folder in spool.folders() if folder.segments or folder.is_claimed}
    beside = {path.parent for path in homes}
    above = _with_those_above(beside)
    bare = [f for f in spool.folders() if not f.segments and f.was_listed and f.path not in above]
    found = _absent_folders(spool, progress, homes, beside, bare)
    held: dict[RunKey, list[Key]] = {key: [] for key, _ in found}
    for name in sorted(progress) if held else ():
        held.get(name[:2], []).append(name)
    runs = [AbsentRun(key, folder, [progress[name] for name in held[key]]) for key, folder in found]
    told = _with_those_above([*spool.problems, *(run.folder for run in runs)])
    filled = _with_those_above(folder.path for folder in bare if folder.has_files)
    paths = []
    for path in spool.paths:
        if path in homes or path in above or path in told:
            continue
        around = next((parent for parent in islice(path.parents, 3) if _is_run(parent)), None)
        if around is not None:
            paths.append((path, f"{path} lies inside a run: give the run's folder, {around}"))
        elif path in filled or (_lies_beside_runs(path) and not _is_new(path)):
            paths.append((path, f"no run lies in {path}: give the folder of a spool, a project or a run, or a segment"))
    return Absent([run for run in runs if wanted(SpoolRun(run.key))], paths)


def _absent_folders(
    spool: Spool, progress: Iterable[Key], homes: Collection[Path], beside: Collection[Path], bare: Iterable[Folder]
) -> list[tuple[RunKey, Path]]:
    """Run folders among the `bare`, which hold no segment and no run.

    `homes` are the folders with segments or claims, `beside` those that these lie in.
    """
    names = {(path_name(project), path_name(run)): (project, run) for project, run, _ in progress} if bare else {}
    found: dict[Path, RunKey] = {}
    for folder in sorted(bare, key=lambda folder: (folder.depth, folder.path)):
        path = folder.path
        if any(parent in homes or parent in found for parent in islice(path.parents, folder.depth)):
            continue  # it lies inside a run
        key = names.get((path.parent.name, path.name))
        run = spool.runs.get(key or (path.parent.name, path.name))
        if run is not None and any(run.segments.values()):
            continue  # its data lies elsewhere
        is_left = path.parent in beside and not folder.has_files and not folder.folders and not _is_new(path)
        if (key or folder.is_claimed or is_left or _has_payloads(folder)) and _is_bare(path):
            found[path] = key or (path.parent.name, path.name)
    return [(key, path) for path, key in found.items()]


def _with_those_above(paths: Iterable[Path]) -> set[Path]:
    found: set[Path] = set()
    for path in paths:
        while path not in found:
            found.add(path)
            path = path.parent
    return found


def _is_whole(entry: Mapping[str, Any]) -> bool:
    return is_settled(entry, _NO_FILES) and entry.get("trouble") is None


def _lies_beside_runs(path: Path) -> bool:
    """Whether a run is among its neighbours: then it is a run's folder, and no spool's."""
    return any(_is_run(path.parent / name) for name in islice(_names_in(path.parent), _MAX_NEIGHBOURS))


def _has_payloads(folder: Folder) -> bool:
    return "media" in folder.folders and any(map(is_media_name, _names_in(folder.path / "media")))


def _is_run(path: Path) -> bool:
    """Whether segments lie in the folder, or claims of attempts."""
    return any(name == CLAIMS or SegmentName.parse(name) is not None for name in _names_in(path))


def _is_bare(path: Path) -> bool:
    """Whether no segment lies in it now, nor is about to."""
    return not _is_new(path / CLAIMS) and not any(SegmentName.parse(name) is not None for name in _names_in(path))


def _is_new(path: Path) -> bool:
    """Whether the folder was made, or something in it, so lately that more may be about to come."""
    try:
        return abs(time.time() - path.lstat().st_mtime) < BEGINS_S
    except OSError:
        return False


def _names_in(path: Path) -> Iterable[str]:
    """Of everything in a folder but links."""
    try:
        with os.scandir(path) as listing:
            for entry in listing:
                if not entry.is_symlink():
                    yield entry.name
    except OSError:
        return
