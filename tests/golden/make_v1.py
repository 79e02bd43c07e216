"""How `v1` beside this file was made, once, by the first release: `python tests/golden/make_v1.py FOLDER`."""

from __future__ import annotations

import sys
from math import inf, nan, pi

import gapless
from gapless import opening, place

SYSTEM = {
    "host": "node-1",
    "user": "someone",
    "command": "python train.py",
    "cwd": "/home/someone",
    "python": "3.11.7",
    "torch": "2.13.0",
    "cuda": "13.0",
    "world_size": 8,
    "slurm_job_id": "42",
    "gpus": ["NVIDIA H100 80GB HBM3"],
    "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "branch": "main", "remote": "https://host/a/b.git"},
}


def main(folder: str) -> None:
    opening.describe = lambda environment: SYSTEM  # type: ignore[assignment]
    place.gethostname = lambda: "node-1"
    place._boot_id = lambda: "00000000-0000-0000-0000-000000000000"
    run = gapless.init(
        "golden",
        "first",
        dir=folder,
        id="A Run",
        config={"lr": 0.1, "limit": inf, "model": {"layers": 3}, "api_key": "never written"},
        group="g",
        job_type="train",
        tags=["golden"],
        notes="made once",
        entity="e",
        sinks=["tensorboard"],
    )
    for step in range(3):
        run.log({"loss": 1 / (step + 1)}, step=step, t=1_700_000_000.0 + step / 32)
    values = {
        "pi": pi,
        "tiny": 5e-324,
        "minus zero": -0.0,
        "inf": inf,
        "-inf": -inf,
        "nan": nan,
        "big": 2**80,
        "int64": -(2**63),
        "text": 'é\u2028"\n',
        "surrogate": "\ud83d",
        "none": None,
        "true": True,
        "list": [1, "two", None],
        "nested": {"key": 1},
    }
    run.log(values, step=3, t=1_700_000_000.125)
    run.log({"table": gapless.Table(["a", "b"], [[1, nan], ["x", None]]), "text": gapless.Text("short")}, step=4)
    run.log({"long text": gapless.Text("0123456789 " * 30_000)}, step=4)
    run.log({"picture": gapless.Image([[0, 255], [255, 0]], caption="chess"), "h": gapless.Histogram([1, 2, 4])})
    run.log({"sound": gapless.Audio([0.0, 0.5, -0.5], sample_rate=8000)})
    run.config["model"] = {"width": 8}
    run.summary["best"] = 0.25
    run.define_axis("val/*", "epoch", summary="min")
    run.console(["a line", "password=never-written"])
    run.finish(7)
    with gapless.init("golden", dir=folder, id="A Run", resume_step=2) as run:
        run.log({"loss": 0.5})
        run.log({"loss": 0.25})
    with gapless.init("golden", dir=folder, id="A Run", writer="eval") as run:
        run.log({"accuracy": 0.75}, step=1)


if __name__ == "__main__":
    main(sys.argv[1])
