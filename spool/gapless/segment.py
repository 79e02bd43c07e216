"""One segment: a file that this process alone creates, appends to and leaves.

Whole lines go in with as few writes as the kernel takes. After any error, and after an interrupt inside `append`, the
file is left for a new one, so only a segment's last line can be torn.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_EINTR_TRIES = 100


class Segment:
    """An open segment. Not thread safe, but `sync` may run beside `append`."""

    def __init__(self, folder: Path, name: str, header: bytes) -> None:
        """Create `name` in `folder` and write its header. Raises OSError, and then leaves no file if it can."""
        self.path = folder / name
        self.size = 0
        self.dirty = False
        """Bytes of a batch may be in the file whose rows are not counted as written."""
        self.syncing = False
        self.sync_failed = False
        """Never synced again: the kernel forgets what it could not write, and then says yes."""
        self._folder = folder
        self._left = False
        self._folder_synced = False
        with open_folder(folder) as at:
            self._fd = create_file(name, at, append=True)
            try:
                self.append(header)
            except BaseException:
                os.close(self._fd)
                with suppress(OSError):
                    os.unlink(name, dir_fd=at)
                raise
        self.dirty = False

    def append(self, data: bytes) -> None:
        """Write all of `data`; the caller clears `dirty` once it has counted it. Raises OSError."""
        self.dirty = True
        left: bytes | memoryview = data
        interrupted = 0
        while True:
            try:
                written = os.write(self._fd, left)
            except InterruptedError:
                interrupted += 1
                if interrupted > _EINTR_TRIES:
                    raise
                continue
            self.size += written
            if written == len(left):
                return
            if written == 0:
                raise OSError(errno.EIO, "the file took no bytes")
            left = memoryview(left)[written:]

    def sync(self) -> None:
        """Return once all that was appended before is on the disk, the file's name too. Raises OSError."""
        os.fdatasync(self._fd)
        if not self._folder_synced:
            sync_folder(self._folder)
            self._folder_synced = True
        if os.fstat(self._fd).st_nlink == 0:
            raise OSError(errno.ESTALE, "the segment was removed")

    def leave(self) -> None:
        """Close the file; a `sync` that is running in another thread keeps it open until it calls `leave` again."""
        if self.syncing or self._left:
            return
        self._left = True
        with suppress(OSError):
            os.close(self._fd)


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder `path`, which must be no link."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make the names in `path` durable. File systems that cannot sync a folder are left to their own ways."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def make_folders(path: Path, num_synced: int) -> None:
    """Make `path` and what is missing above it, and make at least the last `num_synced` of these names durable."""
    missing = []
    at = path
    while not at.is_dir() and at != at.parent:
        missing.append(at)
        at = at.parent
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir()
    # Another process may have made a folder a moment ago and not synced its name yet: sync what we rely on ourselves.
    at = path
    for _ in range(max(num_synced, len(missing))):
        with suppress(PermissionError):  # a folder above that is not ours to read
            sync_folder(at.parent)
        at = at.parent


def create_file(name: str, at: int, *, append: bool = False) -> int:
    """A descriptor of the new file `name` in the folder `at`. Raises FileExistsError, also for a link of that name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_APPEND if append else 0)
    return os.open(name, flags, 0o666, dir_fd=at)


def open_file(path: str | Path, at: int | None = None) -> int:
    """A descriptor to read `path`, which must be no link; a FIFO does not block."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
