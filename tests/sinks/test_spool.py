"""The sink that ships the spool itself."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest

from gapless_schemas import Header, decode, encode_header, encode_record
from gapless_uploader.sink import Misconfigured, Parked, Retryable, RunView
from gapless_uploader.sinks.spool import SpoolSink
from tests.sinks.harness import T0, batch, row, view, write

ATTEMPT = "0123456789abcdef" * 2


class Spool:
    """A run's folder that grows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "grpo" / "r-1"
        (self.folder / "media").mkdir(parents=True)
        self._segment = self.folder / f"main-0001-{ATTEMPT[:8]}-000000.jsonl"
        header = Header("grpo", "r-1", "main", 1, ATTEMPT, 0, 1, "train-7", 1, "boot", T0, None)
        self._segment.write_bytes(encode_header(header))
        self._seq = 0

    @property
    def view(self) -> RunView:
        return replace(view(), folder=self.folder)

    def append(self, count: int = 1) -> None:
        with open(self._segment, "ab") as file:
            for _ in range(count):
                self._seq += 1
                file.write(encode_record(self._seq, T0, 0.0, "metrics", self._seq, b'{"loss":0.5}'))

    def tear(self) -> None:
        with open(self._segment, "ab") as file:
            file.write(b'{"seq":')

    def bytes(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()
        }


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def copy_of(folder: Path) -> dict[str, bytes]:
    run = folder / "grpo" / "r-1"
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_the_copy_has_the_spools_own_bytes(spool: Spool, tmp_path: Path) -> None:
    """Segments and payloads arrive byte for byte, growing with the spool, under the spool's own names."""
    (spool.folder / "media" / f"{'a' * 64}.png").write_bytes(b"picture")
    sink = SpoolSink(str(tmp_path / "copy"))
    memo: dict[str, Any] = {}
    for count in (1, 5, 0, 300):
        spool.append(count)
        memo = write(sink, spool.view, memo, row(0)).memo

        assert spool.bytes() == copy_of(tmp_path / "copy")


def test_a_torn_tail_is_left_for_the_next_time(spool: Spool, tmp_path: Path) -> None:
    """Only whole lines are copied, so the copy decodes at any time."""
    spool.append(3)
    whole = spool.bytes()
    spool.tear()
    write(SpoolSink(str(tmp_path / "copy")), spool.view, {}, row(0))
    copied = copy_of(tmp_path / "copy")

    assert whole == copied
    (content,) = copied.values()
    assert [decode(line).seq for line in content.splitlines()[1:]] == [1, 2, 3]


def test_a_copy_that_ran_ahead_of_its_memo_is_cut_back(spool: Spool, tmp_path: Path) -> None:
    """After a crash between copy and checkpoint, and after a lost state, the copy is the spool's bytes again."""
    sink = SpoolSink(str(tmp_path / "copy"))
    spool.append(2)
    memo = write(sink, spool.view, {}, row(0)).memo
    spool.append(2)
    write(sink, spool.view, memo, row(0))
    (copied,) = (tmp_path / "copy").rglob("*.jsonl")
    copied.write_bytes(copied.read_bytes() + b"torn")
    for known in (memo, {}):
        write(sink, spool.view, known, row(0))

        assert spool.bytes() == copy_of(tmp_path / "copy")


def test_an_object_store_gets_whole_segments(spool: Spool) -> None:
    """Where nothing can be appended to, a segment that grew is put again, and read back."""
    store = fsspec.filesystem("memory")
    sink = SpoolSink("memory://bucket/path")
    memo: dict[str, Any] = {}
    for _ in range(3):
        spool.append(2)
        memo = write(sink, spool.view, memo, row(0)).memo
    ((name, content),) = spool.bytes().items()

    assert store.cat(f"/bucket/path/grpo/r-1/{name}") == content


def test_a_copy_that_reads_back_wrong_is_not_acknowledged(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that lies about what it stored gets no acknowledgement, and the copy is made again."""
    spool.append(2)
    session = SpoolSink(str(tmp_path / "copy")).open(spool.view, {})

    def garbles(target: Path, *_: object) -> None:
        target.write_bytes(b"x" * 10_000)

    with monkeypatch.context() as patch:
        patch.setattr("gapless_uploader.sinks.spool._append", garbles)
        with pytest.raises(Retryable, match="does not read back"):
            session.write(batch(spool.view, row(0)))
    session.write(batch(spool.view, row(0)))

    assert spool.bytes() == copy_of(tmp_path / "copy")


def test_only_segments_and_payloads_are_copied(spool: Spool, tmp_path: Path) -> None:
    """A link, a FIFO and a file of another name stay where they are, whatever they are called; the rest is copied."""
    spool.append(1)
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret\n")
    (spool.folder / "notes.txt").write_bytes(b"notes")
    os.mkfifo(spool.folder / f"main-0002-{ATTEMPT[:8]}-000000.jsonl")
    (spool.folder / f"main-0003-{ATTEMPT[:8]}-000000.jsonl").symlink_to(secret)
    (spool.folder / "media" / f"{'b' * 64}.png").symlink_to(secret)
    write(SpoolSink(str(tmp_path / "copy")), spool.view, {}, row(0))

    assert list(copy_of(tmp_path / "copy")) == [f"main-0001-{ATTEMPT[:8]}-000000.jsonl"]


@pytest.mark.parametrize("target", ["", "nosuch://bucket"])
def test_a_target_that_cannot_be_is_named(spool: Spool, target: str) -> None:
    """No target and a URL of an unknown kind are wrong settings."""
    with pytest.raises(Misconfigured, match="sink 'spool'"):
        SpoolSink(target).open(spool.view, {})


def test_a_pipe_at_the_target_parks_the_run(spool: Spool, tmp_path: Path) -> None:
    """A FIFO in the place of a copy holds nobody up: a person has to take it away."""
    spool.append(1)
    ((name, _),) = spool.bytes().items()
    place = tmp_path / "copy" / "grpo" / "r-1" / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    with pytest.raises(Parked, match="no regular file"):
        write(SpoolSink(str(tmp_path / "copy")), spool.view, {}, row(0))
    place.unlink()
    write(SpoolSink(str(tmp_path / "copy")), spool.view, {}, row(0))

    assert spool.bytes() == copy_of(tmp_path / "copy")


def test_without_fsspec_the_line_that_installs_it_is_said(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is missing: opening says `pip install 'gapless[spool]'`."""
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(Misconfigured, match=r"pip install 'gapless\[spool\]'"):
        SpoolSink(str(tmp_path / "copy")).open(spool.view, {})


@pytest.mark.parametrize("spelling", ["", "/.", "/../spool", "/grpo", "/copies", "/link"])
def test_a_spool_is_never_copied_onto_or_into_itself(spool: Spool, tmp_path: Path, spelling: str) -> None:
    """Whatever the path is called; not one byte of it is touched."""
    spool.append(3)
    (tmp_path / "spool" / "link").symlink_to(tmp_path / "spool")
    before = spool.bytes()
    with pytest.raises(Misconfigured, match="choose a place outside"):
        write(SpoolSink(f"{tmp_path / 'spool'}{spelling}"), spool.view, {}, row(0))

    assert before == spool.bytes()


def test_a_segment_under_another_name_is_not_written_onto_itself(spool: Spool, tmp_path: Path) -> None:
    """Hard links, as a bind mount: the paths differ, the file is the same."""
    spool.append(3)
    (tmp_path / "copy" / "grpo" / "r-1").mkdir(parents=True)
    (segment,) = spool.folder.glob("*.jsonl")
    (tmp_path / "copy" / "grpo" / "r-1" / segment.name).hardlink_to(segment)
    before = spool.bytes()
    with pytest.raises(Misconfigured, match="is the spool itself"):
        write(SpoolSink(str(tmp_path / "copy")), spool.view, {}, row(0))

    assert before == spool.bytes()


def test_a_copy_is_never_made_shorter(spool: Spool, tmp_path: Path) -> None:
    """The state is lost and the spool's own segment was cut: the copy is the only whole one, and stays it."""
    sink = SpoolSink(str(tmp_path / "copy"))
    spool.append(5)
    write(sink, spool.view, {}, row(0))
    whole = copy_of(tmp_path / "copy")
    (segment,) = spool.folder.glob("*.jsonl")
    os.truncate(segment, segment.stat().st_size // 2)
    write(sink, spool.view, {}, row(0))

    assert whole == copy_of(tmp_path / "copy")


def test_a_copy_that_is_longer_and_differs_is_left_alone(spool: Spool, tmp_path: Path) -> None:
    """The spool's segment was cut, and the copy is not what it was: nobody knows which is right."""
    sink = SpoolSink(str(tmp_path / "copy"))
    spool.append(5)
    write(sink, spool.view, {}, row(0))
    (copy,) = (tmp_path / "copy").rglob("*.jsonl")
    copy.write_bytes(copy.read_bytes().replace(b"0.5", b"0.6", 1))
    (segment,) = spool.folder.glob("*.jsonl")
    os.truncate(segment, segment.stat().st_size // 2)
    before = copy_of(tmp_path / "copy")
    with pytest.raises(Parked, match="is longer than in the spool and differs; move it away"):
        write(sink, spool.view, {}, row(0))

    assert before == copy_of(tmp_path / "copy")


def test_an_object_that_is_longer_is_left_alone(spool: Spool) -> None:
    """A store that takes whole objects only."""
    sink = SpoolSink("memory://never-shorter")
    spool.append(5)
    write(sink, spool.view, {}, row(0))
    (segment,) = spool.folder.glob("*.jsonl")
    os.truncate(segment, segment.stat().st_size // 2)
    with pytest.raises(Parked, match="is longer than in the spool"):
        write(sink, spool.view, {}, row(0))
