"""Lines to records: many at once as one by one."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gapless_schemas import Damaged, decode, decode_lines, encode_record, seal


def line_of(data: dict[str, Any]) -> bytes:
    return encode_record(1, 0.0, 0.0, "metrics", 0, orjson.dumps(data))


def test_lines_decode_together_as_one_by_one() -> None:
    lines = [encode_record(seq, 1.0, 2.0, "metrics", seq, b'{"a":%d}' % seq) for seq in range(1, 50)]
    together = decode_lines(lines)
    assert together == [decode(line[:-1]) for line in lines]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"{}\n", "no crc at the end"),
        (line_of({"a": 1}).replace(b"1", b"2", 1), "the crc does not match"),
        (seal(b'{"seq":1}'), "no field 't'"),
        (seal(b'{"seq":1,}'), "no JSON"),
        (seal(b'{"seq":0,"t":1.0,"mono":1.0,"kind":"metrics","step":0,"data":{}}'), "wrong type"),
        (seal(b'{"seq":1,"t":1e300,"mono":1.0,"kind":"metrics","step":0,"data":{}}'), "a time that is none"),
    ],
)
def test_one_bad_line_refuses_them_all_and_says_why(bad: bytes, reason: str) -> None:
    with pytest.raises(Damaged, match=reason):
        decode_lines([line_of({"a": 1}), bad, line_of({"a": 2})])
