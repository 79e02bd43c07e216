"""A disk that does what a test tells it: `Disk` stands between `os` and the real disk for everything under one folder.

It numbers the calls that change the disk, so that a test can break, tear or end the process at any one of them, and
it keeps a journal of them, from which `powerloss.py` works out what a power failure leaves.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

ERRNOS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.EINTR,
    errno.EAGAIN,
    errno.ESTALE,
    errno.EROFS,
)
NAMES = ("open", "write", "fdatasync", "fsync", "rename", "link", "close", "mkdir", "unlink")


class Call:
    """One call that changes the disk: its number from 1, its name, and the path it works on."""

    def __init__(self, number: int, name: str, path: str, data: bytes | None = None) -> None:
        self.number = number
        self.name = name
        self.path = path
        self.data = data


class Disk:
    """Interposes on `os` while `in_place()`; `before` and `after` are called around each call and may raise or exit."""

    def __init__(self, root: os.PathLike[str] | str) -> None:
        self.root = str(root)
        self.calls = 0
        self.journal: list[Call] = []
        self.before: Callable[[Call], None] = lambda call: None
        self.after: Callable[[Call], None] = lambda call: None
        self.short: Callable[[Call, int], int] = lambda call, size: size
        """How many bytes of a write are taken."""
        self.paths: dict[int, str] = {}
        self._real: dict[str, Any] = {name: getattr(os, name) for name in NAMES}

    @contextmanager
    def in_place(self) -> Iterator[Disk]:
        for name in NAMES:
            setattr(os, name, getattr(self, "_" + name))
        try:
            yield self
        finally:
            for name in NAMES:
                setattr(os, name, self._real[name])

    def fail(self, code: int, when: Callable[[Call], bool]) -> None:
        """Let the calls that `when` picks fail with the errno `code`."""

        def before(call: Call) -> None:
            if when(call):
                raise OSError(code, os.strerror(code), call.path)

        self.before = before

    def _do(self, name: str, path: str | None, act: Callable[[], Any], data: bytes | None = None) -> Any:
        if path is None or not path.startswith(self.root):
            return act()
        self.calls += 1
        call = Call(self.calls, name, path, data)
        self.before(call)
        result = act()
        if name == "write":
            call.data = (data or b"")[:result]
        self.journal.append(call)
        self.after(call)
        return result

    def _resolve(self, path: Any, at: int | None) -> str:
        text = os.fspath(path)
        return text if at is None or text.startswith("/") else f"{self.paths.get(at, '')}/{text}"

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = self._resolve(path, dir_fd)
        if flags & os.O_CREAT:
            fd = self._do("create", where, lambda: self._real["open"](path, flags, mode, dir_fd=dir_fd))
        else:
            fd = self._real["open"](path, flags, mode, dir_fd=dir_fd)
        self.paths[fd] = where
        return fd

    def _write(self, fd: int, data: Any) -> int:
        taken = bytes(data)
        path = self.paths.get(fd)
        if path is not None and path.startswith(self.root):
            taken = taken[: self.short(Call(self.calls + 1, "write", path), len(taken))]
        return self._do("write", path, lambda: self._real["write"](fd, taken), taken)

    def _fdatasync(self, fd: int) -> None:
        self._do("fdatasync", self.paths.get(fd), lambda: self._real["fdatasync"](fd))

    def _fsync(self, fd: int) -> None:
        self._do("fsync", self.paths.get(fd), lambda: self._real["fsync"](fd))

    def _close(self, fd: int) -> None:
        path = self.paths.pop(fd, None)
        self._do("close", path, lambda: self._real["close"](fd))

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._do("mkdir", self._resolve(path, dir_fd), lambda: self._real["mkdir"](path, mode, dir_fd=dir_fd))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._do("unlink", self._resolve(path, dir_fd), lambda: self._real["unlink"](path, dir_fd=dir_fd))

    def _rename(self, old: Any, new: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self._resolve(old, src_dir_fd), self._resolve(new, dst_dir_fd)
        act = self._real["rename"]
        self._do("rename", target, lambda: act(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd), source.encode())

    def _link(
        self,
        old: Any,
        new: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        source, target = self._resolve(old, src_dir_fd), self._resolve(new, dst_dir_fd)
        act = self._real["link"]
        self._do("link", target, lambda: act(old, new, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd), source.encode())
