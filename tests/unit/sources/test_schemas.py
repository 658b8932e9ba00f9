"""The common columns of files with different columns, and reads of these files as one table."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support import ingested
from support.data import write_source
from vane_dagster.sources import FragmentRecord, FragmentRule, SourceTable
from vane_dagster.sources.schemas import common_columns, conform, wider_type

STRUCT = pa.struct([("a", pa.int32()), ("b", pa.string())])
TENSOR = pa.fixed_shape_tensor(pa.float32(), (2, 2))


def common(*schemas: dict[str, pa.DataType]) -> tuple[pa.Schema, list[str]]:
    return common_columns([(f"{i}.p", pa.schema(each)) for i, each in enumerate(schemas)], "here")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.uint64(), pa.uint64()),
        (pa.float32(), pa.float64(), pa.float64()),
        (pa.int32(), pa.uint32(), pa.int64()),
        (pa.int32(), pa.float64(), pa.float64()),
        (pa.decimal128(5, 2), pa.decimal128(5, 3), pa.decimal128(6, 3)),
        (pa.decimal128(5, 2), pa.float64(), pa.float64()),
        (pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("ns")),
        (pa.timestamp("us", "Europe/Berlin"), pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.list_(pa.int32(), 2), pa.list_(pa.int32(), 3), pa.list_(pa.int32())),
        (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.time32("ms"), pa.time64("us"), pa.time64("us")),
        (pa.null(), TENSOR, TENSOR),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.list_(pa.null()), pa.list_(STRUCT), pa.list_(STRUCT)),
        (pa.list_(pa.float32(), 3), pa.list_(pa.float64(), 3), pa.list_(pa.float64(), 3)),
        (
            STRUCT,
            pa.struct([("c", pa.bool_()), ("a", pa.int64())]),
            pa.struct([("a", pa.int64()), ("b", pa.string()), ("c", pa.bool_())]),
        ),
        (
            pa.map_(pa.string(), pa.int32()),
            pa.map_(pa.string(), pa.int64()),
            pa.map_(pa.string(), pa.int64()),
        ),
    ],
)
def test_the_wider_of_two_types(one, other, expected):
    assert wider_type(one, other) == expected
    found = wider_type(other, one)
    if pa.types.is_struct(expected):  # in the order of the files
        assert found is not None
        assert sorted(found, key=lambda f: f.name) == sorted(expected, key=lambda f: f.name)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.int64(), pa.string()),
        (pa.date32(), pa.timestamp("us")),
        (pa.timestamp("us"), pa.timestamp("us", "UTC")),
        (STRUCT, pa.struct([("a", pa.string())])),
        (STRUCT, pa.struct([("A", pa.int32())])),
        (TENSOR, pa.fixed_shape_tensor(pa.float32(), (2, 3))),
    ],
)
def test_types_that_have_nothing_in_common(one, other):
    assert wider_type(one, other) is None
    assert wider_type(other, one) is None


def test_every_column_and_file_that_differs_is_in_one_error():
    first = {"id": pa.int64(), "n": pa.int64(), "t": pa.string(), "v": pa.list_(pa.float32(), 2)}
    with pytest.raises(vd.errors.SourceError) as caught:
        common(
            first,
            {**first, "n": pa.string()},
            {**first, "t": pa.int32(), "v": pa.list_(pa.string())},
            *[{**first, "n": pa.string()}] * 3,
            {"id": pa.int64(), "N": pa.int64()},
        )
    text = str(caught.value)
    assert text.startswith(
        "here: column 'n' is string in '1.p', but 'n' is int64 in '0.p'; column "
    )
    assert "column 't' is int32 in '2.p', but 't' is string in '0.p'" in text
    assert "column 'v' is list<item: string> in '2.p', but 'v' is fixed_size" in text
    assert "column 'N' is int64 in '6.p', but 'n' is int64 in '0.p'" in text
    assert "Write the files again" in text


# Reads of Parquet files


def split(folder: Path, small_files: Any = "separate", rows: int = 100) -> SourceTable:
    return ingested.split(vd.parquet(str(folder), small_files=small_files), FragmentRule(rows))


def read(fragment: FragmentRecord, schema: pa.Schema) -> pa.Table:
    return vd.parquet("unread").read(fragment, schema, "here")


NARROW = {
    "small": pa.array([1, None, -3], pa.int8()),
    "unsigned": pa.array([1, None, 3], pa.uint16()),
    "real": pa.array([1.5, None, 3.5], pa.float32()),
    "half": pa.array([1.5, None, 3.5], pa.float16()),
    "decimal": pa.array([1, None, 3], pa.decimal128(5, 0)),
    "moment": pa.array([1, None, 3], pa.timestamp("ms")),
    "nothing": pa.nulls(3),
    "list": pa.array([[1, None], None, []], pa.list_(pa.int32())),
    "nothings": pa.array([[], None, [None]], pa.list_(pa.null())),
    "vector": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}], STRUCT),
    "structs": pa.array([[{"a": 1, "b": "x"}], None, [None]], pa.list_(STRUCT)),
    "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
}
_FIELDS = pa.struct([("c", pa.bool_()), ("b", pa.string()), ("a", pa.int64())])
WIDE = {
    "small": pa.int64(),
    "unsigned": pa.uint64(),
    "real": pa.float64(),
    "half": pa.float64(),
    "decimal": pa.decimal128(9, 0),
    "moment": pa.timestamp("us"),
    "nothing": TENSOR,
    "list": pa.list_(pa.int64()),
    "nothings": pa.list_(_FIELDS),
    "vector": pa.list_(pa.int32(), 2),
    "struct": _FIELDS,
    "structs": pa.list_(_FIELDS),
    "map": pa.map_(pa.string(), pa.int64()),
}


@settings(max_examples=25, deadline=None)
@given(st.recursive(
    st.sampled_from([(NARROW[kind], WIDE[kind]) for kind in NARROW if kind != "nothing"]),
    lambda pairs: pairs.map(
        lambda pair: (
            pa.StructArray.from_arrays([pair[0], pair[0]], ["f", "g"]),
            pa.struct([("g", pair[1]), ("new", pa.string()), ("f", pair[0].type)]),
        )
    ) | pairs.map(
        lambda pair: (
            pa.ListArray.from_arrays(pa.array([0, 1, 1, 3]), pair[0]), pa.list_(pair[1]),
        )
    ), max_leaves=3,
), st.booleans())  # fmt: skip
def test_types_of_any_nesting_are_read_together(pair, wide_first):
    with tempfile.TemporaryDirectory() as folder:
        assert_read_together(*pair, wide_first, Path(folder))


def assert_read_together(
    array: pa.Array, wide: pa.DataType, wide_first: bool, folder: Path
) -> None:
    """By row groups, and inside of one."""
    narrow, other = ("b", "a") if wide_first else ("a", "b")
    write_source(folder, pa.table({"id": range(3), "x": array}), f"{narrow}.parquet")
    write_source(folder, pa.table({"x": pa.nulls(1, wide), "id": [9]}), f"{other}.parquet")
    table = split(folder)
    kind = table.schema.field("x").type
    expected = wider_type(wide, array.type) if wide_first else wider_type(array.type, wide)
    assert kind == expected
    (fragment,) = [each for each in table.fragments if f"/{narrow}.parquet" in each.url]
    values = conform(pa.table({"x": array}), pa.schema([("x", kind)]))["x"].combine_chunks()
    source = vd.parquet("unread")
    pieces = [(0, 3), (0, 2), (1, 3)]
    for start, stop in pieces:
        some = FragmentRecord(fragment.url, start, stop, "", 0, detail=fragment.detail)
        assert (
            source.read(some, table.schema, "here")["x"]
            .combine_chunks()
            .equals(values.slice(start, stop - start))
        )


@pytest.mark.parametrize("small_files", ["separate", "group"])
def test_a_wider_file_changes_the_fragments_of_narrower_files_alone(small_files, tmp_path):
    narrow = pa.table({"id": pa.array([1, 2], pa.int32())})
    write_source(tmp_path, narrow, "a.parquet")
    alone = split(tmp_path, small_files).fragments
    assert alone[0].identity == split(tmp_path, small_files).fragments[0].identity
    wide = write_source(tmp_path, {"id": [3]}, "b.parquet")
    mixed = {s.url: f.identity for f in split(tmp_path, "separate").fragments for s in f.spans}
    assert alone[0].identity not in mixed.values()
    (tmp_path / "a.parquet").unlink()
    (only,) = split(tmp_path, "separate").fragments
    assert mixed[f"file://{wide}"] == only.identity
