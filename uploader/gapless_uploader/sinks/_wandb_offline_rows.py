"""Rows as the process of W&B's client takes them: under W&B's names; what an offline folder cannot hold is refused."""

from __future__ import annotations

from typing import Any

from gapless_uploader.operations import Amend, Media, Missing, Row, Table, Text
from gapless_uploader.sink import Refusal
from gapless_uploader.sinks._wandb_lines import TooBig, above, careful_body, plain, spool_key, tracker_key, valid
from gapless_uploader.sinks._wandb_media import MAX_SHOWN, file_name, path_of
from gapless_uploader.sinks._wandb_tables import MAX_ARTIFACT_ROWS

_MAX_ROW_BYTES = 10_000_000
"""`wandb sync` skips a row above 10,383,360 bytes."""


def values_of(row: Row | Amend, refused: list[Refusal]) -> dict[str, Any]:
    """The row's values as the client's process takes them, under W&B's names."""
    values: dict[str, Any] = {}
    step = row.step or 0
    for key, value in row.values.items():
        name = tracker_key(key)
        match value:
            case Text(text=text):
                values[name] = valid(text)
            case Table(columns=columns, rows=rows, log_mode=mode):
                if len(rows) > MAX_ARTIFACT_ROWS:
                    more = f"{len(rows) - MAX_ARTIFACT_ROWS} rows of a table above the {MAX_ARTIFACT_ROWS}"
                    refused.append(Refusal(step, key, more))
                values[name] = {"_gapless": "table", "columns": columns, "rows": rows, "log_mode": mode}
            case Media(type=kind, items=items):
                if kind == "image" and len(items) > MAX_SHOWN:
                    more = f"{len(items) - MAX_SHOWN} images above the {MAX_SHOWN} of a row"
                    refused.append(Refusal(step, key, more))
                try:
                    values[name] = {"_gapless": kind, "items": _items(key, step, value)}
                except FileNotFoundError as error:
                    refused.append(Refusal(step, key, f"a payload that is missing ({error.strerror})"))
            case Missing(reason=reason):
                refused.append(Refusal(step, key, f"a payload that is missing ({reason})"))
            case _:
                try:
                    values[name] = plain(value)
                except TooBig as too_big:
                    refused.append(Refusal(step, key, str(too_big)))
    return _fitting(values, step, refused)


def _items(key: str, step: int, media: Media) -> list[dict[str, Any]]:
    if media.type == "histogram":
        return [item.info for item in media.items]
    made = [{**item.info, "path": str(path_of(item))} for item in media.items]
    if media.type == "file":
        for item, one in zip(media.items, made, strict=True):
            one["name"] = file_name(key, step, item, path_of(item))
    return made


def _fitting(values: dict[str, Any], step: int, refused: list[Refusal]) -> dict[str, Any]:
    """The values without the largest, where the row is too large for W&B."""
    sizes = {name: len(careful_body({name: value})) for name, value in values.items() if not isinstance(value, dict)}
    for largest in above(sizes, _MAX_ROW_BYTES):
        del values[largest]
        refused.append(Refusal(step, spool_key(largest), f"a row above W&B's {_MAX_ROW_BYTES} bytes"))
    return values


def note_renamed(row: Row | Amend, renamed: list[str]) -> None:
    """Add the row's keys that have another name at W&B."""
    renamed += [key for key in row.values if tracker_key(key) != key and key not in renamed]


def unchanged(row: Row | Amend) -> set[str]:
    """The keys that an operation before this one had with these values."""
    return row.values.keys() - set(row.changed) if isinstance(row, Amend) else set()
