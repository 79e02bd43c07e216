"""Lines to records: many at once as one by one, and when a line's own JSON may stand for its data."""

from __future__ import annotations

from math import inf, isfinite, nan
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless_schemas import Damaged, Record, data_json, decode, decode_lines, encode_record, seal

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ['"data":{', "}", '"data":', "a}b", '","crc":"', "seq", "\\", "\n"]
)
NUMBERS = st.floats() | st.integers(-(1 << 53), 1 << 53) | st.booleans()
ANY = st.recursive(NUMBERS | st.none() | KEYS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))


def line_of(data: dict[str, Any]) -> bytes:
    return encode_record(1, 0.0, 0.0, "metrics", 0, orjson.dumps(data))


def foreign(text: str) -> Record:
    """The record of a line that no writer of ours makes; `text` stands behind its kind."""
    return decode(seal(b'{"seq":1,"t":0.0,"mono":0.0,"kind":"metrics",' + text.encode())[:-1])


def all_numbers(data: dict[str, Any]) -> bool:
    """As the history asks, in one sum."""
    try:
        return isfinite(sum(data.values()))
    except (TypeError, OverflowError):
        return False


@given(st.dictionaries(KEYS, NUMBERS) | st.dictionaries(KEYS, ANY))
def test_the_json_of_numbers_is_the_data(data: dict[str, Any]) -> None:
    record = decode_lines([line_of(data)])[0]
    text = data_json(record)
    if all_numbers(record.data) and text is not None:
        assert orjson.loads(text) == record.data == data
        assert b"\\" not in text  # whoever looks for a key in it finds it
    if all_numbers(record.data) and not any(set(key) & set('}{"\\') or not key.isprintable() for key in data):
        assert text is not None


@pytest.mark.parametrize(
    "text",
    [
        '"step":0,"data":{"a":1},"note":{"b":2}}',
        '"step":0,"data":{"a":1},"note":5}',
        '"data":{"a":1},"step":0}',
        '"data":5,"step":0,"data":{"a":1},"x":1}',
        '"note":{"data":{"b":2}},"step":0,"data":{"a":1}}',
        '"note":{"data":7},"step":0,"data":{"a":1}}',
        '"step":0,"data" : {"a":1}}',
        '"step":0,"d\\u0061ta":{"a":1}}',
        '"step":0,"data":{"a":null},"marks":[[["a"],"nan"]]}',
        '"step":0,"data":{"a":1},"skip_sinks":["wandb"]}',
        '"step":0,"data":{"a":{}}}',
        '"step":0,"data":{"\\u007e_step":1}}',
        '"step":0,"marks":[[["a"],"int"]],"data":{"a":"12345678901234567890123"}}',
        '"skip_sinks":["wandb"],"step":0,"data":{"a":1}}',
        '"step":0,"data":{"a":\r1}}',
        '"note":"\\"data\\":{","step":0,"data":{"a":1}}',
    ],
)
def test_a_line_of_another_shape_gives_no_json_or_the_right_one(text: str) -> None:
    record = foreign(text)
    found = data_json(record)
    assert found is None or orjson.loads(found) == record.data
    assert found is None or not set(found) & set(b"\r\\")


def test_a_key_given_twice_counts_the_last_time_in_both() -> None:
    record = foreign('"step":0,"data":{"a":1,"a":2}}')
    found = data_json(record)
    assert found is not None
    assert orjson.loads(found) == record.data == {"a": 2}


def test_lines_decode_together_as_one_by_one() -> None:
    lines = [encode_record(seq, 1.0, 2.0, "metrics", seq, b'{"a":%d}' % seq) for seq in range(1, 50)]
    together = decode_lines(lines)
    assert together == [decode(line[:-1]) for line in lines]
    assert [record.line for record in together] == lines


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


def test_what_is_not_finite_is_no_number() -> None:
    assert not all_numbers({"a": nan})
    assert not all_numbers({"a": inf, "b": -inf})
