"""Rows of plain numbers that keep the text of their line: the same records as from any other reading."""

from __future__ import annotations

import gc
from random import Random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless_schemas import Damaged, Record, decode_lines, encode_record, encode_row, seal
from gapless_uploader.plain_records import MAX_KEYS, PlainDecoder, PlainRecord, shape_of

KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ['"data":{', "}", '"data":', "a}b", "a{b", '","crc":"', "seq", "\\", "\n", "", "~", "\u2028", "loss_1", "loss_2"]
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(1 << 60), 1 << 60)
VALUES = NUMBERS | st.none() | st.booleans() | KEYS | st.lists(NUMBERS) | st.dictionaries(KEYS, NUMBERS)


def row(seq: int, data: dict[str, Any]) -> bytes:
    return encode_record(seq, 1.5 * seq, 0.5 * seq, "metrics", seq, orjson.dumps(data))


def foreign(text: str) -> bytes:
    """A line that no writer of ours makes, with `text` behind its kind."""
    return seal(b'{"seq":1,"t":0.0,"mono":0.0,"kind":"metrics",' + text.encode())


def taught(data: dict[str, Any]) -> PlainDecoder:
    """A decoder that has met many rows with the keys of `data`."""
    decoder = PlainDecoder()
    decoder.decode_lines([row(seq, dict.fromkeys(data, 0.5)) for seq in range(1, 100)])
    return decoder


def opened(record: Record | PlainRecord) -> Record:
    return record if isinstance(record, Record) else record.opened()


def plain(decoder: PlainDecoder, line: bytes) -> PlainRecord | None:
    """The record of `line`, where it keeps its text; in any case it says what any other reading says."""
    (record,) = decoder.decode_lines([line])
    assert opened(record) == decode_lines([line])[0]
    return None if isinstance(record, Record) else record


@given(st.dictionaries(KEYS, NUMBERS, min_size=1, max_size=6), st.data())
def test_a_row_reads_the_same_with_and_without_its_text(data: dict[str, Any], more: st.DataObject) -> None:
    decoder = taught(data)
    rows = st.fixed_dictionaries(dict.fromkeys(data, NUMBERS))
    others = st.dictionaries(st.sampled_from([*data]) | KEYS, VALUES, max_size=6)
    many = more.draw(st.lists(rows | others, min_size=1, max_size=8))
    lines = [row(seq, values) for seq, values in enumerate(many, 1)]
    records = decoder.decode_lines(lines)
    assert [opened(record) for record in records] == decode_lines(lines)
    for record, line in zip(records, lines, strict=True):
        if isinstance(record, PlainRecord):
            assert record.shape.keys == record.data.keys() == data.keys()
            assert b'"data":{%b},"crc"' % record.members in line
            assert not set(record.members) & set(b"\r\n\\")
            assert all(abs(value) < 1 << 53 for value in record.data.values() if type(value) is int)


def test_nearly_every_row_of_a_run_keeps_its_text() -> None:
    decoder, kept = PlainDecoder(), 0
    for first in range(1, 5_001, 500):
        lines = [row(seq, {"loss": 0.5 * seq, "lr": 1e-5, "epoch": seq}) for seq in range(first, first + 499)]
        lines.append(row(first + 499, {"eval/acc": 0.5}))
        records = decoder.decode_lines(lines)
        assert [opened(record) for record in records] == decode_lines(lines)
        kept += sum(isinstance(record, PlainRecord) for record in records)
    assert kept > 0.85 * 5_000  # all but the first call's and the odd ones


def test_rows_of_two_kinds_in_turns_keep_half_of_their_texts() -> None:
    decoder = PlainDecoder()
    for _ in range(3):
        records = decoder.decode_lines([row(seq, {f"loss_{seq % 2}": 0.5}) for seq in range(1, 101)])
        kept = sum(isinstance(record, PlainRecord) for record in records)
    assert kept == 50


def test_wide_rows_that_come_a_few_at_a_time_are_learned_too() -> None:
    keys = [f"layer.{number}/grad_norm_of_every_parameter" for number in range(MAX_KEYS)]
    decoder = PlainDecoder()
    for first in range(1, 40, 5):
        records = decoder.decode_lines([row(seq, dict.fromkeys(keys, 0.5)) for seq in range(first, first + 5)])
    assert all(isinstance(record, PlainRecord) for record in records)


def test_a_run_that_is_followed_live_builds_no_shape() -> None:
    decoder = PlainDecoder()
    for seq in range(1, 200):
        (record,) = decoder.decode_lines([row(seq, {"loss": 0.5})])
        assert isinstance(record, Record)


@pytest.mark.parametrize("rows", [{"lo\\ss": 0.5}, {}, {"loss": True}, {"loss": "text"}, {"loss": 1 << 60}])
def test_rows_that_need_a_look_at_their_values_get_it(rows: dict[str, Any]) -> None:
    assert plain(taught(rows), row(100, rows)) is None


def test_more_keys_than_a_shape_holds() -> None:
    rows = {f"metric_{number}": 0.5 for number in range(MAX_KEYS + 1)}
    assert plain(taught(rows), row(100, rows)) is None


@pytest.mark.parametrize(
    "text",
    [
        '"step":0,"data":{"a":1},"note":{"b":2}}',
        '"step":0,"data":{"a":1},"note":5}',
        '"data":{"a":1},"step":0}',
        '"data":{"a":2},"step":0,"data":{"a":1}}',
        '"data":5,"step":0,"data":{"a":1}}',
        '"step":0,"data" : {"a":1}}',
        '"step":0,"d\\u0061ta":{"a":1}}',
        '"step":0,"data":{"\\u0061":1}}',
        '"step":0,"data":{"a":null},"marks":[[["a"],"nan"]]}',
        '"step":0,"data":{"a":1},"skip_sinks":["wandb"]}',
        '"step":0,"data":{"a":1},"skip_sinks":[]}',
        '"step":0,"data":{"a":{}}}',
        '"step":0,"data":{"a":12345678901234567890123}}',
        '"step":0,"data":{"a":9007199254740992}}',
        '"step":0,"data":{"a":true}}',
        '"step":0,"data":{"a":\r1}}',
        '"step":0,"data":{}}',
        '"step":0,"data":{"b":1}}',
        '"step":0,"data":{"a":1,"b":1}}',
        '"data":{"a":1}}',
        '"step":null,"data":{"a":1}}',
        '"step":0,"members":"YQ==","data":{"a":1}}',
    ],
)
def test_a_line_of_another_form_is_read_as_ever(text: str) -> None:
    decoder = taught({"a": 0.5})
    assert plain(decoder, row(100, {"a": 0.5})) is not None
    found = plain(decoder, foreign(text))
    assert found is None or orjson.loads(b"{%b}" % found.members) == {"a": 1}


@pytest.mark.parametrize("text", ['"step":0,"data":{ "a" : 1e0 }}', ' "step" : 0 , "data":{"a":1,"a":2}}'])
def test_another_programs_json_keeps_its_text_where_that_is_the_object(text: str) -> None:
    found = plain(taught({"a": 0.5}), foreign(text))
    assert found is not None
    assert b"{%b}" % found.members in text.encode()


@pytest.mark.parametrize(
    "bad",
    [
        b"{}\n",
        row(1, {"a": 1}).replace(b"1", b"2", 1),
        row(1, {"a": 1}).replace(b'"crc"', b'"cRc"'),
        row(1, {"a": 1})[:-12].upper() + row(1, {"a": 1})[-12:],
        seal(b'{"seq":0,"t":1.0,"mono":1.0,"kind":"metrics","step":0,"data":{"a":1}}'),
        seal(b'{"seq":18446744073709551616,"t":1.0,"mono":1.0,"kind":"metrics","step":0,"data":{"a":1}}'),
        seal(b'{"seq":1,"t":1e300,"mono":1.0,"kind":"metrics","step":0,"data":{"a":1}}'),
        seal(b'{"seq":1,"t":1.0,"mono":-1.0,"kind":"metrics","step":0,"data":{"a":1}}'),
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","step":1.0,"data":{"a":1}}'),
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","step":0,"data":{"a":NaN}}'),
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","step":0,"data":{"a":1e999}}'),
        seal(b'{"seq":1,"t":1.0,"mono":1.0,"kind":"metrics","step":0,"data":{"a":01}}'),
    ],
)
def test_what_is_damaged_stays_damaged(bad: bytes) -> None:
    with pytest.raises(Damaged) as as_ever:
        decode_lines([bad])
    with pytest.raises(Damaged, match="^" + str(as_ever.value).split("(")[0].split("{")[0].rstrip()):
        taught({"a": 0.5}).decode_lines([row(1, {"a": 1}), bad])


PARTS = (
    b'" | \\ | { | } | [ | , | null | true | 1e5 | -0 | . | \xff | \xed\xa0\x80 | \0 | \r |   | "data":{ | "step":'
    b' | \\u0061 | 9007199254740993 | 1e999 | NaN | +1 | "crc":"00000000" | ,"a":[[[['
).split(b" | ")


@pytest.mark.parametrize("seed", range(4))
def test_a_line_whose_bytes_were_changed_reads_the_same(seed: int) -> None:
    """Sealed anew, as somebody could who wants to do harm; what no reader takes is damage for both."""
    random = Random(seed)
    keys = ["loss", "train/metric_1", "lr", "\u00e9"]
    decoder, kept = taught(dict.fromkeys(keys, 0.5)), 0
    shape = decoder._shape
    for _ in range(3_000):
        values = {key: random.choice([random.random(), random.randrange(10**15), -1e-300]) for key in keys}
        body = bytearray(row(random.randrange(1, 10**6), values)[:-19] + b"}")
        for _ in range(random.randrange(4)):
            at = random.randrange(len(body))
            match random.randrange(4):
                case 0:
                    body[at] = random.randrange(256)
                case 1:
                    del body[at : at + random.randrange(1, 12)]
                case 2:
                    body[at:at] = random.choice(PARTS)
                case _:
                    begin = random.randrange(len(body))
                    body[at:at] = body[begin : begin + random.randrange(1, 30)]
        line = seal(bytes(body).replace(b"\n", b" "))
        decoder._shape = shape
        try:
            expected = decode_lines([line])
        except Damaged:
            with pytest.raises(Damaged):
                decoder.decode_lines([line])
        else:
            (record,) = decoder.decode_lines([line])
            assert [opened(record)] == expected
            kept += isinstance(record, PlainRecord)
    assert kept > 500


def test_a_crc_in_capitals_is_damage_in_both_readings() -> None:
    line = next(line for seq in range(1, 99) if (line := row(seq, {"a": 1}))[-11:-3] != line[-11:-3].upper())
    shouted = line[:-11] + line[-11:-3].upper() + line[-3:]
    for decode in (decode_lines, taught({"a": 0.5}).decode_lines):
        with pytest.raises(Damaged, match="crc"):
            decode([shouted])


def test_lines_that_only_look_alike_are_not_tried_for_ever() -> None:
    """Every row skips a sink: its keys have a shape that no line of the run fits."""
    decoder, built = PlainDecoder(), shape_of.cache_info().misses
    lines = [
        encode_record(seq, 1.0, 1.0, "metrics", seq, b'{"skips":0.5}', None, b'["other"]') for seq in range(1, 100)
    ]
    tried = 0
    for _ in range(500):
        assert decoder.decode_lines(lines) == decode_lines(lines)
        tried += decoder._shape is not None
    assert tried < 10
    assert shape_of.cache_info().misses == built + 1


def test_the_shapes_of_old_runs_are_let_go_of() -> None:
    before = len(PlainRecord.__subclasses__())
    for run in range(200):
        decoder = taught({f"run_{run}/loss": 0.5})
        del decoder
    gc.collect()
    assert len(PlainRecord.__subclasses__()) <= before + (shape_of.cache_info().maxsize or 0) < before + 200


def test_a_line_of_our_own_writer_keeps_its_text() -> None:
    line = encode_row(100, 1.7e9, 0.25, 7, {"a": 0.1, "b": 3})
    assert line is not None
    found = plain(taught({"a": 0.5, "b": 0.5}), line)
    assert found is not None
    assert (found.members, found.step, found.t, found.mono) == (b'"a":0.1,"b":3', 7, 1.7e9, 0.25)
