"""Types of results: inferred ones, what an inferred schema lacks, and what to return instead."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from PIL import Image

import vane_dagster as vd
from support.udf_calls import row_stage, run_stage
from vane_dagster.errors import UdfError
from vane_dagster.pipeline.contracts import TYPES
from vane_dagster.pipeline.pipeline import Stage
from vane_dagster.types.schema import merged_types, parse_schema, read_schema, schema_code
from vane_dagster.types.to_arrow import to_arrow
from vane_dagster.worker.conversion import fitted
from vane_dagster.worker.inferred_types import column_type
from vane_dagster.worker.results import from_result, result_columns

ROWS = pa.table({"id": [1, 2, 3], "n": [10, 20, 30], "text": ["a", "b", "c"]})
OFFSET = dt.datetime.fromisoformat("2026-01-02T03:04:05+05:30")
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
    for words in ("stage 'docs/out', fragment 0: returned", "which is not in the schema inferred",
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
    assert "returned column 'score', which is not in the schema inferred" in message


def test_it_is_the_error_of_one_row_where_rows_are_isolated():
    stage = pinned("map", lambda text: answer(text), {"label": pa.string()}, on_error="null")
    table = run_stage(stage, ROWS)
    assert table["label"].to_pylist() == ["a", "b", None]
    assert "column 'score'" in table["error"].to_pylist()[2]


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


def probed(method: str, fn: Any, **options: Any) -> pa.Table:
    stage = row_stage(method, fn, schema="infer", **options)
    pipeline = stage.pipeline._with_spec(stage.spec.probe())
    return run_stage(pipeline["out"], ROWS)


def code(rows: pa.Table) -> str:
    return schema_code(merged_types(map(read_schema, rows[TYPES].to_pylist()), "here"))


def types(method: str, fn: Any, **options: Any) -> str:
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
        (np.array([("2026-01-01", 1.5)], [("at", "M8[ns]"), ("v", "f8")]),
         pa.struct([("at", pa.timestamp("ns")), ("v", pa.float64())])),
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


NS = pd.Timestamp("2026-01-01T00:00:00.123456789")
DAY = np.datetime64("2026-01-01")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([NS, NS.floor("D"), None], pa.timestamp("ns")),
        ([NS.tz_localize("UTC")], pa.timestamp("ns", "UTC")),
        ([NS.floor("us")], pa.timestamp("us")),
        ([{"at": [NS]}], pa.struct([("at", pa.list_(pa.timestamp("ns")))])),
        ([pd.Timedelta(1, "ns")], pa.duration("ns")),
        ([DAY, None], pa.date32()),
        ([[DAY]], pa.list_(pa.date32())),
        ([{"day": DAY}], pa.struct([("day", pa.date32())])),
        ([DAY.astype("M8[s]")], pa.timestamp("us")),
        ([DAY.astype("M8[ns]")], pa.timestamp("ns")),
        ([np.timedelta64(1, "h")], pa.duration("us")),
        ([DAY.astype("M8[ns]"), pd.NaT], pa.timestamp("ns")),  # Arrow alone crashes
        (
            [{"at": [NS], "day": DAY}],
            pa.struct([("at", pa.list_(pa.timestamp("ns"))), ("day", pa.date32())]),
        ),
    ],
)
def test_the_type_of_times_holds_them(values: Any, expected: pa.DataType):
    assert column_type(values) == expected
    assert to_arrow(values, expected).type == expected


@pytest.mark.parametrize(
    "values",
    [pl.Series([uuid.UUID(int=1)], dtype=pl.Object), pd.period_range("2026", periods=1, freq="M")],
)
def test_a_column_without_a_type_in_arrow_is_refused(values: Any):
    make = pl.DataFrame if isinstance(values, pl.Series) else pd.DataFrame
    result = make({"a": values, "b": [1]})
    columns = result_columns(result, pa.schema([]), "id", "here")[0]
    for given in (columns["a"], values):
        with pytest.raises(TypeError, match="for which Arrow has no type"):
            column_type(given)
        with pytest.raises(vd.errors.UdfError, match="no type\\. Convert it by"):
            fitted(given, pa.field("a", pa.int64()), "here")
    assert fitted(columns["b"], pa.field("b", pa.int64()), "here").to_pylist() == [1]


def test_the_error_of_ragged_arrays_names_the_type_to_declare():
    ragged = [np.zeros((2, n), np.float32) for n in (3, 4)]
    with pytest.raises(TypeError, match=r"shapes \(2, 3\), \(2, 4\); .*, or FLOAT\[\]\[\] in"):
        column_type(ragged)
    (field,) = parse_schema({"a": "FLOAT[][]"}, "here")
    assert fitted(ragged, field, "here").to_pylist()[0] == [[0] * 3] * 2
    with pytest.raises(TypeError, match=r"expected one shape$"):
        column_type([*ragged, np.zeros((1, 1, 1), np.float32)])


def test_tensors_of_torch_have_the_type_of_their_elements():
    import torch  # here, as each process that collects this module would import it

    cube = torch.zeros(3, 2, 5, 4)
    assert column_type(cube) == vd.tensor("float32", (2, 5, 4))
    assert column_type(cube[:, 0, 0].half()) == pa.list_(pa.float16(), 4)
    assert column_type([torch.zeros(2)] * 3) == pa.list_(pa.float32())


@pytest.mark.parametrize("values", [["a", b"b"], [dt.date(2026, 1, 1), 1], [[1.5, True]]])
def test_values_that_no_type_takes_have_none(values: Any):
    for convert in (column_type, lambda given: to_arrow(given, pa.binary())):
        with pytest.raises(ValueError, match="rows have different types"):
            convert(values)


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
        (
            "map_batches", lambda batch: {"at": pa.array([OFFSET] * len(batch))}, {},
            '{"at": "TIMESTAMP WITH TIME ZONE"}',
        ),
        ("map", row, {}, '{"b": "VARCHAR"}'),
    ],
)  # fmt: skip
def test_a_batch_has_the_types_of_its_columns(method, fn, options, expected):
    assert types(method, fn, **options) == expected


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
        (lambda text: OFFSET, {}, '{"out": "TIMESTAMP WITH TIME ZONE"}'),
        (lambda text: [[OFFSET]], {}, '{"out": "TIMESTAMP WITH TIME ZONE[][]"}'),
        (lambda text: None, {}, "{}"),
        (lambda text: None, {"output_column": "x"}, '{"x": ...}'),
    ],
)
def test_a_row_wise_function_makes_a_column_or_one_of_each_field(fn, options, expected):
    assert types("map", fn, **options) == expected


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


TEXT, FLOAT, BLOB = pa.string(), pa.float32(), pa.binary()
FLOATS = pa.list_(pa.float32())


@dataclasses.dataclass
class Record:
    x: int = 1


def refusal(values: Any, kind: pa.DataType) -> str:
    schema = pa.schema([("y", kind)])
    with pytest.raises(UdfError) as caught:
        from_result({"y": values}, schema, (), "id", "stage 'docs/m'")
    message = str(caught.value)
    assert message.startswith(f"stage 'docs/m': column 'y': expected {kind}, found ")
    return message


CASES: list[tuple[Any, pa.DataType, str]] = [
    ([None, Image.new("L", (5, 4))], FLOATS, "a Image has no type in Arrow. Return numbers, text"),
    ([{"x": 1}], FLOATS, "or declare {'y': 'STRUCT(\"x\" BIGINT)'}"),
    ([1, "a"], TEXT, "rows have different types: int, str"),
    (np.zeros(2, complex), FLOAT, "ndarray of complex128, shape (2,): it is complex128, for"),
    (np.ones((2, 2)), FLOAT, 'a vector a row. Declare vd.tensor("'),
    (None, FLOAT, "a single value, not one for each row. Return a list or an array"),
    ({"a": 1}, FLOAT, "Return one of its values, or a list with a dict for each row"),
    ([2**70], pa.int64(), "too large"),
    # columns that Arrow holds, of another type
    (["1", "2"], pa.int64(), "string"),
    (np.ones((3, 2)), pa.list_(FLOAT, 3), "vectors have 2 elements, not 3"),
    ([[1.0, 2.0], [1.0]], pa.list_(FLOAT, 2), "list of list"),
    ([{1, 2}], TEXT, "Convert them in the function, or declare {'y': 'BIGINT[]'} in the schema"),
    ([2.5], pa.int64(), "Return values that fit, and None for missing ones, or declare {'y':"),
]


@pytest.mark.parametrize(("values", "kind", "words"), CASES, ids=range(len(CASES)))
def test_the_message_has_the_type_and_what_to_return(values, kind, words):
    assert words in refusal(values, kind)


def test_a_message_holds_no_value():
    secret = SimpleNamespace(password="hunter2")
    assert "hunter2" not in refusal([secret], TEXT)
    assert "hunter2" not in refusal(["a", Record(x="hunter2")], TEXT)  # type: ignore[arg-type]  # a value that is easy to find
    assert "hunter2" not in refusal([[1], "hunter2"], pa.list_(pa.int64()))


class AsArray:
    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values


def test_columns_are_copied_from_memory_that_a_function_writes_again():
    for share in (memoryview, AsArray):
        numbers = np.arange(3)
        column = fitted(share(numbers), pa.field("n", pa.int64()), "here")
        numbers[:] = 9
        assert column.to_pylist() == [0, 1, 2]
