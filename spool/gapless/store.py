"""Payload files: whole, synced and renamed under the sha256 of their bytes before anything refers to them."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from gapless.numeric import Refused
from gapless.segment import create_file, make_folders, open_folder

MEDIA = "media"
_CHUNK = 1 << 20


class Put(Protocol):
    """Stores bytes, or a copy of a regular file, and returns the name to refer to."""

    def __call__(
        self, extension: str, *, content: bytes | None = None, path: str | None = None, max_bytes: int = ...
    ) -> str: ...


class Store:
    """The `media` folder of a run. `unique` names this process's temporary files."""

    def __init__(self, run_folder: Path, unique: str) -> None:
        self._folder = run_folder / MEDIA
        self._unique = unique
        self._count = 0

    def put(
        self, extension: str, *, content: bytes | None = None, path: str | None = None, max_bytes: int = 1 << 62
    ) -> str:
        """The stored file's name. Raises OSError for this disk, `Refused` for a `path` that cannot be copied."""
        make_folders(self._folder, 1)
        self._count += 1
        temporary = f".{self._unique}-{self._count}.tmp"
        with open_folder(self._folder) as at:
            if content is not None:
                name = f"{sha256(content).hexdigest()}.{extension}"
                if _is_whole(at, name, len(content)):
                    return name
            fd = create_file(temporary, at)
            try:
                try:
                    if content is not None:
                        _write(fd, content)
                    else:
                        assert path is not None  # noqa: S101  # one of the two is given
                        name = f"{_copy(fd, path, max_bytes)}.{extension}"
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.rename(temporary, name, src_dir_fd=at, dst_dir_fd=at)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=at)
                raise
            os.fsync(at)
        return name


def _is_whole(at: int, name: str, size: int) -> bool:
    """The same bytes are there already, and their name is durable."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        return False
    os.fsync(at)
    return True


def _write(fd: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(fd, left[:_CHUNK]) :]


def _copy(to: int, path: str, max_bytes: int) -> str:
    try:
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Refused(f"{path} cannot be opened: {error.strerror}") from None
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path} is no regular file")
        if found.st_size > max_bytes:
            raise Refused(f"{path} has {found.st_size} bytes, more than {max_bytes}")
        digest = sha256()
        while True:
            try:
                chunk = os.read(source, _CHUNK)
            except OSError as error:
                raise Refused(f"{path} cannot be read: {error.strerror}") from None
            if not chunk:
                return digest.hexdigest()
            digest.update(chunk)
            _write(to, chunk)
    finally:
        os.close(source)
