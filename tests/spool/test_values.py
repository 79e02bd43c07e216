"""What objects mean: every value comes back as the number or text it stands for, or is refused out loud."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import enum
import json
import math
import struct
import types
import uuid
import weakref
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import ml_dtypes
import numpy as np
import omegaconf
import orjson
import pydantic
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gapless
from gapless.encode import Part, encode_config, encode_metrics
from gapless_schemas import apply_marks, decode, encode_row
from tests.spool.oracle import only, segments


class Colour(enum.Enum):
    RED = "red"
    DEEP = (1, 2)
    ONE = 1


class Level(enum.IntEnum):
    HIGH = 3


Reports = list[tuple[str, str]]


def logged(data: Any) -> tuple[dict[str, Any], Reports]:
    """What a reader gets for one row, and what was reported."""
    reports: Reports = []
    slow = whole(encode_metrics(data, lambda what, _, text: reports.append((what, text)))[0])
    line = encode_row(1, 0.0, 0.0, 0, data)
    if line is not None:  # plain rows go the short way, and mean the same
        assert same(decode(line[:-1]).data, slow)
    return slow, reports


def configured(data: Any) -> dict[str, Any]:
    return whole(encode_config(data, lambda *_: None))


def whole(parts: list[Part]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in parts:
        values = orjson.loads(part.data)
        apply_marks(values, orjson.loads(part.marks or b"[]"))
        found.update(values)
    return found


def same(left: Any, right: Any) -> bool:
    """Equal in type and, for floats, in every bit; all NaNs are one."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return (math.isnan(left) and math.isnan(right)) or struct.pack("d", left) == struct.pack("d", right)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


NUMBERS = [
    (0.1, 0.1),
    (-0.0, -0.0),
    (5e-324, 5e-324),
    (1.7976931348623157e308, 1.7976931348623157e308),
    (float("nan"), math.nan),
    (float("inf"), math.inf),
    (float("-inf"), -math.inf),
    (True, True),
    (2**53 + 1, 2**53 + 1),
    (2**63 - 1, 2**63 - 1),
    (-(2**63), -(2**63)),
    (2**63, 2**63),
    (2**64 + 5, 2**64 + 5),
    (-(10**100), -(10**100)),
    (np.float64(0.1), 0.1),
    (np.float32(0.1), 0.10000000149011612),
    (np.float16(0.1), 0.0999755859375),
    (np.float32("nan"), math.nan),
    (np.int8(-3), -3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.bool_(True), True),
    (np.array(2.5), 2.5),
    (np.array([[7]]), 7),
    (np.longdouble(0.5), 0.5),
    (ml_dtypes.bfloat16(0.1), 0.10009765625),
    (np.array([0.1], dtype=ml_dtypes.bfloat16), 0.10009765625),
    (ml_dtypes.float8_e4m3fn(0.1), 0.1015625),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([0.5], requires_grad=True), 0.5),
    (torch.tensor(3), 3),
    (torch.tensor(True), True),
    (torch.tensor(0.1, dtype=torch.bfloat16), 0.10009765625),
    (torch.tensor(0.1, dtype=torch.float16), 0.0999755859375),
    (torch.tensor([0.1]).to(torch.float8_e4m3fn), 0.1015625),
    (torch.tensor(float("inf"), dtype=torch.bfloat16), math.inf),
    (torch.nn.Parameter(torch.tensor(2.0)), 2.0),
    (Decimal("0.1"), 0.1),
    (Decimal("NaN"), math.nan),
    (Decimal("-Infinity"), -math.inf),
    (Decimal(10) ** 400, 10**400),
    (Fraction(1, 3), 1 / 3),
    (Fraction(10**400, 1), 10**400),
    (Level.HIGH, 3),
    (Colour.ONE, 1),
    (datetime.timedelta(minutes=1), 60.0),
]


@pytest.mark.parametrize(("value", "expected"), NUMBERS, ids=[f"{type(v).__name__} {v!r:.30}" for v, _ in NUMBERS])
def test_numbers_of_every_make_stay_numbers(value: Any, expected: Any) -> None:
    """A scalar of any library, alone or beside others, in a row or a config, is that number to the last bit."""
    row, reports = logged({"x": value, "y": 1.5})
    config = configured({"a": [{"x": value}]})

    assert same(row, {"x": expected, "y": 1.5})
    assert same(config, {"a": [{"x": expected}]})
    assert reports == []


@dataclasses.dataclass
class Optimizer:
    lr: float
    betas: tuple[float, float]


class Model(pydantic.BaseModel):
    name: str
    layers: int
    key: pydantic.SecretStr


@attrs.define
class Point:
    x: int


OBJECTS: list[tuple[Any, Any]] = [
    (Path("/a/b"), "/a/b"),
    (Colour.RED, "red"),
    (Colour.DEEP, [1, 2]),
    (datetime.datetime(2025, 1, 2, 3, 4, 5, tzinfo=datetime.UTC), "2025-01-02T03:04:05+00:00"),
    (datetime.date(2025, 1, 2), "2025-01-02"),
    (np.datetime64("2025-01-02"), "2025-01-02"),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    (np.str_("text"), "text"),
    (b"raw \xff", "raw \\xff"),
    (Optimizer(0.1, (0.9, 0.99)), {"lr": 0.1, "betas": [0.9, 0.99]}),
    (Point(3), {"x": 3}),
    (collections.namedtuple("Pair", "a b")(1, 2), {"a": 1, "b": 2}),
    (argparse.Namespace(lr=0.1), {"lr": 0.1}),
    (types.SimpleNamespace(lr=0.1), {"lr": 0.1}),
    (collections.OrderedDict(a=1), {"a": 1}),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", 1}), [1, "b"]),
    (range(3), [0, 1, 2]),
    (collections.deque([1, 2]), [1, 2]),
    (torch.bfloat16, "torch.bfloat16"),
    (torch.device("cpu"), "cpu"),
    (torch.Size([1, 2]), [1, 2]),
    (np.dtype("float32"), "float32"),
    (np.arange(3), [0, 1, 2]),
    (torch.ones(2), [1.0, 1.0]),
    (np.zeros(5000), "ndarray(shape=(5000,), dtype=float64)"),
    (omegaconf.OmegaConf.create({"a": {"b": 1}, "c": "${a.b}"}), {"a": {"b": 1}, "c": 1}),
    (omegaconf.OmegaConf.create({"a": "???", "b": "${no.such}"}), {"a": "???", "b": "${no.such}"}),
    (omegaconf.OmegaConf.create([1, {"a": 2}]), [1, {"a": 2}]),
    ({1: "int key", None: "none key", Colour.RED: "enum key"}, {"1": "int key", "None": "none key", "red": "enum key"}),
    (Optimizer, f"{__name__}.Optimizer"),
    (math.sqrt, "math.sqrt"),
    (complex(1, 2), "(1+2j)"),
    (None, None),
]


# By place: the repr of a set is another one in each process.
@pytest.mark.parametrize(
    ("value", "expected"), OBJECTS, ids=[f"{n} {type(v).__name__}" for n, (v, _) in enumerate(OBJECTS)]
)
def test_objects_in_a_config_become_what_they_mean(value: Any, expected: Any) -> None:
    """Dataclasses, OmegaConf, pydantic, enums, paths, sets and the like are plain values in the config record."""
    assert same(configured({"x": value}), {"x": expected})


def test_pydantic_models_become_dicts_without_their_secrets() -> None:
    """A model's fields are recorded; what pydantic hides stays hidden."""
    found = configured({"x": Model(name="m", layers=3, key=pydantic.SecretStr("hunter2"))})["x"]

    assert (found["name"], found["layers"]) == ("m", 3)
    assert "hunter2" not in str(found)


def test_a_config_that_refers_to_itself_is_recorded() -> None:
    """A cycle, a lambda, an object whose repr raises and a depth of thousands cost only themselves."""

    class Rude:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    config: dict[str, Any] = {"lr": 0.1, "rude": Rude(), "f": lambda: None}
    config["self"] = config
    deep: Any = 1
    for _ in range(2000):
        deep = [deep]
    config["deep"] = deep
    found = configured(config)

    assert found["lr"] == 0.1
    assert found["self"] == "<refers to itself>"
    assert "Rude" in found["rude"]
    assert "<lambda>" in found["f"]
    assert "<nested too deeply>" in str(found["deep"])


def test_nan_text_null_and_infinity_stay_apart() -> None:
    """A strict parser reads the line, and the round trip keeps NaN, infinity, the text 'NaN' and None apart."""
    data = {"loss": math.nan, "n": math.inf, "s": "NaN", "z": None}
    parts, _ = encode_metrics(data, lambda *_: None)

    def refuse(token: str) -> float:
        raise AssertionError(token)

    assert json.loads(parts[0].data, parse_constant=refuse) == {"loss": None, "n": None, "s": "NaN", "z": None}
    assert same(whole(parts), data)


def test_large_arrays_are_refused_once_per_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An array or tensor of several values is no metric: counted each time, told once, the rest of the row kept."""
    with gapless.init("p", dir=tmp_path) as run:
        for _ in range(5):
            run.log({"loss": 1.0, "grid": np.ones(4), "heat": torch.ones(2, 2)})

    assert [record.data for record in only(run.path, "metrics")] == [{"loss": 1.0}] * 5
    assert run.stats().refused == 10
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_no_tensor_is_held(tmp_path: Path) -> None:
    """After `log` nothing refers to the tensor or its graph any more."""
    with gapless.init("p", dir=tmp_path) as run:
        loss = (torch.ones(1, requires_grad=True) * 2).sum()
        gone = weakref.ref(loss)
        run.log({"loss": loss})
        del loss

        assert gone() is None


def test_a_tensor_that_cannot_be_read_is_refused() -> None:
    """Meta and sparse tensors cost themselves, not the row."""
    found, reports = logged({"meta": torch.ones(1, device="meta"), "a": 1, "s": torch.ones(3).to_sparse()})

    assert found == {"a": 1}
    assert [what for what, _ in reports] == ["refused", "refused"]


def test_nested_dicts_join_with_a_slash_and_clashes_are_counted(tmp_path: Path) -> None:
    """`{"a": {"b": 1}}` is `a/b`; two values of one key after joining are counted, and the last one stays."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({"a": {"b": {"c": 1}, 3: 2}, "t": (1, 2), "words": ["x", "y"]})
        run.log({"a": {"b": math.nan}, "a/b": 2})

    first, second = only(run.path, "metrics")
    assert first.data == {"a/b/c": 1, "a/3": 2, "t": [1, 2], "words": ["x", "y"]}
    assert second.data == {"a/b": 2}
    assert run.stats().clashes == 1


@pytest.mark.parametrize(
    "key", ["", "a b", "line\nbreak", "nul\0", "emoji 🎉", "x" * 10_000, "\u2028\u2029\x85\v\f\r", 'quote"\\', "null"]
)
def test_any_text_is_a_key(tmp_path: Path, key: str) -> None:
    """Keys and texts of any characters make one line, read back the same."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({key: 1.5, "text": key})

    assert [record.data for record in only(run.path, "metrics")] == [{key: 1.5, "text": key}]


def test_lone_surrogates_and_bytes_are_kept_as_marked_text(tmp_path: Path) -> None:
    """Text that UTF-8 cannot hold is escaped and marked; nothing raises."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log({"a": "ok \ud83d end", "b": b"\xff", "k\udc00": 1})

    (row,) = only(run.path, "metrics")
    assert row.data == {"a": "ok \\ud83d end", "b": "\\xff", "k\\udc00": 1}
    line = next(line for line in segments(run.path)[0].read_bytes().split(b"\n") if b'"metrics"' in line)
    assert json.loads(line)["marks"] == [[["a"], "repr"], [["b"], "repr"]]


@pytest.mark.parametrize("odd", [None, 3, "text", [1], object()])
def test_odd_rows_raise_nothing(tmp_path: Path, odd: Any) -> None:
    """Something that is no dict is counted and told, and the next row is kept."""
    with gapless.init("p", dir=tmp_path) as run:
        run.log(odd)
        run.log({"a": 1})

    assert run.stats().refused == 1
    assert [record.data for record in only(run.path, "metrics")] == [{"a": 1}]


class Hostile:
    """An object whose every look raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __float__(self) -> float:
        raise RuntimeError("float")

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __len__(self) -> int:
        raise RuntimeError("len")

    def __iter__(self) -> Any:
        raise RuntimeError("iter")


class HostileDict(dict):  # type: ignore[type-arg]
    def items(self) -> Any:
        raise RuntimeError("items")

    def values(self) -> Any:
        raise RuntimeError("values")


class HostileText(str):
    def __str__(self) -> str:
        raise RuntimeError("str")

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("encode")


HOSTILE: list[Callable[[], Any]] = [
    Hostile,
    lambda: {"a": Hostile()},
    lambda: HostileDict(a=1),
    lambda: {"a": HostileDict(b=1), "c": 1},
    lambda: {HostileText("k"): 1, "c": HostileText("v")},
    lambda: {"a": [Hostile(), HostileDict()]},
    lambda: {"t": gapless.Table(["a"], [[Hostile()]])},
    lambda: {"t": gapless.Table(["a", "b"], [[1]])},
    lambda: {"t": gapless.Text(Hostile())},
    lambda: {"h": gapless.Histogram(Hostile())},
    lambda: {"h": gapless.Histogram([])},
    lambda: {"h": gapless.Histogram([1, 2], bins=Hostile())},  # type: ignore[arg-type]
    lambda: {"i": gapless.Image(Hostile())},
    lambda: {"i": gapless.Image(np.zeros((2, 2, 7)))},
    lambda: {"i": [gapless.Image(np.zeros((2, 2))), 3]},
    lambda: {"v": gapless.Video(np.zeros((2, 2)))},
    lambda: {"v": gapless.Video(np.zeros((2, 3, 2, 2)), fps=Hostile())},  # type: ignore[arg-type]
    lambda: {"a": gapless.Audio(object())},
    lambda: {"a": gapless.Audio(np.zeros(3), sample_rate="x")},  # type: ignore[arg-type]
    lambda: {"f": gapless.File("/no/such/file")},
    lambda: {"f": gapless.File("/")},
    lambda: {"f": gapless.File(Hostile())},
]


@pytest.mark.parametrize("make", HOSTILE)
def test_hostile_objects_raise_nothing(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Objects that raise at every look are refused or told; log, config and summary go on."""
    run = gapless.init("p", dir=tmp_path, config={"x": make()})
    run.log(make(), step=0)
    run.log({"inner": make()}, step=Hostile())  # type: ignore[arg-type]
    run.config["x"] = make()
    run.summary["x"] = make()
    run.log({"good": 1}, step=5, t=Hostile())  # type: ignore[arg-type]
    run.finish()

    assert [r.data for r in only(run.path, "metrics") if r.step == 5] == [{"good": 1}]
    assert [r.seq for r in only(run.path)] == list(range(1, len(only(run.path)) + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values, max_size=8))
def test_any_row_of_plain_values_comes_back(data: dict[str, Any]) -> None:
    """Whatever plain values a row has, the reader gets the same ones."""
    found, reports = logged(data)

    assert same(found, data)
    assert reports == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn])
def test_scalars_on_a_gpu_are_numbers(dtype: torch.dtype) -> None:
    """A value on a device is brought over and is that number; a large tensor stays where it is and is refused."""
    row, reports = logged({"x": torch.tensor([2.0], device="cuda").to(dtype), "y": torch.ones(5, device="cuda")})

    assert row == {"x": 2.0}
    assert [what for what, _ in reports] == ["refused"]


def test_a_masked_value_is_no_number(tmp_path: Path) -> None:
    """It stands for a value that is not there: 0 or the fill value would be made up."""
    run = gapless.init("p", dir=tmp_path)
    run.log({"a": 1, "masked": np.ma.masked, "one": np.ma.array([1.0], mask=[True]), "open": np.ma.array([2.0])})
    run.finish()

    assert [record.data for record in only(run.path, "metrics")] == [{"a": 1, "open": 2.0}]
    assert run.stats().refused == 2
