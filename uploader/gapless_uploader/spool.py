"""What lies under a spool's folders: runs, their attempts and segments, and what is wrong with them.

The scan is the truth; file events only say where to look first. Folders are listed when their mtime changed or was
fresh, and every `FULL_SCAN_S` in any case; the newest segment of a run is looked at often while it grows and ever more
rarely when it does not. Media folders are never listed, links never followed.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path

from gapless_schemas import Header, SegmentName
from gapless_uploader.attempt import read_header

QUICK_S = 1.0
SLOW_S = 60.0
FULL_SCAN_S = 60.0
_MAX_DEPTH = 12

RunKey = tuple[str, str]
"""(project, run id), the true names."""


@dataclass(slots=True)
class Segment:
    """One segment's file."""

    path: Path
    size: int
    mtime: float
    header: Header | None = None
    problem: str | None = None
    """Why its header cannot be used."""


@dataclass(slots=True)
class SpoolRun:
    """A run: all its attempts, wherever they lie."""

    key: RunKey
    attempts: dict[str, Header] = field(default_factory=dict)
    """attempt_id -> header of its first known segment."""
    segments: dict[str, dict[int, Segment]] = field(default_factory=dict)
    folders: set[Path] = field(default_factory=set)
    unsupported: str | None = None
    """A format version this reader does not know: the run is not read."""

    def paths(self) -> dict[str, dict[int, Path]]:
        """attempt_id -> segment index -> path, a copy that a worker may keep."""
        return {attempt: {i: s.path for i, s in found.items()} for attempt, found in self.segments.items()}

    def sizes(self) -> dict[str, dict[int, int]]:
        """attempt_id -> segment index -> bytes."""
        return {attempt: {i: s.size for i, s in found.items()} for attempt, found in self.segments.items()}

    @property
    def newest_mtime(self) -> float:
        """Unix seconds at which a segment last grew."""
        return max((s.mtime for found in self.segments.values() for s in found.values()), default=0.0)


@dataclass(slots=True)
class _Folder:
    path: Path
    mtime_ns: int = -1
    listed: float = -1e18
    due: float = -1e18
    interval_s: float = QUICK_S
    segments: dict[str, Segment] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)


class Spool:
    """The runs under some paths: a root, a project, a run, or a segment each. Not thread safe."""

    def __init__(self, paths: list[Path], slow_s: float = SLOW_S) -> None:
        self.paths = [Path(os.path.realpath(path)) for path in paths]
        """The user's own path may be a link; nothing below it is followed."""
        self.runs: dict[RunKey, SpoolRun] = {}
        self.problems: dict[Path, str] = {}
        """What is named like a segment and is none, or cannot be read: path -> reason."""
        self._folders: dict[Path, _Folder] = {}
        self._slow_s = slow_s
        self._hints: set[Path] = set()
        self._next_full = -1e18

    def hint(self, path: Path) -> None:
        """An event named this path: its folder is looked at in the next scan."""
        self._hints.add(path)

    def scan(self, now: float) -> set[RunKey]:
        """Look where something is due; the runs that are new, grew, shrank or went. `now` is monotonic seconds."""
        changed: set[RunKey] = set()
        full = now >= self._next_full
        if full:
            self._next_full = now + FULL_SCAN_S
        for path in self.paths:
            if SegmentName.parse(path.name) is not None:
                self._scan_single(path, changed)
            else:
                self._scan_folder(path, now, full, 0, changed)
        self._hints.clear()
        return changed

    def next_due(self) -> float:
        """When the next folder is due, monotonic seconds."""
        return min((folder.due for folder in self._folders.values()), default=-1e18)

    def _scan_single(self, path: Path, changed: set[RunKey]) -> None:
        folder = self._folders.setdefault(path, _Folder(path))
        try:
            found = path.lstat()
        except OSError as error:
            self.problems[path] = f"read {path}: {error.strerror}"
            return
        self._note_segment(folder, path.name, path, found, changed)

    def _scan_folder(self, path: Path, now: float, full: bool, depth: int, changed: set[RunKey]) -> None:
        folder = self._folders.setdefault(path, _Folder(path))
        hinted = path in self._hints or any(hint.parent == path for hint in self._hints)
        if full or hinted or now >= folder.due:
            grew = self._look(folder, now, full or hinted, changed)
            if grew or not folder.segments:
                folder.interval_s = QUICK_S
            else:
                folder.interval_s = min(folder.interval_s * 1.5, self._slow_s)
            folder.due = now + folder.interval_s
        if depth < _MAX_DEPTH and not folder.segments:
            for name in sorted(folder.folders):
                self._scan_folder(path / name, now, full, depth + 1, changed)

    def _look(self, folder: _Folder, now: float, full: bool, changed: set[RunKey]) -> bool:
        try:
            mtime_ns = folder.path.stat().st_mtime_ns
        except OSError as error:
            self._gone(folder, error, changed)
            return False
        fresh = abs(time.time_ns() - mtime_ns) < 3_000_000_000
        if full or fresh or mtime_ns != folder.mtime_ns:
            return self._list(folder, mtime_ns, now, changed)
        return self._stat_growing(folder, changed)

    def _list(self, folder: _Folder, mtime_ns: int, now: float, changed: set[RunKey]) -> bool:
        try:
            entries = list(os.scandir(folder.path))
        except OSError as error:
            self._gone(folder, error, changed)
            return False
        folder.mtime_ns, folder.listed = mtime_ns, now
        self.problems.pop(folder.path, None)
        names = set()
        folders = set()
        grew = False
        for entry in entries:
            if SegmentName.parse(entry.name) is not None:
                names.add(entry.name)
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                grew |= self._note_segment(folder, entry.name, Path(entry.path), found, changed)
            elif entry.name != "media" and not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                folders.add(entry.name)
        for name in set(folder.segments) - names:
            self._forget(folder, name, changed)
        folder.folders = folders
        return grew

    def _stat_growing(self, folder: _Folder, changed: set[RunKey]) -> bool:
        """Only a writer's newest segment grows, or one that a network disk shows late: look at the last two."""
        newest: dict[tuple[str, int, str], list[str]] = {}
        for name in folder.segments:
            parts = SegmentName.parse(name)
            if parts is not None:
                newest.setdefault((parts.writer, parts.attempt, parts.short_id), []).append(name)
        grew = False
        for names in newest.values():
            for name in sorted(names)[-2:]:
                path = folder.path / name
                try:
                    found = path.lstat()
                except OSError:
                    self._forget(folder, name, changed)
                    continue
                grew |= self._note_segment(folder, name, path, found, changed)
        return grew

    def _note_segment(
        self, folder: _Folder, name: str, path: Path, found: os.stat_result, changed: set[RunKey]
    ) -> bool:
        if not stat.S_ISREG(found.st_mode):
            self.problems[path] = f"{path} is named like a segment and is no regular file: refused"
            return False
        known = folder.segments.get(name)
        if known is not None and known.size == found.st_size and known.header is not None:
            known.mtime = found.st_mtime
            return False
        segment = known or Segment(path, found.st_size, found.st_mtime)
        grew = known is None or known.size != found.st_size
        segment.size, segment.mtime = found.st_size, found.st_mtime
        folder.segments[name] = segment
        if segment.header is None:
            self._read_header(segment, name)
        if segment.header is not None:
            changed.add(self._file(segment, segment.header))
        return grew

    def _read_header(self, segment: Segment, name: str) -> None:
        path = segment.path
        try:
            header = read_header(path)
        except OSError as error:
            self.problems[path] = f"read {path}: {error.strerror or error}"
            return
        except ValueError as error:
            segment.problem = f"{path}: {error}"
            self.problems[path] = segment.problem
            header = _header_from_names(path, name)
            if "format version" in str(error):
                self._run((header.project, header.run_id)).unsupported = segment.problem
        else:
            if header is None:
                self.problems[path] = f"{path} has no header yet ({segment.size} bytes): 0 records"
                return
            self.problems.pop(path, None)
        segment.header = header

    def _run(self, key: RunKey) -> SpoolRun:
        run = self.runs.get(key)
        if run is None:
            run = self.runs[key] = SpoolRun(key)
        return run

    def _file(self, segment: Segment, header: Header) -> RunKey:
        """Put the segment where it belongs; the larger of two copies counts."""
        run = self._run((header.project, header.run_id))
        attempt_id = header.attempt_id
        for other in run.attempts:
            if segment.problem and other.startswith(attempt_id[:8]):
                attempt_id = other  # its own header is damaged; a sister segment has the whole id
        nameless = attempt_id[:8] + "0" * 24
        if not segment.problem and nameless in run.attempts and nameless != attempt_id:
            del run.attempts[nameless]
            run.segments[attempt_id] = run.segments.pop(nameless, {})
        run.attempts.setdefault(attempt_id, header)
        found = run.segments.setdefault(attempt_id, {})
        index = header.segment
        other_copy = found.get(index)
        if other_copy is None or other_copy.path == segment.path or other_copy.size < segment.size:
            found[index] = segment
        run.folders.add(segment.path.parent)
        return run.key

    def _forget(self, folder: _Folder, name: str, changed: set[RunKey]) -> None:
        segment = folder.segments.pop(name)
        self.problems.pop(segment.path, None)
        if segment.header is None:
            return
        run = self.runs.get((segment.header.project, segment.header.run_id))
        if run is None:
            return
        changed.add(run.key)
        for found in run.segments.values():
            held = found.get(segment.header.segment)
            if held is not None and held.path == segment.path:
                del found[segment.header.segment]

    def _gone(self, folder: _Folder, error: OSError, changed: set[RunKey]) -> None:
        for name in list(folder.segments):
            self._forget(folder, name, changed)
        folder.folders = set()
        folder.mtime_ns = -1
        if folder.path in self.paths:
            self.problems[folder.path] = f"read {folder.path}: {error.strerror}"
        else:
            self.problems.pop(folder.path, None)


def _header_from_names(path: Path, name: str) -> Header:
    """What the path says of a segment whose header is damaged."""
    parts = SegmentName.parse(name)
    assert parts is not None  # noqa: S101 - only segments come here
    return Header(
        project=path.parent.parent.name,
        run_id=path.parent.name,
        writer=parts.writer,
        attempt=parts.attempt,
        attempt_id=parts.short_id + "0" * 24,
        segment=parts.index,
        first_seq=1,
        host="",
        pid=0,
        boot_id="",
        created=0.0,
        resume_step=None,
    )
