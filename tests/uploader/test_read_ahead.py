"""What was decoded while a tracker answered is what reading would have found, or is thrown away."""

from __future__ import annotations

from pathlib import Path

import pytest

from gapless_uploader import attempt as attempt_module
from gapless_uploader.attempt import AttemptReader, read_header
from gapless_uploader.tail import CHUNK_BYTES
from tests.wandb_spool import Attempt

ROWS = [(step, {"loss": step / 7, "text": "x" * 200}) for step in range(6_000)]
"""Five chunks of them and a part."""
MAX_BYTES = 3 * CHUNK_BYTES


@pytest.fixture
def written(tmp_path: Path) -> Attempt:
    written = Attempt(tmp_path)
    written.add_rows(ROWS)
    return written


def reader_of(written: Attempt) -> AttemptReader:
    header = read_header(written.path)
    assert header is not None
    return AttemptReader(header)


def take_all(reader: AttemptReader, path: Path) -> list[int | None]:
    found: list[int | None] = []
    while (taken := reader.take({0: path}, 0.0)) is not None:
        found += [record.step for record in taken.records]
    return found


def begun(written: Attempt) -> tuple[AttemptReader, list[int | None]]:
    """A reader that took one chunk and read ahead, and the steps of that chunk."""
    reader = reader_of(written)
    taken = reader.take({0: written.path}, 0.0)
    assert taken is not None
    reader.read_ahead({0: written.path}, 0.0, MAX_BYTES)
    return reader, [record.step for record in taken.records]


def test_what_was_read_ahead_is_handed_out_in_its_place(written: Attempt) -> None:
    """All records come once and in order, whether or not they were read ahead; the place moves with them alone."""
    reader, first = begun(written)
    place = reader.cursor()

    assert place["open"][0][1] < CHUNK_BYTES
    assert first + take_all(reader, written.path) == [step for step, _ in ROWS]
    assert reader.cursor()["seen"] == [[1, len(ROWS)]]


def test_what_was_read_ahead_is_not_read_again(written: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail does not read the chunks that are ready."""
    reader, _ = begun(written)
    reads: list[int] = []
    fill = attempt_module.Tail.read

    def counted(tail: attempt_module.Tail, *args: object) -> attempt_module.Chunk:
        reads.append(tail.offset)
        return fill(tail, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(attempt_module.Tail, "read", counted)
    for _ in range(3):
        assert reader.take({0: written.path}, 0.0) is not None

    assert reads == []
    take_all(reader, written.path)
    assert len(reads) > 0


def test_the_end_of_a_file_is_not_kept(written: Attempt) -> None:
    """What may still grow is read when it is asked for: rows that came since are among it."""
    reader = reader_of(written)
    first = reader.take({0: written.path}, 0.0)
    assert first is not None
    reader.read_ahead({0: written.path}, 0.0, 1 << 30)
    written.add_rows([(6_000, {"loss": 1.0})])

    assert len(first.records) + len(take_all(reader, written.path)) == 6_001


def test_a_file_that_was_replaced_is_read_anew(written: Attempt) -> None:
    """Another file in the segment's place: nothing that was read ahead of the old one is handed out."""
    reader, _ = begun(written)
    other = Attempt(written.path.parent / "other")
    other.add_rows([(step, {"loss": 0.5, "other": "y" * 200}) for step in range(6_000)])
    written.path.write_bytes(other.path.read_bytes())
    # The first chunk that was ready begins where the old file was looked at last; behind it the bytes are others.
    reader.take({0: written.path}, 0.0)
    rest = reader.take({0: written.path}, 0.0)

    assert rest is not None
    assert all("other" in record.data for record in rest.records)


def test_damage_is_left_to_the_reading(written: Attempt) -> None:
    """A damaged line ends what is read ahead, and is reported once, when its chunk is read."""
    data = bytearray(written.path.read_bytes())
    data[CHUNK_BYTES + 5_000] ^= 0xFF
    written.path.write_bytes(data)
    reader, first = begun(written)

    assert reader.damage == []
    assert len(first) + len(take_all(reader, written.path)) == 5_999
    assert len(reader.damage) == 1


def test_an_idle_attempt_holds_nothing_ahead(written: Attempt) -> None:
    """With its buffer, an attempt that rests forgets what it read ahead, and reads it again."""
    reader, first = begun(written)
    reader.drop_buffer()

    assert first + take_all(reader, written.path) == [step for step, _ in ROWS]
