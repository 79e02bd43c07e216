"""Tables as W&B holds them: a media file that the run's page shows, and an artifact version that `wandb.Api` loads.

Both hold the rows of their own step alone. W&B's client would send the whole growing table each time.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from hashlib import md5, sha512
from math import isnan
from typing import Any, ClassVar
from zlib import crc32

from gapless_uploader.operations import Table

MAX_MEDIA_ROWS = 10_000
MAX_ARTIFACT_ROWS = 200_000
_MAX_COLLECTION = 128
_DIGITS = "abcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class TableArtifact:
    """One artifact version with one file."""

    collection: str
    type: str
    file: str
    content: bytes
    client_id: str
    sequence_client_id: str
    step: int
    incremental: bool = False
    of_a_value: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """What it is known by."""
        return self.client_id

    @property
    def address(self) -> str:
        """What a row refers to."""
        return f"wandb-client-artifact://{self.client_id}/{self.file}"

    @property
    def latest_address(self) -> str:
        """The newest version of the same collection."""
        return f"wandb-client-artifact://{self.sequence_client_id}:latest/{self.file}"

    @property
    def md5(self) -> str:
        """Base64 MD5 of the file."""
        return md5_of(self.content)

    @property
    def digest(self) -> str:
        """The version's own digest, from which W&B knows a repeated one."""
        manifest = f"wandb-artifact-manifest-v1\n{self.file}:{self.md5}\n"
        return md5(manifest.encode(), usedforsecurity=False).hexdigest()


def media_file(table: Table) -> bytes:
    """What the run's page shows; NaN and infinities are bare literals."""
    shown = {"columns": table.columns, "data": table.rows[:MAX_MEDIA_ROWS]}
    return json.dumps(shown, separators=(",", ":"), default=str).encode()


def whole(place: str, key: str, step: int, table: Table, mode: str) -> TableArtifact:
    """The artifact of a table of its own."""
    _, _, run_id = place.rpartition("/")
    content = _artifact_file(table, {"log_mode": mode})
    collection = collection_name(f"run-{run_id}-{key}")
    return TableArtifact(
        collection,
        "run_table",
        f"{key}.table.json",
        content,
        _name(place, key, str(step), content),
        _name(place, collection),
        step,
    )


def increment(place: str, key: str, step: int, table: Table, number: int, before: list[str]) -> TableArtifact:
    """The artifact of a table's new rows. The file's name is made of the step, where W&B's client takes the clock."""
    _, _, run_id = place.rpartition("/")
    more = {"log_mode": "INCREMENTAL", "increment_num": number, "previous_increments_paths": before}
    content = _artifact_file(table, more)
    collection = collection_name(f"run-{run_id}-incr-{key}")
    return TableArtifact(
        collection,
        "wandb-run-incremental-table",
        f"{number or None}-{step}.inc.table.json",
        content,
        _name(place, key, str(step), content),
        _name(place, collection),
        step,
        incremental=True,
    )


def collection_name(name: str) -> str:
    """`name` where W&B takes it, else what is left of it and a checksum of the whole, as W&B's client names it.

    W&B takes 128 characters, which its client does not heed.
    """
    left = re.sub(r"[^a-zA-Z0-9_\-.]", "", name)
    if left == name and len(name) <= _MAX_COLLECTION:
        return name
    left = left[: _MAX_COLLECTION - 7]
    checksum = crc32(name.encode("utf-8", "surrogatepass")).to_bytes(4, "big")
    return f"{left}-{base64.urlsafe_b64encode(checksum).decode().rstrip('=')}"


def manifest(artifact: TableArtifact, artifact_id: str) -> bytes:
    """The version's manifest."""
    entry = {"digest": artifact.md5, "size": len(artifact.content), "birthArtifactID": artifact_id}
    return json.dumps(
        {
            "version": 1,
            "storagePolicy": "wandb-storage-policy-v1",
            "storagePolicyConfig": {"storageLayout": "V2"},
            "contents": {artifact.file: entry},
        },
        separators=(",", ":"),
    ).encode()


def md5_of(content: bytes) -> str:
    """The base64 MD5 that W&B's artifacts are declared with."""
    return base64.b64encode(md5(content, usedforsecurity=False).digest()).decode()


def _name(*parts: str | bytes) -> str:
    """128 letters and digits that are always the same for the same parts: a repeated version is known again."""
    joined = b"\0".join(p if isinstance(p, bytes) else p.encode("utf-8", "surrogatepass") for p in parts)
    number = int.from_bytes(sha512(joined + b"\0a").digest() + sha512(joined + b"\0b").digest(), "big")
    letters = []
    for _ in range(128):
        number, digit = divmod(number, len(_DIGITS))
        letters.append(_DIGITS[digit])
    return "".join(letters)


def _artifact_file(table: Table, more: dict[str, Any]) -> bytes:
    rows = table.rows[:MAX_ARTIFACT_ROWS]
    types = {
        name: _type_of([row[at] if at < len(row) else None for row in rows]) for at, name in enumerate(table.columns)
    }
    numbers = {at for at, name in enumerate(table.columns) if types[name] == _optional("number")}
    content = {
        "_type": "table",
        "column_types": {"params": {"type_map": types}, "wb_type": "typedDict"},
        "columns": table.columns,
        "data": [[_cell(cell, at in numbers) for at, cell in enumerate(row)] for row in rows],
        "ncols": len(table.columns),
        "nrows": len(rows),
        **more,
    }
    return json.dumps(content, sort_keys=True, default=str).encode()


def _cell(cell: Any, is_number: bool) -> Any:
    """NaN is null in a column of numbers, as W&B's client writes it."""
    return None if is_number and isinstance(cell, float) and isnan(cell) else cell


def _type_of(cells: list[Any]) -> dict[str, Any]:
    kinds = {_kind(cell) for cell in cells if cell is not None}
    if not kinds:
        return {"wb_type": "unknown"}
    return _optional(kinds.pop() if len(kinds) == 1 else "any")


def _optional(kind: str) -> dict[str, Any]:
    pair = [{"wb_type": "none"}, {"wb_type": kind}] if kind != "any" else [{"wb_type": "any"}, {"wb_type": "none"}]
    return {"params": {"allowed_types": pair}, "wb_type": "union"}


def _kind(cell: Any) -> str:
    if isinstance(cell, bool):
        return "boolean"
    if isinstance(cell, int | float):
        return "number"
    return "string" if isinstance(cell, str) else "any"
