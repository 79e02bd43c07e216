"""A real file system whose disk can be stopped: FUSE's kernel protocol, spoken by a process of its own, held in memory.

`python -m tests.spool.fuse FOLDER` mounts itself and serves until it is unmounted. SIGSTOP makes every access hang in
the kernel, as a dead NFS server does; SIGCONT brings the disk back. Needs root and /dev/fuse, no library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.spool.scripts import environment

_IN = struct.Struct("<IIQQIIIHH")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_CHANGES = (4, 9, 10, 11, 12, 13, 16, 35, 45)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Node:
    mode: int
    content: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)
    nlink: int = 1


class Refuse(Exception):
    """The call fails with this errno."""


class FileSystem:
    """Answers the kernel's requests, one by one."""

    def __init__(self) -> None:
        self.nodes = {1: Node(stat.S_IFDIR | 0o755)}
        self.read_only = False
        self.answers: dict[int, Callable[[int, bytes], bytes]] = {
            1: lambda at, body: self.entry(self.find(at, body[:-1])),
            3: lambda at, body: struct.pack("<QII", 0, 0, 0) + self.attr(at),
            4: self.setattr,
            9: lambda at, body: self.entry(self.add(at, body[8:-1], stat.S_IFDIR | 0o755)),
            10: self.unlink,
            11: self.unlink,
            12: lambda at, body: self.rename(at, body, 8),
            13: self.link,
            14: lambda at, body: struct.pack("<QII", 0, 0, 0),
            15: lambda at, body: self.read(at, *struct.unpack_from("<QI", body, 8)),
            16: self.write,
            17: lambda at, body: struct.pack("<QQQQQIII28x", 1 << 20, 1 << 20, 1 << 20, 1000, 1000, 4096, 255, 4096),
            18: lambda at, body: b"",
            20: lambda at, body: b"",
            25: lambda at, body: b"",
            26: lambda at, body: struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 1 << 5, 16, 12, 1 << 17, 1, 0, 0, 0),
            27: lambda at, body: struct.pack("<QII", 0, 0, 0),
            28: lambda at, body: self.readdir(at, *struct.unpack_from("<QI", body, 8)),
            29: lambda at, body: b"",
            30: lambda at, body: b"",
            34: lambda at, body: b"",
            35: lambda at, body: self.entry(self.add(at, body[16:-1], stat.S_IFREG | 0o644)) + bytes(16),
            45: lambda at, body: self.rename(at, body, 16),
        }

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, 1 << 18)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (2, 36, 42):  # forget, interrupt: no answer
                continue
            try:
                if opcode not in self.answers:
                    raise Refuse(errno.ENOSYS)
                if self.read_only and opcode in _CHANGES:
                    raise Refuse(errno.EROFS)
                body, code = self.answers[opcode](node, request[_IN.size :]), 0
            except Refuse as why:
                body, code = b"", -why.args[0]
            with suppress(FileNotFoundError):  # whoever asked was killed meanwhile
                os.write(device, struct.pack("<IiQ", 16 + len(body), code, unique) + body)

    def find(self, at: int, name: bytes) -> int:
        try:
            return self.nodes[at].names[name.decode()]
        except KeyError:
            raise Refuse(errno.ENOENT) from None

    def add(self, at: int, name: bytes, mode: int) -> int:
        if name.decode() in self.nodes[at].names:
            raise Refuse(errno.EEXIST)
        number = max(self.nodes) + 1
        self.nodes[number] = Node(mode)
        self.nodes[at].names[name.decode()] = number
        return number

    def attr(self, number: int) -> bytes:
        node = self.nodes[number]
        size = len(node.content)
        return _ATTR.pack(number, size, size // 512, 0, 0, 0, 0, 0, 0, node.mode, node.nlink, 0, 0, 0, 4096, 0)

    def entry(self, number: int) -> bytes:
        return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self.attr(number)

    def setattr(self, at: int, body: bytes) -> bytes:
        valid, size = struct.unpack_from("<I12xQ", body)
        if valid & 8:
            del self.nodes[at].content[size:]
        return struct.pack("<QII", 0, 0, 0) + self.attr(at)

    def unlink(self, at: int, body: bytes) -> bytes:
        number = self.find(at, body[:-1])
        self.nodes[number].nlink -= 1
        del self.nodes[at].names[body[:-1].decode()]
        return b""

    def rename(self, at: int, body: bytes, skip: int) -> bytes:
        (to,) = struct.unpack_from("<Q", body)
        old, new = body[skip:-1].split(b"\0")
        number = self.find(at, old)
        del self.nodes[at].names[old.decode()]
        self.nodes[to].names[new.decode()] = number
        return b""

    def link(self, at: int, body: bytes) -> bytes:
        (number,) = struct.unpack_from("<Q", body)
        if body[8:-1].decode() in self.nodes[at].names:
            raise Refuse(errno.EEXIST)
        self.nodes[at].names[body[8:-1].decode()] = number
        self.nodes[number].nlink += 1
        return self.entry(number)

    def read(self, at: int, offset: int, size: int) -> bytes:
        return bytes(self.nodes[at].content[offset : offset + size])

    def write(self, at: int, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        self.nodes[at].content[offset : offset + size] = body[40 : 40 + size]
        return struct.pack("<II", size, 0)

    def readdir(self, at: int, offset: int, size: int) -> bytes:
        out = b""
        for place, (name, number) in enumerate(list(self.nodes[at].names.items())[offset:], offset + 1):
            text = name.encode()
            entry = struct.pack("<QQII", number, place, len(text), self.nodes[number].mode >> 12) + text
            entry += bytes(-len(entry) % 8)
            if len(out) + len(entry) > size:
                break
            out += entry
        return out


class Stoppable:
    """The mounted folder, and the process behind it."""

    def __init__(self, folder: Path, server: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self._server = server

    def stop(self) -> None:
        """From now on every access hangs."""
        self._server.send_signal(signal.SIGSTOP)
        # The signal is on its way until the process shows as stopped.
        while Path(f"/proc/{self._server.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            pass

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def toggle_read_only(self) -> None:
        """Refuse every change with EROFS, or take them again; returns when the server has heard of it."""
        assert self._server.stdout is not None
        self._server.send_signal(signal.SIGUSR1)
        self._server.stdout.readline()


@contextmanager
def stoppable_disk(folder: Path) -> Iterator[Stoppable]:
    """A mounted file system at `folder`. Raises OSError where none can be mounted."""
    folder.mkdir()
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.spool.fuse", str(folder)], stdout=subprocess.PIPE, env=environment()
    )
    assert server.stdout is not None
    try:
        if server.stdout.readline() != b"mounted\n":
            raise OSError("no FUSE file system can be mounted here")
        yield Stoppable(folder, server)
    finally:
        server.send_signal(signal.SIGCONT)
        _libc.umount2(os.fsencode(folder), 2)
        server.kill()
        server.wait()
        server.stdout.close()


def main(folder: str) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if _libc.mount(b"gapless-test", os.fsencode(folder), b"fuse", 6, options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), folder)
    files = FileSystem()

    def toggle(_signal: int, _frame: object) -> None:
        files.read_only = not files.read_only
        os.write(1, b"toggled\n")

    signal.signal(signal.SIGUSR1, toggle)
    print("mounted", flush=True)
    files.serve(device)


if __name__ == "__main__":
    main(sys.argv[1])
