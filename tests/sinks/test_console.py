"""What the console sink prints."""

import io

import pytest

from gapless_uploader.operations import Log, Rewind, Row, State, Table, Text
from gapless_uploader.sink import Misconfigured
from gapless_uploader.sinks.console import ConsoleSink
from tests.sinks.harness import T0, amend, row, view, write

RUN = view(name="qwen")


def printed(*operations: object, **options: object) -> list[str]:
    stream = io.StringIO()
    write(ConsoleSink(stream=stream, **options), RUN, {}, *operations)
    return stream.getvalue().splitlines()


def test_a_row_is_verls_line() -> None:
    """A row is one line as verl prints it, under the run's name."""
    assert printed(row(7, loss=0.5, lr=1e-06)) == ["==> grpo/qwen <==", "step:7 - loss:0.5 - lr:1e-06"]


def test_the_runs_name_comes_when_another_run_writes() -> None:
    """The name stands before the first row and whenever another run's rows follow."""
    stream = io.StringIO()
    sink = ConsoleSink(stream=stream)
    for run in (RUN, RUN, view(name="other"), RUN):
        write(sink, run, {}, row(1, loss=0.5))

    assert [line for line in stream.getvalue().splitlines() if line.startswith("==>")] == [
        "==> grpo/qwen <==",
        "==> grpo/other <==",
        "==> grpo/qwen <==",
    ]


def test_a_table_has_areals_form() -> None:
    """`style="table"` frames two metrics a line, floats with four decimals, integers as they are."""
    assert printed(row(7, loss=0.5, n_tokens=1024, lr=1e-06), style="table")[1:] == [
        "step:7",
        "+----------+------------+----------+------------+",
        "| loss     | 5.0000e-01 | n_tokens |       1024 |",
        "| lr       | 1.0000e-06 |          |            |",
        "+----------+------------+----------+------------+",
    ]


def test_terminal_escapes_are_shown_not_obeyed() -> None:
    """Escape sequences, bells, line breaks and text that turns its direction come out as their escapes."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\u202eabc\u2028\x9b31m"
    lines = printed(
        Row(1, T0, 0.0, {f"k{evil}": 1.0, "text": Text(evil), "word": evil, "list": [evil]}),
        Log(evil, [evil], T0),
        State(evil, None, T0, 0.0),
    )

    assert len(lines) == 4
    assert all(character.isprintable() for line in lines for character in line)
    assert r"k\x1b]0;owned\x07\x1b[2J\r\n\u202eabc\u2028\x9b31m:1.0" in lines[1]


def test_changes_and_ends_are_said() -> None:
    """A change prints its step's changed keys; a rewind and the end state are a line each."""
    assert printed(row(1, loss=0.5), amend(row(1, loss=0.5), acc=0.9), Rewind(1), State("failed", 1, T0, 0.0))[1:] == [
        "step:1 - loss:0.5",
        "step:1 - acc:0.9",
        "rows from step 1 on are taken back",
        "failed, exit code 1",
    ]


def test_what_a_terminal_cannot_show_is_counted() -> None:
    """A table is refused with its key, the row's numbers are printed."""
    ack = write(ConsoleSink(stream=io.StringIO()), RUN, {}, row(1, loss=0.5, samples=Table(["a"], [[1]])))

    assert [(one.step, one.key) for one in ack.refused] == [(1, "samples")]


@pytest.mark.parametrize(("target", "options"), [("file", {}), ("", {"style": "x"}), ("", {"columns": 0})])
def test_wrong_options_are_named(target: str, options: dict[str, object]) -> None:
    """An option that makes no sense says which and what would."""
    with pytest.raises(Misconfigured, match="sink 'console'"):
        ConsoleSink(target, **options)  # type: ignore[arg-type]
