"""What lies under a spool's folders: runs, their attempts and segments, and what is wrong with them.

The scan is the truth; file events only say where to look first. A look costs little, and what is quiet is looked at
ever more rarely:

1. A folder is listed when its mtime changed or is fresh, and now and then in any case; else only the newest segments of
   its writers are looked at, since nothing else grows.
2. A run is looked at after `QUICK_S` while it grows, then ever more rarely, up to `slow_s`.
3. Folders that hold no run themselves, and runs that are over (`retire`), are spread so that they cost so many looks a
   second at most, however many there are. A new attempt of a retired run makes it active again.

Media folders are never listed, links never followed. Paths are not trusted: `header` says whose a segment is.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

from gapless_schemas import CLAIMS, Header, SegmentName
from gapless_uploader.agenda import Agenda
from gapless_uploader.attempt import read_header

QUICK_S = 1.0
SLOW_S = 60.0
LIST_S = 60.0
"""A folder is listed again after so long, whatever its mtime says; later when it holds very many entries."""
LOOKS_PER_S = 12.0
"""Of folders without runs, and of retired runs: each kind together."""
_MAX_DEPTH = 12
_FRESH_NS = 3_000_000_000
_GONE = (errno.ENOENT, errno.ENOTDIR)

RunKey = tuple[str, str]
"""(project, run id), the true names."""


@dataclass(slots=True)
class Segment:
    """One segment's file."""

    folder: Path
    name: str
    size: int
    mtime: float
    header: Header | None = None
    problem: str | None = None
    """Why its header cannot be used."""

    @property
    def path(self) -> Path:
        """Made when asked for: a root may hold a hundred thousand."""
        return self.folder / self.name


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
    def size(self) -> int:
        """Bytes of all its segments."""
        return sum(s.size for found in self.segments.values() for s in found.values())

    @property
    def newest_mtime(self) -> float:
        """Unix seconds at which a segment last grew."""
        return max((s.mtime for found in self.segments.values() for s in found.values()), default=0.0)


@dataclass(slots=True)
class Folder:
    """A folder under one of the paths, or a path that is a segment."""

    path: Path
    depth: int
    mtime_ns: int = -1
    looked: float = -math.inf
    """The last look at what may grow in it; monotonic seconds, as for `listed`."""
    listed: float = -math.inf
    entries: int = 0
    interval_s: float = QUICK_S
    segments: dict[str, Segment] = field(default_factory=dict)
    folders: frozenset[str] = frozenset()
    retired: bool = False
    is_claimed: bool = False
    """A run's writers claim their attempts in it."""
    has_files: bool = False
    """Besides segments and what is hidden."""

    @property
    def was_listed(self) -> bool:
        """Whether what is in it is known."""
        return self.listed > -math.inf


class Spool:
    """The runs under some paths: a root, a project, a run, or a segment each. Not thread safe."""

    def __init__(self, paths: list[Path], slow_s: float = SLOW_S) -> None:
        self.paths = [Path(os.path.realpath(path)) for path in paths]
        """The user's own path may be a link; nothing below it is followed."""
        self.runs: dict[RunKey, SpoolRun] = {}
        self.problems: dict[Path, str] = {}
        """What is named like a segment and is none, or cannot be read: path -> reason."""
        self.unhinted: dict[Path, float] = {}
        """Segments that the last scan found grown though no event had named them: path -> when they had not, which is
        never where their folder was not looked at before."""
        self.num_looks = 0
        """Folders and segments that were looked at, since the start: what a scan costs a disk."""
        self._slow_s = slow_s
        self._agenda: Agenda[Path] = Agenda()
        self._folders: dict[Path, Folder] = {}
        self._hints: set[Path] = set()
        self._num_retired = 0
        self._num_bare = 0
        """Folders that hold no segment."""
        for path in self.paths:
            self._add(path, 0, -math.inf)

    def hint(self, path: Path) -> None:
        """An event named this segment or folder: it is looked at in the next scan."""
        self._hints.add(path)

    def scan(self, now: float) -> set[RunKey]:
        """Look where something is due; the runs that are new, grew, shrank or went. `now` is monotonic seconds."""
        changed: set[RunKey] = set()
        self.unhinted.clear()
        hints, self._hints = self._hints, set()
        for path in hints:
            self._follow(path, now, changed)
        while (due := self._agenda.pop(now)) is not None:
            folder = self._folders.get(due)
            if folder is not None:
                looked = folder.looked
                grown = self._look(folder, now, False, changed)
                self.unhinted.update(dict.fromkeys(grown, looked))
                self._plan(folder, now, bool(grown))
        return changed

    def next_due(self) -> float:
        """When the next folder is due, monotonic seconds; infinity when nothing is."""
        return -math.inf if self._hints else self._agenda.next_due()

    def folders(self) -> Iterable[Folder]:
        """Every folder that was found, as the last look at it saw it."""
        return self._folders.values()

    def retire(self, key: RunKey) -> None:
        """Everybody is done with this run: look at it rarely until it changes."""
        for path in self.runs[key].folders:
            folder = self._folders.get(path)
            if folder is not None and not folder.retired and path not in self.paths:
                folder.retired = True
                self._num_retired += 1

    # where to look, and when

    def _follow(self, path: Path, now: float, changed: set[RunKey]) -> None:
        """Look at what an event named, or at the nearest folder known above it."""
        folder = self._folders.get(path.parent)
        if folder is not None and path.name in folder.segments and path not in self._folders:
            grown = self._stat_segment(folder, path.name, changed)
        else:
            # A new segment seldom comes alone: attempts that are there together are met together.
            above = path
            while above not in self._folders:
                if above.parent == above:
                    return
                if above.name == "media" and path != above:
                    return
                path, above = above, above.parent
            folder = self._folders[above]
            grown = bool(self._look(folder, now, True, changed))
        self._plan(folder, now, grown)

    def _add(self, path: Path, depth: int, due: float) -> None:
        if path not in self._folders:
            self._folders[path] = Folder(path, depth)
            self._num_bare += 1
            self._agenda.set(path, due)

    def _plan(self, folder: Folder, now: float, grew: bool) -> None:
        if folder.path not in self._folders:
            return
        if grew:
            folder.interval_s = QUICK_S
            if folder.retired:
                folder.retired = False
                self._num_retired -= 1
        elif folder.retired:
            folder.interval_s = max(self._slow_s, self._num_retired / LOOKS_PER_S)
        elif folder.segments:
            folder.interval_s = min(folder.interval_s * 1.5, self._slow_s)
        elif folder.depth == 0:
            folder.interval_s = QUICK_S
        else:
            folder.interval_s = max(QUICK_S, self._num_bare / LOOKS_PER_S)
        due = now + folder.interval_s
        if folder.interval_s >= 4 * QUICK_S:
            # Spread, so that a thousand runs found together do not come due together; then whole seconds, so that
            # they do not wake the loop a thousand times.
            due -= folder.interval_s * (crc32(os.fsencode(folder.path)) % 1024) / 4096
            due = math.ceil(due)
        self._agenda.set(folder.path, due)

    # looking

    def _look(self, folder: Folder, now: float, thorough: bool, changed: set[RunKey]) -> list[Path]:
        """Look at one folder; the segments that grew."""
        folder.looked = now
        if folder.depth == 0 and SegmentName.parse(folder.path.name) is not None:
            return [folder.path] if self._stat_segment(folder, folder.path.name, changed) else []
        self.num_looks += 1
        try:
            mtime_ns = folder.path.stat(follow_symlinks=False).st_mtime_ns
            rare = now - folder.listed >= max(LIST_S, folder.entries / 100)
            if thorough or rare or mtime_ns != folder.mtime_ns or abs(time.time_ns() - mtime_ns) < _FRESH_NS:
                return self._list(folder, mtime_ns, now, changed)
        except OSError as error:
            self._gone(folder, error, changed)
            return []
        return self._stat_growing(folder, changed)

    def _list(self, folder: Folder, mtime_ns: int, now: float, changed: set[RunKey]) -> list[Path]:
        segments: list[str] = []
        folders: list[str] = []
        entries, is_claimed, has_files = 0, False, False
        with os.scandir(folder.path) as listing:
            for entry in listing:
                entries += 1
                name = entry.name
                if name.endswith(".jsonl") and SegmentName.parse(name) is not None:
                    segments.append(name)
                elif name[0] == ".":
                    is_claimed |= name == CLAIMS
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                else:
                    has_files = True
        folder.mtime_ns, folder.listed, folder.entries = mtime_ns, now, entries
        folder.is_claimed, folder.has_files = is_claimed, has_files
        self.problems.pop(folder.path, None)
        grown = [folder.path / name for name in sorted(segments) if self._stat_segment(folder, name, changed)]
        for name in set(folder.segments).difference(segments):
            self._forget(folder, name, changed)
        if segments and "media" in folders:
            folders.remove("media")
        for name in folder.folders.difference(folders):
            self._drop(folder.path / name, changed)
        folder.folders = frozenset(folders)
        if folder.depth < _MAX_DEPTH:
            for name in sorted(folders):
                self._add(folder.path / name, folder.depth + 1, now)
        return grown

    def _stat_growing(self, folder: Folder, changed: set[RunKey]) -> list[Path]:
        """Only a writer's newest segment grows, or one that a network disk shows late: look at the last two."""
        newest: dict[str, tuple[int, str, list[str]]] = {}
        for name in folder.segments:
            parts = SegmentName.parse(name)
            if parts is None:
                continue
            attempt = (parts.attempt, parts.short_id)
            held = newest.get(parts.writer)
            if held is None or attempt > held[:2]:
                newest[parts.writer] = (*attempt, [name])
            elif attempt == held[:2]:
                held[2].append(name)
        names = [name for *_, found in newest.values() for name in sorted(found)[-2:]]
        return [folder.path / name for name in names if self._stat_segment(folder, name, changed)]

    def _stat_segment(self, folder: Folder, name: str, changed: set[RunKey]) -> bool:
        """Take note of a segment; whether it is new or has another size."""
        path = folder.path if folder.path.name == name else folder.path / name
        self.num_looks += 1
        try:
            found = path.lstat()
        except OSError as error:
            if name in folder.segments:
                self._forget(folder, name, changed)
            if path in self.paths:
                self.problems[path] = f"read {path}: {error.strerror}"
            return False
        return self._note_segment(folder, name, path, found, changed)

    def _note_segment(self, folder: Folder, name: str, path: Path, found: os.stat_result, changed: set[RunKey]) -> bool:
        if not stat.S_ISREG(found.st_mode):
            self.problems[path] = f"{path} is named like a segment and is no regular file: refused"
            return False
        known = folder.segments.get(name)
        if known is not None and known.size == found.st_size and known.header is not None:
            known.mtime = found.st_mtime
            return False
        if not folder.segments:
            self._num_bare -= 1
        segment = known or Segment(
            path.parent if folder.path == path else folder.path, name, found.st_size, found.st_mtime
        )
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
            # A hundred thousand runs name few projects, hosts and boots.
            header = replace(
                header,
                project=sys.intern(header.project),
                writer=sys.intern(header.writer),
                host=sys.intern(header.host),
                boot_id=sys.intern(header.boot_id),
            )
        segment.header = header

    # what was found

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
        run.folders.add(segment.folder)
        return run.key

    def _forget(self, folder: Folder, name: str, changed: set[RunKey]) -> None:
        segment = folder.segments.pop(name)
        if not folder.segments:
            self._num_bare += 1
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
        for copy in [self._folders[path].segments.get(name) for path in run.folders if path in self._folders]:
            if copy is not None and copy.header is not None:
                self._file(copy, copy.header)

    def _gone(self, folder: Folder, error: OSError, changed: set[RunKey]) -> None:
        """A folder that cannot be looked at: what was in it is out of sight, and comes back with it."""
        self._empty(folder, changed)
        if folder.depth == 0 or error.errno not in _GONE:
            self.problems[folder.path] = f"read {folder.path}: {error.strerror}"
        else:
            self._drop(folder.path, changed)

    def _empty(self, folder: Folder, changed: set[RunKey]) -> None:
        for name in list(folder.segments):
            self._forget(folder, name, changed)
        for name in folder.folders:
            self._drop(folder.path / name, changed)
        folder.folders, folder.mtime_ns = frozenset(), -1

    def _drop(self, path: Path, changed: set[RunKey]) -> None:
        folder = self._folders.pop(path, None)
        if folder is None:
            return
        self._empty(folder, changed)
        self._agenda.drop(path)
        self._num_bare -= 1
        self._num_retired -= folder.retired
        self.problems.pop(path, None)


def _header_from_names(path: Path, name: str) -> Header:
    """What the path says of a segment whose header is damaged."""
    parts = SegmentName.parse(name)
    assert parts is not None  # noqa: S101 - only segments come here
    return Header(
        project=_as_text(path.parent.parent.name),
        run_id=_as_text(path.parent.name),
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


def _as_text(name: str) -> str:
    """A folder's name as text that JSON can hold, its undecodable bytes written out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
