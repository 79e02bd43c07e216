"""An independent reader for tests: splits on newlines, decodes, drops repeats. It shares no code with the uploader."""

from __future__ import annotations

from pathlib import Path

import orjson

from gapless_schemas import Damaged, Header, Record, SegmentName, decode, decode_header


def segments(folder: Path) -> list[Path]:
    """The run's segments by writer, attempt and index."""
    named = [(SegmentName.parse(path.name), path) for path in folder.iterdir()]
    found = [(name.writer, name.attempt, name.short_id, name.index, path) for name, path in named if name is not None]
    return [path for *_, path in sorted(found)]


def header(segment: Path) -> Header:
    return decode_header(segment.read_bytes().split(b"\n")[0])


def records(folder: Path) -> dict[str, list[Record]]:
    """The sound records of each attempt by seq, repeats dropped. A torn last line is left out; other damage raises."""
    attempts: dict[str, dict[int, Record]] = {}
    for segment in segments(folder):
        first, *lines = segment.read_bytes().split(b"\n")
        try:
            attempt_id = decode_header(first).attempt_id
        except Damaged:
            assert not lines, f"{segment} has rows and no header"
            continue
        kept = attempts.setdefault(attempt_id, {})
        for line in lines[:-1]:
            record = decode(line)
            twin = kept.setdefault(record.seq, record)
            assert repr(twin) == repr(record), f"two records of seq {record.seq}"
    return {attempt_id: [kept[seq] for seq in sorted(kept)] for attempt_id, kept in attempts.items()}


def only(folder: Path, kind: str | None = None) -> list[Record]:
    """The records of a run's only attempt, of one kind if given."""
    (found,) = records(folder).values()
    return [record for record in found if kind in (None, record.kind)]


def raw(folder: Path) -> list[dict[str, object]]:
    """All whole lines as JSON, headers included."""
    return [orjson.loads(line) for segment in segments(folder) for line in segment.read_bytes().split(b"\n")[:-1]]
