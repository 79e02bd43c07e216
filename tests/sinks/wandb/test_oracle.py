"""The real client is the oracle: one training through it and through the sink, the server's two runs field by field.

Differences that are meant are in `MEANT`, each with its reason; docs/wandb.md lists the same ones.
"""

from __future__ import annotations

import json
import struct
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.servers.wandb_server import Run, WandbServer
from tests.servers.wandb_server.client import run_client
from tests.sinks.wandb.lives import Clock, Lives
from tests.wandb_spool import T0, Attempt

MEANT = {
    "_runtime": "the training's seconds, where the client says the seconds since its own process began",
    "_wandb.runtime": "the same, of the run",
    "_gapless": "the progress, in the summary alone",
    "config._wandb.t": "telemetry: the client's list of its own features in use",
    "config._wandb.e": "the training node, as the spool's system record knows it; the quiet client sends none",
    "config NaN": "is the text `NaN`, where the client's is null",
    "media paths": "hold the row's step, where the client takes the step of the row before",
    "clientID": "made of run, key, step and content, where the client draws it at random",
}


def png(width: int, height: int, shade: int) -> bytes:
    """A grey image."""
    rows = b"".join(b"\0" + bytes([shade]) * width for _ in range(height))
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


SCRIPT = """
wandb.init(project="grpo", id="r-1", name="Qwen 7B", group="g", job_type="train", tags=["a", "b"], notes="words",
  config={"lr": 0.1, "net": {"depth": 3, "sizes": [1, 2]}, "none": None, "off": False, "nan": math.nan},
  settings=settings(disable_git=True, git_commit="c0ffee", git_remote_url="https://example.test/a/b.git"))
run = wandb.run
run.define_metric("low", summary="min")
run.define_metric("high", summary="max")
run.define_metric("avg", summary="mean")
run.define_metric("end", summary="last")
run.define_metric("gone", summary="none")
run.define_metric("epoch")
run.define_metric("val/*", step_metric="epoch", step_sync=False, summary="max")
run.define_metric("dotted\\\\.key", summary="min")
T0 = %r
def log(step, **values):
    run.log({**values, "_timestamp": T0 + step}, step=step)
for step in range(20):
    log(step, loss=1 / (step + 1), low=20.0 - step, high=step * 1.5, avg=step + 0.25, end=step, gone=step,
        **{"val/acc": (7 * step) %% 5 + 0.5, "epoch": step // 4, "dotted.key": 5 - step, "a b/c:d": step})
log(20, nan=math.nan, up=math.inf, down=-math.inf, loss=math.nan, low=math.nan)
log(21, big=2**53 + 1, huge=2**63 - 1, yes=True, text="line\\n\\u2028 \\U0001f680", items=[1, 2.5, "x"], third=1 / 3)
log(30, tables=wandb.Table(columns=["q", "score"], data=[["why", 1.5], ["how", 2]]))
log(31, tables=wandb.Table(columns=["q", "score"], data=[["what", 0.5]], log_mode="MUTABLE"))
log(32, hist=wandb.Histogram(np_histogram=([1, 2, 3], [0.0, 1.0, 2.0, 3.0])))
log(33, image=wandb.Image("one.png", caption="first"))
log(34, images=[wandb.Image("one.png", caption="c0"), wandb.Image("two.png")])
inc = wandb.Table(columns=["q"], log_mode="INCREMENTAL")
for step in (40, 41):
    inc.add_data("row %%d" %% step)
    log(step, inc=inc)
run.summary["best"] = 0.75
run.finish(exit_code=3)
"""


@pytest.fixture
def both(tmp_path: Path, clock: Clock) -> Any:
    """(the client's run, the sink's run) of one training."""
    images = {"one": png(6, 4, 10), "two": png(6, 4, 200)}
    (tmp_path / "client").mkdir()
    for name, content in images.items():
        (tmp_path / "client" / f"{name}.png").write_bytes(content)
    with WandbServer(clock=clock) as theirs, WandbServer(clock=clock) as ours:
        run_client(theirs.url, tmp_path / "client", SCRIPT % T0)
        spool(tmp_path / "spool", images)
        lives = Lives(tmp_path / "spool", ours.url, clock)
        lives.run()
        assert lives.failures == []
        yield theirs.run("grpo", "r-1"), ours.run("grpo", "r-1"), ours


def spool(root: Path, images: dict[str, bytes]) -> None:
    """The same training, as the training side would have written it."""
    attempt = Attempt(root)
    folder = attempt.path.parent / "media"
    folder.mkdir()
    names = {name: f"{sha256(content).hexdigest()}.png" for name, content in images.items()}
    for name, content in images.items():
        (folder / names[name]).write_bytes(content)
    config = {"lr": 0.1, "net": {"depth": 3, "sizes": [1, 2]}, "none": None, "off": False, "nan": None}
    about = {"name": "Qwen 7B", "group": "g", "job_type": "train", "tags": ["a", "b"], "notes": "words"}
    attempt.add("run", {**about, "config": config}, marks=[[["config", "nan"], "nan"]])
    git = {"commit": "c0ffee", "remote": "https://example.test/a/b.git", "branch": "main"}
    attempt.add("system", {"command": "python train.py --lr 0.1", "git": git, "python": "3.11.7"})
    for key, axis, rule in [
        ("low", None, "min"), ("high", None, "max"), ("avg", None, "mean"), ("end", None, "last"),
        ("gone", None, "none"), ("epoch", None, None), ("val/*", "epoch", "max"), ("dotted.key", None, "min"),
    ]:  # fmt: skip
        attempt.add("axis", {"key": key, "axis": axis, "summary": rule})

    def log(step: int, kind: str, data: dict[str, Any], marks: Any = None) -> None:
        attempt.created = T0 + step - attempt.seq - 1
        attempt.add(kind, data, step, marks)

    for step in range(20):
        values = {"loss": 1 / (step + 1), "low": 20.0 - step, "high": step * 1.5, "avg": step + 0.25, "end": step}
        values |= {"gone": step, "val/acc": (7 * step) % 5 + 0.5, "epoch": step // 4, "dotted.key": 5 - step}
        log(step, "metrics", {**values, "a b/c:d": step})
    odd = [[["nan"], "nan"], [["up"], "inf"], [["down"], "-inf"], [["loss"], "nan"], [["low"], "nan"]]
    log(20, "metrics", dict.fromkeys(["nan", "up", "down", "loss", "low"]), odd)
    log(21, "metrics", {"big": 2**53 + 1, "huge": 2**63 - 1, "yes": True, "items": [1, 2.5, "x"], "third": 1 / 3,
                        "text": "line\n\u2028 \U0001f680"})  # fmt: skip
    log(30, "table", {"key": "tables", "columns": ["q", "score"], "rows": [["why", 1.5], ["how", 2]]})
    log(31, "table", {"key": "tables", "columns": ["q", "score"], "rows": [["what", 0.5]], "log_mode": "MUTABLE"})
    log(
        32,
        "media",
        {"key": "hist", "type": "histogram", "items": [{"counts": [1, 2, 3], "edges": [0.0, 1.0, 2.0, 3.0]}]},
    )
    one = {"media": names["one"], "format": "png", "width": 6, "height": 4}
    two = {**one, "media": names["two"]}
    log(33, "media", {"key": "image", "type": "image", "items": [{**one, "caption": "first"}]})
    log(34, "media", {"key": "images", "type": "image", "items": [{**one, "caption": "c0"}, two]})
    for step in (40, 41):
        log(step, "table", {"key": "inc", "columns": ["q"], "rows": [[f"row {step}"]], "log_mode": "INCREMENTAL"})
    attempt.add("summary", {"best": 0.75})
    attempt.add("finish", {"state": "failed", "exit_code": 3})


def without_what_is_meant(value: Any) -> Any:
    """A row or summary without what differs by intention; media paths by folder and content."""
    if isinstance(value, dict):
        found = {key: without_what_is_meant(item) for key, item in value.items()}
        if "path" in found:
            head, _, tail = found["path"].rpartition("/")
            found["path"] = f"{head}/{tail.rpartition('_')[2]}"
        for name in ("artifact_path", "_latest_artifact_path"):
            if name in found:
                found[name] = found[name].rpartition("/")[2].partition("-")[0]
        if "filenames" in found:
            found["filenames"] = [name.rpartition("_")[2] for name in found["filenames"]]
        if "previous_increments_paths" in found:
            found["previous_increments_paths"] = len(found["previous_increments_paths"])
        return {key: item for key, item in found.items() if key not in ("_runtime", "_wandb", "_gapless")}
    if isinstance(value, list):
        return [without_what_is_meant(item) for item in value]
    return repr(float(value)) if isinstance(value, float | int) and not isinstance(value, bool) else value


def test_the_sink_leaves_what_the_client_leaves(both: tuple[Run, Run, WandbServer]) -> None:
    """Names, config, definitions, rows, summary, files, artifacts and end state are those of a run logged online."""
    theirs, ours, server = both

    assert ours.fields == theirs.fields
    assert ours.group == theirs.group
    assert ours.config == {**theirs.config, "nan": "NaN"}
    assert definitions(ours) == definitions(theirs)
    assert [row["_step"] for row in ours.rows] == [row["_step"] for row in theirs.rows]
    for our, their in zip(ours.rows, theirs.rows, strict=True):
        assert without_what_is_meant(our) == without_what_is_meant(their), our["_step"]
    assert without_what_is_meant(ours.summary) == without_what_is_meant(theirs.summary)
    assert (ours.base_state, ours.exit_code, ours.complete) == (theirs.base_state, theirs.exit_code, theirs.complete)
    assert contents(ours) == contents(theirs)
    assert artifacts(ours) == artifacts(theirs)
    assert server.backend.unanswered == set()


def test_what_differs_is_listed_in_the_docs() -> None:
    """Every difference that the oracle lets pass is in the docs, with its reason."""
    docs = (Path(__file__).parents[3] / "docs" / "wandb.md").read_text()

    assert [name for name, reason in MEANT.items() if name not in docs or reason not in docs] == []


def definitions(run: Run) -> list[str]:
    """The metric definitions, each with its axis by name, in no order."""
    listed = run.wandb_config["m"]
    named = [entry.get("1") or entry.get("2") for entry in listed]
    found = []
    for entry in listed:
        axis = named[entry["5"] - 1] if "5" in entry else None
        found.append(json.dumps([entry.get("1"), entry.get("2"), axis, sorted(entry["6"]), entry["7"]]))
    return sorted(found)


def contents(run: Run) -> list[tuple[str, bytes]]:
    """Media files by folder and content."""
    return sorted((name.rpartition("/")[0], data) for name, data in run.files.items() if name.startswith("media/"))


def artifacts(run: Run) -> list[Any]:
    """Artifacts without what the clock or chance put into them."""
    return sorted(
        (made["name"], made["type"], made["state"], made["version"], sorted(made["aliases"]), len(made["files"]))
        + (() if "incremental" in made["type"] else (made["digest"], sorted(made["files"].items())))
        for made in run.artifacts
    )
