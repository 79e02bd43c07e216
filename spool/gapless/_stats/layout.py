"""Layouts: which keys an export holds, of which kind, in which order, the same on every rank.

1. A rank proposes the layout agreed last, extended by what it recorded that is not in it.
2. Equal digests of all proposals mean that the proposal is the layout; nothing else is sent.
3. Otherwise the proposals themselves travel, and every rank merges them into the same new layout, or finds
   the same conflict.

Nothing here talks to anybody or imports torch.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import cached_property

Name = tuple[str, str]
"""A tracker's name and a full key."""

_LIVE = 0x80


class ReduceType(Enum):
    """How a statistic is reduced over elements, recordings and ranks."""

    AVG_MIN_MAX = auto()
    AVG = auto()
    SUM = auto()
    MIN = auto()
    MAX = auto()
    SCALAR = auto()


DENOMINATOR = 0
SCALAR = ReduceType.SCALAR.value


def kind_label(kind: int) -> str:
    """A kind as a person would name it."""
    if kind == DENOMINATOR:
        return "a denominator"
    return "a scalar" if kind == SCALAR else f"reduce type {ReduceType(kind).name}"


class Layout:
    """Keys in the order of their names, each with its kind. Never changes once made."""

    def __init__(self, kinds: Mapping[Name, int]) -> None:
        self.kinds: dict[Name, int] = {name: kinds[name] for name in sorted(kinds)}
        self._digests: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.kinds)

    def extended(self, kinds: Mapping[Name, int]) -> Layout:
        """This layout with more keys, or other kinds for keys that it has."""
        return Layout({**self.kinds, **kinds})

    def only(self, names: Iterable[Name]) -> Layout:
        """The part of this layout that is named."""
        return Layout({name: self.kinds[name] for name in names if name in self.kinds})

    def digest(self, request: str) -> int:
        """A number of 62 bits that is equal for equal layouts and requests, and hardly for others."""
        if request not in self._digests:
            text = json.dumps([request, [[*name, kind] for name, kind in self.kinds.items()]])
            raw = hashlib.blake2b(text.encode(), digest_size=8).digest()
            self._digests[request] = int.from_bytes(raw, "big") >> 2
        return self._digests[request]

    @cached_property
    def _packed_names(self) -> bytes:
        return zlib.compress(json.dumps([list(name) for name in self.kinds]).encode(), 1)

    def num_payload_bytes(self, request: str) -> int:
        """How long `payload` is, whichever keys are live."""
        return 12 + len(request.encode()) + len(self._packed_names) + len(self.kinds)

    def payload(self, request: str, live: set[Name]) -> bytes:
        """The proposal as bytes: the request, the names, and per key its kind and whether it was recorded."""
        asked = request.encode()
        sizes = b"".join(len(part).to_bytes(4, "big") for part in (asked, self._packed_names, self.kinds))
        flags = bytes(kind | _LIVE if name in live else kind for name, kind in self.kinds.items())
        return sizes + asked + self._packed_names + flags


def _unpacked(payload: bytes) -> tuple[str, list[tuple[Name, int]]]:
    asked, packed, num_keys = (int.from_bytes(payload[at : at + 4], "big") for at in (0, 4, 8))
    names = json.loads(zlib.decompress(payload[12 + asked : 12 + asked + packed]))
    flags = payload[12 + asked + packed : 12 + asked + packed + num_keys]
    return payload[12 : 12 + asked].decode(), [
        ((name[0], name[1]), flag) for name, flag in zip(names, flags, strict=True)
    ]


def merged(payloads: Sequence[bytes], ranks: Sequence[int]) -> Layout:
    """One layout from every rank's proposal: the union of the keys, with the kinds in which they were recorded.

    Raises ValueError, with the same text on every rank, when the ranks asked for different exports or
    recorded one key in different kinds.
    """
    ranks_by_payload: dict[bytes, list[int]] = {}
    for rank, payload in zip(ranks, payloads, strict=True):
        ranks_by_payload.setdefault(payload, []).append(rank)
    ranks_by_request: dict[str, list[int]] = {}
    kinds: dict[Name, int] = {}
    recorded: dict[Name, dict[int, list[int]]] = {}
    for payload, holders in ranks_by_payload.items():
        request, rows = _unpacked(payload)
        ranks_by_request.setdefault(request, []).extend(holders)
        for name, flag in rows:
            kinds.setdefault(name, flag & ~_LIVE)
            if flag & _LIVE:
                recorded.setdefault(name, {}).setdefault(flag & ~_LIVE, []).extend(holders)
    if len(ranks_by_request) > 1:
        asked = "; ".join(f"{ranks_label(held)}: {request}" for request, held in sorted(ranks_by_request.items()))
        raise ValueError(f"the ranks of one group called different exports ({asked}); all must call the same")
    conflicts = [(name, held) for name, held in sorted(recorded.items()) if len(held) > 1]
    if conflicts:
        raise ValueError("; ".join(_conflict(name, held) for name, held in conflicts[:5]))
    kinds.update({name: next(iter(held)) for name, held in recorded.items()})
    return Layout(kinds)


def _conflict(name: Name, held: Mapping[int, list[int]]) -> str:
    tracker, key = name
    where = f" of tracker {tracker!r}" if tracker else ""
    sides = ", ".join(f"{kind_label(kind)} on {ranks_label(ranks)}" for kind, ranks in sorted(held.items()))
    return f"`{key}`{where} was recorded as {sides}; one key has one reduce type on all ranks"


def ranks_label(ranks: Iterable[int]) -> str:
    """Ranks as a person would list them: "rank 2", "ranks 0, 1, 3"."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
