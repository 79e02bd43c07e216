"""A run's records in one order: attempts of a writer one after the other, writers side by side by their clocks.

Reading is bounded by bytes; what was read and not taken is dropped when nobody wants it. Only one thread uses a reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gapless_schemas import Header, decode_lines
from gapless_uploader.attempt import AttemptReader, Taken
from gapless_uploader.intervals import Intervals
from gapless_uploader.merge import attempt_order, writer_order
from gapless_uploader.tail import Damage, DecodeLines

Paths = Mapping[str, Mapping[int, Path]]
Sizes = Mapping[str, Mapping[int, int]]
Cursor = dict[str, Any]
"""attempt_id -> where its reader is."""


class RunReader:
    """Reads the attempts of one run from where `cursor` left off."""

    def __init__(
        self, cursor: Cursor | None = None, grace_s: float = 30.0, decode_lines: DecodeLines = decode_lines
    ) -> None:
        self.attempts: dict[str, AttemptReader] = {}
        self._cursor = dict(cursor or {})
        self._grace_s = grace_s
        self._decode_lines = decode_lines

    def meet(self, headers: Mapping[str, Header]) -> list[Header]:
        """Take up attempts not known yet; which they were."""
        new = [header for attempt_id, header in headers.items() if attempt_id not in self.attempts]
        for header in new:
            cursor = self._cursor.get(header.attempt_id)
            self.attempts[header.attempt_id] = AttemptReader(header, cursor, self._grace_s, self._decode_lines)
        return new

    def cursor(self) -> Cursor:
        """What the constructor takes to go on from here; attempts that are out of sight keep their place."""
        return {**self._cursor, **{name: reader.cursor() for name, reader in self.attempts.items()}}

    def seen(self) -> dict[str, Intervals]:
        """attempt_id -> the live set of seqs read."""
        return {name: reader.seen for name, reader in self.attempts.items()}

    def first_step(self, attempt_id: str, paths: Paths, now: float) -> int | None:
        """The step of the attempt's first metrics record, if it is in reach. Raises OSError."""
        return self.attempts[attempt_id].first_metrics_step(paths.get(attempt_id, {}), now)

    def read(self, paths: Paths, sizes: Sizes, now: float, max_bytes: int) -> Iterator[tuple[str, Taken]]:
        """Records in order, until about `max_bytes` were read or nothing is there. Raises OSError.

        Attempts whose segments have the `sizes` that were read already are not opened.
        """
        writers: dict[str, list[AttemptReader]] = {}
        for reader in sorted(self.attempts.values(), key=lambda r: attempt_order(r.header)):
            if not reader.idle(sizes.get(reader.header.attempt_id, {})):
                writers.setdefault(reader.header.writer, []).append(reader)
        order = sorted(writers, key=writer_order)
        taken_bytes = 0
        while taken_bytes < max_bytes:
            heads: list[tuple[float, int, AttemptReader]] = []
            for writer in order:
                for reader in writers[writer]:
                    record = reader.head(paths.get(reader.header.attempt_id, {}), now)
                    if record is not None:
                        heads.append((record.t, len(heads), reader))
                        break
            if not heads:
                return
            heads.sort(key=lambda head: head[:2])
            reader = heads[0][2]
            until = heads[1][0] if len(heads) > 1 else None
            taken = reader.take(paths.get(reader.header.attempt_id, {}), now, until)
            if taken is None:
                return
            taken_bytes += taken.end - taken.start
            if taken.records:
                yield reader.header.attempt_id, taken

    def read_ahead(self, paths: Paths, sizes: Sizes, now: float, max_bytes: int) -> None:
        """Decode about `max_bytes` of what `read` hands out next, and move nothing. What fails is left to `read`."""
        for name, reader in self.attempts.items():
            if not reader.idle(sizes.get(name, {})):
                with suppress(OSError, ValueError):
                    reader.read_ahead(paths.get(name, {}), now, max_bytes)

    def bound(self, cursor: Cursor) -> None:
        """Read no further than `cursor` from now on: what a batch held is read again, and nothing else."""
        for name, reader in self.attempts.items():
            reader.bound(cursor.get(name, {"open": [], "next": 0}))

    @property
    def waits_for_blocks(self) -> bool:
        """Whether some segment shows NUL bytes where a network disk may still bring data."""
        return any(tail.waits for reader in self.attempts.values() for tail in reader.tails.values())

    def take_damage(self) -> Iterator[tuple[str, Damage]]:
        """Damage found since the last call."""
        for name, reader in self.attempts.items():
            found, reader.damage = reader.damage, []
            for damage in found:
                yield name, damage

    def rest(self) -> None:
        """Hold no memory while nothing comes."""
        for reader in self.attempts.values():
            reader.drop_buffer()

    def behind(self, sizes: Sizes) -> int:
        """Bytes of `sizes` not consumed yet, torn tails included."""
        total = 0
        for attempt_id, found in sizes.items():
            reader = self.attempts.get(attempt_id)
            total += reader.behind(found) if reader is not None else sum(found.values())
        return total
