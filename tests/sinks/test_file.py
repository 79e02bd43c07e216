"""The file sink's own promises: verl's shape, strict JSON, nothing of anybody else's touched."""

import errno
import json
import os
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from gapless_uploader.operations import Config, Identity, Media, MediaItem, Rewind, Row, State, System, Table
from gapless_uploader.sink import Parked, Retryable
from gapless_uploader.sinks.file import FileSink
from tests.sinks.harness import T0, amend, batch, row, view, write
from tests.sinks.harness_file import strict

RUN = view(name=None)


def lines(folder: Path) -> list[str]:
    return (folder / "grpo" / "r-1.jsonl").read_text().splitlines()


def test_a_line_has_verls_shape(tmp_path: Path) -> None:
    """Each line is an object with `step` and `data`, as verl's file logger writes it; the wall clock follows."""
    write(FileSink(str(tmp_path)), RUN, {}, row(7, loss=0.5, lr=1e-6))

    assert lines(tmp_path) == ['{"step":7,"data":{"loss":0.5,"lr":1e-6},"t":1700000007.0}']


def test_nan_infinity_text_and_null_are_four_things(tmp_path: Path) -> None:
    """What JSON cannot hold is null and marked, as in the spool; a text and a list with a null stay what they are."""
    write(FileSink(str(tmp_path)), RUN, {}, row(1, a=nan, b=inf, c=-inf, s="NaN", z=[None, nan], n=2**64))
    line = strict(lines(tmp_path)[0])

    assert line["data"] == {"a": None, "b": None, "c": None, "s": "NaN", "z": [None, None], "n": str(2**64)}
    assert line["marks"] == [
        [["a"], "nan"],
        [["b"], "inf"],
        [["c"], "-inf"],
        [["z", 1], "nan"],
        [["n"], "int"],
    ]


def test_a_change_appends_only_what_changed(tmp_path: Path) -> None:
    """A change of a row is one more line of its step."""
    memo = write(FileSink(str(tmp_path)), RUN, {}, row(1, loss=0.5)).memo
    write(FileSink(str(tmp_path)), RUN, memo, amend(row(1, loss=0.5), acc=0.9))

    assert [json.loads(line)["data"] for line in lines(tmp_path)] == [{"loss": 0.5}, {"acc": 0.9}]


def test_rows_without_a_step_arrive_once(tmp_path: Path) -> None:
    """A row without a step has a null step, stays through a rewind, and is not doubled by a repeated batch."""
    sink = FileSink(str(tmp_path))
    memo = write(sink, RUN, {}, Row(None, T0, 0.0, {"a": 1.0}), row(3, loss=0.5)).memo
    for _ in range(2):
        write(sink, RUN, memo, Row(None, T0 + 1, 0.0, {"a": 2.0}), Rewind(0))

    assert [(json.loads(line)["step"], json.loads(line)["data"]) for line in lines(tmp_path)] == [
        (None, {"a": 1.0}),
        (None, {"a": 2.0}),
    ]


def test_what_the_run_is_stands_beside_its_rows(tmp_path: Path) -> None:
    """Config, system, tags, summary and end state are in the run's `.json`, strict JSON with marks."""
    run = replace(RUN, config={"lr": nan}, system={"host": "train-7"}, tags=["a"], summary={"loss": 0.5})
    operations = [Identity(None, None, None, ["a"], None, None, None), Config(run.config), System(run.system)]
    write(FileSink(str(tmp_path)), run, {}, *operations, State("failed", 1, T0 + 9, 9.0))
    about = strict((tmp_path / "grpo" / "r-1.json").read_text())

    assert (about["project"], about["id"], about["state"], about["exit_code"]) == ("grpo", "r-1", "failed", 1)
    assert (about["system"], about["tags"], about["summary"]) == ({"host": "train-7"}, ["a"], {"loss": 0.5})
    assert (about["config"], about["marks"]) == ({"lr": None}, [[["config", "lr"], "nan"]])


def test_tables_and_histograms_are_kept_whole(tmp_path: Path) -> None:
    """A table keeps all its rows, a histogram its edges and counts."""
    table = Table(["input", "score"], [[f"sample {place}", place / 7] for place in range(3000)])
    histogram = Media("histogram", [MediaItem(None, {"edges": [0.0, 1.0], "counts": [4]})])
    write(FileSink(str(tmp_path)), RUN, {}, row(1, samples=table, weights=histogram))
    data = strict(lines(tmp_path)[0])["data"]

    assert data["samples"] == {"columns": table.columns, "rows": table.rows}
    assert data["weights"] == {"type": "histogram", "items": [{"edges": [0.0, 1.0], "counts": [4]}]}


def test_somebody_elses_file_is_left_alone(tmp_path: Path) -> None:
    """A file of that name that this sink did not write parks the run, and stays as it was."""
    path = tmp_path / "grpo" / "r-1.jsonl"
    path.parent.mkdir()
    path.write_text('{"step": 1, "data": {"loss": 0.5}}\n')

    with pytest.raises(Parked, match="not this sink's"):
        FileSink(str(tmp_path)).open(RUN, {})
    assert path.read_text() == '{"step": 1, "data": {"loss": 0.5}}\n'


# Crashes and the disk


def test_a_torn_line_is_cut_back(tmp_path: Path) -> None:
    """Wherever a write was torn, opening with the memo and the same batch leave every line once and whole."""
    sink = FileSink(str(tmp_path))
    memo = write(sink, RUN, {}, row(0)).memo
    write(sink, RUN, memo, row(1), row(2))
    path = tmp_path / "grpo" / "r-1.jsonl"
    whole = path.read_bytes()
    for length in range(memo["length"], len(whole)):
        path.write_bytes(whole[:length])
        write(sink, RUN, memo, row(1), row(2))

        assert whole == path.read_bytes()


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.hardlink_to", "pathlib.Path.replace"])
@pytest.mark.parametrize("which", range(6))
def test_a_rewind_that_fails_anywhere_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, which: int
) -> None:
    """A disk error at any step of a rewind leaves the file as it was, and the same batch then takes."""
    sink = FileSink(str(tmp_path))
    session = sink.open(RUN, {})
    memo = session.write(batch(RUN, row(0), row(1), row(2))).memo
    before = lines(tmp_path)
    change = batch(RUN, row(0, note="late"), Rewind(1), row(1, loss=9.0))
    module, _, name = call.rpartition(".")
    target = __import__("pathlib").Path if "Path" in module else __import__("os")
    real, calls = getattr(target, name), iter(range(100))

    def fails(*arguments: object) -> object:
        if next(calls) == which:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    failed = False
    with monkeypatch.context() as patch:
        patch.setattr(target, name, fails)
        try:
            session.write(change)
        except Retryable:
            failed = True
    if failed:
        assert lines(tmp_path) == before
        session.write(change)
    session.close()
    after = lines(tmp_path)
    assert [json.loads(line)["data"] for line in after] == [{"loss": 0.5, "lr": 0.1}, {"note": "late"}, {"loss": 9.0}]

    sink.open(RUN, memo).close()
    assert lines(tmp_path) == before


def test_a_run_named_like_anothers_file_leaves_it_alone(tmp_path: Path) -> None:
    """A run whose id is another's file name, from a spool nobody vouches for, touches nothing of it."""
    sink = FileSink(str(tmp_path))
    other = view(name=None, run_id="r-1.jsonl")
    memo = write(sink, other, {}, row(0), row(1)).memo
    before = {path.name: path.read_bytes() for path in (tmp_path / "grpo").iterdir()}
    write(sink, other, memo, Rewind(1), row(1, loss=9.0))
    write(sink, RUN, {}, row(0))
    sink.open(RUN, {}).close()
    sink.open(other, memo).close()

    assert before == {
        path.name: path.read_bytes() for path in (tmp_path / "grpo").iterdir() if "r-1.jsonl." in path.name
    }


# What is in the place


@pytest.mark.parametrize("name", [".", "grpo", "grpo/r-1.jsonl", "grpo/r-1.json", "grpo/.r-1.json.tmp"])
def test_a_pipe_in_the_place_holds_nobody_up(tmp_path: Path, name: str) -> None:
    """A FIFO where the sink makes its folder or a file is left alone: the run is parked at once, then goes on."""
    target = tmp_path / "out"
    place = target / name
    place.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(place)
    if name == "grpo/r-1.json":
        write(FileSink(str(target)), RUN, {}, row(0))  # what says what the run is takes its place whole
    else:
        with pytest.raises(Parked, match="goes on by itself"):
            FileSink(str(target)).open(RUN, {})
        assert place.is_fifo()
        place.unlink()
        write(FileSink(str(target)), RUN, {}, row(0))

    assert len(lines(target)) == 1


def test_a_file_that_was_moved_away_takes_nothing_more(tmp_path: Path) -> None:
    """Rows are not put into a file that lost its name, however open it is; with the file back they arrive."""
    session = FileSink(str(tmp_path)).open(RUN, {})
    session.write(batch(RUN, row(0)))
    path = tmp_path / "grpo" / "r-1.jsonl"
    path.rename(tmp_path / "aside")
    with pytest.raises(Parked, match="put it back"):
        session.write(batch(RUN, row(1)))

    assert len((tmp_path / "aside").read_bytes().splitlines()) == 1

    path.write_bytes((tmp_path / "aside").read_bytes())
    session.write(batch(RUN, row(1)))
    session.close()

    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1]


def test_a_handle_that_went_stale_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may say of an open file that it is stale, for ever: the session opens it anew and goes on."""
    session = FileSink(str(tmp_path)).open(RUN, {})
    session.write(batch(RUN, row(0)))
    real, answers = os.fstat, iter([OSError(errno.ESTALE, os.strerror(errno.ESTALE))])

    def fstat(handle: int) -> os.stat_result:
        for error in answers:
            raise error
        return real(handle)

    with monkeypatch.context() as patch:
        patch.setattr("os.fstat", fstat)
        session.write(batch(RUN, row(1)))
    session.close()

    assert [json.loads(line)["step"] for line in lines(tmp_path)] == [0, 1]


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    """A disk that is only not mounted gets no folder in its place from a run that it holds already."""
    memo = write(FileSink(str(tmp_path / "disk")), RUN, {}, row(0)).memo
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    with pytest.raises((Parked, Retryable)):
        FileSink(str(tmp_path / "disk")).open(RUN, memo)

    assert not (tmp_path / "disk").exists()
