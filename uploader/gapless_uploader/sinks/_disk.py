"""Files that a sink writes: a disk's errors as the uploader understands them, and replacing that survives a crash."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gapless_uploader.sink import Parked, Retryable

_NEEDS_SOMEBODY = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}


def folder_target(target: str) -> str:
    """A target that is a folder, absolute: progress is kept by target, and `runs` is another one in another place."""
    return os.path.abspath(os.path.expanduser(target))  # noqa: PTH100, PTH111 - links stay as the user named them


@contextmanager
def disk(what: str, path: Path) -> Iterator[None]:
    """An OSError inside becomes Parked where only a person can help, else Retryable."""
    try:
        yield
    except OSError as error:
        reason = f"{what} {path}: {error.strerror or error}"
        if error.errno in _NEEDS_SOMEBODY:
            raise Parked(f"{reason}; give the uploader's user a folder it may write, then start it again") from error
        raise Retryable(reason) from error


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
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    sync_folder(path.parent)
