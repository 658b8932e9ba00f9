"""Factories written for Spark: what `predict` gets, and what it returns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage

ROWS = pa.table(
    {
        "id": [1, 2, 3],
        "a": pa.array([1, 2, 3], pa.float32()),
        "b": pa.array([10, 20, 30], pa.float32()),
        "flat": pa.array([[1, 2, 3, 4]] * 3, pa.list_(pa.float32())),
        "text": ["x", None, "z"],
    }
)


def predicted(factory: Any, inputs: list[str], return_type: Any, **options: Any) -> pa.Table:
    stage = row_stage("predict_batch", factory, columns=inputs, return_type=return_type, **options)
    return run_stage(stage, ROWS)


def returning(predict: Any) -> Any:
    """A factory that was given its model."""
    return lambda: predict


def scale(factor: float, *, offset: float = 0) -> Any:
    return lambda a: a * factor + offset


def added(first: Any, second: Any) -> Any:
    assert first.dtype == second.dtype == np.float32
    assert first.shape == (3,)
    return first + second


@pytest.mark.parametrize(
    ("factory", "inputs", "expected"),
    [
        (returning(added), ["a", "b"], [11, 22, 33]),
        (returning(lambda x: x.sum(axis=1)), ["a", "b"], [11, 22, 33]),  # one array of both
        (functools.partial(scale, 2.0, offset=1), ["a"], [3, 5, 7]),
    ],
)
def test_each_parameter_gets_an_array(factory, inputs, expected):
    table = predicted(factory, inputs, "float")
    assert table.schema.field("out").type == pa.float32()
    assert table["out"].to_pylist() == expected


@pytest.mark.parametrize("shapes", [[[2, 2]], {0: [2, 2]}])
def test_a_flat_list_is_a_tensor_of_its_shape(shapes):
    def predict(images):
        assert images.shape == (3, 2, 2)
        return images.reshape(len(images), -1)

    table = predicted(returning(predict), ["flat"], "array<float>", input_tensor_shapes=shapes)
    assert table["out"].to_pylist() == [[1, 2, 3, 4]] * 3


def test_a_wrong_shape_names_column_and_shape():
    with pytest.raises(vd.errors.UdfError, match=r"column 'flat' does not have shape \[3, 3\]"):
        predicted(returning(lambda x: x), ["flat"], "array<float>", input_tensor_shapes=[[3, 3]])


@pytest.mark.parametrize(
    "result",
    [
        lambda a: {"label": np.array(["l"] * len(a)), "score": a},
        lambda a: [{"label": "l", "score": score} for score in a],
    ],
)
@pytest.mark.parametrize("output", [None, "preds"])
def test_structs_are_columns_or_one_column(result, output):
    options = {"output_column": output} if output else {}
    table = predicted(
        returning(result), ["a"], "label string, score float", include_columns=["b"], **options
    )
    rows = [{"label": "l", "score": float(n)} for n in (1, 2, 3)]
    assert table["b"].to_pylist() == [10, 20, 30]
    found = (
        table.select(["label", "score"]).to_pylist() if not output else table[output].to_pylist()
    )
    assert found == rows


@pytest.mark.parametrize(
    ("factory", "options", "words"),
    [
        (scale, {}, "missing a required argument: 'factor'"),
        (vd.Pipeline, {}, "expected a function that loads the model"),
        (returning(None), {"columns": []}, "expected the input columns"),
        (returning(None), {"return_type": "flaot"}, "flaot"),
        (
            returning(None),
            {"columns": ["a", "b"], "input_tensor_shapes": [[4]]},
            r"\[\[4\]\] for 2 inputs; give each input the sizes.* or \[\[2\]\]",
        ),
    ],
)
def test_mistakes_are_refused_where_they_are_written(factory, options, words):
    given = {"columns": ["a"], "return_type": "float", **options}
    with pytest.raises((vd.errors.DefinitionError, vd.errors.SchemaError), match=words):
        row_stage("predict_batch", factory, **given)


@pytest.mark.parametrize(
    ("fits", "wrong", "shapes", "words"),
    [
        (
            lambda x: x.reshape(len(x), -1).sum(axis=1), lambda a, b: a + b, [[2]],
            r"fragment 0: input_tensor_shapes has 1 shapes; expected 2",
        ),
        (
            lambda a, b: (a + b).sum(axis=1), lambda x: x, [[1], [1]],
            r"has 2 shapes; expected 1",
        ),
    ],
)  # fmt: skip
def test_shapes_are_those_of_one_array_or_of_several(fits, wrong, shapes, words):
    given = {"input_tensor_shapes": shapes}
    found = predicted(returning(fits), ["a", "b"], "double", **given)
    assert found["out"].to_pylist() == [11, 22, 33]
    with pytest.raises(vd.errors.UdfError, match=words):
        predicted(returning(wrong), ["a", "b"], "float", **given)


@pytest.mark.parametrize(
    ("output", "words"),
    [(None, "'score' is declared in the schema"), ("preds", "lacks 'score' and has 'more'")],
)
def test_a_row_without_a_declared_field_is_refused(output, words):
    def predict(a):
        rows = [{"label": "l", "score": score, "more": 1} for score in a]
        del rows[2]["score"]
        return rows

    options = {"output_column": output} if output else {}
    with pytest.raises(vd.errors.UdfError, match=words):
        predicted(returning(predict), ["a"], "label string, score float", **options)
