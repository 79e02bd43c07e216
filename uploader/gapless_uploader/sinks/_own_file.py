"""A file that one session appends to, and that a crash at any moment leaves in a state the checkpoint describes.

1. The memo holds the file's length and generation. `open` cuts the file back to it.
2. `append` is durable when it returns; a failed one leaves the file as it was. A file that was moved away or deleted
   under us takes nothing more: what a handle still writes there nobody will read. One that was put in its place since,
   with everything that was acknowledged, is gone on with.
3. `rewrite` makes the next generation under a temporary name and renames it into place. The generation before stays
   hidden beside it, since the memo that stands may still be its; `open` brings it back, or removes it once the memo
   is the new one's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from gapless_uploader.sink import Memo, Parked
from gapless_uploader.sinks._disk import regular_file, sync_folder


class OwnFile:
    """One file in `folder`. Raises OSError, and Parked when what was acknowledged is gone. Not thread safe."""

    def __init__(self, folder: Path, hidden: str, name_of: Callable[[int], str]) -> None:
        """`name_of(generation)` is the file's name, the same or another for each; `hidden` begins with a dot."""
        self._folder = folder
        self._hidden = hidden
        self._name_of = name_of
        self._file: BinaryIO | None = None
        self.length = 0
        self.generation = 0

    @property
    def path(self) -> Path:
        """The file as it is now."""
        return self._folder / self._name_of(self.generation)

    def begin(self, content: bytes) -> None:
        """A new file that holds `content`; what was there under its name, or hidden, is gone."""
        self._remove_hidden()
        self.generation = 0
        self._handle("wb+")
        self.append(content)
        sync_folder(self._folder)

    def resume(self, memo: Memo) -> None:
        """Go on behind what `memo` describes."""
        self.generation, self.length = memo["generation"], memo["length"]
        before = self._hidden_path(self.generation)
        if before.is_file():
            # What was rewritten after the memo was made is undone, and its batch comes again.
            for later in range(self.generation + 1, self.generation + 1 + len(self._hidden_paths())):
                if self._name_of(later) != self._name_of(self.generation):
                    (self._folder / self._name_of(later)).unlink(missing_ok=True)
            before.replace(self.path)
            sync_folder(self._folder)
        self._remove_hidden()
        for earlier in range(self.generation):
            if self._name_of(earlier) != self._name_of(self.generation):
                (self._folder / self._name_of(earlier)).unlink(missing_ok=True)
        self._take_up()

    def append(self, content: bytes) -> None:
        """Put `content` behind everything else, on the disk."""
        if not self._is_in_place():
            self._take_up()
        file = self._opened()
        try:
            file.seek(self.length)
            _write(file, content)
            os.fsync(file.fileno())
        except BaseException:
            file.truncate(self.length)
            raise
        self.length += len(content)

    def rewrite(self, content: Iterable[bytes]) -> None:
        """The file holds `content` and nothing else, as the next generation."""
        beside = self._folder / f"{self._hidden}.tmp"
        with open(beside, "wb", opener=regular_file) as file:
            for part in content:
                file.write(part)
            length = file.tell()
            file.flush()
            os.fsync(file.fileno())
        before, hidden = self.path, self._hidden_path(self.generation)
        hidden.unlink(missing_ok=True)
        hidden.hardlink_to(before)
        self.generation += 1
        beside.replace(self.path)
        if before != self.path:
            # A program that follows the old name must find that it ended, not that it is gone.
            beside.write_bytes(b"")
            beside.replace(before)
        sync_folder(self._folder)
        self._handle("rb+")
        self.length = length

    def undo(self, memo: Memo) -> None:
        """The file as `memo`, made in this session, describes it."""
        if self._file is None:
            return
        if memo["generation"] != self.generation:
            self.close()
            self.resume(memo)
        else:
            self.length = memo["length"]
            self._file.truncate(self.length)

    def memo(self) -> Memo:
        """What `resume` needs."""
        return {"length": self.length, "generation": self.generation}

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _handle(self, mode: str) -> None:
        self.close()
        self._file = open(  # type: ignore[assignment]  # noqa: SIM115 - kept open
            self.path, mode, buffering=0, opener=regular_file
        )

    def _is_in_place(self) -> bool:
        """Whether the open file still has its name. A handle that went stale, as on NFS, has none."""
        try:
            return os.path.samestat(os.fstat(self._opened().fileno()), self.path.stat())
        except OSError:
            return False

    def _take_up(self) -> None:
        """Open what is under the name, and cut it back to `length`."""
        if not self.path.is_file() or self.path.stat().st_size < self.length:
            raise Parked(f"{self.path} lacks what was acknowledged; put it back, or choose another folder")
        self._handle("rb+")
        self._opened().truncate(self.length)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise RuntimeError("write to a closed session")
        return self._file

    def _hidden_path(self, generation: int) -> Path:
        return self._folder / f"{self._hidden}.{generation}"

    def _hidden_paths(self) -> list[Path]:
        prefix = f"{self._hidden}."
        named = [path for path in self._folder.iterdir() if path.name.startswith(prefix)]
        # Another file's hidden name may begin like this one's; it never goes on with a number alone.
        return [path for path in named if path.name[len(prefix) :].isdigit() or path.name == f"{prefix}tmp"]

    def _remove_hidden(self) -> None:
        for path in self._hidden_paths():
            path.unlink()


def _write(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
