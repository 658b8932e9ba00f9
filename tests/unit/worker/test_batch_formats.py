"""Batches of arrays of several dimensions, what functions may return for them, and row values."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vane_dagster as vd
from support.udf_calls import call
from vane_dagster.types.row_values import row_values
from vane_dagster.worker.batch_formats import given_batch
from vane_dagster.worker.conversion import fitted

IMAGE = (224, 224, 3)
IMAGES = np.random.default_rng(0).integers(0, 256, (3, *IMAGE), dtype=np.uint8)


def column(values: Any, kind: pa.DataType) -> pa.ChunkedArray:
    return fitted(values, pa.field("x", kind), "here")


def images() -> pa.Table:
    return pa.table({"id": [1, 2, 3], "image": column(IMAGES, vd.tensor("uint8", IMAGE))})


# What is given

CUBE = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
SHAPED = {
    "tensors": vd.tensor("float32", (2, 3)),
    "nested lists of a fixed size": pa.list_(pa.list_(pa.float32(), 3), 2),
}


@pytest.mark.parametrize("case", SHAPED)
@pytest.mark.parametrize("form", ["numpy", "torch", "pandas", "polars"])
def test_rows_of_one_shape_are_arrays_of_several_dimensions(case, form):
    table = pa.table({"id": [1, 2], "x": column(CUBE, SHAPED[case])})
    x = given_batch(table, form)["x"]
    if form == "pandas":
        assert [row.shape for row in x] == [(2, 3), (2, 3)]
        assert x[0].dtype == np.float32
        x = np.stack(x)
    elif form == "polars":
        assert str(x.dtype) == "Array(Float32, shape=(2, 3))"
        x = x.to_numpy()
    assert tuple(x.shape) == (2, 2, 3)
    assert str(x.dtype).removeprefix("torch.") == "float32"
    assert np.asarray(x).tolist() == CUBE.tolist()


RAGGED = pa.table(
    {
        "id": [1, 2, 3],
        "lists": pa.array([[1], None, [2, 3]], pa.list_(pa.float32())),
        "equal": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32())),
    }
)


def test_lists_of_variable_size_are_object_arrays_whatever_their_lengths():
    batch = given_batch(RAGGED, "numpy")
    for name in "lists", "equal":
        assert batch[name].dtype == object
        assert batch[name].shape == (3,)
        assert batch[name][2].dtype == np.float32
    assert batch["lists"][1] is None
    batch = given_batch(RAGGED, "torch")
    assert [type(row).__name__ for row in batch["lists"]] == ["Tensor", "NoneType", "Tensor"]
    assert [row.tolist() for row in batch["equal"]] == [[1, 2], [3, 4], [5, 6]]
    assert str(batch["equal"][0].dtype) == "torch.float32"


def test_columns_that_torch_has_no_type_for_are_lists():
    table = pa.table(
        {
            "text": ["a", None],
            "day": pa.array([0, 1], pa.date32()),
            "flag": [True, None],
            "doc": [{"a": 1}, None],
            "words": [["a"], []],
            "flags": [[True, None], [False]],
            "count": [1, None],
        }
    )
    batch = given_batch(table, "torch")
    assert batch["text"] == ["a", None]
    assert [str(day) for day in batch["day"]] == ["1970-01-01", "1970-01-02"]
    assert batch["flag"] == [True, None]
    assert batch["doc"] == [{"a": 1}, None]
    assert batch["words"] == [["a"], []]
    assert batch["flags"] == [[True, None], [False]]
    assert str(batch["count"].tolist()) == "[1.0, nan]", "as in numpy"


@pytest.mark.parametrize(("form", "package"), [("torch", "torch"), ("polars", "polars")])
def test_a_package_that_the_worker_lacks_is_named(form, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(vd.errors.StageError, match=rf"needs the package '{package}'.*Install it"):
        given_batch(RAGGED, form)


def test_polars_batches_of_other_types():
    """Its own reader aborts at decimals of 256 bits."""
    tensors = column([{"t": CUBE[0]}, None], pa.struct([("t", SHAPED["tensors"])]))
    batch = given_batch(pa.table({"tensors": tensors}), "polars")
    assert batch["tensors"].to_list() == [{"t": list(range(6))}, None]
    wide = pa.table({"d": pa.array([1], pa.decimal256(50, 2))})
    with pytest.raises(
        vd.errors.StageError, match=r"column 'd' is decimal256.*cast it in a project"
    ):
        given_batch(wide, "polars")


# What is returned


def torch_images() -> Any:
    import torch

    return torch.from_numpy(IMAGES.copy())


def objects(values: Any) -> Any:
    array = np.empty(len(values), object)
    array[:] = list(values)
    return array


WAYS = {
    "one array": lambda: IMAGES,
    "a list of arrays": lambda: list(IMAGES),
    "one tensor": torch_images,
    "whole numbers as floats": lambda: IMAGES.astype(np.float32),
    "a column of tensors": lambda: images()["image"],
}


@pytest.mark.parametrize("case", WAYS)
def test_ways_to_return_images(case):
    output = call(lambda batch: {"image": WAYS[case]()}, {"image": vd.tensor("uint8", IMAGE)})
    assert output["image"].equals(images()["image"])


WRONG = {
    "flat": (CUBE.reshape(2, 6), "a row has shape (6,), not (2, 3)"),
    "transposed": (CUBE.transpose(0, 2, 1), "a row has shape (3, 2), not (2, 3)"),
    "other size": (CUBE[:, :, :2], "ndarray of float32, shape (2, 2, 2): a row has shape (2, 2)"),
    "numbers": (np.ones(2), "values are double, one for each row"),
    "text": (np.full((2, 2, 3), "a"), "found string as elements. Convert them"),
    "a null inside": ([[[1, 2, 3], None]] * 2, "a list inside a row is null"),
    "other tensors": (pa.nulls(2, vd.tensor("float32", (3, 2))), "shape (3, 2), not (2, 3)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_shapes_and_types_are_refused_with_the_fix(case):
    values, words = WRONG[case]
    with pytest.raises(vd.errors.UdfError) as raised:
        column(values, SHAPED["tensors"])
    assert "here: column 'x': expected vd.tensor(\"float32\", (2, 3)), found" in str(raised.value)
    assert words in str(raised.value)


@pytest.mark.parametrize("shape", [(3, 1), (3, 1, 1)])
def test_a_last_dimension_of_1_is_squeezed_for_scalars(shape):
    import torch

    array = np.arange(3.0).reshape(shape)
    for values in array, list(array), torch.from_numpy(array), objects(array):
        assert column(values, pa.float32()).to_pylist() == [0, 1, 2]
    scalars = [np.array(0.0), None, torch.tensor(2.0)]
    assert column(scalars, pa.float64()).to_pylist() == [0, None, 2]
    assert column(array.reshape(3, 1), pa.list_(pa.float64(), 1)).to_pylist() == [[0], [1], [2]]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_floating_point_numbers_of_any_precision_are_results(dtype):
    import torch

    batch = torch.tensor([[0.0, 0.5, 1.5]] * 2).to(getattr(torch, dtype)).requires_grad_()
    for values in batch, list(batch):
        found = column(values, pa.list_(pa.float32(), 3))
        assert found.to_pylist() == [[0, 0.5, 1.5]] * 2
    assert column(batch[:, 1], pa.float32()).to_pylist() == [0.5, 0.5]


# Nulls

NAN = float("nan")


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def test_nan_is_a_number_but_of_pandas_null():
    for values in (np.array([NAN, 1.0]), [NAN, 1.0], np.array([[NAN], [1]])):
        found = column(values, pa.float64())
        assert found.null_count == 0
        assert is_nan(found[0].as_py())
    assert column(pd.Series([NAN, 1.0]), pa.float64()).to_pylist() == [None, 1.0]
    rows = pd.Series([CUBE[0], NAN])
    assert column(rows, SHAPED["tensors"]).is_null().to_pylist() == [False, True]


def test_none_is_null():
    for values in [None, 1.0], np.array([None, 1.0], object), pd.Series([None, 1.0], dtype=object):
        assert column(values, pa.float64()).to_pylist() == [None, 1.0]
    for kind in SHAPED.values():
        for rows in [None, CUBE[0]], objects([None, CUBE[0]]), [None, CUBE[0].tolist()]:
            assert column(rows, kind).is_null().to_pylist() == [True, False]
        assert column([None, None], kind).null_count == 2


@pytest.mark.parametrize("form", ["pandas", "numpy", "torch"])
def test_integers_that_nulls_would_round_are_refused(form):
    few = pa.table({"n": pa.array([2**53, None], pa.int64()), "m": [2**60 + 1, 1]})
    given_batch(few, form)
    for number, kind in ((2**60 + 1, pa.int64()), (-(2**53) - 1, pa.int64()), (2**63, pa.uint64())):
        many = pa.table({"n": pa.array([number, None], kind)})
        with pytest.raises(
            vd.errors.StageError, match=r"'n' has nulls and integers beyond 2\*\*53"
        ):
            given_batch(many, form)
        given_batch(many, "polars")


def test_nulls_that_are_given():
    """A null element is as a null in a column of scalars; a null row is None."""
    rows = [[[1, None], [3, 4]], [[5, 6], [7, 8]]]
    for value, dtype in (pa.float32(), np.float32), (pa.int8(), np.float64):
        lists = pa.array(rows, pa.list_(pa.list_(value, 2), 2))
        for kind in lists.type, pa.fixed_shape_tensor(value, (2, 2)):
            batch = given_batch(pa.table({"x": column(lists, kind)}), "numpy")
            assert batch["x"].dtype == dtype
            assert np.isnan(batch["x"][0, 0, 1])
    gaps = column([CUBE[0], None], SHAPED["tensors"])
    for form in "numpy", "pandas", "torch":
        x = given_batch(pa.table({"x": gaps}), form)["x"]
        assert np.asarray(x[0]).shape == (2, 3)
        assert x[1] is None


# Nested lists that are slices, from which Arrow's take and filter return other rows


# Values of rows


def test_values_of_rows():
    kind = pa.struct([("t", SHAPED["tensors"]), ("n", pa.int8())])
    structs = column([{"t": CUBE[0], "n": 1}, None, {"t": None, "n": 2}], kind)
    first, second, third = row_values(structs)
    assert np.array_equal(first["t"], CUBE[0])
    assert second is None
    assert third == {"t": None, "n": 2}
    lists = column([[{"t": CUBE[0], "n": 1}], [], None], pa.list_(kind))
    (row,), empty, none = row_values(lists)
    assert row["t"].shape == (2, 3)
    assert (empty, none) == ([], None)
    assert column(row_values(lists), pa.list_(kind)).equals(lists)
    for case in SHAPED.values():
        table = column([CUBE[0], None], case)
        array, none = row_values(table)
        array[:] = 7
        assert none is None
        assert table[0].as_py() != [7] * 6, "a copy"
    assert row_values(pa.chunked_array([["a", None]])) == ["a", None]
    vectors = pa.chunked_array([pa.array([[1, 2], None], pa.list_(pa.int8(), 2))])
    assert row_values(vectors) == [[1, 2], None]
    assert row_values(pa.chunked_array([], SHAPED["tensors"])) == []


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.sampled_from(["bool", "uint8", "int64", "float16", "float32"]),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.sampled_from(["numpy", "torch", "pandas", "polars", "rows"]),
    st.booleans(),
)
@example([2], "float32", [False, True], "rows", False)
def test_arrays_of_any_shape_survive_any_format(shape, dtype, is_null, form, as_lists):
    """With null rows, in slices, and in several chunks."""
    kind: Any = vd.tensor(dtype, shape)
    if as_lists:
        kind = kind.value_type
        for size in reversed(shape):
            kind = pa.list_(kind, size)
    random = np.random.default_rng(0)
    rows = [None if null else random.integers(0, 2, shape).astype(dtype) for null in is_null]
    whole = column([rows[0], *rows], kind).combine_chunks()
    table = pa.table({"x": pa.chunked_array([whole.slice(1, 1), whole.slice(2)])})
    returned = row_values(table["x"]) if form == "rows" else given_batch(table, form)["x"]
    assert column(returned, kind).combine_chunks().equals(whole.slice(1))
