"""Files that a sink writes: a disk's errors as the uploader understands them, and replacing that survives a crash."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gapless_uploader.sink import Parked, Retryable

_NEEDS_SOMEBODY = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
    errno.ENXIO,
}  # fmt: skip
"""The last two are links and pipes where a file was looked for, EEXIST is something else where a folder should be."""


def folder_target(target: str) -> str:
    """A target that is a folder, absolute: progress is kept by target, and `runs` is another one in another place."""
    return os.path.abspath(os.path.expanduser(target))  # noqa: PTH100, PTH111 - links stay as the user named them


@contextmanager
def disk(what: str, path: Path) -> Iterator[None]:
    """An OSError inside becomes Parked where only a person can help, else Retryable."""
    try:
        yield
    except OSError as error:
        raise disk_trouble(f"{what} {path}", error) from error


def disk_trouble(what: str, error: OSError) -> Parked | Retryable:
    """What `error` means for the uploader, with the way out where only a person can help."""
    reason = f"{what}: {error.strerror or error}"
    if error.errno in _NEEDS_SOMEBODY:
        way_out = "give the uploader's user a folder there that it may write, and a watch goes on by itself"
        return Parked(f"{reason}; {way_out}")
    return Retryable(reason)


def check_folder(target: str) -> str:
    """For `doctor`: that files can be made in the folder, or in the nearest above it. Raises Parked and Retryable."""
    nearest = Path(target)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    with disk("write to", Path(target)), tempfile.TemporaryFile(dir=nearest) as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    return f"writes to {target}"


def regular_file(path: str, flags: int) -> int:
    """An `opener` for `open`: waits for nobody at a pipe, and takes nothing but a file. Raises OSError."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ENXIO, "is no regular file", path)
    return handle


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_durably(path: Path, content: bytes, temporary: str) -> None:
    """`path` holds `content`, whole, also after a crash at any point. `temporary` is a name in the same folder."""
    beside = path.with_name(temporary)
    with open(beside, "wb", opener=regular_file) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)
