"""Texts of ids of several columns: exact, stable, and different for different values."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vane_dagster.types.id_texts import (
    is_identifying,
    joined,
    parse_kind,
    texts,
)

UTC = dt.UTC
BERLIN = pa.timestamp("us", "Europe/Berlin")

KINDS = [
    pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(),
    pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary(16),
    pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"), pa.timestamp("s"),
    pa.timestamp("ns"), BERLIN, pa.timestamp("ms", "+01:00"), pa.decimal128(10, 2),
    pa.decimal256(60, 3), pa.decimal32(5, 2), pa.decimal128(10, -2),
]  # fmt: skip


def column(values: list[Any], kind: pa.DataType | None = None) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values, kind)])


ROW = st.tuples(st.text(alphabet="a|\\é", max_size=4), st.integers(-3, 3), st.text(max_size=3))


@given(st.lists(ROW, min_size=1, max_size=30))
def test_different_rows_have_different_texts(rows):
    columns = [column(list(values)) for values in zip(*rows)]
    ids = joined(columns).to_pylist()
    assert len(set(ids)) == len(set(rows))


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (3, pa.int32(), "3"),
        (True, pa.bool_(), "true"),
        (0.1, pa.float32(), "0.1"),
        (-0.0, pa.float64(), "0"),
        ("a|b\\", pa.string(), "a\\|b\\\\"),
        (b"\x00\xff", pa.binary(), "00ff"),
        (Decimal("1.50"), pa.decimal128(10, 2), "1.50"),
        (dt.date(2026, 1, 2), pa.date32(), "2026-01-02"),
        (dt.time(10, 0), pa.time64("ns"), "10:00:00"),
        (dt.datetime(2026, 1, 2, 10, 0, 0, 500), pa.timestamp("us"), "2026-01-02 10:00:00.0005"),
        (dt.datetime(2026, 1, 2, 10), pa.timestamp("ns"), "2026-01-02 10:00:00"),
        (dt.datetime(2026, 1, 2, 10, tzinfo=UTC), BERLIN, "2026-01-02 10:00:00Z"),
    ],
)
def test_the_text_of_a_value_never_changes(value, kind, text):
    """Ids are stored. This pins Arrow's own conversions too."""
    assert texts(column([value, None], kind)).to_pylist() == [text, None]


def test_a_row_with_a_null_has_no_id():
    ids = joined([column(["a", "b", None]), column([1, None, None])])
    assert ids.to_pylist() == ["a|1", None, None]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_types_are_read_by_their_names(kind):
    assert is_identifying(kind)
    assert parse_kind(str(kind)) == kind


@pytest.mark.parametrize(
    "kind", [pa.null(), pa.list_(pa.int8()), pa.struct([]), pa.duration("s")], ids=str
)
def test_types_without_an_exact_text(kind):
    assert not is_identifying(kind)
