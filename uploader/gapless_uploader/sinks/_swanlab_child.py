"""The real library in a process of its own: reads messages, one JSON object a line, and logs them with `swanlab.log`.

Run by path with `python -P`, in an empty folder, by `_swanlab_library.py`; imports the standard library and swanlab.
Every message is answered with one line. When the other end closes without `finish`, the process ends and leaves its
folder as it is: whoever comes next makes it again.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer messages until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # The library prints to the terminal; our answers must not be mixed with it.
    os.dup2(2, 1)
    import swanlab

    for line in sys.stdin:
        message = json.loads(line)
        try:
            told = _do(swanlab, message)
        except Exception as error:  # noqa: BLE001 - whatever the library raises, the other end decides
            told = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(told) + "\n")
        answers.flush()
        if "finish" in message:
            break
    answers.flush()
    os._exit(0)


def _do(swanlab: Any, message: dict[str, Any]) -> dict[str, Any]:
    if "init" in message:
        swanlab.init(**message["init"])
        for name, axis in message["axes"].items():
            swanlab.define_metric(name, x_axis=axis)
    elif "rows" in message:
        for step, values in message["rows"]:
            swanlab.log({key: float(value) for key, value in values.items()}, step=step)
        for step, key, kind, value in message["media"]:
            swanlab.log({key: _media(swanlab, kind, value)}, step=step)
    elif "finish" in message:
        state = message["finish"]
        swanlab.finish(**({"state": state} if state != "success" else {}))
    return {"done": True}


def _media(swanlab: Any, kind: str, value: Any) -> Any:
    if kind == "TEXT":
        return swanlab.Text(value)
    if kind == "ECHARTS":
        table = swanlab.echarts.Table()
        table.add(value["columns"], value["rows"])
        return table
    make = swanlab.Audio if kind == "AUDIO" else swanlab.Image
    return [make(path, caption=caption) if caption else make(path) for path, caption in value]


if __name__ == "__main__":
    main()
