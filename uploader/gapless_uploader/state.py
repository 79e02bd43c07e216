"""The uploader's progress, outside the spool: an append-only journal, one group commit a turn.

A journal belongs to one uploader of one spool; all journals of the state folder are read, so a spool that moved goes on
where it was. Progress is keyed by project, run id and sink, and holds attempt ids and offsets, never paths. A torn tail
is ignored; a damaged line costs that line, which means that a batch is offered again, never that one is skipped. It
never expires. Snapshots beside the journal hold a history's state, so that a long run is not read again from its start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from gapless_schemas import Damaged, seal, unseal
from gapless_uploader.spool import RunKey

Key = tuple[str, str, str]
"""(project, run id, sink)."""

_COMPACT_BYTES = 4 << 20
_VERSION = 1


class Entries(MutableMapping[Key, dict[str, Any]]):
    """Progress by key, kept as its journal line and parsed when asked for: 100,000 ended runs cost little."""

    def __init__(self) -> None:
        self._lines: dict[Key, bytes] = {}

    def __getitem__(self, key: Key) -> dict[str, Any]:
        return unseal(self._lines[key])

    def __setitem__(self, key: Key, entry: dict[str, Any]) -> None:
        self._lines[key] = seal(_dumps(entry))[:-1]

    def __delitem__(self, key: Key) -> None:
        del self._lines[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def line(self, key: Key) -> bytes:
        """The journal's line of the entry, newline included."""
        return self._lines[key] + b"\n"


class State:
    """The journal of one uploader. Not thread safe: only the turn commits."""

    def __init__(self, folder: Path, paths: Iterable[Path], problem: Callable[[str, str], None] | None = None) -> None:
        names = "\0".join(sorted(str(path) for path in paths))
        self.folder = folder / sha256(names.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.progress = Entries()
        self._saved = 0.0
        """The newest entry's time. Times only rise, whatever the clock does: the later entry counts."""
        self._problem = problem or (lambda *_: None)
        self._parent = folder
        self._journal = self.folder / "journal.jsonl"
        self._fd: int | None = None
        self._is_open = False
        self._size = 0
        self._live_size = 0
        self._torn = False

    def load(self) -> None:
        """Read every journal of the state folder; of two entries with one key the later counts. Writes nothing."""
        times: dict[Key, float] = {}
        for journal in sorted(self._parent.glob("*/journal.jsonl")):
            for entry in self._entries(journal):
                key: Key = (entry["project"], entry["run"], entry["sink"])
                saved = float(entry.get("saved", 0.0))
                if key not in times or times[key] <= saved:
                    times[key] = saved
                    self.progress[key] = entry
        self._saved = max(times.values(), default=0.0)

    def open(self) -> None:
        """Begin to write: compact what was loaded into a fresh journal. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._compact()
        self._is_open = True

    def commit(self, entries: Iterable[dict[str, Any]]) -> None:
        """Make these progress entries durable, all with one sync. Raises OSError; then they are not durable."""
        if not self._is_open:
            raise RuntimeError("the state is not open")
        lines = []
        for entry in entries:
            self._saved = max(time.time(), self._saved + 1e-3)
            key: Key = (entry["project"], entry["run"], entry["sink"])
            self.progress[key] = {"version": _VERSION, **entry, "saved": self._saved}
            lines.append(self.progress.line(key))
        if not lines:
            return
        if self._fd is None or self._torn or self._size > max(_COMPACT_BYTES, 4 * self._live_size):
            self._compact()
            return
        data = b"".join(lines)
        self._torn = True  # until it is known that the journal ends in a whole, synced line
        if os.write(self._fd, data) != len(data):
            self._compact()
            return
        os.fdatasync(self._fd)
        self._torn = False
        self._size += len(data)

    def close(self) -> None:
        """Let go of the journal."""
        self._is_open = False
        self._let_go()

    def save_snapshot(self, key: Key, snapshot: dict[str, Any]) -> None:
        """Replace the snapshot of a history. Raises OSError."""
        path = self._snapshot_path(self.folder, key)
        path.parent.mkdir(exist_ok=True)
        body = json.dumps({"version": _VERSION, **snapshot}, separators=(",", ":")).encode()
        replace_file(path, sha256(body).hexdigest().encode() + b"\n" + body)

    def load_snapshot(self, key: Key) -> dict[str, Any] | None:
        """The newest sound snapshot of a history; None when there is none."""
        found = [self._snapshot_path(folder, key) for folder in self._parent.iterdir() if folder.is_dir()]
        for path in sorted((p for p in found if p.exists()), key=lambda p: p.stat().st_mtime, reverse=True):
            try:
                digest, _, body = path.read_bytes().partition(b"\n")
                if sha256(body).hexdigest().encode() == digest:
                    snapshot: dict[str, Any] = json.loads(body)
                    if snapshot.get("version") == _VERSION:
                        return snapshot
            except (OSError, ValueError) as error:
                self._problem(str(path), str(error))
            else:
                self._problem(str(path), "a damaged snapshot: its run is read again from the start")
        return None

    def dead_letter(self, run: RunKey, line: dict[str, Any]) -> None:
        """Keep what could not be delivered, by run. Raises OSError."""
        folder = self.folder / "dead-letters"
        folder.mkdir(parents=True, exist_ok=True)
        name = sha256("\0".join(run).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        with (folder / f"{name}.jsonl").open("ab") as file:
            file.write(_dumps({"project": run[0], "run": run[1], **line}) + b"\n")

    @staticmethod
    def _snapshot_path(folder: Path, key: Key) -> Path:
        return folder / "snapshots" / sha256("\0".join(key).encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def _entries(self, journal: Path) -> Iterable[dict[str, Any]]:
        try:
            data = journal.read_bytes()
        except OSError as error:
            self._problem(str(journal), str(error))
            return
        whole, _, _ = data.rpartition(b"\n")
        damaged = 0
        for line in whole.split(b"\n") if whole else []:
            try:
                yield _entry(line)
            except Damaged:
                damaged += 1
        if damaged or (data and not whole and data.strip(b"\0 \n")):
            kept = journal.with_name(f"journal.damaged-{int(time.time())}")
            try:
                kept.write_bytes(data)
            except OSError as error:
                self._problem(str(journal), str(error))
            what = f"{damaged} damaged lines" if damaged else "not one whole line"
            self._problem(str(journal), f"{what}; a copy is {kept.name}; what is missing is offered again")
        elif data and not data.strip(b"\0 \n"):
            self._problem(str(journal), f"{len(data)} bytes of nothing: what was uploaded is offered again")

    def _let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _compact(self) -> None:
        data = b"".join(map(self.progress.line, self.progress))
        replace_file(self._journal, data)
        self._let_go()
        self._fd = os.open(self._journal, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = self._live_size = len(data)
        self._torn = False


def _entry(line: bytes) -> dict[str, Any]:
    entry = unseal(line)
    if entry.get("version") != _VERSION:
        raise Damaged("another version")
    for name in ("project", "run", "sink"):
        if type(entry.get(name)) is not str:
            raise Damaged(f"no {name}")
    return entry


def _dumps(value: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate in a name, or an integer beyond 64 bits
        return json.dumps(value, separators=(",", ":")).encode()


def replace_file(path: Path, data: bytes) -> None:
    """Write beside, sync, rename, sync the folder: the file is the old one or the new one. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()  # a disk that is full is not to stay full of it
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
