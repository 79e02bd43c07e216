"""What the tracker was given of a run, small enough for a memo: points per key, and which key has which type.

Keys are kept as six bytes of their sha256, grouped by how many points they have: most keys of a run have the same.
Not thread safe.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from hashlib import sha256
from typing import Any

_DIGEST_BYTES = 6
NUMBER = "FLOAT"


class Tally:
    """Counts and types of one run's keys, as acknowledged; `begin` and `commit` bracket a batch."""

    def __init__(self, memo: dict[str, Any]) -> None:
        self._counts: Counter[bytes] = Counter()
        for count, digests in memo.get("sent", []):
            packed = b64decode(digests)
            for at in range(0, len(packed), _DIGEST_BYTES):
                self._counts[packed[at : at + _DIGEST_BYTES]] = count
        self.media: dict[str, str] = dict(memo.get("media", {}))
        """Key -> column type, of those that are no numbers."""
        self.lines: int = memo.get("lines", 0)
        """Console lines sent."""
        self.top: int = memo.get("top", -1)
        """The highest step sent."""
        self._nans: Counter[bytes] = Counter({bytes.fromhex(k): n for k, n in memo.get("nans", {}).items()})
        self._digests: dict[str, bytes] = {}
        self.begin()

    def begin(self) -> None:
        """Forget what the batch at hand added."""
        self._shapes: Counter[tuple[str, ...]] = Counter()
        self._less: Counter[str] = Counter()
        self._new_nans: Counter[str] = Counter()
        self._new_lines = 0
        self._new_top = self.top

    def add(self, step: int, names: tuple[str, ...]) -> None:
        """A step has one point of each of `names`."""
        self._shapes[names] += 1
        self._new_top = max(self._new_top, step)

    def add_nan(self, name: str) -> None:
        """Of those points, one is a NaN."""
        self._new_nans[name] += 1

    def drop(self, name: str) -> None:
        """Of those points, one was refused by the tracker."""
        self._less[name] += 1

    def next_line(self) -> int:
        """The number of one more console line, from 1."""
        self._new_lines += 1
        return self.lines + self._new_lines

    def commit(self) -> None:
        """The batch at hand was acknowledged."""
        for names, count in self._shapes.items():
            for name in names:
                self._counts[self._digest(name)] += count
        for name, count in self._less.items():
            self._counts[self._digest(name)] -= count
        for name, count in self._new_nans.items():
            self._nans[self._digest(name)] += count
        self.lines += self._new_lines
        self.top = self._new_top
        self.begin()

    def is_number(self, name: str) -> bool:
        """Whether the key was sent as a number, now or earlier."""
        return self._digest(name) in self._counts and name not in self.media

    def note_number(self, name: str) -> None:
        """The key is a number's from now on."""
        self._counts[self._digest(name)] += 0

    def sent(self, name: str) -> int:
        """Points of the key that were acknowledged."""
        return self._counts[self._digest(name)]

    def nans(self, name: str) -> int:
        """How many of them are NaN."""
        return self._nans[self._digest(name)]

    def keys_sent(self) -> int:
        """How many keys have points."""
        return sum(1 for count in self._counts.values() if count)

    def points_sent(self) -> int:
        """All points."""
        return sum(self._counts.values())

    def without(self, names: set[str]) -> tuple[int, int]:
        """Keys and points of keys other than `names`."""
        known = {self._digest(name) for name in names}
        left = [count for digest, count in self._counts.items() if count and digest not in known]
        return len(left), sum(left)

    def memo(self) -> dict[str, Any]:
        """What the constructor takes; JSON."""
        groups: dict[int, list[bytes]] = {}
        for digest, count in self._counts.items():
            groups.setdefault(count, []).append(digest)
        return {
            "sent": [[count, b64encode(b"".join(digests)).decode()] for count, digests in groups.items()],
            "media": dict(self.media),
            "lines": self.lines,
            "top": self.top,
            "nans": {digest.hex(): count for digest, count in self._nans.items()},
        }

    def _digest(self, name: str) -> bytes:
        digest = self._digests.get(name)
        if digest is None:
            digest = sha256(name.encode("utf-8", "surrogatepass")).digest()[:_DIGEST_BYTES]
            self._digests[name] = digest
        return digest
