"""Results with columns and fields that an inferred schema lacks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage
from vane_dagster.pipeline.pipeline import Stage

ROWS = pa.table({"id": [1, 2, 3], "n": [10, 20, 30], "text": ["a", "b", "c"]})
META = pa.struct([("a", pa.int64())])


@dataclasses.dataclass
class Answer:
    label: str
    score: float


def pinned(method: str, fn: Any, columns: dict[str, Any], **options: Any) -> Stage:
    stage = row_stage(method, fn, schema="infer", **options)
    return stage.pipeline._with_schema("out", pa.schema(columns))["out"]


def refused(method: str, fn: Any, columns: dict[str, Any], **options: Any) -> str:
    with pytest.raises(vd.errors.UdfError) as raised:
        run_stage(pinned(method, fn, columns, **options), ROWS)
    message = str(raised.value)
    for words in ("stage 'docs/out', fragment 0: returned", "which the pinned schema lacks",
                  "with None where there is no value, or declare the schema"):  # fmt: skip
        assert words in message
    return message


def answer(label: str) -> Any:
    return {"label": label, "score": 1.0} if label == "c" else {"label": label}


@pytest.mark.parametrize(
    ("method", "fn", "options"),
    [
        ("map", lambda text: answer(text), {}),
        ("map", lambda text: Answer(text, 1.0) if text == "c" else {"label": text}, {}),
        ("flat_map", lambda text: [answer(text)], {"id": "new"}),
    ],
)
def test_a_column_that_a_later_row_has_is_refused(method, fn, options):
    message = refused(method, fn, {"label": pa.string()}, **options)
    assert "returned column 'score', which the pinned schema lacks" in message


def test_it_is_the_error_of_one_row_where_rows_are_isolated():
    stage = pinned("map", lambda text: answer(text), {"label": pa.string()}, on_error="null")
    table = run_stage(stage, ROWS)
    assert table["label"].to_pylist() == ["a", "b", None]
    assert "column 'score'" in table["error"].to_pylist()[2]


def test_a_function_does_not_fill_the_column_of_errors():
    def own(batch):
        return {"x": batch["n"], "error": pa.array(["mine", None, None])}

    def without(text):
        return {"x": text, "error": "mine"}

    for method, fn, kind in (("map_batches", own, "BIGINT"), ("map", without, "VARCHAR")):
        stage = row_stage(method, fn, schema={"x": kind}, on_error="null")
        assert run_stage(stage, ROWS)["error"].to_pylist() == [None] * 3


COLUMNS = {"x": [1, 2, 3], "y": [4, 5, 6]}


@pytest.mark.parametrize(
    "result",
    [
        COLUMNS,
        pa.table(COLUMNS),
        pd.DataFrame(COLUMNS),
        pl.DataFrame(COLUMNS),
    ],
    ids=lambda result: type(result).__name__,
)
def test_a_column_of_any_batch_is_refused(result):
    stage = pinned("map_batches", lambda batch: result, {"x": pa.int64(), "y": pa.int64()})
    assert run_stage(stage, ROWS)["y"].to_pylist() == [4, 5, 6]
    assert "column 'y'" in refused("map_batches", lambda batch: result, {"x": pa.int64()})


@pytest.mark.parametrize("fn", [lambda batch: batch, lambda batch: batch.to_pandas()])
def test_ids_and_columns_that_are_passed_on_may_be_returned(fn):
    stage = pinned("map_batches", fn, {"text": pa.string()}, include_columns=["n"])
    assert run_stage(stage, ROWS).schema.names == ["id", "n", "text"]


@pytest.mark.parametrize(
    ("value", "kind", "path"),
    [
        ({"a": 1, "b": 2}, META, "meta.b"),
        ([{"a": 1}, {"a": 1, "b": 2}], pa.list_(META), "meta.b"),
        ([("key", {"a": 1, "b": 2})], pa.map_(pa.string(), META), "meta.value.b"),
        (Answer("a", 1.0), pa.struct([("label", pa.string())]), "meta.score"),
    ],
)
def test_a_field_that_a_later_value_has_is_refused(value, kind, path):
    def row(text):
        return {"meta": value if text == "c" else None}

    columns = {"meta": kind}
    assert f"returned field '{path}'" in refused("map", row, columns)
    assert f"returned field '{path}'" in refused(
        "map", lambda text: value, columns, output_column="meta"
    )
    values = [None, None, value]
    assert f"returned field '{path}'" in refused("map_batches", lambda _: {"meta": values}, columns)
    frame = pd.DataFrame({"meta": values})
    assert f"returned field '{path}'" in refused("map_batches", lambda _: frame, columns)


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}, None, {"a": None}],
        pa.array([{"a": 1}, None, {"a": 2}]),
        pl.Series([{"a": 1}, {"a": 2}, {"a": 3}]),
    ],
    ids=lambda values: type(values).__module__,
)
def test_the_same_fields_are_kept(values):
    stage = pinned("map_batches", lambda _: {"meta": values}, {"meta": META})
    assert run_stage(stage, ROWS).schema.field("meta").type == META
