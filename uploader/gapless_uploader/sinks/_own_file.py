"""A file that one session appends to, and that a crash at any moment leaves in a state the checkpoint describes.

1. The memo holds the file's length, a checksum of the bytes before it, and its generation. `open` cuts the file back to
   it. A file that does not fit (the state is an old copy, or the file was cut) is no file to go on with: everything is
   asked for again.
2. `append` is durable when it returns; a failed one leaves the file as it was. A file that was moved away or deleted
   under us takes nothing more: what a handle still writes there nobody will read. One that was put in its place since,
   with everything that was acknowledged, is gone on with.
3. `rewrite` makes the next generation under a temporary name and renames it into place. The generation before stays
   hidden beside it, since the memo that stands may still be its; `open` brings it back, or removes it once the memo
   is the new one's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from gapless_uploader.sink import Memo, Parked, Place, Resume
from gapless_uploader.sinks._disk import disk, regular_file, sync_folder

_ANCHOR_BYTES = 256


class OwnFile:
    """One file in `folder`. Raises OSError, Parked when what was acknowledged is gone, and Resume when the memo is of
    another file. Not thread safe."""

    def __init__(self, folder: Path, hidden: str, name_of: Callable[[int], str], run_generation: int) -> None:
        """`name_of(generation)` is the file's name, the same or another for each; `hidden` begins with a dot."""
        self._run_generation = run_generation
        self._folder = folder
        self._hidden = hidden
        self._name_of = name_of
        self._file: BinaryIO | None = None
        self._last = b""
        """The last bytes of the file."""
        self.length = 0
        self.generation = 0

    @property
    def path(self) -> Path:
        """The file as it is now."""
        return self._folder / self._name_of(self.generation)

    def begin(self, content: bytes) -> None:
        """A new file that holds `content`; what was there under its name, or hidden, is gone."""
        self._remove_hidden()
        self.generation, self.length, self._last = 0, 0, b""
        self._handle("wb+")
        self.append(content)
        sync_folder(self._folder)

    def resume(self, memo: Memo) -> None:
        """Go on behind what `memo` describes."""
        self.generation, self.length = memo["generation"], memo["length"]
        before = self._hidden_path(self.generation)
        self._check(memo, before if before.is_file() else self.path)
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
            self._check(self.memo(), self.path)
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
        self._last = (self._last + content[-_ANCHOR_BYTES:])[-_ANCHOR_BYTES:]

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
        self.length, self._last = length, _before(self._opened(), length)

    @contextmanager
    def whole_or_not(self) -> Iterator[None]:
        """All that is done inside is in the file, or nothing of it. Raises Retryable for what the disk says."""
        before = self.memo()
        with disk("write", self.path):
            try:
                yield
            except BaseException:
                self._undo(before)
                raise

    def _undo(self, memo: Memo) -> None:
        """The file as `memo`, made in this session, describes it."""
        if self._file is None:
            return
        if memo["generation"] != self.generation:
            self.close()
            self.resume(memo)
        else:
            self.length = memo["length"]
            self._file.truncate(self.length)
            self._last = _before(self._file, self.length)

    def memo(self) -> Memo:
        """What `resume` needs."""
        return {"length": self.length, "generation": self.generation, "before": _checksum(self._last)}

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check(self, memo: Memo, path: Path) -> None:
        """Raise what there is to raise before anything is changed."""
        later = self._folder / self._name_of(self.generation + 1)
        if path == self.path and later != path and later.is_file():
            raise self._another()
        if not path.is_file():
            raise Parked(f"{path} lacks what was acknowledged; put it back, or choose another folder")
        if path.stat().st_size < self.length:
            raise self._another()
        with open(path, "rb", buffering=0, opener=regular_file) as file:
            if memo.get("before", found := _checksum(_before(file, self.length))) != found:
                raise self._another()

    def _another(self) -> Resume:
        reason = f"{self.path} is not as the state says: it is written anew from the spool"
        return Resume(reason, self._run_generation, Place(), {})

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
        self._handle("rb+")
        self._opened().truncate(self.length)
        self._last = _before(self._opened(), self.length)

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


def _before(file: BinaryIO, length: int) -> bytes:
    """The last bytes before `length`."""
    file.seek(max(0, length - _ANCHOR_BYTES))
    return file.read(min(length, _ANCHOR_BYTES))


def _checksum(data: bytes) -> str:
    return f"{crc32(data):08x}"


def _write(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
