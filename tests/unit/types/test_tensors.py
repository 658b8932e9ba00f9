"""The type of tensor columns: how it is declared, and what SQL, Parquet and Delta make of it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.part_file import PartTarget, read_part, write_part
from vane_dagster.types.schema import seen_by_sql, type_name
from vane_dagster.types.sql import bind
from vane_dagster.types.tensors import unsliced

TENSOR = vd.tensor("float32", (2, 3))
LARGE = vd.tensor("uint8", (224, 224, 3))
"""More elements than DuckDB's arrays can have."""


def test_the_type_is_that_of_arrow():
    import torch  # here, as each process that collects this module would import it

    assert pa.fixed_shape_tensor(pa.float32(), [2, 3]) == TENSOR
    for dtype in np.float32, np.dtype("float32"), "float32", pa.float32():
        assert vd.tensor(dtype, [2, 3]) == TENSOR
    assert vd.tensor("float", (1,)).value_type == pa.float64(), "as in numpy"
    assert vd.tensor(torch.int16, (2,)).value_type == pa.int16()
    with pytest.raises(vd.errors.SchemaError, match=r"dtype is torch.bfloat16; expected the name"):
        vd.tensor(torch.bfloat16, (2,))
    assert vd.tensor("float16", (1,)).value_type == pa.float16()
    assert vd.tensor("bool", (1,)).value_type == pa.bool_()
    assert type_name(TENSOR) == 'vd.tensor("float32", (2, 3))'
    assert type_name(vd.tensor("bool", (5,))) == 'vd.tensor("bool", (5,))'
    assert type_name(pa.list_(pa.float32(), 2)) == "FLOAT[2]"
    assert type_name(pa.float16()) == "halffloat"


@pytest.mark.parametrize(
    "dtype", ["text", "string", "str", pa.string(), None, "complex64", "M8[s]"]
)
def test_elements_have_to_be_numbers(dtype):
    with pytest.raises(
        vd.errors.SchemaError, match=r"vd.tensor: dtype is .*expected the name of a"
    ):
        vd.tensor(dtype, (2,))


@pytest.mark.parametrize("shape", [(), 3, "3", (0,), (-1, 2), (2.0,), (True,), None, (None, 3)])
def test_the_shape_is_a_list_of_positive_integers(shape):
    with pytest.raises(
        vd.errors.SchemaError, match=r"vd.tensor: shape is .*for example \(3, 224, 224\)"
    ):
        vd.tensor("float32", shape)


def test_sql_sees_a_flat_list():
    assert seen_by_sql(TENSOR) == pa.list_(pa.float32(), 6)
    assert seen_by_sql(LARGE) == pa.list_(pa.uint8())
    assert seen_by_sql(pa.list_(pa.float32(), 100_001)) == pa.list_(pa.float32())
    schema = pa.schema([("id", pa.int64()), ("x", TENSOR), ("large", LARGE)])
    columns = (("x", "x"), ("y", "large"), ("last", "x[6]"), ("size", "len(large)"))
    bound = bind(columns, "len(large) > 0", schema, "here")
    assert [field.type for field in bound] == [TENSOR, LARGE, pa.float32(), pa.int64()]


def rows(kind: pa.FixedShapeTensorType) -> pa.Array:
    size = int(np.prod(kind.shape))
    values = pa.array(np.arange(3 * size) % 2).cast(kind.value_type)
    flat = pa.FixedSizeListArray.from_arrays(values, size)
    whole = pa.ExtensionArray.from_storage(kind, flat.cast(kind.storage_type))
    return whole.take(pa.array([0, None, 2]))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "int64"])
def test_parts_keep_it(dtype, tmp_path):
    kind = vd.tensor(dtype, (2, 3))
    lists = pa.ListArray.from_arrays([0, 1, 3, 3], rows(kind))
    inside = pa.StructArray.from_arrays([rows(kind)], fields=[pa.field("t", kind)])
    table = pa.table({"id": [1, 2, 3], "x": rows(kind), "lists": lists, "inside": inside})
    folder = StoragePath(str(tmp_path))
    info = write_part(table, PartTarget(folder, "0" * 40, "id", measured=("x",)))
    assert info.measures["x"]["nulls"] == 1
    found = read_part(folder, info.name)
    assert found.schema == table.schema
    assert found.equals(table)
    assert write_part(table, PartTarget(folder, "0" * 40, "id")).digest == info.digest


def test_rows_with_slices_inside_are_selected_right():
    rows = pa.array([[[n], [n]] for n in range(6)], pa.list_(pa.list_(pa.int8(), 1), 2)).slice(2)
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), rows)
    maps = pa.MapArray.from_arrays(lists.offsets, pa.array(["a", "b", "c", "d"]), rows)
    for column in pa.StructArray.from_arrays([rows], ["nested"]), lists, maps:
        table = pa.table({"x": column})
        expected = [column.to_pylist()[place] for place in (3, 1)]
        assert unsliced(table).take(pa.array([3, 1]))["x"].to_pylist() == expected
