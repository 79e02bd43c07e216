"""The `wandb` package, in a process of its own: it knows credentials and hosts, and reads back what W&B holds.

It reads one JSON object a line and answers each with one, all but `connect`, which only prepares it for the questions
to come. It stays out of the uploader's process because the package takes 60 MB, starts a service of its own, and may
hang; it ends when its standard input does. Run as a file, it imports nothing of ours.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Any, TextIO

Apis = dict[tuple[str, str], Any]
"""(host, key) -> what speaks to it."""


def answer(request: dict[str, Any], apis: Apis) -> dict[str, Any]:
    """What the parent asked for. Raises what the package raises."""
    if request["do"] == "credentials":
        return credentials(request.get("base_url"))
    api = connected(request, apis)
    api.flush()  # its cache would show a run as it was
    run = api.run(request["path"])
    rows: list[dict[str, Any]] = []
    for first, last in request["steps"]:
        rows.extend(run.scan_history(page_size=max(1, last - first + 1), min_step=first, max_step=last + 1))
    return {"rows": rows, "state": run.state, "progress": run.summary_metrics.get("_gapless")}


def connected(request: dict[str, Any], apis: Apis) -> Any:
    """The `wandb.Api` for the request's host and key."""
    import wandb

    key = (request["base_url"], request["api_key"])
    if key not in apis:
        apis[key] = wandb.Api(overrides={"base_url": key[0]}, api_key=key[1], timeout=request["timeout_s"])
    return apis[key]


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

        threading.Thread(target=start_service, name="service", daemon=True).start()
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
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    # What the package prints must not be taken for an answer, nor may it ask anybody anything.
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    apis: Apis = {}
    with suppress(Exception):  # whoever asks is told why
        load()
    try:
        for line in requests:
            reply(json.loads(line), apis, answers)
    finally:
        for folder in sys.argv[1:]:
            shutil.rmtree(folder, ignore_errors=True)


def reply(request: dict[str, Any], apis: Apis, answers: TextIO) -> None:
    """Do what one line asks for. Raises OSError when the parent is gone."""
    if request["do"] == "connect":
        with suppress(Exception):
            connected(request, apis)
        return
    try:
        found = answer(request, apis)
    except Exception as error:  # noqa: BLE001 - whatever a vendor raises is the answer
        found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
    answers.write(json.dumps(found, default=dict) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
