"""Data frames of tables whose columns are slices, or have arrays inside of structs."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.types.frames import to_pandas, to_polars
from vane_dagster.worker.batch_formats import given_batch

VECTORS = pa.array([[1.0, 2.0], None, [3.0, 4.0], None], pa.list_(pa.float32(), 2))
NESTED = pa.array([[[1], [2]], None, [[3], [4]]], pa.list_(pa.list_(pa.int8(), 1), 2))
TENSORS = pa.ExtensionArray.from_storage(vd.tensor("float32", (2, 1)), VECTORS)


@pytest.mark.parametrize("column", [VECTORS, NESTED, TENSORS], ids=["vectors", "nested", "tensors"])
def test_slices_with_nulls_are_frames_of_polars(column):
    chunks = pa.chunked_array([column.slice(0, 2), column.slice(2)])
    for given in (column.slice(1), chunks, column):
        beside = pa.chunked_array([range(1), range(1, len(given))])  # in other chunks
        found = to_polars(pa.table({"id": beside, "x": given}))["x"].to_list()
        assert [row is None for row in found] == given.is_null().to_pylist()
        assert np.ravel([row for row in found if row is not None]).tolist() == [
            value for row in given.drop_null().to_pylist() for value in np.ravel(row)
        ]


def test_arrays_inside_of_structs_have_their_shape():
    boxes = pa.array([{"boxes": [[1, 2], [3, 4], [5, 6]]}, None],
                     pa.struct([("boxes", pa.list_(pa.list_(pa.int64(), 2), 3))]))  # fmt: skip
    table = pa.table({"found": boxes})
    for given in (given_batch(table, "numpy")["found"], to_pandas(table)["found"]):
        assert given[0]["boxes"].shape == (3, 2)
        assert given[1] is None


def test_times_of_day_are_cut_to_the_microseconds_of_python():
    table = pa.table({"t": pa.array([1001, None], pa.time64("ns"))})
    for given in (given_batch(table, "numpy")["t"], to_pandas(table)["t"]):
        assert [value and value.microsecond for value in given] == [1, None]
