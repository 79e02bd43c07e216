"""The vemlp_wandb sink, against a stand-in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gapless_uploader.operations import State
from gapless_uploader.sink import Misconfigured, Parked, Retryable
from gapless_uploader.sinks.vemlp_wandb import VemlpWandbSink
from tests.sinks.harness import amend, batch, row, view, write
from tests.sinks.harness_vemlp_wandb import Harness

RUN = view(config={"lr": 0.1})


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    made = Harness(tmp_path)
    yield made
    made.close()


def test_credentials_are_the_uploaders_and_given_once(harness: Harness) -> None:
    """The platform is logged in to by the names verl uses, once a process."""
    sink = harness.sink()
    write(sink, RUN, {}, row(0))
    write(sink, view(name="other"), {}, row(0))

    login = {"ak": "volc_access_key_id", "sk": "volc_secret_access_key", "region": "mlp_tracking_region"}
    assert harness.stand_in.logins == [login]


def test_missing_credentials_park_the_sink(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key nothing is tried, and the names that are missing are said."""
    monkeypatch.delenv("VOLC_SECRET_ACCESS_KEY")
    with pytest.raises(Parked, match="VOLC_SECRET_ACCESS_KEY") as raised:
        harness.sink().open(RUN, {})

    assert raised.value.whole_sink


def test_the_package_that_is_not_on_pypi_is_said() -> None:
    """Without the module, the message says that no extra has it."""
    with pytest.raises(Misconfigured, match="not on PyPI"):
        VemlpWandbSink().open(RUN, {})


def test_steps_that_do_not_rise_are_counted(harness: Harness) -> None:
    """A change and a late step are refused; a repeated batch of older steps is not logged again."""
    memo = write(harness.sink(), RUN, {}, row(0), row(5)).memo
    ack = write(harness.sink(), RUN, memo, amend(row(5), acc=1.0), row(3), row(6))

    assert [one.step for one in ack.refused] == [5, 3]
    assert harness.expect([row(0), row(5), row(6)]) == harness.actual(RUN)


def test_a_failed_call_is_asked_again(harness: Harness) -> None:
    """Whatever the module raises is Retryable, and its text, which may hold anything, is not repeated."""
    session = harness.sink().open(RUN, {})
    harness.stand_in.failures = [RuntimeError("secret key abc refused")]
    with pytest.raises(Retryable, match="RuntimeError") as raised:
        session.write(batch(RUN, row(0)))

    assert "abc" not in str(raised.value)
    session.write(batch(RUN, row(0)))
    assert harness.expect([row(0)]) == harness.actual(RUN)


def test_runs_take_turns_in_the_one_process(harness: Harness) -> None:
    """The module has one run a process: two runs that write in turn each begin again, and no row goes to the other."""
    sink, other = harness.sink(), view(name="other")
    first, second = sink.open(RUN, {}), sink.open(other, {})
    for step in range(3):
        first.write(batch(RUN, row(step)))
        second.write(batch(other, row(10 + step)))

    assert harness.expect([row(step) for step in range(3)]) == harness.actual(RUN)
    assert harness.expect([row(10 + step) for step in range(3)]) == harness.actual(other)


def test_a_run_that_only_waits_is_not_begun_again(harness: Harness) -> None:
    """A finished run that is opened once more, and written nothing to, keeps its end at the tracker."""
    memo = write(harness.sink(), RUN, {}, row(0), State("finished", 0, 0.0, 0.0)).memo
    session = harness.sink().open(RUN, memo)
    session.flush()
    session.close()

    assert harness.state(RUN) == "finished"
