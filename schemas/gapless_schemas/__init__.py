"""The record contract that the training side and the uploader share.

Standard library and orjson only. `FORMAT.md` beside this file says the bytes in prose; `record.schema.json`
is the JSON Schema that every line validates against.
"""

from gapless_schemas.marks import apply_marks
from gapless_schemas.names import CLAIMS, SegmentName, is_media_name, path_name
from gapless_schemas.records import (
    CRC_BYTES,
    CRC_MARK,
    FORMAT_VERSION,
    KINDS,
    MAX_LINE_BYTES,
    MAX_READ_BYTES,
    MAX_STEP,
    MAX_TIME,
    SEAL,
    SEALED,
    SEGMENT_BYTES,
    Damaged,
    Header,
    Record,
    UnsupportedVersion,
    decode,
    decode_header,
    decode_lines,
    encode_header,
    encode_record,
    encode_row,
    seal,
    unseal,
)

__all__ = [
    "CLAIMS",
    "CRC_BYTES",
    "CRC_MARK",
    "FORMAT_VERSION",
    "KINDS",
    "MAX_LINE_BYTES",
    "MAX_READ_BYTES",
    "MAX_STEP",
    "MAX_TIME",
    "SEAL",
    "SEALED",
    "SEGMENT_BYTES",
    "Damaged",
    "Header",
    "Record",
    "SegmentName",
    "UnsupportedVersion",
    "apply_marks",
    "decode",
    "decode_header",
    "decode_lines",
    "encode_header",
    "encode_record",
    "encode_row",
    "is_media_name",
    "path_name",
    "seal",
    "unseal",
]
