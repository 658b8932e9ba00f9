"""Values of every kind with an identity."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import re
import types
import uuid
import zoneinfo
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pydantic


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Options:
    size: int = 1
    names: tuple[str, ...] = ()


class Pair(NamedTuple):
    a: int
    b: int


class Blob(NamedTuple):
    a: int
    b: bytes


class Settings(pydantic.BaseModel):
    rate: float = 0.5
    inner: dict[str, int] = {}


class Text(str):
    pass


class Reduced(str):
    """A text with an attribute that pickle writes as an argument."""

    note: int

    @classmethod
    def made(cls, text: str, note: int) -> Reduced:
        found = cls(text)
        found.note = note
        return found

    def __reduce__(self) -> Any:
        return Reduced.made, (str(self), self.note)


@dataclasses.dataclass
class Parts:
    """A record of which pickle writes what it is given, and builds it by `rebuilt`."""

    parts: tuple[Any, ...]

    def __reduce__(self) -> Any:
        return tuple(iter(each) if isinstance(each, list) else each for each in self.parts)

    __setstate__ = append = extend = __setitem__ = print


def rebuilt() -> Parts:
    return Parts(())


def rebuilt_too() -> Parts:
    return Parts(())


def function(x: int) -> int:
    return x


class Holder:
    @classmethod
    def make(cls) -> Holder:
        return cls()


UTC = dt.UTC
DAY = dt.datetime(2026, 1, 2, 3, 4, 5)
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 10**5000, 1.0, -0.0, 0.0, float("nan"), float("inf"), 1j, "", "1",
    "\ud800", b"1", bytearray(b"1"), ..., Path("a/b"), "a/b", Colour.RED, Colour.BLUE,
    Bits.A | Bits.B, Bits.A, dt.date(2026, 1, 2), DAY, DAY.replace(tzinfo=UTC),
    DAY.replace(tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")), DAY.replace(fold=1), dt.time(1),
    dt.timedelta(1), decimal.Decimal("1.0"), decimal.Decimal("1.00"), uuid.UUID(int=1),
    [1, 2], [2, 1], (1, 2), {1, 2}, frozenset({1, 2}), [[1], 2], [[1, 2]], [], (), {}, set(),
    {"a": 1}, {"a": 2}, {"b": 1}, {1: "a"}, collections.OrderedDict(a=1),
    collections.defaultdict(list, a=1), collections.Counter("a"), collections.deque([1, 2]),
    types.MappingProxyType({"a": 1}), types.SimpleNamespace(a=1), range(3), range(0, 3, 2),
    slice(3), slice(0, 3), re.compile("a"), re.compile("a", re.I), re.compile(b"a"),
    Options(), Options(2), Options(names=("a",)), Pair(1, 2), Settings(), Settings(rate=0.6),
    Settings(inner={"a": 1}), Reduced.made("a", 1), Reduced.made("a", 2), Parts((rebuilt, ())),
    Parts((rebuilt_too, ())), Parts((rebuilt, (), ({"a": 1}, {"a": 2}))),
    Parts((rebuilt, (), ({"a": 3}, {"a": 2}))), Parts((rebuilt, (), None, [1])),
    Parts((rebuilt, (), None, None, [("a", 1)])),
    Parts((rebuilt, (), {"a": 1}, None, None, function)), Text("1"), Blob(1, b"1"), Blob(1, b"2"),
    np.int64(1), np.float32(1), np.float64(1), np.str_("1"),
    np.dtype("f4"), np.dtype(">f4"), np.dtype([("a", "i4")]), np.arange(3), np.arange(3.0),
    np.arange(4).reshape(2, 2), np.arange(4), np.array(["a", None], dtype=object), np.add,
    np.datetime64("2026-01-01"), pa.int64(), pa.list_(pa.float32(), 3), pa.field("a", pa.int64()),
    pa.field("a", pa.int64(), nullable=False), pa.schema([("a", pa.int64())]),
    pa.table({"a": [1, 2]}), pa.table({"a": [1, None]}), pa.table({"b": [1, 2]}),
    pa.array([1, 2]), pa.array(["a"]), pa.array([[1], []]), pa.array([1], pa.timestamp("ns")),
    pa.array([1, None], pa.timestamp("ns")), pa.array([2, None], pa.timestamp("ns")),
    pa.array([(1, 2, 3)], pa.month_day_nano_interval()), pa.array([1], pa.duration("ns")),
    pa.scalar(1), pa.scalar(1.0),
    pd.DataFrame({"a": [1, 2]}), pd.DataFrame({"a": [1.0, 2]}), pd.DataFrame({"a": ["x", None]}),
    pd.DataFrame({"a": [1, 2]}, index=[1, 2]), pd.Series([1, 2]), pd.Series([1, 2], name="a"),
    pd.Index([1, 2], name="b"), pd.Timestamp("2026-01-01"), pd.Timestamp("2026-01-01", tz="UTC"),
    pd.Timedelta("1D"), pd.NA, pd.NaT, pd.MultiIndex.from_tuples([(1, "a")]),
    function, Options, Holder.make, functools.partial(function, 1),
    functools.partial(function, x=1), int, len, "".join, "x".join, str.upper, dict.fromkeys,
    re, np, np.mean, np.float32, functools.lru_cache(function),
    functools.lru_cache(Holder.make.__func__),
]  # fmt: skip
