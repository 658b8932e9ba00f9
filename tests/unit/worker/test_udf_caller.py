"""What users' functions are given, what they may return, and what is made of it."""

from __future__ import annotations

import asyncio
import datetime as dt
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import IDS, call, refused, row_stage, run_stage
from vane_dagster.sources.base import ROW_ERROR

DAY = dt.datetime(2026, 1, 2, 3, 4, 5)


# What is given

GIVEN = pa.table(
    {
        "id": [1, 2, 3],
        "vector": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
        "gaps": pa.array([[1, 2], None, [5, 6]], pa.list_(pa.float32(), 2)),
        "lists": [[1], None, [2, 3]],
        "whole": [1, None, 3],
        "text": ["a", None, "c"],
        "time": pa.array([DAY, None, DAY], pa.timestamp("us")),
        "doc": [{"a": 1, "b": ["x"]}, None, {"a": 2, "b": []}],
        "flag": [True, False, True],
        "data": [b"x", b"", None],
    }
)


@pytest.mark.parametrize("form", ["pyarrow", "numpy", "pandas"])
def test_every_type_survives_a_function_that_returns_its_batch(form):
    """Nulls, vectors, lists, structs, times: what goes in comes out."""
    given_ = GIVEN if form == "pyarrow" else GIVEN.drop_columns(["whole"])
    output = call(lambda batch: batch, given_.schema, given_, form)
    assert output.to_pydict() == given_.to_pydict()


@pytest.mark.parametrize(("size", "sizes"), [(None, [7]), (3, [3, 3, 1])])
def test_batch_size_is_kept(size, sizes):
    row_counts: list[int] = []

    def fn(batch):
        row_counts.append(batch.num_rows)
        return {"x": batch["id"]}

    output = call(fn, {"x": "BIGINT"}, pa.table({"id": range(7)}), batch_size=size)
    assert row_counts == sizes
    assert output["x"].to_pylist() == list(range(7))


@pytest.mark.parametrize(
    ("batch_size", "on_error", "places"),
    [
        (2, "quarantine", [range(2), range(3, 5), range(5, 6)]),
        (8, "quarantine", [range(1), range(1, 2), *(range(n, n + 1) for n in (3, 4, 5))]),
        (8, "raise", [range(6)]),
    ],
)
def test_a_batch_that_may_end_its_worker_is_passed_row_by_row(batch_size, on_error, places):
    unread = pa.array([None, None, {"error": "ValueError", "message": "bad"}, *[None] * 3])
    table = pa.table({"id": range(6), ROW_ERROR: unread})
    options: Any = {"schema": {"y": "BIGINT"}, "batch_size": batch_size, "on_error": on_error}
    stage = row_stage("map_batches", lambda batch: {"y": batch["id"]}, **options)
    begun: list[range] = []
    if on_error == "raise":
        table = table.drop_columns(ROW_ERROR)
    ids = run_stage(stage, table, begun=begun)["id"].to_pylist()
    assert begun == places
    assert ids == [n for n in range(6) if on_error == "raise" or n != 2]


def test_a_large_batch_that_may_end_its_worker_is_passed_in_parts():
    """Each is recorded before it begins, which takes long for every row."""
    options: Any = {"schema": {"y": "BIGINT"}, "batch_size": None, "on_error": "quarantine"}
    stage = row_stage("map_batches", lambda batch: {"y": batch["id"]}, **options)
    rows, calls = 100_000, 0
    while rows > 1:
        begun: list[range] = []
        run_stage(stage, pa.table({"id": range(rows)}), begun=begun)
        calls, rows = calls + len(begun), max(map(len, begun))
    assert calls < 300


def test_only_the_columns_asked_for_are_given():
    received: list[list[str]] = []

    def fn(batch):
        received.append(batch.column_names)
        return {"x": batch["n"]}

    table = IDS.append_column("heavy", pa.array(["x"] * 3))
    call(fn, {"x": "BIGINT"}, table, columns=("n",))
    call(fn, {"x": "BIGINT"}, table, columns=("n", "id"))
    call(fn, {"x": "BIGINT"}, table)
    assert received == [["n"], ["n", "id"], ["id", "n", "heavy"]]


def test_rows_without_an_id_are_matched_by_position():
    output = call(lambda batch: {"x": batch["n"]}, {"x": "BIGINT"}, columns=("n",), batch_size=2)
    assert output.to_pydict() == {"id": IDS["id"].to_pylist(), "x": IDS["n"].to_pylist()}
    words = (
        "returned 2 rows for 3 without 'id'",
        "Return the id, or one row for each input row",
    )
    for given in ({"columns": ("n",)}, {}, {"cardinality": "filter"}):
        refused(lambda batch: {"x": [1, 2]}, {"x": "BIGINT"}, *words, **given)


# What is returned

STRUCT = "STRUCT(a INTEGER, b VARCHAR)"


def torch_tensor(values: Any) -> Any:
    import torch

    return torch.tensor(values, requires_grad=isinstance(values[0], list))


CAST = {
    "wide ints that fit": ("TINYINT", np.array([1, 2, 3]), [1, 2, 3]),
    "whole floats": ("BIGINT", np.array([1.0, 2.0, 3.0]), [1, 2, 3]),
    "ints with null": ("BIGINT", [1, None, 3], None),
    "series": ("BIGINT", pd.Series([1, 2, 3]), [1, 2, 3]),
    "tensor": ("FLOAT", lambda: torch_tensor([0.5, 1.5, 2.5]), [0.5, 1.5, 2.5]),
    "text": ("VARCHAR", ["a", None, "ä"], None),
    "lists": ("FLOAT[]", [[1.0], [], None], None),
    "ragged arrays": ("FLOAT[]", [np.ones(1), np.ones(2), np.ones(0)], [[1.0], [1.0, 1.0], []]),
    "matrix in column order": (
        "FLOAT[2]", np.array([[1, 3, 5], [2, 4, 6]]).T, [[1, 2], [3, 4], [5, 6]],
    ),
    "list of vectors": ("FLOAT[2]", [np.ones(2), np.zeros(2), None], [[1, 1], [0, 0], None]),
    "structs": (STRUCT, [{"a": 1, "b": "x"}, None, {"a": None, "b": "z"}], None),
    "bytes as text": ("VARCHAR", np.array([b"a", None, "é".encode()], object), ["a", None, "é"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CAST)
def test_what_is_cast(case):
    kind, returned, expected = CAST[case]
    returned = returned() if callable(returned) else returned
    output = call(lambda batch: {"x": returned}, {"x": kind})
    assert output["x"].to_pylist() == (returned if expected is None else expected)
    assert output["id"].to_pylist() == [1, 2, 3]


def test_a_result_that_is_no_table():
    words = ("expected a table (pyarrow, pandas, polars,", "or a dict of column to array")
    refused(lambda batch: None, {"x": "BIGINT"}, "returned NoneType", *words)
    refused(lambda batch: [1, 2, 3], {"x": "BIGINT"}, "returned list", *words)


def test_columns_that_are_missing_or_differ_in_length():
    text = refused(lambda batch: {"y": [1, 2, 3]}, {"x": "BIGINT"}, "'x' is declared", "'y'")
    assert "Return it, or remove it from the schema" in text
    refused(
        lambda b: {"x": [1, 2, 3], "y": [1]}, {"x": "BIGINT", "y": "BIGINT"}, "differ in length"
    )


@pytest.mark.parametrize("batch_format", ["numpy", "torch"])
def test_nulls_of_integers_that_are_passed_through_an_array_are_explained(batch_format):
    table = pa.table({"id": [1, 2, 3], "n": [10, None, 30]})
    given = {"table": table, "batch_format": batch_format}
    words = ("nan was truncated", "a null among integers is NaN", "include_columns=")
    refused(lambda batch: {"n": batch["n"]}, {"n": "BIGINT"}, *words, **given)
    text = refused(lambda batch: {"n": [0.5] * 3}, {"n": "BIGINT"}, "expected int64")
    assert "include_columns" not in text


@pytest.mark.parametrize("make", [dict, pa.table, pd.DataFrame, pa.RecordBatch.from_pydict])
def test_more_columns_than_declared_are_dropped(make):
    output = call(lambda batch: make({"y": [0, 0, 0], "x": [1, 2, 3]}), {"x": "BIGINT"})
    assert output.to_pydict() == {"id": [1, 2, 3], "x": [1, 2, 3]}


# Ids


WRONG_IDS = {
    "lost": ([1, 3], ["1 of 3 rows were not returned: ids 2", 'cardinality="filter"']),
    "invented": ([1, 2, 4], ["1 id not in the batch: 4", "Return the ids"]),
    "twice": ([1, 2, 2], ["1 id more than once: 2", "Return each id once"]),
    "null": ([1, 2, None], ["1 null id"]),
}


@pytest.mark.parametrize("case", WRONG_IDS)
def test_ids_that_are_not_those_given(case):
    ids, words = WRONG_IDS[case]
    refused(lambda batch: {"id": ids, "x": [0] * len(ids)}, {"x": "BIGINT"}, *words)


# Ways to answer


def halves(batch):
    """Two results a batch, the second half first."""
    for rows in (batch.slice(1), batch.slice(0, 1)):
        yield {"id": rows["id"], "x": rows["n"]}


class HalvesLater:
    """The same, awaited."""

    async def __call__(self, batch):
        for result in halves(batch):
            await asyncio.sleep(0)
            yield result


@pytest.mark.parametrize("fn", [halves, HalvesLater])
def test_results_may_come_in_pieces(fn):
    output = call(fn, {"x": "BIGINT"}, batch_size=2)
    assert dict(zip(*output.to_pydict().values())) == {1: 10, 2: 20, 3: 30}
    assert output["id"].to_pylist()[2:] == [3], "batches stay in order"


# Data frames and their index

FRAME = pd.DataFrame({"id": [1, 2, 3], "n": [10, 30, 20]})
BY_N = FRAME.sort_values("n")
INDEXED = {
    "in order": FRAME[["n"]],
    "sorted, with its id": BY_N,
    "the id as index": BY_N.set_index("id"),
    "a series in order": {"n": FRAME["n"]},
    "pieces": [FRAME[["n"]][:1], FRAME[["n"]][1:].reset_index(drop=True)],
}


@pytest.mark.parametrize("case", INDEXED)
def test_the_rows_of_a_data_frame_are_told_by_its_index(case):
    returned = INDEXED[case]

    def fn(batch):
        yield from returned if isinstance(returned, list) else [returned]

    output = call(fn, {"n": "BIGINT"}, batch_format="pandas")
    assert dict(zip(*output.to_pydict().values())) == {1: 10, 2: 30, 3: 20}


REFUSED_INDEX = {
    "sorted": BY_N[["n"]],
    "sorted series with the id": {"id": BY_N["id"], "n": BY_N["n"]},
    "pieces": [FRAME[["n"]][:1], FRAME[["n"]][1:]],
}


@pytest.mark.parametrize("case", REFUSED_INDEX)
def test_an_index_that_matches_no_rows_is_refused(case):
    returned = REFUSED_INDEX[case]

    def fn(batch):
        yield from returned if isinstance(returned, list) else [returned]

    refused(fn, {"n": "BIGINT"}, "index", "rows cannot be matched", "to_numpy()",
            batch_format="pandas")  # fmt: skip


@pytest.mark.parametrize("place", [3, np.int64(-1)])
def test_what_is_no_place_of_a_failed_row(place):
    def fn(batch):
        raise vd.errors.RowErrors({place: ConnectionError("again")}, rows={"n": [10, 30]})

    refused(fn, {"n": "BIGINT"}, "RowErrors names the positions", "in a batch of 3 rows")


# What is returned and then written into


def _arrow(buffer: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(buffer.reshape(-1)), 2)


def _torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


RETURNED = {
    "the array itself": lambda b: {"x": b},
    "a tensor": lambda b: {"x": _torch().from_numpy(b)},
    "a list of views": lambda b: {"x": list(b)},
    "an arrow table": lambda b: pa.table({"x": _arrow(b)}),
}


@pytest.mark.parametrize("kind", RETURNED)
@pytest.mark.parametrize("style", ["returns", "yields"])
def test_a_buffer_that_is_used_again_is_copied(kind, style):
    made = RETURNED[kind]
    buffer = np.zeros((1, 2), np.float32)

    def filled(batch):
        buffer[:] = batch["n"][0].as_py()
        return made(buffer)

    def yields(batch):
        for start in range(batch.num_rows):
            yield _with_id(filled(batch.slice(start, 1)), batch["id"].slice(start, 1))

    fn, size = (yields, None) if style == "yields" else (filled, 1)
    output = call(fn, {"x": "FLOAT[2]"}, batch_size=size)

    assert output["x"].to_pylist() == [[10, 10], [20, 20], [30, 30]]
    assert output["id"].to_pylist() == [1, 2, 3]


def _with_id(result: Any, ids: pa.ChunkedArray) -> Any:
    return {"id": ids, **result} if isinstance(result, dict) else result.append_column("id", ids)


@pytest.mark.usefixtures("no_waits")
def test_arrays_of_numpy_can_be_written_into_and_nothing_else_sees_it():
    columns = {
        "n": pa.array([1.5, 2.5]),
        "at": pa.array([1, 2], pa.timestamp("us")),
        "fixed": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2)),
        "ragged": pa.array([[1.0], [2.0, 3.0]]),
        "flag": pa.array([True, False]),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 2, 2))),
    }
    given_ = pa.table({"id": [1, 2], **columns})
    before = given_.to_pylist()
    seen = []

    def fn(batch):
        seen.append([str(column.tolist()) for column in batch.values()])
        for name in ("n", "fixed", "tensor"):
            batch[name] *= 2
        batch["ragged"][1] *= 2
        batch["at"] += np.timedelta64(1, "s")
        batch["flag"][:] = False
        if len(seen) == 1:
            raise ConnectionError("again")
        return {"x": batch["n"]}

    assert call(fn, {"x": "DOUBLE"}, given_, "numpy")["x"].to_pylist() == [3.0, 5.0]
    assert seen[0] == seen[1]
    assert given_.to_pylist() == before


class Together:
    """Each call waits for as many others as should be in flight; alone it would wait for ever."""

    wanted: ClassVar[int] = 4
    most: ClassVar[int] = 0

    def __init__(self) -> None:
        self.now = 0
        self.met = asyncio.Event()

    async def __call__(self, batch):
        self.now += 1
        type(self).most = max(self.most, self.now)
        if self.now == self.wanted:
            self.met.set()
        await asyncio.wait_for(self.met.wait(), timeout=60)
        self.now -= 1
        return {"x": batch["id"]}


def test_async_calls_are_in_flight_together():
    Together.most = 0
    table = pa.table({"id": range(12)})
    output = call(Together, {"x": "BIGINT"}, table, batch_size=1, max_concurrency=4)
    assert output["x"].to_pylist() == list(range(12)), "in the order of the batches"
    assert Together.most == 4, "and never more than max_concurrency"


def test_an_async_error_ends_the_others():
    ended: list[int] = []
    released = threading.Event()

    async def fn(batch):
        if batch["id"][0].as_py() == 3:
            raise ValueError("row 3")
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(batch["id"][0].as_py())
            if len(ended) == 3:
                released.set()

    with pytest.raises(ValueError, match="row 3"):
        call(fn, {"x": "BIGINT"}, pa.table({"id": range(4)}), batch_size=1)
    assert released.wait(30)
    assert sorted(ended) == [0, 1, 2]


def test_results_whose_rows_have_no_certain_place_are_refused():
    def some_ids(batch):
        yield {"id": [1], "x": [1]}
        yield {"x": [2, 3]}

    twice = pa.Table.from_arrays([pa.array([1, 2, 3])] * 2, names=["x", "x"])
    refused(lambda batch: {"x": {30, 7, 1000}}, {"x": "BIGINT"}, "a set", "Return a list")
    refused(some_ids, {"x": "BIGINT"}, "'id', 'x', another has 'x'", "Return the same columns")
    refused(lambda batch: twice, {"x": "BIGINT"}, "several columns named 'x'")
    refused(lambda batch: pa.RecordBatchReader.from_batches(twice.schema, twice.to_batches()),
            {"x": "BIGINT"}, "several columns named 'x'")  # fmt: skip


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
