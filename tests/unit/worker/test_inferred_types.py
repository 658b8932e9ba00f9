"""Types of results, inferred where a stage declares no schema."""

from __future__ import annotations

import dataclasses
import decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage
from vane_dagster.pipeline.contracts import TYPES
from vane_dagster.types.schema import merged_types, read_schema, schema_code
from vane_dagster.worker.inferred_types import column_type

ROWS = pa.table({"id": [1, 2, 3], "n": [10, 20, 30], "text": ["a", "b", "c"]})


@dataclasses.dataclass
class Answer:
    label: str
    score: float


def probed(method: str, fn: Any, **options: Any) -> pa.Table:
    """Return the rows of the probe of a stage."""
    stage = row_stage(method, fn, schema="infer", **options)
    pipeline = stage.pipeline._with_spec(stage.spec.probe())
    return run_stage(pipeline["out"], ROWS)


def code(rows: pa.Table) -> str:
    """Return the types that the rows of a probe have, as code."""
    return schema_code(merged_types(map(read_schema, rows[TYPES].to_pylist()), "here"))


def types(method: str, fn: Any, **options: Any) -> str:
    """Return the types that a stage's results have, as code."""
    return code(probed(method, fn, **options))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.zeros(3, np.float32), pa.float32()),
        (np.zeros((3, 4), np.float32), pa.list_(pa.float32(), 4)),
        (np.zeros((3, 2, 5), np.uint8), vd.tensor("uint8", (2, 5))),
        ([np.zeros((2, 5), np.float16), None], vd.tensor("float16", (2, 5))),
        ([np.float32(1), np.float32(2)], pa.float32()),
        (np.array(["a", "b"]), pa.string()),
        (pd.Series([1.5, None]), pa.float64()),
        ([1, None, 2], pa.int64()),
        ([1, 2.5], pa.float64()),
        ([decimal.Decimal("1.25")], pa.decimal128(38, 2)),
        ([[decimal.Decimal("1.5")]], pa.list_(pa.decimal128(38, 1))),
        ([Answer("a", 1.0)], pa.struct([("label", pa.string()), ("score", pa.float64())])),
        ([[], [Answer("a", 1.0)]],
         pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())]))),
        ([None], pa.null()),
    ],
)  # fmt: skip
def test_a_column_has_the_type_of_its_values(values: Any, expected: pa.DataType):
    assert column_type(values) == expected


def test_tensors_of_torch_have_the_type_of_their_elements():
    import torch  # here, as each process that collects this module would import it

    cube = torch.zeros(3, 2, 5, 4)
    assert column_type(cube) == vd.tensor("float32", (2, 5, 4))
    assert column_type(cube[:, 0, 0].half()) == pa.list_(pa.float16(), 4)
    assert column_type([torch.zeros(2)] * 3) == pa.list_(pa.float32())


@pytest.mark.parametrize("value", [5, "text", {"a": 1}])
def test_a_single_value_is_no_column(value: Any):
    with pytest.raises(ValueError, match="for each row"):
        column_type(value)


def test_types_without_a_common_one_are_refused_by_column():
    found = [pa.schema([("a", pa.string())]), pa.schema([("a", pa.int64())])]
    with pytest.raises(
        vd.errors.UdfError,
        match=r"here: a column has .*: Field a has incompatible types: string vs int64",
    ):
        merged_types(found, "here")


def vectors(batch: pa.Table) -> Any:
    return {"vector": np.zeros((3, 2), np.float32), "text": batch["text"], "n": [1, None, 3]}


async def row(text: str) -> Any:
    return {"b": text}


@pytest.mark.parametrize(
    ("method", "fn", "options", "expected"),
    [
        (
            "map_batches", vectors, {},
            '{"vector": "FLOAT[2]", "text": "VARCHAR", "n": "BIGINT"}',
        ),
        (
            "map_batches", lambda frame: frame.assign(half=frame.n / 2), {"batch_format": "pandas"},
            '{"id": "BIGINT", "n": "BIGINT", "text": "VARCHAR", "half": "DOUBLE"}',
        ),
        ("map", row, {}, '{"b": "VARCHAR"}'),
    ],
)  # fmt: skip
def test_a_batch_has_the_types_of_its_columns(method, fn, options, expected):
    assert types(method, fn, **options) == expected


def test_results_that_are_yielded_are_combined():
    def fn(batch):
        yield {"a": [1]}
        yield {"a": [2.5], "b": ["x"]}

    expected = '{"a": "DOUBLE", "b": "VARCHAR"}'
    assert types("map_batches", fn, cardinality="filter") == expected


@pytest.mark.parametrize(
    ("fn", "options", "expected"),
    [
        (lambda text: text.upper(), {}, '{"out": "VARCHAR"}'),
        (lambda text: Answer(text, 1.0), {}, '{"label": "VARCHAR", "score": "DOUBLE"}'),
        (
            lambda text: Answer(text, 1.0),
            {"output_column": "x"},
            '{"x": "STRUCT(\\"label\\" VARCHAR, \\"score\\" DOUBLE)"}',
        ),
        (
            lambda row: {**row, "half": row["n"] / 2},
            {},
            '{"id": "BIGINT", "n": "BIGINT", "text": "VARCHAR", "half": "DOUBLE"}',
        ),
        (lambda text: None, {}, "{}"),
        (lambda text: None, {"output_column": "x"}, '{"x": ...}'),
    ],
)
def test_a_row_wise_function_makes_a_column_or_one_of_each_field(fn, options, expected):
    assert types("map", fn, **options) == expected


def test_each_value_of_a_flat_map_counts_and_rows_without_any_are_counted():
    def fn(text):
        if text != "b":
            yield {"letter": text, "place": 0}

    table = probed("flat_map", fn, id="letter_id")
    assert table["id"].to_pylist() == [1, 2, 3]
    assert code(table) == '{"letter": "VARCHAR", "place": "BIGINT"}'


def test_rows_that_fail_are_left_out_if_the_stage_isolates_them():
    def fn(text):
        if text == "b":
            raise ValueError("b")
        return 1

    for on_error in ("quarantine", "null"):
        assert probed("map", fn, on_error=on_error)["id"].to_pylist() == [1, 3]
    with pytest.raises(ValueError, match="b"):
        probed("map", fn)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda text: 1 if text == "a" else "x", "the type of column 'out' cannot be inferred"),
        (lambda text: object(), "the type of column 'out' cannot be inferred"),
        (lambda text: 1 if text == "a" else {"a": 1}, "returned int; expected"),
        (lambda text: {"x": np.zeros((0, 2))}, "column 'x' cannot be inferred: vd.tensor: shape"),
    ],
)
def test_results_without_one_type_are_refused(fn, words):
    with pytest.raises((vd.errors.UdfError, TypeError), match=words):
        probed("map", fn)
