"""Names of the spool's folders and files, from true names and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256

CLAIMS = ".attempts"
"""The folder in a run's folder that is there from its first attempt on."""

_PLAIN = re.compile(r"(?!\.)[a-z0-9._-]{1,64}")
_SEGMENT = re.compile(
    r"(?P<writer>(?!\.)[a-z0-9._~-]{1,96})-(?P<attempt>\d{4,9})-(?P<id>[0-9a-f]{8})-(?P<index>\d{6,9})\.jsonl"
)
_MEDIA = re.compile(r"[0-9a-f]{64}\.[a-z0-9]{1,8}")


def path_name(name: str) -> str:
    """The folder's or file's name for a project, run id or writer: itself when plain, else `slug~hash`."""
    if _PLAIN.fullmatch(name):
        return name
    slug = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.")[:40]
    digest = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{slug}~{digest}"


def is_media_name(name: object) -> bool:
    """Whether `name` is a reference into `media/`, and nothing else."""
    return isinstance(name, str) and _MEDIA.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class SegmentName:
    """A segment's file name in parts; `writer` is the path name, the true one is in the header."""

    writer: str
    attempt: int
    short_id: str
    """The first 8 hex digits of the attempt's id."""
    index: int

    def __str__(self) -> str:
        return f"{self.writer}-{self.attempt:04d}-{self.short_id}-{self.index:06d}.jsonl"

    @staticmethod
    def parse(name: str) -> SegmentName | None:
        """The parts of `name`, or None when it is no segment's name."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return None
        return SegmentName(match["writer"], int(match["attempt"]), match["id"], int(match["index"]))
