"""How parts are encoded: tensors as bytes, and codecs, dictionaries and statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.data import column_of
from support.stored import FORMS, keep, local_store  # noqa: F401  # fixture
from vane_dagster.checks.partition import sample
from vane_dagster.sources.parquet import ParquetSource, read_footer
from vane_dagster.sources.parquet_scan import scan
from vane_dagster.storage.damage import verified
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileRecord, FileSpan
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.types.tensors import as_storage, from_ndarray

DTYPES = ("uint8", "int16", "float16", "float32", "float64", "int64", "bool")


def tensors(dtype: str, shape: tuple[int, ...], rows: int) -> pa.Array:
    values = np.random.default_rng(0).integers(0, 2, (rows, *shape)).astype(dtype)
    return from_ndarray(values, vd.tensor(dtype, shape))


def written(folder, table: pa.Table, compression: str | None = None) -> str:
    target = PartTarget(StoragePath(str(folder)), "c" * 40, "id", compression=compression)
    return write_part(table, target).name


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(1,), (3,), (2, 3), (2, 1, 4)]),
    st.lists(st.booleans(), max_size=6),
    st.integers(0, 3),
    st.booleans(),
)
def test_every_reader_gets_the_tensors_that_were_written(
    tmp_path_factory, dtype, shape, valid, start, null_element
):
    folder = tmp_path_factory.mktemp("parts")
    column = tensors(dtype, shape, len(valid))
    rows = column.take(pa.array([i if v else None for i, v in enumerate(valid)], pa.int64()))
    if null_element and len(rows):
        size = rows.type.storage_type.list_size
        flat = pa.array([[None] * size] * len(rows), rows.type.storage_type)
        rows = pa.ExtensionArray.from_storage(rows.type, flat)
    rows = rows.slice(start)
    table = pa.table({"id": range(len(rows)), "t": pa.chunked_array([rows, rows[:0]])})
    name = written(folder, table)
    assert read_part(StoragePath(str(folder)), name).equals(table)
    assert read_part(StoragePath(str(folder)), name, ["t"]).equals(table.select(["t"]))
    url = str(folder / name)
    file = FileRecord(url, 0, "")
    assert read_footer(file, ParquetSource(url), "here")[0].remove_metadata() == table.schema
    got = scan(FileSpan(url, 1, len(rows)), table.schema, {}, "here")
    assert got.equals(table.slice(1))


def test_tensors_are_stored_as_bytes_but_in_published_files(tmp_path):
    table = pa.table({"id": [1, 2], "t": tensors("float32", (4, 4), 2)})
    stored = pq.read_schema(tmp_path / written(tmp_path, table)).field("t").type
    assert stored == pa.binary(64)
    published = pq.read_schema(tmp_path / written(tmp_path, table, "zstd")).field("t").type
    assert published == table.schema.field("t").type


def with_a_null_element(rows: pa.Table) -> pa.Table:
    """Such tensors stay lists."""
    kind = rows.schema.field("t").type
    size = kind.storage_type.list_size
    flat = pa.array([[None, *[1] * (size - 1)]] * len(rows), kind.storage_type)
    return rows.set_column(1, "t", pa.ExtensionArray.from_storage(kind, flat))


@pytest.mark.parametrize("form", FORMS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_files_with_bytes_and_with_lists_are_read_together(local_store, form):
    rows = pa.table({"id": [1, 2], "t": tensors("float32", (2, 3), 2)})
    other = with_a_null_element(rows)
    keep(local_store, "docs", "a", rows)
    keep(local_store, "docs", "b", other)
    read = vd.load("docs", as_=form, store=local_store)
    if isinstance(read, (ds.Dataset, pa.Table, pa.RecordBatchReader)):
        assert read.schema == rows.schema
    expected = as_storage(pa.concat_tables([rows, other])["t"]).to_pylist()
    found = [np.array(row, float).ravel() for row in column_of(read, "t")]
    assert np.array_equal(found, np.array(expected, float), equal_nan=True)


def test_checks_sample_both(tmp_path):
    rows = pa.table({"id": [1, 2], "t": tensors("uint8", (2, 3), 2)})
    other = with_a_null_element(rows)
    paths = [str(tmp_path / written(tmp_path, each)) for each in (rows, other)]
    found = ds.dataset(paths, schema=rows.schema, format=verified())
    batches = pa.Table.from_batches(sample(found, ["t", "id"], 10)).select(["id", "t"])
    assert batches.equals(pa.concat_tables([rows, other]))


def test_how_nested_columns_are_encoded(tmp_path):
    table = pa.table(
        {
            "id": range(1000),
            "score": [0.1, 0.2] * 500,
            "logit": [n / 2 for n in range(1000)],
            "vector": pa.array([[0.5] * 8] * 1000, pa.list_(pa.float32(), 8)),
            "words": [["same", "words"]] * 1000,
            "doc": [{"title": "t", "tags": [{"name": "n"}]}] * 1000,
            "counts": pa.array([[("k", 1)]] * 1000, pa.map_(pa.string(), pa.int64())),
        }
    )

    def columns(**given: Any) -> dict[str, pq.ColumnChunkMetaData]:
        target = PartTarget(StoragePath(str(tmp_path)), "c" * 40, "id", **given)
        group = pq.read_metadata(tmp_path / write_part(table, target).name).row_group(0)
        chunks = [group.column(i) for i in range(group.num_columns)]
        assert len(chunks) == 9
        return {chunk.path_in_schema: chunk for chunk in chunks}

    def codecs(**given: Any) -> set[str]:
        return {chunk.compression for chunk in columns(**given).values()}

    plain = {name for name, chunk in columns().items() if not chunk.has_dictionary_page}
    assert plain == {"id", "vector.list.element", "logit"}, "floats that hardly repeat"
    plain = {
        name for name, one in columns(compression="zstd").items() if not one.has_dictionary_page
    }
    assert plain == {"id", "vector.list.element"}, "a published file has what others expect"

    def searched(**given: Any) -> set[str]:
        return {name for name, chunk in columns(**given).items() if chunk.is_stats_set}

    assert searched() == {"id", "doc.title"}, "nobody looks for a part's rows by floats"
    assert searched(compression="zstd") == {"id", "doc.title", "score", "logit"}, "a published file"

    raw = {name for name, chunk in columns().items() if chunk.compression == "UNCOMPRESSED"}
    assert raw == {"logit"}
    for name in ("zstd", "snappy", "gzip"):
        assert codecs(compression=name) == {name.upper()}, "what the user declared"
    assert codecs(compression="none") == {"UNCOMPRESSED"}


def test_columns_without_nulls_are_stored_as_required_and_read_as_they_were(tmp_path):
    kinds = {"id": pa.int64(), "x": pa.float32(), "some": pa.int8(), "none": pa.null()}
    values = {"id": [1, 2], "x": [1.0, 2.0], "some": [None, 1], "none": [None, None]}
    schema = pa.schema([pa.field(name, kind) for name, kind in kinds.items()])
    schema = schema.append(pa.field("strict", pa.string(), nullable=False, metadata={"a": "b"}))
    rows = pa.table({**values, "strict": ["a", "b"]}, schema)
    folder = StoragePath(str(tmp_path))
    info = write_part(rows, PartTarget(folder, "c" * 40, "id"))
    stored = pq.read_schema(folder.file(info.name))
    assert [field.nullable for field in stored] == [False, False, True, True, False]
    assert read_part(folder, info.name).schema.equals(schema, check_metadata=True)
    span = FileSpan(folder.file_url(info.name), 0, 2)
    assert scan(span, schema, {}, "here").schema.equals(schema)
