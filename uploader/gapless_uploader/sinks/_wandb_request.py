"""The body of a file_stream request: lines at their offsets, the summary with the progress, and the run's end."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import orjson

from gapless_uploader.operations import Media, Missing, Table, Text
from gapless_uploader.sink import RunView
from gapless_uploader.sinks._wandb_axes import Rules, ruled
from gapless_uploader.sinks._wandb_describe import config_text, exit_code_of, metadata
from gapless_uploader.sinks._wandb_draft import Draft
from gapless_uploader.sinks._wandb_lines import above, careful_body, plain, tracker_key
from gapless_uploader.sinks._wandb_media import MAX_TEXT_BYTES, Upload
from gapless_uploader.sinks._wandb_progress import Progress


def request_body(draft: Draft, before: Progress, summary: str, names: list[str], end: str | None) -> bytes:
    """The request of a draft that follows on `before`; `names` are files that went up, `end` how the run ended."""
    # Parts that are joined once: a request may have megabytes, and each copy is fresh memory.
    parts = [b'{"files":{']
    if draft.lines:
        parts += [*stream_file("wandb-history.jsonl", before.lines, draft.lines), b","]
    if draft.events:
        parts += [*stream_file("wandb-events.jsonl", before.events, draft.events), b","]
    if draft.output:
        parts += [*stream_file("output.log", before.output, draft.output), b","]
    parts += [summary_file(summary), b"}"]
    if names:
        parts += [b',"uploaded":', orjson.dumps(names)]
    if end in ("finished", "failed"):
        parts.append(b',"complete":true,"exitcode":%d' % exit_code_of(end, draft.run.exit_code))
    return b"".join([*parts, b"}"])


def stream_file(name: str, offset: int, lines: list[str]) -> tuple[bytes, bytes, bytes]:
    """One file of a request, in parts."""
    try:
        content = orjson.dumps(lines)
    except TypeError:  # a lone surrogate
        content = json.dumps(lines).encode()
    return b'"%b":{"offset":%d,"content":' % (name.encode(), offset), content, b"}"


def summary_file(summary: str) -> bytes:
    """The summary, which is one line that is written anew each time."""
    return b"".join(stream_file("wandb-summary.json", 0, [summary]))


def summary_text(
    run: RunView, progress: Progress, held: dict[str, Any], max_bytes: int, left_out: Collection[str] = ()
) -> tuple[str, list[str]]:
    """The run's summary by its rules, with `held` as its `_gapless`, without the keys `left_out`; and the names of the
    largest values, which go where it is too large."""
    values = summary_values(run, progress, left_out)
    own: dict[str, Any] = dict(zip(("_step", "_timestamp"), progress.last, strict=False))
    own["_runtime"] = run.runtime if progress.ended or not progress.last else progress.last[2]
    own["_wandb"] = {"runtime": int(run.runtime)}
    own["_gapless"] = held
    text = careful_body({**values, **own})
    if len(text) <= max_bytes:
        return text, []
    sizes = {name: len(careful_body({name: value})) for name, value in values.items()}
    lost = above(sizes, max_bytes - len(text) + sum(sizes.values()))
    for name in lost:
        del values[name]
    return careful_body({**values, **own}), lost


def summary_values(run: RunView, progress: Progress, left_out: Collection[str] = ()) -> dict[str, Any]:
    """The run's summary by its rules, under W&B's names, without the keys `left_out`."""
    rules = Rules(run.axes)
    values: dict[str, Any] = {}
    for key, value in [*((key, shown[1]) for key, shown in progress.shown.items()), *run.summary.items()]:
        if isinstance(value, Table | Media | Missing) or key in left_out:
            continue
        try:
            simple = plain(value.text[:MAX_TEXT_BYTES] if isinstance(value, Text) else value)
        except ValueError:
            continue
        is_kept, simple = ruled(key, simple, rules, progress.folds)
        if is_kept:
            values[tracker_key(key)] = simple
    return values


def end_files(run: RunView, progress: Progress, summary: str, version: str) -> list[Upload]:
    """The files that W&B's client leaves at a run's end."""
    import yaml

    config = json.loads(config_text(run, progress.late == "axis", version, progress.renamed))
    text = yaml.safe_dump(config, indent=4, default_flow_style=False, allow_unicode=True, width=10_000)
    files = [Upload("wandb-summary.json", summary.encode()), Upload("config.yaml", text.encode())]
    if run.system:
        files.append(Upload("wandb-metadata.json", json.dumps(metadata(run), indent=2).encode()))
    return files
