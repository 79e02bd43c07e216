"""What a power failure leaves of a spool, worked out from the journal of a `Disk`.

The model is a hard one. Bytes are safe once an fdatasync or fsync of their file returned; of later ones, any subset of
4 KiB pages reached the disk, the file's length is anything between, and a page that did not is zeros. A name is safe
once its folder was synced; a later one is there or not. A sync that failed has lost what it was to save: no later sync
of that file brings it back.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tests.spool.disk import Call

PAGE = 4096


@dataclass
class File:
    content: bytearray = field(default_factory=bytearray)
    safe: int = 0
    lost: list[tuple[int, int]] = field(default_factory=list)
    """Ranges that a failed sync dropped."""


class Model:
    """The disk as the journal left it, up to some call."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.names: dict[str, File | None] = {}
        """Path to file, None for a folder: as the running system sees it."""
        self.safe_names: dict[str, File | None] = {}

    def play(self, calls: Iterable[Call]) -> None:
        for call in calls:
            getattr(self, "_" + call.name)(call)

    def _create(self, call: Call) -> None:
        self.names[call.path] = File()

    def _mkdir(self, call: Call) -> None:
        self.names[call.path] = None

    def _write(self, call: Call) -> None:
        file = self.names.get(call.path)
        if file is not None and call.data:
            file.content += call.data

    def _fdatasync(self, call: Call) -> None:
        file = self.names.get(call.path)
        if file is not None:
            file.safe = len(file.content)

    def _fsync(self, call: Call) -> None:
        if call.path in self.names and self.names[call.path] is not None:
            self._fdatasync(call)
            return
        for path in set(self.names) | set(self.safe_names):
            if str(PurePosixPath(path).parent) == call.path:
                if path in self.names:
                    self.safe_names[path] = self.names[path]
                else:
                    self.safe_names.pop(path, None)

    def _failed_sync(self, call: Call) -> None:
        file = self.names.get(call.path)
        if file is not None and file.safe < len(file.content):
            file.lost.append((file.safe, len(file.content)))

    def _rename(self, call: Call) -> None:
        assert call.data is not None
        self.names[call.path] = self.names.pop(call.data.decode())

    def _link(self, call: Call) -> None:
        assert call.data is not None
        self.names[call.path] = self.names[call.data.decode()]

    def _unlink(self, call: Call) -> None:
        self.names.pop(call.path, None)

    def _close(self, call: Call) -> None:
        pass

    def after_power_loss(self, chance: random.Random) -> dict[str, bytes]:
        """Path to content of the files that are found when the power is back."""
        found: dict[str, bytes] = {}
        there: dict[str, File | None] = {}
        for path in set(self.names) | set(self.safe_names):
            now, safe = self.names.get(path, ...), self.safe_names.get(path, ...)
            chosen = safe if now is safe or chance.random() < 0.5 else now
            if chosen is not ...:
                there[path] = chosen  # type: ignore[assignment]
        for path, file in there.items():
            parents = [str(parent) for parent in PurePosixPath(path).parents]
            known = [parent for parent in parents if parent in self.names or parent in self.safe_names]
            if file is not None and all(parent in there for parent in known):
                found[path] = self._content(file, chance)
        return found

    def _content(self, file: File, chance: random.Random) -> bytes:
        size = chance.randint(file.safe, len(file.content))
        content = bytearray(file.content[:size])
        for start in range(file.safe // PAGE * PAGE, size, PAGE):
            if chance.random() < 0.5:
                low, high = max(start, file.safe), min(start + PAGE, size)
                content[low:high] = bytes(high - low)
        for low, high in file.lost:
            content[low : min(high, size)] = bytes(max(0, min(high, size) - low))
        return bytes(content)
