"""The uploader's journal: what is committed is there after any end, and damage never skips a row."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from gapless_uploader.state import State


def entry(run: str = "run", sink: str = "memory:", **fields: Any) -> dict[str, Any]:
    return {"project": "proj", "run": run, "sink": sink, **fields}


def opened(folder: Path, *paths: str) -> State:
    state = State(folder, [Path(path) for path in paths or ("/spool",)])
    state.load()
    state.open()
    return state


def loaded(folder: Path, *paths: str) -> tuple[State, list[tuple[str, str]]]:
    problems: list[tuple[str, str]] = []
    state = State(folder, [Path(path) for path in paths or ("/spool",)], lambda *problem: problems.append(problem))
    state.load()
    return state, problems


def journal(folder: Path) -> Path:
    (found,) = folder.glob("*/journal.jsonl")
    return found


def test_the_last_entry_of_a_key_counts(tmp_path: Path) -> None:
    """An entry replaces the one before it, whole."""
    state = opened(tmp_path)
    state.commit([entry(top=1, memo={"a": 1}), entry(sink="file:x", top=7)])
    state.commit([entry(top=2)])
    state.close()

    again, problems = loaded(tmp_path)

    assert 2 == again.progress[("proj", "run", "memory:")]["top"]
    assert "memo" not in again.progress[("proj", "run", "memory:")]
    assert 7 == again.progress[("proj", "run", "file:x")]["top"]
    assert [] == problems


def test_the_later_entry_counts_whatever_the_clock_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back an hour takes no progress back."""
    state = opened(tmp_path)
    state.commit([entry(top=1)])
    state.close()
    monkeypatch.setattr("gapless_uploader.state.time.time", lambda: 1000.0)
    state = opened(tmp_path)
    state.commit([entry(top=2)])
    state.commit([entry(top=3)])
    state.close()

    assert 3 == loaded(tmp_path)[0].progress[("proj", "run", "memory:")]["top"]


def test_after_a_failed_commit_the_next_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line at the journal's end costs nothing that is committed later."""
    state = opened(tmp_path)
    state.commit([entry(top=1)])
    with open(journal(tmp_path), "ab") as file:
        file.write(b'{"half')

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gapless_uploader.state.os.write", full)
        with pytest.raises(OSError, match="No space"):
            state.commit([entry(top=2)])
    state.commit([entry("other", top=3)])
    state.close()

    again, problems = loaded(tmp_path)
    assert [2, 3] == [again.progress[("proj", run, "memory:")]["top"] for run in ("run", "other")]
    assert [] == problems


def test_a_tear_at_every_byte_keeps_every_commit_before_it(tmp_path: Path) -> None:
    """What a kill leaves of the last line is ignored, silently."""
    state = opened(tmp_path)
    for top in range(5):
        state.commit([entry(top=top)])
    state.close()
    path = journal(tmp_path)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]

    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        again, _ = loaded(tmp_path)
        whole = sum(1 for end in ends if end <= cut)
        held = again.progress.get(("proj", "run", "memory:"))
        assert (None if whole == 0 else whole - 1) == (held["top"] if held else None), cut


def test_a_damaged_line_costs_that_line_and_is_told(tmp_path: Path) -> None:
    """An older entry counts then: a batch is offered again, never one skipped; the bytes are kept aside."""
    state = opened(tmp_path)
    state.commit([entry(top=1), entry("other", top=5)])
    state.commit([entry(top=2)])
    state.close()
    path = journal(tmp_path)
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(bytes(data))

    again, problems = loaded(tmp_path)

    assert 1 == again.progress[("proj", "run", "memory:")]["top"]
    assert 5 == again.progress[("proj", "other", "memory:")]["top"]
    assert 1 == len(problems)
    assert [bytes(data)] == [kept.read_bytes() for kept in path.parent.glob("journal.damaged-*")]


@pytest.mark.parametrize("content", [b"", b"\0" * 2048, b'{"half', b"[1]\n", b'{"version":1}\n', b"\xff\n" * 3])
def test_a_journal_of_any_content_lets_the_uploader_start(tmp_path: Path, content: bytes) -> None:
    """It begins from nothing, and the next commit holds."""
    state = opened(tmp_path)
    state.commit([entry(top=1)])
    state.close()
    journal(tmp_path).write_bytes(content)

    again = opened(tmp_path)
    assert 0 == len(again.progress)
    again.commit([entry(top=3)])
    again.close()

    assert 3 == loaded(tmp_path)[0].progress[("proj", "run", "memory:")]["top"]


def test_a_spool_at_another_path_finds_its_progress(tmp_path: Path) -> None:
    """Every journal of the state folder is read; each uploader writes its own."""
    first = opened(tmp_path, "/here/spool")
    first.commit([entry(top=4)])
    first.close()

    second = opened(tmp_path, "/there/spool")
    assert 4 == second.progress[("proj", "run", "memory:")]["top"]
    second.commit([entry(top=9)])
    second.close()

    assert 9 == loaded(tmp_path, "/here/spool")[0].progress[("proj", "run", "memory:")]["top"]
    assert 2 == len(list(tmp_path.glob("*/journal.jsonl")))


def test_a_thousand_runs_cost_one_write_and_one_sync_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group commit for all of them."""
    state = opened(tmp_path)
    calls: list[str] = []
    for name in ("write", "fdatasync", "fsync"):
        monkeypatch.setattr(f"os.{name}", _counted(name, calls))

    state.commit([entry(f"run{i}", top=i) for i in range(1000)])

    assert ["write", "fdatasync"] == calls
    state.close()


def _counted(name: str, calls: list[str]) -> Any:
    import os

    real = getattr(os, name)

    def call(*arguments: Any) -> Any:
        calls.append(name)
        return real(*arguments)

    return call


def test_a_journal_that_has_grown_is_compacted_and_nothing_is_lost(tmp_path: Path) -> None:
    """By rename: at any moment the file is the old one or the new one."""
    state = opened(tmp_path)
    for top in range(3000):
        state.commit([entry(top=top, memo={"text": "x" * 2000})])
    size = journal(tmp_path).stat().st_size
    state.close()

    assert size < 5 << 20
    assert 2999 == loaded(tmp_path)[0].progress[("proj", "run", "memory:")]["top"]


def test_a_damaged_snapshot_is_told_and_not_used(tmp_path: Path) -> None:
    """Its run is read again from the start."""
    state = opened(tmp_path)
    key = ("proj", "run", "memory:")
    state.save_snapshot(key, {"cursor": {}, "history": {"x": float("nan")}})
    assert state.load_snapshot(key) is not None
    (path,) = tmp_path.glob("*/snapshots/*")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    state.close()

    again, problems = loaded(tmp_path)

    assert again.load_snapshot(key) is None
    assert 1 == len(problems)


def test_a_disk_that_fills_while_the_journal_is_compacted_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are committed when there is room again, nothing is left lying about, and what was there stays."""
    state = opened(tmp_path)
    state.commit([entry("a", offset=1)])

    def full(fd: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for _ in range(3):
            with pytest.raises(OSError, match="No space"):
                state.commit([entry("b", offset=2)])
    assert [path.name for path in state.folder.iterdir()] == ["journal.jsonl"]
    state.commit([entry("b", offset=2)])
    state.close()
    again, _ = loaded(tmp_path)

    assert {"a": 1, "b": 2} == {key[1]: found["offset"] for key, found in again.progress.items()}
