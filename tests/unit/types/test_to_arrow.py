"""Values of users' code as columns of a type: what is converted, and what is refused."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import uuid
from collections import namedtuple
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pydantic
import pytest

from vane_dagster.types.casts import Mismatch
from vane_dagster.types.to_arrow import to_arrow

UTC, CET = dt.UTC, dt.timezone(dt.timedelta(hours=1))
NOON = dt.datetime(2026, 1, 2, 12)
DAY, MIDNIGHT = NOON.date(), dt.datetime(2026, 1, 2)
MICROS, ZONED = pa.timestamp("us"), pa.timestamp("us", "UTC")
NANOSECONDS = pa.timestamp("ns")
UNITLESS = np.array([5]).view("m8")[0]
NANOS = pd.Timestamp("2026-01-02T12:00:00.123456789")
PRICE = pa.decimal128(10, 2)
STRUCT = pa.struct([("x", pa.int64()), ("y", pa.string())])
COUNTS = pa.map_(pa.string(), pa.int64())
Decimal = decimal.Decimal


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Record:
    x: int
    y: Any = None


class Model(pydantic.BaseModel):
    x: int
    y: str


Point = namedtuple("Point", ["x", "y"])

CONVERTED: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "naive to naive": ([NOON, None], MICROS, [NOON, None]),
    "another zone": ([NOON.replace(tzinfo=CET)], ZONED, [dt.datetime(2026, 1, 2, 11, tzinfo=UTC)]),
    "numpy in lists": (
        [np.array([NOON, "NaT"], "M8[us]"), None, np.array([], "M8[us]"), [np.datetime64(NOON)]],
        pa.list_(ZONED),
        [[NOON.replace(tzinfo=UTC), None], None, [], [NOON.replace(tzinfo=UTC)]],
    ),
    "numpy in structs": (
        [{"x": np.datetime64(NOON)}],
        pa.struct([("x", ZONED)]),
        [{"x": NOON.replace(tzinfo=UTC)}],
    ),
    "numpy days": (np.array([DAY], "M8[D]"), MICROS, [MIDNIGHT]),
    "numpy days as dates": (np.array([DAY], "M8[D]"), pa.date32(), [DAY]),
    "numpy years": (np.array(["2026"], "M8[Y]"), pa.date32(), [dt.date(2026, 1, 1)]),
    "numpy weeks": ([np.timedelta64(1, "W")], pa.duration("s"), [dt.timedelta(7)]),
    "objects in arrays": (
        [np.array([[1, None]], object), np.array([[2, 3]], object)],
        pa.list_(pa.list_(pa.int64())), [[[1, None]], [[2, 3]]],
    ),
    "numpy hours in arrays": (
        [np.array([["2026-01-02T12"]], "M8[h]")] * 2, pa.list_(pa.list_(MICROS)), [[[NOON]]] * 2,
    ),
    "numpy nanoseconds in lists": (
        [NANOS.to_numpy()[None], np.array([], "M8[ns]")], pa.list_(NANOSECONDS), [[NANOS], []],
    ),
    "numpy nanoseconds in records": (
        np.array([((NANOS.to_numpy(),), 1)], [("a", [("t", "M8[ns]")]), ("b", "i4")]),
        pa.struct([("a", pa.struct([("t", NANOSECONDS)])), ("b", pa.int32())]),
        [{"a": {"t": NANOS}, "b": 1}],
    ),
    "missing of pandas": ([1, pd.NA], pa.int64(), [1, None]),
    "big-endian": (np.array([1], ">i4"), pa.int64(), [1]),
    "large integers beside floats": (
        [np.array([2**60 + 1]), None, np.array([2.0, 3.0])],
        pa.list_(pa.int64()), [[2**60 + 1], None, [2, 3]],
    ),
    "dates as times": ([DAY], MICROS, [MIDNIGHT]),
    "midnights as dates": ([MIDNIGHT], pa.date32(), [DAY]),
    "nanoseconds": ([NANOS], pa.timestamp("ns"), [NANOS]),
    "whole seconds": ([dt.time(1, 2, 3)], pa.time32("s"), [dt.time(1, 2, 3)]),
    "integers as decimals": ([7, None], PRICE, [Decimal("7.00"), None]),
    "decimals of several sizes": ([Decimal("1.2"), 100], PRICE, [Decimal("1.20"), Decimal(100)]),
    "float that is a decimal": ([19.99], PRICE, [Decimal("19.99")]),
    "large unsigned": ([2**64 - 1], pa.uint64(), [2**64 - 1]),
    "infinity stays": ([float("inf")], pa.float32(), [float("inf")]),
    "UUID column": (pa.array([uuid.UUID(int=1)]), pa.binary(16), [uuid.UUID(int=1).bytes]),
    "UUID as text": ([uuid.UUID(int=1), None], pa.string(), [str(uuid.UUID(int=1)), None]),
    "UUID column as text": (
        pa.chunked_array([pa.array([uuid.UUID(int=1)])]), pa.string(), [str(uuid.UUID(int=1))],
    ),
    "bytes as text": (np.array([b"a"], "S4"), pa.string(), ["a"]),
    "no categories": (pd.Series([None], dtype="category"), pa.string(), [None]),
    "map": ([{"a": 1}, None, {}], COUNTS, [[("a", 1)], None, []]),
    "map of Arrow": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), COUNTS, [[("a", 1)]]),
    "dataclass": ([Record(1, "a"), None], STRUCT, [{"x": 1, "y": "a"}, None]),
    "pydantic": ([Model(x=1, y="a")], STRUCT, [{"x": 1, "y": "a"}]),
    "named tuple": ([Point(1, "a")], STRUCT, [{"x": 1, "y": "a"}]),
    "records in lists": ([[Record(1)], None], pa.list_(STRUCT), [[{"x": 1, "y": None}], None]),
    "records in maps": (
        [{"k": Record(1)}], pa.map_(pa.string(), STRUCT), [[("k", {"x": 1, "y": None})]],
    ),
    "a field left out": ([{"x": 1}], STRUCT, [{"x": 1, "y": None}]),
    "enum": ([Colour.RED, None], pa.string(), ["red", None]),
    "a slice of maps": (
        pa.array([[("a", 1.5)], [("b", 2.0)]], pa.map_(pa.string(), pa.float64())).slice(1),
        pa.map_(pa.string(), PRICE), [[("b", Decimal(2))]],
    ),
    "enum in structs": ([{"x": 1, "y": Colour.RED}], STRUCT, [{"x": 1, "y": "red"}]),
    "arrays and lists": ([np.array([1.5]), [1]], pa.list_(pa.float32()), [[1.5], [1.0]]),
    "masked inside": (
        [{"v": np.ma.array([1, 2], mask=[0, 1])}],
        pa.struct([("v", pa.list_(pa.int64()))]),
        [{"v": [1, None]}],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("values", "kind", "expected"), CONVERTED.values(), ids=CONVERTED)
def test_what_is_converted(values, kind, expected):
    found = to_arrow(values, kind)
    assert found.type == kind
    assert found.to_pylist() == expected
    found.validate(full=True)


REFUSED: dict[str, tuple[Any, pa.DataType, str]] = {
    "zone guessed": ([NOON], ZONED, r"timestamp\[us\], not timestamp\[us, tz=UTC\]"),
    "some zones": ([NOON.replace(tzinfo=UTC), NOON], ZONED, "a part of the values has a time zone"),
    "some zones in lists": (
        [[NOON.replace(tzinfo=UTC)], [NOON]], pa.list_(ZONED), "a part of the values has",
    ),
    "time of day": ([NOON], pa.date32(), "a value has a time of day"),
    "integers as times": ([5], MICROS, "int64, not timestamp"),
    "times among dates": ([DAY, NOON], MICROS, "different types: date, datetime"),
    "times among dates in lists": ([[DAY], [NOON]], pa.list_(pa.date32()), "date, datetime"),
    "zone of times of day": ([NOON.time().replace(tzinfo=UTC)], pa.time64("us"), "a time zone"),
    "bools among floats": ([1.5, True], pa.float64(), "different types: bool, float"),
    "bools among integers": ([np.bool_(True), 5], pa.int64(), "different types: bool_?, int"),
    "floats among decimals": ([Decimal("1.5"), 1.5], PRICE, "different types: Decimal, float"),
    "microseconds": ([NOON.replace(microsecond=1)], pa.timestamp("ms"), "lose data"),
    "nanoseconds": ([NANOS], MICROS, "lose data"),
    "picoseconds": (np.array([15], "m8[ps]"), pa.duration("ns"), "a unit that no column has"),
    "durations without a unit": ([UNITLESS], pa.duration("s"), "a unit that no column"),
    "durations of months": (np.array([5], "m8[M]"), pa.duration("s"), "a unit that no column has"),
    "text as times": (["2026-01-02"], MICROS, "string, not timestamp"),
    "bytes among text": (["a", b"b"], pa.string(), "different types: bytes, str"),
    "bytes of one size as text": (pa.array([b"ab"], pa.binary(2)), pa.string(), "not string"),
    "rounded": ([1.239], PRICE, "more than 2 digits"),
    "too many digits": ([10**10], PRICE, "precision"),
    "too large": ([1e300], pa.float32(), "too large for float"),
    "too large in Arrow": (pa.array([[7e4]]), pa.list_(pa.float16()), "too large for halffloat"),
    "arrays of integers as half": (np.array([[2049]]), pa.list_(pa.float16()), "not exact"),
    "fractions in maps": ([{"a": 1.5}], COUNTS, "truncated"),
    "misspelt field": ([{"x": 1, "z": "a"}], STRUCT, "lacks 'y' and has 'z'"),
    "text for a struct": (["{}"], STRUCT, "a value is of type str, not a dict"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(values, kind, words):
    with pytest.raises((TypeError, ValueError), match=words):
        to_arrow(values, kind)


def test_a_mismatch_inside_of_structs_has_its_path():
    kind = pa.struct([("a", pa.list_(pa.struct([("b", pa.int64())])))])
    with pytest.raises(Mismatch) as caught:
        to_arrow([{"a": [{"b": 1.5}]}], kind)
    assert caught.value.path == ["a", "b"]
    assert caught.value.actual == pa.float64()
