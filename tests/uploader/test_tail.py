"""A tail hands out every sound record once, and damage with its offset, whatever happens to the bytes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gapless_schemas import MAX_READ_BYTES, seal
from gapless_uploader.attempt import AttemptReader, read_header
from gapless_uploader.tail import NotASegment, SegmentFile, Tail
from tests.uploader.harness import T0, Attempt, SpoolDir


class Bytes:
    """A segment in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def pread(self, size: int, offset: int) -> bytes:
        return self.data[offset : offset + size]

    def size(self) -> int:
        return len(self.data)


def read_all(tail: Tail, data: bytes, now: float = 0.0, max_bytes: int = 1 << 18) -> tuple[list[int], int]:
    """Seqs handed out until nothing comes any more, and how many lines were damaged."""
    file, seqs, damaged = Bytes(data), [], 0
    while True:
        chunk = tail.read(file, now, max_bytes)
        seqs += [record.seq for record in chunk.records]
        damaged += len(chunk.damage)
        if chunk.end == tail.offset:
            return seqs, damaged
        tail.consume(file, chunk.end)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return SpoolDir(tmp_path).attempt()


def mixed(attempt: Attempt, rows: int) -> bytes:
    """A segment of mixed kinds, with text in several scripts."""
    attempt.run({"lr": 0.1, "model": "模型 🚀"})
    for step in range(rows):
        attempt.log(step, loss=1 / (step + 1), note=f"ü{step}\u2028")
    attempt.finish()
    return attempt.path.read_bytes()


def test_a_cut_at_every_byte_gives_the_whole_records_before_it_and_the_rest_later(attempt: Attempt) -> None:
    """Cut anywhere, complete records come; when the rest of the bytes is there, the others come, each once."""
    data = mixed(attempt, 60)
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]

    for cut in range(len(data) + 1):
        tail = Tail(0)
        first, damaged = read_all(tail, data[:cut])
        rest, damaged_later = read_all(tail, data)

        assert len(first) == max(0, sum(1 for end in ends if end <= cut) - 1), cut
        assert first + rest == list(range(1, 63))
        assert damaged == damaged_later == 0


@pytest.mark.parametrize("rows", [12, pytest.param(110, marks=pytest.mark.torture)])
def test_a_flip_of_any_bit_costs_the_touched_record_and_no_other(attempt: Attempt, rows: int) -> None:
    """At most one record is lost, newlines included, and the loss is counted by seq, exactly."""
    data = mixed(attempt, rows)
    total = attempt.seq
    header_end = data.index(b"\n") + 1

    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << (bit % 8)
        seqs, damaged = read_all(Tail(0, grace_s=0.0), bytes(flipped))

        last_newline = bit // 8 == len(data) - 1
        missing = set(range(1, total + 1)) - set(seqs)
        assert len(seqs) == len(set(seqs))
        assert len(missing) <= (0 if bit // 8 < header_end - 1 else 1), bit
        assert damaged >= 1 or last_newline, bit
        assert set(seqs) <= set(range(1, total + 1))


def test_a_line_longer_than_a_chunk_is_read_whole(attempt: Attempt) -> None:
    """The chunk size bounds memory, not the length of a record."""
    attempt.log(1, text="x" * 700_000)
    attempt.log(2, a=1)

    assert ([1, 2], 0) == read_all(Tail(0), attempt.path.read_bytes(), max_bytes=4096)


def test_a_line_above_the_limit_is_stepped_over_without_being_held(attempt: Attempt) -> None:
    """It is damage with its length; the next record comes; no read is larger than the limit."""
    attempt.log(1, a=1)
    attempt.raw(b'{"seq":2,' + b"x" * (5 << 20) + b"\n")
    attempt.log(2, a=2)
    data = attempt.path.read_bytes()
    largest = 0

    class Measuring(Bytes):
        def pread(self, size: int, offset: int) -> bytes:
            nonlocal largest
            largest = max(largest, size)
            return super().pread(size, offset)

    tail, file, seqs, lengths = Tail(0), Measuring(data), [], []
    while True:
        chunk = tail.read(file, 0.0)
        seqs += [record.seq for record in chunk.records]
        lengths += [damage.length for damage in chunk.damage]
        if chunk.end == tail.offset:
            break
        tail.consume(file, chunk.end)

    assert [1, 2] == seqs
    assert [(5 << 20) + 9] == lengths
    assert largest <= MAX_READ_BYTES + 1


def test_an_endless_line_without_newline_is_waited_for(attempt: Attempt) -> None:
    """What has no newline is not there yet, however long."""
    attempt.log(1, a=1)
    attempt.raw(b"x" * (3 << 20))
    tail = Tail(0)

    assert ([1], 0) == read_all(tail, attempt.path.read_bytes())
    attempt.raw(b"\n")
    attempt.log(2, a=1)
    assert ([2], 1) == read_all(tail, attempt.path.read_bytes())


def test_nul_bytes_at_the_end_are_not_there_yet(attempt: Attempt) -> None:
    """A network disk shows the size before the data: the reader goes back to its last good offset."""
    for step in range(50):
        attempt.log(step, a=step)
    true = attempt.path.read_bytes()
    end_of_40 = len(b"".join(true.splitlines(keepends=True)[:41]))
    tail = Tail(0)

    assert (list(range(1, 41)), 0) == read_all(tail, true[:end_of_40] + b"\0" * 4096)
    assert (list(range(41, 51)), 0) == read_all(tail, true)


def test_nul_bytes_that_stay_before_sound_lines_are_damage_after_the_grace(attempt: Attempt) -> None:
    """Until the grace is over they may still become data; then the sound lines after them come."""
    attempt.log(1, a=1)
    attempt.raw(b"\0" * 100)
    attempt.log(2, a=2)
    data = attempt.path.read_bytes()
    tail = Tail(0, grace_s=30.0)

    assert ([1], 0) == read_all(tail, data, now=0.0)
    assert tail.waits
    assert ([], 0) == read_all(tail, data, now=29.0)
    assert ([2], 1) == read_all(tail, data, now=31.0)


def test_blank_lines_and_crlf_are_harmless(attempt: Attempt) -> None:
    """They are neither records nor damage."""
    attempt.log(1, a=1)
    attempt.raw(b"\n\r\n  \n")
    attempt.raw(attempt.line("metrics", {"a": 2}, 2).replace(b"\n", b"\r\n"))
    attempt.log(3, a=3)

    assert ([1, 2, 3], 0) == read_all(Tail(0), attempt.path.read_bytes())


@pytest.mark.parametrize(
    "line",
    [
        b"null", b"[]", b'"x"', b"12", b"{}", b'{"seq":1}', b"\xff\xfe", b"{" * 5000,
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","step":"abc","data":{}}')[:-1],
        seal(b'{"seq":"1","t":1.0,"mono":1.0,"kind":"metrics","data":{}}')[:-1],
        seal(b'{"seq":1,"t":1e400,"mono":1.0,"kind":"metrics","data":{}}')[:-1],
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","data":[1]}')[:-1],
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","data":{"a":1},"marks":[[["b"],"nan"]]}')[:-1],
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","data":{"a":1},"marks":[[["a"],"nan"]]}')[:-1],
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","data":{"a":"1"},"marks":7}')[:-1],
    ],
)  # fmt: skip
def test_a_line_of_the_wrong_shape_is_damage_and_its_neighbours_come(attempt: Attempt, line: bytes) -> None:
    """Valid JSON is not enough: every field has its type."""
    attempt.log(1, a=1)
    attempt.raw(line + b"\n")
    attempt.log(2, a=2)

    assert ([1, 2], 1) == read_all(Tail(0), attempt.path.read_bytes())


def test_another_file_under_the_same_name_is_read_from_its_start(tmp_path: Path, attempt: Attempt) -> None:
    """The bytes before the offset are compared at every reading."""
    for step in range(20):
        attempt.log(step, a=step)
    data = attempt.path.read_bytes()
    tail = Tail(0)
    read_all(tail, data)
    other = SpoolDir(tmp_path / "other").attempt(attempt_id=attempt.attempt_id, created=T0 + 5)
    for step in range(30):
        other.log(step, a=step)

    seqs, _ = read_all(tail, other.path.read_bytes())

    assert list(range(1, 31)) == seqs
    assert tail.resets == 1


def test_a_file_shorter_than_the_offset_is_read_from_its_start_at_once(attempt: Attempt) -> None:
    """It is never waited for until it grows."""
    for step in range(20):
        attempt.log(step, a=step)
    data = attempt.path.read_bytes()
    tail = Tail(0)
    read_all(tail, data)

    seqs, _ = read_all(tail, b"".join(data.splitlines(keepends=True)[:6]))

    assert [1, 2, 3, 4, 5] == seqs


def test_a_segment_that_is_a_link_a_fifo_or_a_device_is_refused(tmp_path: Path, attempt: Attempt) -> None:
    """Nothing named like a segment is followed, waited on, or read when it is no regular file."""
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to(attempt.path)
    os.mkfifo(fifo)

    with pytest.raises(OSError):
        SegmentFile(link)
    with pytest.raises(NotASegment):
        SegmentFile(fifo)
    with pytest.raises(NotASegment):
        SegmentFile(Path("/dev/zero"))


def seqs_of(reader: AttemptReader, paths: dict[int, Path], now: float = 0.0) -> list[int]:
    found = []
    while (taken := reader.take(paths, now)) is not None:
        found += [record.seq for record in taken.records]
    return found


def test_repeats_in_a_later_segment_are_dropped_and_holes_are_filled(attempt: Attempt) -> None:
    """After a failed sync rows are written again with their seq: each comes once, and nothing is lost."""
    for step in range(5):
        attempt.log(step, a=step)
    kept = attempt.path.read_bytes().splitlines(keepends=True)
    attempt.path.write_bytes(b"".join(kept[:3] + kept[4:]))  # seq 3 never reached the disk
    paths = {0: attempt.path}
    attempt.rotate(first_seq=3)
    for line in attempt.lines[2:]:
        attempt.raw(line)
    attempt.log(5, a=5)
    reader = AttemptReader(read_header(paths[0]))  # type: ignore[arg-type]

    assert [1, 2, 4, 5] == seqs_of(reader, paths)
    assert [(3, 3)] == reader.seen.holes()
    assert [3, 6] == seqs_of(reader, {**paths, 1: attempt.path})
    assert [] == reader.seen.holes()
    assert 6 == reader.seen.complete_to


def test_a_torn_tail_with_a_successor_is_counted_and_holds_up_nothing(attempt: Attempt) -> None:
    """The writer died there and went on in a new segment."""
    attempt.log(1, a=1)
    torn = attempt.line("metrics", {"a": 2}, 2)
    attempt.raw(torn[:20])
    first = attempt.path
    attempt.seq -= 1
    attempt.rotate()
    attempt.log(2, a=2)
    reader = AttemptReader(read_header(first))  # type: ignore[arg-type]
    paths = {0: first, 1: attempt.path}

    assert [1, 2] == seqs_of(reader, paths) + seqs_of(reader, paths)
    assert 1 == reader.torn
    assert [1] == list(reader.tails)


def test_a_cursor_goes_on_where_it_was(attempt: Attempt) -> None:
    """A reader made from a cursor hands out what the first one did not."""
    for step in range(10):
        attempt.log(step, a=step)
    paths = {0: attempt.path}
    header = read_header(attempt.path)
    assert header is not None
    reader = AttemptReader(header)
    seqs_of(reader, paths)
    attempt.log(10, a=10)

    again = AttemptReader(header, reader.cursor())

    assert [11] == seqs_of(again, paths)


def test_one_wait_serves_a_whole_file_whose_nul_bytes_stay(attempt: Attempt) -> None:
    """Damaged lines with NUL bytes cost one grace together; bytes that come later get their own."""
    for step in range(5):
        attempt.log(step, a=step)
        attempt.raw(b"\0" * 10 + b"\n")
    tail = Tail(0, grace_s=30.0)

    assert ([1], 0) == read_all(tail, attempt.path.read_bytes(), now=0.0)
    assert ([2, 3, 4, 5], 5) == read_all(tail, attempt.path.read_bytes(), now=30.0)
    assert not tail.waits
    attempt.raw(b"\0" * 10 + b"\n")
    attempt.log(5, a=5)
    assert ([], 0) == read_all(tail, attempt.path.read_bytes(), now=31.0)
    assert ([6], 1) == read_all(tail, attempt.path.read_bytes(), now=61.0)
