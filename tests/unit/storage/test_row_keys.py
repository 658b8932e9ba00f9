"""Row keys: equal exactly for equal bits, and the same in every version of what computes them."""

from __future__ import annotations

import hashlib
import struct

import mmh3
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vane_dagster.storage.row_keys import ENCODING, has_keys, row_keys
from vane_dagster.types.schema import empty_table


def keys(*columns: pa.Array) -> list[str]:
    return [key.tobytes().hex() for key in row_keys(columns).T]


def of(values: list[object], kind: pa.DataType) -> list[str]:
    return keys(pa.array(values, kind))


NAN = struct.unpack("<d", struct.pack("<Q", 0x7FF8000000000001))[0]
ALL_DIFFERENT = [
    ([0.0, -0.0, float("nan"), NAN, None], pa.float64()),
    ([0, 1, 256, None], pa.int64()),
    (["", "a", "ab", "a\0", None], pa.string()),
    ([True, False, None], pa.bool_()),
    ([None, [], [None], [0], [0, 0], [[0][0], None]], pa.list_(pa.int8())),
    ([None, [[]], [], [[], []], [[1]], [[1], []], [[], [1]]], pa.list_(pa.list_(pa.int8()))),
    ([None, {"a": None, "b": None}, {"a": 0, "b": None}, {"a": 0, "b": ""}],
     pa.struct([("a", pa.int8()), ("b", pa.string())])),
    ([None, [], [("a", 1)], [("a", None)], [("a", 1), ("b", 1)]], pa.map_(pa.string(), pa.int8())),
    ([None, [0, 0], [0, None], [None, None]], pa.list_(pa.int16(), 2)),
    ([None, [], [None], [{"a": "xy", "b": "z"}], [{"a": "x", "b": "yz"}], [{"a": "x", "b": None}],
      [{"a": "x", "b": "y"}, {"a": "z", "b": ""}], [{"a": "x", "b": "y"}, {"a": "", "b": "z"}],
      [{"a": "x", "b": "y"}, None], [None, {"a": "x", "b": "y"}]],
     pa.list_(pa.struct([("a", pa.string()), ("b", pa.string())]))),
    ([[("a", [None])], None, [("a", [])], [("a", None)], []],
     pa.map_(pa.string(), pa.list_(pa.null()))),
    ([[{"a": 1, "b": None}], None, [{"a": 2, "b": None}], [None]],
     pa.list_(pa.struct([("a", pa.int8()), ("b", pa.null())]), 1)),
]  # fmt: skip


@pytest.mark.parametrize(("values", "kind"), ALL_DIFFERENT, ids=lambda value: str(value)[:30])
def test_values_with_other_bits_have_other_keys(values, kind):
    found = of(values, kind)
    assert len(set(found)) == len(values)
    assert of(values[::-1], kind) == found[::-1]


@pytest.mark.parametrize(("values", "kind"), ALL_DIFFERENT, ids=lambda value: str(value)[:30])
def test_a_part_of_an_array_has_the_keys_of_its_values(values, kind):
    array = pa.array(values, kind)
    for start, rows in ((1, 2), (2, 1), (2, len(array) - 2)):
        assert keys(array.slice(start, rows)) == keys(array)[start : start + rows]
    assert keys(pa.chunked_array([array, array])) == 2 * keys(array)


def test_types_and_the_order_of_columns_count():
    one, other = pa.array([1], pa.int64()), pa.array([1], pa.uint64())
    assert len({*keys(one), *keys(other), *keys(one, other), *keys(other, one)}) == 4


def test_what_lies_below_null_does_not_count():
    data = pa.py_buffer(b"\1\0\0\0\2\0\0\0")
    hidden = pa.Array.from_buffers(pa.int32(), 2, [pa.py_buffer(b"\1"), data])
    assert hidden.to_pylist() == [1, None]
    assert keys(hidden) == of([1, None], pa.int32())
    lists = pa.ListArray.from_arrays([0, 1, 2], [5, 6], mask=pa.array([False, True]))
    assert keys(lists) == of([[5], None], pa.list_(pa.int64()))
    struct_ = pa.StructArray.from_arrays([[5, 6]], ["a"], mask=pa.array([False, True]))
    assert keys(struct_) == of([{"a": 5}, None], pa.struct([("a", pa.int64())]))


def test_how_values_are_stored_does_not_count():
    text = pa.array(["a", "b", None, "a"])
    assert keys(text.dictionary_encode()) == keys(text)


def test_a_type_without_an_encoding_is_refused():
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    with pytest.raises(TypeError, match=r"values of type sparse_union.* have no row key"):
        row_keys([union])


KINDS = [
    *(pa.null(), pa.bool_(), pa.float16(), pa.date64(), pa.duration("s"), pa.decimal128(20, 2)),
    *(pa.month_day_nano_interval(), pa.binary(), pa.binary(4), pa.large_string()),
    *(pa.binary_view(), pa.string_view(), pa.uuid(), pa.fixed_shape_tensor(pa.int8(), (2, 2))),
    *(pa.run_end_encoded(pa.int32(), pa.string()), pa.sparse_union([pa.field("a", pa.int8())])),
]
NESTING = [
    *(lambda kind: kind, pa.list_, pa.large_list, pa.list_view, lambda kind: pa.list_(kind, 3)),
    *(lambda kind: pa.struct([("a", kind)]), lambda kind: pa.map_(pa.string(), kind)),
    lambda kind: pa.dictionary(pa.int8(), kind),
]


@pytest.mark.parametrize("nested", NESTING)
def test_types_that_have_keys_are_those_whose_rows_are_encoded(nested):
    for kind in map(nested, KINDS):
        try:
            rows = empty_table(pa.schema([("x", kind)]))
        except (NotImplementedError, pa.ArrowInvalid):
            continue
        try:
            row_keys(rows.columns)
        except (TypeError, pa.ArrowNotImplementedError):
            assert not has_keys(kind), kind
        else:
            assert has_keys(kind), kind


ITEMS = st.lists(
    st.none() | st.lists(st.none() | st.text("ab", max_size=2), max_size=2), max_size=3
)


@given(st.lists(st.tuples(st.text(max_size=3), st.none() | ITEMS), min_size=1))
def test_rows_have_equal_keys_exactly_if_they_are_equal(rows):
    texts, lists = zip(*rows)
    found = keys(pa.array(texts), pa.array(lists, pa.list_(pa.list_(pa.string()))))
    assert [found.index(key) for key in found] == [rows.index(row) for row in rows]


def test_rows_of_numbers_have_the_keys_that_the_reference_computes():
    columns = [
        pa.array([1, None, -1], pa.int16()),
        pa.array([0.5, None, 2.0]),
        pa.array([True, None, False]),
        pa.array([7, 8, None], pa.decimal128(20)),
        pa.array([None, 3, 4], pa.date32()),
    ]
    types = "\n".join(str(column.type) for column in columns)
    header = hashlib.blake2b(f"{ENCODING}\n{types}".encode(), digest_size=16).digest()
    values = [(7, 0.5, 0, 1, True), (8, 0.0, 3, 0, False), (0, 2.0, 4, -1, False)]
    nulls = [b"\0\0\0\0\1", b"\1\1\1\0\0", b"\0\0\0\1\0"]
    encoded = [
        (header + struct.pack("<qxxxxxxxxdih?", *row) + null).ljust(64, b"\0")
        for row, null in zip(values, nulls)
    ]
    assert keys(*columns) == [mmh3.hash_bytes(row).hex() for row in encoded]
