"""An attempt's place in the run: its number, and the step its predecessor reached.

Start-up never lists the run's folder: numbers are claimed as files of their own in `.attempts`, found by doubling and
halving, and a claim holds the attempt's id, from which the predecessor's segments are found the same way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gapless.segment import create_file, make_folders, open_file, open_folder
from gapless_schemas import CLAIMS, Damaged, SegmentName, decode

MAX_TAIL_BYTES = 1 << 20
MAX_PREDECESSORS = 16


def claim_attempt(folder: Path, writer: str, attempt_id: str) -> int:
    """Claim the next free attempt number of `writer` (a path name) in the run's `folder`. Raises OSError."""
    claims = folder / CLAIMS
    fresh = not claims.is_dir()
    make_folders(claims, 1)
    if fresh:  # an old or copied run may have segments and no claims: this one time, look
        _adopt(folder, writer)
    number = _first_missing(1, lambda n: _is_there(claims / _claim(writer, n)))
    while not put_claim(folder, writer, number, attempt_id):
        number += 1
    return number


def put_claim(folder: Path, writer: str, number: int, attempt_id: str) -> bool:
    """Write the claim of `number`; False when somebody else holds it. Raises OSError."""
    with open_folder(folder / CLAIMS) as at:
        try:
            fd = create_file(_claim(writer, number), at)
        except FileExistsError:
            return False
        try:
            # A claim that stays empty on a full disk still holds its number.
            with suppress(OSError):
                os.write(fd, attempt_id.encode())
        finally:
            os.close(fd)
    return True


def last_step(folder: Path, writer: str, attempt: int) -> int | None:
    """The largest step in the last readable rows of the attempts before `attempt`; None when there is none."""
    budget = MAX_TAIL_BYTES
    for number in range(attempt - 1, max(0, attempt - 1 - MAX_PREDECESSORS), -1):
        short_id = _claimed_id(folder, writer, number)
        if short_id is None:
            continue
        for index in range(_num_segments(folder, writer, number, short_id) - 1, -1, -1):
            path = folder / str(SegmentName(writer, number, short_id, index))
            step, read = _tail_step(path, budget)
            if step is not None:
                return step
            budget -= read
            if budget <= 0:
                return None
    return None


def _claim(writer: str, number: int) -> str:
    return f"{writer}-{number:04d}"


def _adopt(folder: Path, writer: str) -> None:
    seen: dict[int, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            name = SegmentName.parse(entry.name)
            if name is not None and name.writer == writer:
                seen[name.attempt] = name.short_id
    # Every number below the highest, so that doubling finds no hole.
    for number in range(1, max(seen, default=0) + 1):
        put_claim(folder, writer, number, seen.get(number, ""))


def _claimed_id(folder: Path, writer: str, number: int) -> str | None:
    try:
        fd = open_file(folder / CLAIMS / _claim(writer, number))
    except OSError:
        return None
    try:
        text = os.read(fd, 32).decode("ascii", "replace")[:8]
    except OSError:
        return None
    finally:
        os.close(fd)
    return text if len(text) == 8 else None


def _num_segments(folder: Path, writer: str, number: int, short_id: str) -> int:
    def there(index: int) -> bool:
        return _is_there(folder / str(SegmentName(writer, number, short_id, index)))

    found = _first_missing(0, there)
    if found:
        return found
    # The first segment was never whole, or was removed: only then is the folder listed.
    names = (SegmentName.parse(path.name) for path in folder.iterdir())
    return max((name.index + 1 for name in names if name is not None and name.short_id == short_id), default=0)


def _is_there(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    return True


def _first_missing(start: int, there: Callable[[int], bool]) -> int:
    if not there(start):
        return start
    low, stride = start, 1
    while there(start + stride):
        low, stride = start + stride, stride * 2
    high = start + stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if there(middle) else (low, middle)
    return high


def _tail_step(path: Path, budget: int) -> tuple[int | None, int]:
    """The largest step among the sound metrics rows of the file's last `budget` bytes, and how many were read."""
    try:
        fd = open_file(path)
    except OSError:
        return None, 0
    try:
        size = os.fstat(fd).st_size
        want = 16_384
        while True:
            want = min(want, budget, size)
            data = os.pread(fd, want, size - want)
            steps = [step for line in data.split(b"\n")[1:] if (step := _step_of(line)) is not None]
            if steps or want >= min(budget, size):
                return max(steps, default=None), want
            want *= 8
    except OSError:
        return None, 0
    finally:
        os.close(fd)


def _step_of(line: bytes) -> int | None:
    if b'"kind":"metrics"' not in line[:200]:
        return None
    try:
        return decode(line).step
    except Damaged:
        return None
