"""The common columns of files with different columns, and reads of these files as one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

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
        (pa.int64(), pa.float64(), pa.float64()),
        (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us")),
        (pa.null(), TENSOR, TENSOR),
        (pa.list_(pa.null()), pa.list_(STRUCT), pa.list_(STRUCT)),
        (STRUCT, pa.struct([("c", pa.bool_())]), pa.struct([*STRUCT, ("c", pa.bool_())])),
        (pa.int64(), pa.string(), None),
        (pa.date32(), pa.timestamp("us"), None),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (STRUCT, pa.struct([("a", pa.string())]), None),
        (TENSOR, pa.fixed_shape_tensor(pa.float32(), (2, 3)), None),
    ],
)
def test_the_wider_of_two_types(one, other, expected):
    assert wider_type(one, other) == expected


def test_columns_are_in_the_order_of_the_files():
    schema, _ = common(
        {"id": pa.int32(), "a": pa.string()},
        {"c": pa.bool_(), "id": pa.int64()},
        {"b": pa.int8(), "id": pa.int16(), "c": pa.bool_()},
    )
    assert schema == pa.schema(
        [("id", pa.int64()), ("a", pa.string()), ("c", pa.bool_()), ("b", pa.int8())]
    )


def test_encodings_and_metadata_are_no_differences():
    found = common_columns(
        [
            ("a", pa.schema([("x", pa.dictionary(pa.int8(), pa.string()))], metadata={"k": "1"})),
            ("b", pa.schema([("x", pa.large_string())], metadata={"k": "2"})),
            ("c", pa.schema([("x", pa.string_view())])),
        ],
        "here",
    )
    assert found == (pa.schema([("x", pa.string())]), [""] * 3)


def test_every_column_and_file_that_differs_is_in_one_error():
    first = {"id": pa.int64(), "n": pa.int64(), "t": pa.string()}
    with pytest.raises(vd.errors.SourceError) as caught:
        common(
            first,
            {**first, "n": pa.string()},
            {**first, "t": pa.int32()},
            {"id": pa.int64(), "N": pa.int64()},
        )
    text = str(caught.value)
    assert "here: column 'n' is string in '1.p', but 'n' is int64 in '0.p'" in text
    assert "column 't' is int32 in '2.p', but 't' is string in '0.p'" in text
    assert "column 'N' is int64 in '3.p', but 'n' is int64 in '0.p'" in text


# Reads of Parquet files


def split(folder: Path, small_files: Any = "separate", rows: int = 100) -> SourceTable:
    return ingested.split(vd.parquet(str(folder), small_files=small_files), FragmentRule(rows))


def read(fragment: FragmentRecord, schema: pa.Schema) -> pa.Table:
    return vd.parquet("unread").read(fragment, schema, "here")


@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize(
    ("array", "wide"),
    [
        (pa.array([1, None, -3], pa.int8()), pa.float64()),
        (pa.array([1, None, 3], pa.timestamp("ms")), pa.timestamp("us")),
        (pa.nulls(3), TENSOR),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)), pa.list_(pa.int32(), 2)),
        (
            pa.array([[{"a": 1, "b": "x"}], None, [None]], pa.list_(STRUCT)),
            pa.list_(pa.struct([("c", pa.bool_()), ("b", pa.string()), ("a", pa.int64())])),
        ),
        (pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
         pa.map_(pa.string(), pa.int64())),
    ],
)  # fmt: skip
def test_files_of_other_types_are_read_together(array, wide, wide_first, tmp_path):
    """By row groups, and inside of one."""
    narrow, other = ("b", "a") if wide_first else ("a", "b")
    write_source(tmp_path, pa.table({"id": range(3), "x": array}), f"{narrow}.parquet")
    write_source(tmp_path, pa.table({"x": pa.nulls(1, wide), "id": [9]}), f"{other}.parquet")
    table = split(tmp_path)
    kind = table.schema.field("x").type
    (fragment,) = [each for each in table.fragments if f"/{narrow}.parquet" in each.url]
    values = conform(pa.table({"x": array}), pa.schema([("x", kind)]))["x"].combine_chunks()
    for start, stop in ((0, 3), (0, 2), (1, 3)):
        some = FragmentRecord(fragment.url, start, stop, "", 0, detail=fragment.detail)
        found = read(some, table.schema)["x"].combine_chunks()
        assert found.equals(values.slice(start, stop - start))


def test_a_value_that_the_common_type_does_not_hold_is_an_error(tmp_path):
    write_source(tmp_path, {"x": [2**53 + 1]}, "a.parquet")
    write_source(tmp_path, {"x": [0.5]}, "b.parquet")
    table = split(tmp_path)
    with pytest.raises(vd.errors.SourceError, match=r"a\.parquet.* 'x' has a value that") as caught:
        read(table.fragments[0], table.schema)
    assert str(2**53 + 1) not in str(caught.value)


@pytest.mark.parametrize("kind", [pa.int64(), STRUCT, TENSOR])
@pytest.mark.parametrize("small_files", ["separate", "group"])
def test_a_column_that_a_file_lacks_is_null(kind, small_files, tmp_path):
    write_source(tmp_path, {"id": [0, 1, 2]}, "a.parquet")
    write_source(tmp_path, pa.table({"id": [3], "x": pa.nulls(1, kind)}), "b.parquet")
    table = split(tmp_path, small_files)
    assert table.schema == pa.schema([("id", pa.int64()), ("x", kind)])
    only = pa.schema([("x", kind)])
    found, nulls = [], 0
    for fragment in table.fragments:
        found += read(fragment, table.schema)["id"].to_pylist()
        nulls += read(fragment, only)["x"].null_count
    assert (found, nulls) == ([0, 1, 2, 3], 4)
    part = table.fragments[0].spans[0]
    some = FragmentRecord(part.url, 1, 3, "", 0, detail=part.detail)
    assert read(some, only)["x"].null_count == 2


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
