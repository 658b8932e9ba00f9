"""Results in any form that exports Arrow streams: polars, DuckDB, readers, and others."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import polars as pl
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import call

DOUBLED = [{"id": 1, "twice": 20}, {"id": 2, "twice": 40}, {"id": 3, "twice": 60}]


class OnlyStream:
    """An object of a library that nobody has heard of."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._table.__arrow_c_stream__(requested_schema)


def polars_frame(batch: pa.Table) -> pl.DataFrame:
    return pl.DataFrame(batch).select("id", twice=pl.col("n") * 2)


def polars_without_id(batch: pa.Table) -> pl.DataFrame:
    return polars_frame(batch).drop("id")


def relation(batch: pa.Table) -> duckdb.DuckDBPyRelation:
    return duckdb.connect().from_arrow(batch).project("id, n * 2 AS twice")


def reader(batch: pa.Table) -> pa.RecordBatchReader:
    table = polars_frame(batch).to_arrow()
    return pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=1))


def unknown(batch: pa.Table) -> OnlyStream:
    return OnlyStream(polars_frame(batch).to_arrow())


def generated(batch: pa.Table) -> Iterator[pl.DataFrame]:
    frame = polars_frame(batch)
    yield frame[:1]
    yield frame[1:]


@pytest.mark.parametrize(
    "fn", [polars_frame, polars_without_id, relation, reader, unknown, generated]
)
def test_a_table_of_any_library_is_taken(fn):
    assert call(fn, {"twice": "BIGINT"}).to_pylist() == DOUBLED


TYPED = {
    "category": ("VARCHAR", pl.Series(["a", None, "b"], dtype=pl.Categorical)),
    "vector": ("FLOAT[2]", pl.Series([[1.0, 2], [3, 4], [5, 6]], dtype=pl.Array(pl.Float64, 2))),
    "struct": ("STRUCT(a VARCHAR)", pl.Series([{"a": "x"}, {"a": None}, {"a": "z"}])),
}


@pytest.mark.parametrize("case", TYPED)
@pytest.mark.parametrize("form", ["frame", "dict"])
def test_types_of_polars_are_cast_to_those_declared(case, form):
    kind, series = TYPED[case]
    output = call(lambda b: {"x": series} if form == "dict" else pl.DataFrame({"x": series}),
                  {"x": kind})  # fmt: skip
    assert output.column("x").to_pylist() == series.to_list()


@pytest.mark.parametrize("result", [pl.Series([1, 2, 3]), pa.chunked_array([[1, 2, 3]])])
def test_a_stream_of_single_values_is_no_table(result):
    with pytest.raises(vd.errors.UdfError, match=r"expected a table.* or a dict"):
        call(lambda b: result, {"x": "BIGINT"})


def test_an_error_while_the_stream_is_read_is_the_error_of_the_code():
    def divided(batch: pa.Table) -> duckdb.DuckDBPyRelation:
        return duckdb.connect().sql("SELECT CAST('x' AS INTEGER) AS x")

    with pytest.raises(duckdb.ConversionException, match="'x'"):
        call(divided, {"x": "BIGINT"})
