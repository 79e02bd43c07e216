"""One history through the real library and through the sink: what the server then holds, field by field.

The differences that are meant are in `docs/swanlab.md`; each has its assertion here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path

import pytest

from gapless_uploader.operations import Axis, Config, Identity, Media, MediaItem, Row, State, System, Table, Text
from gapless_uploader.sink import Batch, RunView
from gapless_uploader.sinks.swanlab import SwanlabSink
from tests.servers.swanlab import SwanLabServer
from tests.servers.swanlab.client import RealClient
from tests.servers.swanlab.clock import unix

on_both = pytest.mark.xdist_group("swanlab-oracle")

T0 = 1_704_067_200.123456
ROWS: list[tuple[int, dict[str, float]]] = [
    (step, {"loss": 1 / (step + 1), "acc/top1": step * 0.5, "n": step, "flag": step % 2 == 0}) for step in range(6)
]
ODD = {"nan": nan, "up": inf, "down": -inf, "big": 2**53 + 1, "tiny": 5e-324, "minus": -0.0, "max": 1.7e308}
CONFIG = {"lr": 0.1, "net": {"width": [1, 2], "deep": {"a": None}}, "name": "qwen", "n": 10**12, "bad": nan}

REAL = """
from google.protobuf.timestamp_pb2 import Timestamp
from swanlab.sdk.internal.bus.events import MetricLogEvent
run = swanlab.init(project="proj", name="first", description="what it is", tags=["a", "b"], group="grp",
                   job_type="train", id="real", resume="allow", config={**config, "bad": float("nan")})
def log(data, step, t):
    stamp = Timestamp()
    stamp.FromMicroseconds(round(t * 1e6))
    run._components.emitter.emit(MetricLogEvent(data=data, step=step, timestamp=stamp))
swanlab.define_metric("m/x", x_axis="epoch")
for step, values in rows:
    log({**values, "m/x": float(step), "epoch": float(step)}, step, t0 + step)
log({key: float(value) if isinstance(value, str) else value for key, value in odd.items()}, 6, t0 + 6)
log({"said": swanlab.Text("hello é"), "empty": swanlab.Text("")}, 7, t0 + 7)
table = swanlab.echarts.Table()
table.add(["h", "v"], [["x", 1.5], ["é", None], ["z", 3]])
log({"table": table, "pic": swanlab.Image(picture, caption="black")}, 8, t0 + 8)
swanlab.finish()
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwanLabServer]:
    """A server after the real library's run "real" and the sink's run "ours"."""
    folder = tmp_path_factory.mktemp("oracle")
    with SwanLabServer() as server, pytest.MonkeyPatch.context() as patch:
        picture = folder / "black.png"
        client = RealClient(folder, server.url, server.api_key)
        odd = {key: str(value) if value != value or abs(value) == inf else value for key, value in ODD.items()}
        client.script(
            f"from PIL import Image; Image.new('RGB', (4, 4)).save({str(picture)!r})\n" + REAL,
            rows=ROWS,
            odd=odd,
            t0=T0,
            picture=str(picture),
            config={key: value for key, value in CONFIG.items() if key != "bad"},
        )
        patch.setenv("SWANLAB_API_HOST", server.url)
        patch.setenv("SWANLAB_API_KEY", server.api_key)
        # The library encodes an image anew; its bytes go through the sink, so that only the protocol differs.
        (held,) = server.experiments["real"].media("pic")[8]
        payload = folder / f"{hashlib.sha256(held[1]).hexdigest()}.png"
        payload.write_bytes(held[1])
        send(SwanlabSink(settle=0), payload)
        yield server


def send(sink: SwanlabSink, picture: Path) -> None:
    view = RunView("proj", "ours", T0, "train-7", "first", "grp", "train", ["a", "b"], "what it is", config=CONFIG)
    view.axes = {"m/x": ("epoch", None)}
    view.system = {"host": "train-7", "command": "python train.py", "cwd": "/job", "python": "3.11.7"}
    view.system |= {"gpus": ["H200", "H200"], "git": {"commit": "abc", "branch": "main", "remote": "ssh://x/y"}}
    rows = [
        Row(step, T0 + step, float(step), {**values, "m/x": float(step), "epoch": float(step)}) for step, values in ROWS
    ]
    rows.append(Row(6, T0 + 6, 6.0, dict(ODD)))
    rows.append(Row(7, T0 + 7, 7.0, {"said": Text("hello é"), "empty": Text("")}))
    table = Table(["h", "v"], [["x", 1.5], ["é", None], ["z", 3]])
    image = Media("image", [MediaItem(picture, {"caption": "black"})])
    rows.append(Row(8, T0 + 8, 8.0, {"table": table, "pic": image}))
    session = sink.open(view, {})
    identity = Identity("first", "grp", "train", ["a", "b"], "what it is", None, None)
    session.write(Batch([identity, Config(CONFIG), System(view.system), Axis("m/x", "epoch", None), *rows], view))
    view.state, view.exit_code, view.runtime = "finished", 0, 8.0
    session.write(Batch([State("finished", 0, T0 + 8, 8.0)], view))
    session.flush()
    session.close()


@on_both
def test_the_rows_are_the_same(both: SwanLabServer) -> None:
    """Key, step, value, type of value and original time of every scalar row are those of the library."""
    real, ours = (
        {(row.key, row.step): (row.data, type(row.data), unix(row.create_time))
         for row in both.experiments[name].raw if row.kind == "scalar"}
        for name in ("real", "ours")
    )  # fmt: skip
    signs = {("up~inf", 6): 1.0, ("down~inf", 6): -1.0}

    assert {place: ours.pop(place)[0] for place in signs} == signs
    assert real == ours
    assert len(ours) == 6 * 6 + len(ODD)
    assert both.experiments["ours"].duplicates.total == both.experiments["real"].duplicates.total == 0


@on_both
def test_text_tables_and_images_are_the_same(both: SwanLabServer) -> None:
    """Media rows name the same files with the same bytes, captions and times."""
    real, ours = (
        {(row.key, row.step): (row.data, row.more, unix(row.create_time), [held.objects[path] for path in row.data])
         for row in held.raw if row.kind == "media"}
        for held in (both.experiments["real"], both.experiments["ours"])
    )  # fmt: skip

    assert real == ours
    assert set(ours) == {("said", 7), ("empty", 7), ("table", 8), ("pic", 8)}


@on_both
def test_the_run_is_described_as_the_library_does(both: SwanLabServer) -> None:
    """Name, description, labels, job, group and end are the library's; colours are one of its own."""
    real, ours = both.experiments["real"], both.experiments["ours"]
    for name in ("name", "description", "labels", "cluster", "job", "state"):
        assert getattr(real, name) == getattr(ours, name), name
    assert [set(state) for state in real.states] == [set(state) for state in ours.states]
    assert {key: state for key, state in ours.states[0].items() if key != "finishedAt"} == {
        key: state for key, state in real.states[0].items() if key != "finishedAt"
    }


@on_both
def test_the_config_is_the_same_but_for_what_the_library_spoils(both: SwanLabServer) -> None:
    """Each key is wrapped alike and in the same order; beside them is ours, with the original times."""
    real, ours = (dict(both.experiments[name].profile["config"]) for name in ("real", "ours"))
    own = ours.pop("_gapless")["value"]

    assert real == ours
    assert own["started_at"] == "2024-01-01T00:00:00.123456Z"
    assert own["ended_at"] == "2024-01-01T00:00:08.123456Z"
    assert (own["duration_s"], own["exit_code"], own["host"]) == (8.0, 0, "train-7")


@on_both
def test_the_metadata_is_the_trainings_in_the_same_shape(both: SwanLabServer) -> None:
    """The document has the library's fields, and none of this machine's values."""
    real, ours = (both.experiments[name].profile["metadata"] for name in ("real", "ours"))

    assert set(real) == set(ours)
    assert ours["runtime"]["hostname"] == "train-7"
    assert ours["runtime"]["command"] == "python train.py"
    assert [device["name"] for device in ours["hardware"]["accelerators"][0]["devices"]] == ["H200", "H200"]
    assert ours["git"] == {"remote_url": "ssh://x/y", "branch": "main", "commit": "abc"}


@on_both
def test_columns_are_defined_alike(both: SwanLabServer) -> None:
    """What the sink says of a column is what the library said first of the same column."""
    columns = both.projects["proj"].columns
    repeated = [column for column in both.projects["proj"].ignored_columns if column["key"] != "m/x"]

    assert len(repeated) > 10
    assert [column for column in repeated if columns[column["key"]] != column] == []
    assert columns["m/x"]["xAxis"] == "epoch"
    assert columns["up~inf"] == {"key": "up~inf", "type": "FLOAT"}


@on_both
def test_swanlabs_own_api_reads_what_was_sent(both: SwanLabServer, tmp_path: Path) -> None:
    """A second opinion: `swanlab.Api` reads every point of the sink's run, with its values."""
    client = RealClient(tmp_path, both.url, both.api_key)
    read = client.script(
        """
    run = swanlab.Api().run(f"{user}/proj/ours")
    found = run.metrics(keys=["loss", "acc/top1"], all=True)["list"]
    result = [run.state, [[[point["step"], point["value"]] for point in line["metrics"]] for line in found]]
    """,
        user=both.username,
    )

    assert read == [
        "FINISHED",
        [[[step, values[key]] for step, values in ROWS] for key in ("loss", "acc/top1")],
    ]
