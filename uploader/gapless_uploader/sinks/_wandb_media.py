"""Values that are files at W&B: what goes up, under which name, and what the row holds in their place.

The name is made of key, step and content, so a repeated upload writes the same bytes to the same name. What the row
holds has the fields of W&B's own types (`image-file`, `images/separated`, `video-file`, `audio-file`, `histogram`,
`table-file`, `incremental-table-file`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from gapless_uploader.operations import Media, MediaItem, Table, Text
from gapless_uploader.sink import Refusal
from gapless_uploader.sinks import _wandb_tables as tables
from gapless_uploader.sinks._wandb_lines import valid

MAX_SHOWN = 108
"""Items of a list of images that W&B shows."""
MAX_TEXT_BYTES = 1 << 20
"""A longer text goes up as a file, and the row holds its beginning."""
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""What reading a payload raises that is not there, or not for us, and will not be."""
_FOLDERS = {"image": "images", "video": "videos", "audio": "audio"}


@dataclass(slots=True)
class Upload:
    """A run's file: its name at W&B and where its bytes are."""

    name: str
    content: bytes | Path
    of_a_value: bool = False
    """It belongs to a row's value, and not to the run."""

    def read(self) -> bytes:
        """The bytes. Raises OSError."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


@dataclass(slots=True)
class Encoded:
    """What a row's media came to."""

    uploads: list[Upload] = field(default_factory=list)
    artifacts: list[tables.TableArtifact] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)


class MediaEncoder:
    """Encodes the values of one run that are no plain JSON."""

    def __init__(self, place: str, increments: dict[str, dict[str, Any]]) -> None:
        """`place` is entity/project/run; `increments` holds key -> what an incremental table has so far."""
        self._place = place
        self._increments = increments

    def encode(self, key: str, step: int, value: Text | Table | Media, into: Encoded) -> Any:
        """What the row holds for `value`; files and artifacts are added to `into`. Raises OSError."""
        if isinstance(value, Text):
            return self._text(key, step, value.text, into)
        if isinstance(value, Table):
            return self._table(key, step, value, into)
        if value.type == "histogram":
            return _one_or_all([_histogram(item.info) for item in value.items])
        if value.type == "file":
            return _one_or_all([self._plain_file(key, step, item, into) for item in value.items])
        made = [self._file(key, step, value.type, item, into) for item in value.items]
        if value.type == "image":
            return self._images(key, step, made, into)
        return made[0] if len(made) == 1 else _listed(value, made)

    def moved(self, key: str, step: int, text: str, into: Encoded) -> str:
        """A text that makes its row too large goes up as a file; the row says where it is."""
        return self._text(key, step, text, into, 100)

    def _text(self, key: str, step: int, text: str, into: Encoded, max_bytes: int = MAX_TEXT_BYTES) -> str:
        text = valid(text)
        data = text.encode()
        if len(data) <= max_bytes:
            return text
        name = f"media/text/{path_part(key)}_{step}_{sha256(data).hexdigest()[:20]}.txt"
        into.uploads.append(Upload(name, data, True))
        return f"{data[:max_bytes].decode('utf-8', 'ignore')}\n[the whole text of {len(data)} bytes: {name}]"

    def _file(self, key: str, step: int, kind: str, item: MediaItem, into: Encoded) -> dict[str, Any]:
        path = path_of(item)
        digest, info = path.name[:64], item.info
        extension = path.suffix.lstrip(".")
        name = f"media/{_FOLDERS[kind]}/{path_part(key)}_{step}_{digest[:20]}.{extension}"
        made: dict[str, Any] = {"_type": f"{kind}-file", "sha256": digest, "size": path.stat().st_size, "path": name}
        into.uploads.append(Upload(name, path, True))
        if kind == "image":
            made["format"] = info.get("format") or extension
        if kind in ("image", "video"):
            made.update({side: info[side] for side in ("width", "height") if isinstance(info.get(side), int)})
        if info.get("caption") is not None:
            made["caption"] = valid(str(info["caption"]))
        return made

    def _images(self, key: str, step: int, made: list[dict[str, Any]], into: Encoded) -> Any:
        if len(made) == 1:
            return made[0]
        if len(made) > MAX_SHOWN:
            more = f"{len(made) - MAX_SHOWN} images above the {MAX_SHOWN} of a row; their files are in the run"
            into.refused.append(Refusal(step, key, more))
        shown = made[:MAX_SHOWN]
        listed: dict[str, Any] = {"_type": "images/separated", "count": len(shown), "format": shown[0]["format"]}
        listed.update({side: shown[0][side] for side in ("width", "height") if side in shown[0]})
        listed["filenames"] = [item["path"] for item in shown]
        if any("caption" in item for item in shown):
            listed["captions"] = [item.get("caption") for item in shown]
        return listed

    def _plain_file(self, key: str, step: int, item: MediaItem, into: Encoded) -> str:
        """A file has no type in W&B's history: it is one of the run's files, and the row says its name."""
        path = path_of(item)
        path.stat()  # a file that went away is found out here, where it costs its key alone
        name = file_name(key, step, item, path)
        into.uploads.append(Upload(name, path, True))
        return name

    def _table(self, key: str, step: int, table: Table, into: Encoded) -> dict[str, Any]:
        content = tables.media_file(table)
        digest = sha256(content).hexdigest()
        mode = table.log_mode if table.log_mode in ("MUTABLE", "INCREMENTAL") else "IMMUTABLE"
        name = f"media/table/{path_part(key)}_{step}_{digest[:20]}.table.json"
        into.uploads.append(Upload(name, content, True))
        left_out = len(table.rows) - tables.MAX_ARTIFACT_ROWS
        if left_out > 0:
            into.refused.append(Refusal(step, key, f"{left_out} rows of a table above the {tables.MAX_ARTIFACT_ROWS}"))
        made: dict[str, Any] = {
            "_type": "table-file",
            "path": name,
            "sha256": digest,
            "size": len(content),
            "ncols": len(table.columns),
            "nrows": len(table.rows),
            "log_mode": mode,
        }
        if mode == "INCREMENTAL":
            held = self._increments.get(key, {"num": 0, "rows": 0, "paths": []})
            artifact = tables.increment(self._place, key, step, table, held["num"], held["paths"])
            made["_type"] = "incremental-table-file"
            made["increment_num"] = held["num"]
            made["previous_increments_paths"] = held["paths"]
            made["nrows"] = held["rows"] + len(table.rows)
            paths = [*held["paths"], artifact.address]
            self._increments[key] = {"num": held["num"] + 1, "rows": made["nrows"], "paths": paths}
        else:
            artifact = tables.whole(self._place, key, step, table, mode)
        made["artifact_path"] = artifact.address
        made["_latest_artifact_path"] = artifact.latest_address
        into.artifacts.append(artifact)
        return made


def increments_of(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the run's summary says of its incremental tables: what `MediaEncoder` takes."""
    return {
        key: {
            "num": value["increment_num"] + 1,
            "rows": value["nrows"],
            "paths": [*value["previous_increments_paths"], value["artifact_path"]],
        }
        for key, value in summary.items()
        if isinstance(value, dict) and value.get("_type") == "incremental-table-file"
    }


def path_part(key: str) -> str:
    """`key` in a file's name: slashes make folders, as at W&B, but none leads out of them."""
    parts = [part if part.strip(".") else "_" for part in key.split("/")]
    return re.sub(r"[\x00-\x1f\x7f\\]", "_", "/".join(parts))[:400]


def file_name(key: str, step: int, item: MediaItem, path: Path) -> str:
    """The name that a plain file has among the run's."""
    own = Path(str(item.info.get("name") or path.name)).name
    return f"media/files/{path_part(key)}_{step}_{path.name[:20]}/{path_part(own)}"


def path_of(item: MediaItem) -> Path:
    """Where its bytes are. Raises FileNotFoundError where it names none."""
    if item.path is None:
        raise FileNotFoundError(2, "no file", "media")
    return item.path


def _one_or_all(made: list[Any]) -> Any:
    return made[0] if len(made) == 1 else made


def _histogram(info: dict[str, Any]) -> dict[str, Any]:
    return {"_type": "histogram", "values": info.get("counts", []), "bins": info.get("edges", [])}


def _listed(value: Media, made: list[dict[str, Any]]) -> dict[str, Any]:
    kind = "videos" if value.type == "video" else "audio"
    listed: dict[str, Any] = {"_type": kind, "count": len(made), kind: made}
    if value.type == "audio":
        listed["sampleRates"] = [item.info.get("sample_rate") for item in value.items]
        listed["durations"] = [item.info.get("duration") for item in value.items]
    if any("caption" in item for item in made):
        listed["captions"] = [item.get("caption") for item in made]
    return listed
