"""The `wandb` package, in a process of its own: it knows credentials and hosts, and reads back what W&B holds.

It reads one JSON object a line and answers each with one of the same `number`: `credentials` in its turn, `look` in a
thread of its own, so its answer may come after that to a later one; the parent sees to it that they are few. `connect`
has no answer: it prepares for the looks behind it. All this stays out of the uploader's process because the package
takes 60 MB, starts a service of its own, and may hang; it ends when its standard input does. Run as a file, it imports
nothing of ours.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, TextIO


class Apis:
    """What speaks to W&B: of each host and key as many as there were looks at once. Thread safe.

    A `wandb.Api` is lent to one look at a time: `flush()` in the middle of another's `run()` would fail that.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[Any]] = {}

    def connect(self, request: dict[str, Any]) -> None:
        """Make the first for the request's host and key. Raises what the package raises."""
        if (request["base_url"], request["api_key"]) not in self._idle:
            with self.lent(request):
                pass

    @contextmanager
    def lent(self, request: dict[str, Any]) -> Iterator[Any]:
        """One for the request's host and key, which nobody else uses. Raises what the package raises."""
        import wandb

        base_url, key = request["base_url"], request["api_key"]
        idle = self._idle.setdefault((base_url, key), [])
        try:
            api = idle.pop()
        except IndexError:
            api = wandb.Api(overrides={"base_url": base_url}, api_key=key, timeout=request["timeout_s"])
        try:
            yield api
        finally:
            idle.append(api)


class Answers:
    """Where answers go, a line each. Thread safe."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, line: str) -> None:
        """Give an answer; to nobody when the parent is gone, which the end of our input tells."""
        with self._lock, suppress(OSError):
            self._stream.write(line + "\n")
            self._stream.flush()


def look(request: dict[str, Any], apis: Apis) -> dict[str, Any]:
    """A run as W&B shows it. Raises what the package raises."""
    with apis.lent(request) as api:
        api.flush()  # its cache would show a run as it was
        run = api.run(request["path"])
        rows: list[dict[str, Any]] = []
        for first, last in request["steps"]:
            rows.extend(run.scan_history(page_size=max(1, last - first + 1), min_step=first, max_step=last + 1))
        return {"rows": rows, "state": run.state, "progress": run.summary_metrics.get("_gapless")}


def credentials(base_url: str | None) -> dict[str, Any]:
    """Host, key and proxies, from where `wandb` itself takes them."""
    import wandb
    from wandb.sdk.lib import wbauth

    settings = wandb.setup().settings
    host = str(base_url or settings.base_url).rstrip("/")
    found = wbauth.authenticate_session(host=host, source="gapless", prompt=False, update_session=False)
    proxies = {"http": settings.http_proxy, "https": settings.https_proxy}
    return {
        "base_url": host,
        "api_key": getattr(found, "api_key", None),
        "proxies": {scheme: proxy for scheme, proxy in proxies.items() if proxy},
    }


def load() -> None:
    """Import the package before anybody asks: that takes a second. Nothing of it is garbage, so none is looked for.

    Nor is numpy, which it can do without: a tenth of the second, ten megabytes, and threads that wait for work. Its
    service, without which it asks W&B nothing, starts beside the rest of the imports.
    """
    gc.disable()
    sys.modules["numpy"] = None  # type: ignore[assignment]
    with suppress(Exception):
        leave_sources_alone()
    try:
        import wandb

        threading.Thread(target=start_service, name="service").start()
        _ = wandb.Api  # imported when first named
        import_module("requests")  # which `wandb.Api` imports with its first run
        gc.freeze()
    except ImportError:
        del sys.modules["numpy"]  # for whoever asks and imports it again
        raise
    finally:
        gc.enable()


def leave_sources_alone() -> None:
    """The package's models look up in their source files what each field is for, which nobody reads here: a sixth of
    the second. This is pydantic's own affair and may move; then the files are read."""
    models: Any = import_module("pydantic._internal._fields")
    models.extract_docstrings_from_cls = lambda *_, **__: {}


def start_service() -> None:
    """Start W&B's own service; whoever needs it before it is there waits for it."""
    import wandb

    with suppress(Exception):  # whoever asks is told why
        wandb.setup()


def main() -> None:
    """Answer until the parent is gone; a parent that was killed cannot remove our folder, the first argument."""
    for folder in sys.argv[
        1:
    ]:  # after the last look, and what the package does at its end: its service writes in there
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    nothing = os.open(os.devnull, os.O_RDWR)
    # What the package prints must not be taken for an answer, nor may it ask anybody anything.
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    apis = Apis()
    with suppress(Exception):  # whoever asks is told why
        load()
    for line in requests:
        take(json.loads(line), apis, answers)


def take(request: dict[str, Any], apis: Apis, answers: Answers) -> None:
    """Do what one line asks for, or begin to."""
    match request["do"]:
        case "connect":
            with suppress(Exception):  # whoever looks is told why
                apis.connect(request)
        case "credentials":
            answers.write(answer(request, lambda: credentials(request["base_url"])))
        case "look":
            threading.Thread(target=lambda: answers.write(answer(request, lambda: look(request, apis)))).start()


def answer(request: dict[str, Any], find: Callable[[], dict[str, Any]]) -> str:
    """The line that answers the request."""
    try:
        return json.dumps({**find(), "number": request["number"]}, default=dict)
    except BaseException as error:  # noqa: BLE001 - whatever a vendor raises is the answer
        return json.dumps({"error": f"{type(error).__name__}: {str(error)[:500]}", "number": request["number"]})


if __name__ == "__main__":
    main()
