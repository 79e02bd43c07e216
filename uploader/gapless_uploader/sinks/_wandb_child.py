"""The `wandb` package, in a process of its own: it knows credentials and hosts, and reads back what W&B holds.

It reads one JSON object a line and answers each with one. It stays out of the uploader's process because the package
takes 60 MB, starts a service of its own, and may hang; it ends when its standard input does.
"""

from __future__ import annotations

import json
import os
from typing import Any


def answer(request: dict[str, Any], apis: dict[tuple[str, str], Any]) -> dict[str, Any]:
    """What the parent asked for. Raises what the package raises."""
    import wandb

    if request["do"] == "credentials":
        return credentials(request.get("base_url"))
    key = (request["base_url"], request["api_key"])
    if key not in apis:
        apis[key] = wandb.Api(overrides={"base_url": key[0]}, api_key=key[1], timeout=request["timeout_s"])
    api = apis[key]
    api.flush()  # its cache would show a run as it was
    run = api.run(request["path"])
    rows: list[dict[str, Any]] = []
    for first, last in request["steps"]:
        rows.extend(run.scan_history(page_size=max(1, last - first + 1), min_step=first, max_step=last + 1))
    return {"rows": rows, "state": run.state, "progress": dict(run.summary).get("_gapless")}


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


def main() -> None:
    """Answer until the parent is gone."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    # What the package prints must not be taken for an answer, nor may it ask anybody anything.
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    apis: dict[tuple[str, str], Any] = {}
    for line in requests:
        try:
            found = answer(json.loads(line), apis)
        except Exception as error:  # noqa: BLE001 - whatever a vendor raises is the answer
            found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        answers.write(json.dumps(found, default=dict) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
