"""What a person sees: TensorBoard's and trackio's own pages, opened in a real Chromium with no network."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gapless_uploader.operations import Config, Table, Text
from gapless_uploader.sinks.tensorboard import TensorboardSink
from tests.sinks.harness import row, view, write
from tests.sinks.test_tensorboard import Server

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RUN = view(config={"lr": 0.1})
GENERATIONS = Table(["step", "input", "output", "score"], [[2, "What is 2+2?", "<b>four</b>", 1.0]])
ROWS = [row(0, **{"actor/loss": 0.5}), row(1, **{"actor/loss": 0.25}), row(2, **{"val/generations": GENERATIONS})]
SERVE_TRACKIO = """
import sys, trackio
trackio.show(project="grpo", open_browser=False, block_thread=False)
sys.stdin.read()
"""
WRITE_TRACKIO = """
import sys
from gapless_uploader.sinks.trackio import TrackioSink
from tests.sinks.harness import write
from tests.sinks.test_pages import ROWS, RUN
write(TrackioSink(sys.argv[1]), RUN, {}, *ROWS)
"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


def page(url: str, profile: Path) -> str:
    """The page's elements as they stand after its scripts have run."""
    quiet = ["background-networking", "component-update", "sync", "gpu", "quic", "extensions", "default-apps"]
    flags = ["--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    flags += [f"--user-data-dir={profile}", "--virtual-time-budget=20000", "--dump-dom"]
    assert CHROMIUM is not None
    done = subprocess.run([CHROMIUM, *flags, url], capture_output=True, text=True, timeout=100, check=True)
    return done.stdout


@contextmanager
def trackio_dashboard(folder: Path) -> Iterator[str]:
    """The address of trackio's own dashboard, in a process of its own since trackio reads its folder once."""
    environment = {**os.environ, "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    paths = [*(str(Path(name).resolve()) for name in ("uploader", "schemas")), str(Path.cwd())]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    subprocess.run([sys.executable, "-c", WRITE_TRACKIO, str(folder)], env=environment, check=True, timeout=100)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE_TRACKIO], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        yield next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
    finally:
        process.communicate()


def test_tensorboards_page_shows_the_run_and_its_tags(tmp_path: Path) -> None:
    """TensorBoard's first page lists the run under project and name, and has a card for a key of it."""
    write(TensorboardSink(str(tmp_path / "tb")), RUN, {}, Config(RUN.config), *ROWS, row(3, note=Text("hello")))
    server = Server(tmp_path / "tb", "fast")
    try:
        server.until(lambda: len(server.get("plugin/timeseries/tags").get("scalars", {}).get("runTagInfo", {})) == 1)
        shown = page(f"{server.url}/#timeseries", tmp_path / "profile")
    finally:
        server.close()

    assert "grpo/Qwen-7B@r-1" in shown
    assert "actor/loss" in shown


def test_trackios_page_shows_generations_as_traces(tmp_path: Path) -> None:
    """trackio's dashboard shows a generation as a trace of its run and step, its markup as text."""
    pytest.importorskip("trackio")
    with trackio_dashboard(tmp_path / "trackio") as url:
        shown = page(f"{url}/traces?project=grpo", tmp_path / "profile")
    text = re.sub(r"\s+", " ", shown)

    assert "Qwen-7B" in text
    assert "What is 2+2?" in text
    assert "&lt;b&gt;four&lt;/b&gt;" in text
