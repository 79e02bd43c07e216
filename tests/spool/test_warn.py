"""Warnings: once, then every 30 s with a count, and never an exception."""

from __future__ import annotations

import sys

import pytest

from gapless import warn


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(warn, "monotonic", clock)
    return clock


def test_a_topic_is_told_once_and_then_every_30_seconds_with_its_count(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    """Within 30 s a topic is counted only; the next line after that says how often it came."""
    warner = warn.Warner()
    for _ in range(5):
        warner.warn("disk", "no space")
    clock.now += 29.9
    warner.warn("disk", "no space")
    clock.now += 0.2
    warner.warn("disk", "no space")

    assert capfd.readouterr().err.splitlines() == [
        "gapless: no space",
        "gapless: no space (5 more since the last time)",
    ]


def test_topics_do_not_hide_each_other(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    """Each topic is told for itself; `warn_once` never again."""
    warner = warn.Warner()
    warner.warn("a", "one")
    warner.warn("b", "two")
    warner.warn_once("c", "three")
    clock.now += 100
    warner.warn_once("c", "three")

    assert capfd.readouterr().err.splitlines() == ["gapless: one", "gapless: two", "gapless: three"]


def test_topics_are_bounded(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    """A million different keys are a thousand topics and one more."""
    warner = warn.Warner()
    for number in range(5000):
        warner.warn(f"value {number}", "refused")

    assert len(warner._seen) == warn.MAX_TOPICS + 1
    assert len(capfd.readouterr().err.splitlines()) == warn.MAX_TOPICS + 1


def test_a_stderr_that_raises_is_nobodys_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stands in for stderr may be missing, closed or broken."""

    class Broken:
        def write(self, text: str) -> int:
            raise RuntimeError(text)

    for stderr in (None, Broken()):
        monkeypatch.setattr(sys, "stderr", stderr)
        warn.Warner().warn("a", "text")


def test_a_quiet_warner_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """At interpreter exit nothing is printed any more."""
    warner = warn.Warner()
    warner.quiet = True
    warner.warn("a", "text")

    assert capfd.readouterr().err == ""
