"""Copies the spool itself to another disk or an object store, for sites that ship files: `spool:s3://bucket/path`.

The copy is a spool like the first: `gapless replay` reads it. Whole lines are copied, never a torn tail. On a disk the
new bytes are appended and synced; where files cannot be appended to, a segment that grew is put again as a whole, which
for a segment of up to 128 MiB costs its size each time: give such a target a slow poll. Every byte is read back and
compared before the acknowledgement. Nothing at the target is ever deleted or made shorter.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from gapless_schemas import SegmentName, is_media_name, path_name
from gapless_uploader.sink import Ack, Batch, Capabilities, Memo, Misconfigured, Parked, RunView
from gapless_uploader.sinks import need
from gapless_uploader.sinks._disk import check_folder, disk_trouble, folder_target, regular_file

_BLOCK = 1 << 20


class SpoolSink:
    """A folder or URL that fsspec knows."""

    kind = "spool"
    needs = "fsspec"
    capabilities = Capabilities(
        exactly_once="a copy has the segment's own bytes at their own offsets; writing them again is the same",
        rewind=True,
        unstepped=True,
        text=True,
        tables=True,
        media=True,
        end_state=True,
        read_back=True,
        settles_intents=False,
        takes_json=True,
    )

    def __init__(self, target: str = "", *, options: dict[str, Any] | None = None) -> None:
        """`target`: a folder or an fsspec URL. `options`: fsspec's own for that kind of URL, such as `endpoint_url`."""
        if not target:
            raise Misconfigured(
                "sink 'spool' needs where to copy to: --to spool:/other/disk or --to spool:s3://bucket/path"
            )
        self.target = target if "://" in target else folder_target(target)
        self._options = options or {}

    def open(self, run: RunView, memo: Memo) -> SpoolSession:
        """A session that copies the run's folder. Raises Misconfigured for a URL that fsspec or its plug-in lacks."""
        fsspec = need("spool", "fsspec")
        if run.folder is None:
            raise Misconfigured("sink 'spool' copies a spool's folders, and this run has none")
        try:
            files, root = fsspec.core.url_to_fs(self.target, **self._options)
        except (ValueError, ImportError) as error:
            raise Misconfigured(f"sink 'spool': {self.target}: {error}") from error
        folder = f"{root.rstrip('/')}/{path_name(run.project)}/{path_name(run.run_id)}"
        if _is_local(files):
            copies, spool = Path(root).resolve(), run.folder.resolve().parent.parent
            if copies == spool or spool in copies.parents or Path(folder).resolve() == run.folder.resolve():
                raise _itself(root)
        return SpoolSession(files, run.folder, folder, memo)

    def check(self) -> str:
        """For `doctor`: that a folder can be written; of a URL, what it is. Raises Parked and Retryable."""
        return f"writes to {self.target}" if "://" in self.target else check_folder(self.target)


class SpoolSession:
    """One run's copy. Not thread safe."""

    def __init__(self, files: Any, source: Path, folder: str, memo: Memo) -> None:
        self._files = files
        self._source = source
        self._folder = folder
        self._copied: dict[str, int] = dict(memo.get("copied", {}))
        """Name -> bytes that the copy holds."""

    def write(self, batch: Batch) -> Ack:
        """Copy what is new in the run's folder, which holds at least what the batch was read from."""
        try:
            # Payloads first, as the training side writes them: a line never refers to what is not there.
            for name in sorted(self._media()):
                self._copy(name)
            for name in sorted(self._segments()):
                self._copy(name)
        except OSError as error:
            place = f" ({error.filename})" if error.filename else ""
            raise disk_trouble(f"copy {self._source} to {self._folder}{place}", error) from error
        return Ack(len(batch.operations), self.flush())

    def heartbeat(self, now: float) -> None:
        """Nothing: `alive` lines are copied like all others."""

    def flush(self) -> Memo:
        """The memo; what was copied was read back already."""
        return {"copied": dict(self._copied)}

    def close(self) -> None:
        """Nothing is held. May be called twice."""

    def _segments(self) -> Iterator[str]:
        for path in self._source.iterdir():
            if SegmentName.parse(path.name) is not None and stat.S_ISREG(path.lstat().st_mode):
                yield path.name

    def _media(self) -> Iterator[str]:
        folder = self._source / "media"
        if folder.is_dir() and not folder.is_symlink():
            for path in folder.iterdir():
                if is_media_name(path.name) and stat.S_ISREG(path.lstat().st_mode):
                    yield f"media/{path.name}"

    def _copy(self, name: str) -> None:
        handle = os.open(self._source / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as source:
            size = os.fstat(source.fileno()).st_size if name.startswith("media/") else _whole_lines(source)
            held = self._copied.get(name, 0)
            if size <= held:
                return
            target = f"{self._folder}/{name}"
            start = held if _is_local(self._files) else 0
            if not start:
                self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            if _is_local(self._files):
                _append(Path(target), source, start, size)
            else:
                if not held and self._files.exists(target) and self._files.size(target) > size:
                    raise Parked(f"{target} is longer than in the spool; move it away, or choose another target")
                self._put(target, source, size)
            self._compare(target, source, start, size)
            self._copied[name] = size

    def _put(self, target: str, source: BinaryIO, size: int) -> None:
        with self._files.open(target, "wb") as file:
            for block in _blocks(source, 0, size):
                file.write(block)

    def _compare(self, target: str, source: BinaryIO, start: int, size: int) -> None:
        with self._files.open(target, "rb") as copy:
            theirs = sha256()
            for block in _blocks(copy, start, size):
                theirs.update(block)
        ours = sha256()
        for block in _blocks(source, start, size):
            ours.update(block)
        if theirs.digest() != ours.digest():
            raise OSError(f"{target} does not read back as it was written")


def _is_local(files: Any) -> bool:
    """Whether these are the files of a disk, which can be appended to."""
    return "file" in (files.protocol if isinstance(files.protocol, tuple) else (files.protocol,))


def _whole_lines(source: BinaryIO) -> int:
    """The length of `source` up to and including its last newline."""
    end = source.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - 65536)
        source.seek(start)
        found = source.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def _blocks(file: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    file.seek(start)
    while start < end:
        block = file.read(min(_BLOCK, end - start))
        if not block:
            return
        start += len(block)
        yield block


def _append(target: Path, source: BinaryIO, start: int, size: int) -> None:
    """Make `target` hold the first `size` bytes of `source`, of which `start` were acknowledged.

    It loses no whole line that it has beyond them: a spool that was cut is no reason to cut its copy.
    """
    # What was copied before is there: where it is not, nothing is made in its place.
    created = 0 if start else os.O_CREAT
    with os.fdopen(regular_file(str(target), os.O_RDWR | os.O_NOFOLLOW | created), "rb+") as file:
        if os.path.samestat(os.fstat(file.fileno()), os.fstat(source.fileno())):
            raise _itself(target)
        held = os.fstat(file.fileno()).st_size
        if held < start:
            raise Parked(f"{target} lacks bytes that were copied; put it back, or choose another target")
        beyond = any(b"\n" in block for block in _blocks(file, size, held))
        same = _same_until(file, source, start, min(held, size))
        if beyond and same < size:
            raise Parked(f"{target} is longer than in the spool and differs; move it away, or choose another target")
        if not beyond and held > size:
            file.truncate(size)  # the torn end of a copy that a crash broke off
        file.seek(same)
        for block in _blocks(source, same, size):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _same_until(copy: BinaryIO, source: BinaryIO, start: int, end: int) -> int:
    """Where the two begin to differ, block by block; `end` where they do not."""
    for theirs, ours in zip(_blocks(copy, start, end), _blocks(source, start, end), strict=False):
        if theirs != ours:
            return start
        start += len(ours)
    return start


def _itself(target: object) -> Misconfigured:
    return Misconfigured(f"sink 'spool': {target} is the spool itself, or lies in it; choose a place outside")
