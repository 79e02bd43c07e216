"""Files of version 1 as the first release wrote them stay readable for ever."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jsonschema

import gapless_schemas
from gapless_schemas import KINDS
from tests.spool.oracle import header, records, segments

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"
RUN = GOLDEN / "golden" / "a-run~63d329bf592bee33"
SCHEMA = json.loads((Path(gapless_schemas.__file__).parent / "record.schema.json").read_text())


def test_every_line_is_valid_by_the_schema() -> None:
    """Each line of the golden files validates against the published JSON Schema."""
    lines = [line for segment in segments(RUN) for line in segment.read_bytes().split(b"\n")[:-1]]
    for line in lines:
        jsonschema.validate(json.loads(line), SCHEMA)

    assert len(lines) > 20


def test_the_golden_run_reads_as_it_was_written() -> None:
    """Two attempts and an eval writer: headers, all kinds, values to the last bit, marks, times and steps."""
    headers = [header(path) for path in segments(RUN)]
    found = {one.attempt_id: (one, rows) for one, rows in zip(headers, records(RUN).values(), strict=True)}
    by_writer = {(one.writer, one.attempt): rows for one, rows in found.values()}
    first = by_writer["main", 1]
    values = next(record for record in first if record.step == 3)

    assert {(one.project, one.run_id) for one in headers} == {("golden", "A Run")}
    assert sorted(by_writer) == [("eval", 1), ("main", 1), ("main", 2)]
    assert [one.resume_step for one in headers] == [None, None, 2]
    assert {record.kind for rows in by_writer.values() for record in rows} == KINDS - {"header", "alive", "gap"}
    assert math.isnan(values.data["nan"])
    assert {**values.data, "nan": 0} == {
        "pi": math.pi,
        "tiny": 5e-324,
        "minus zero": 0.0,
        "inf": math.inf,
        "-inf": -math.inf,
        "nan": 0,
        "big": 2**80,
        "int64": -(2**63),
        "text": 'é\u2028"\n',
        "surrogate": "\\ud83d",
        "none": None,
        "true": True,
        "list": [1, "two", None],
        "nested/key": 1,
    }
    assert math.copysign(1, values.data["minus zero"]) == -1
    assert values.t == 1_700_000_000.125
    assert first[-1].data == {"state": "failed", "exit_code": 7}


def test_golden_payloads_are_whole() -> None:
    """Every reference names a file in `media` with the sha256 it says."""
    from hashlib import sha256

    names = [path.name for path in (RUN / "media").iterdir()]

    assert len(names) == 3
    assert all(sha256((RUN / "media" / name).read_bytes()).hexdigest() == name.partition(".")[0] for name in names)
