"""Functions that are called row by row or with columns: what they get and return, and failures."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any, NamedTuple, Optional, TypedDict

import numpy as np
import pyarrow as pa
import pydantic
import pytest

import vane_dagster as vd
from support.prompts import Reversed
from support.udf_calls import row_stage, run_stage
from vane_dagster._lazy import LazyModule
from vane_dagster.errors import StageError
from vane_dagster.retries import Backoff
from vane_dagster.worker.kept_values import kept

TEXTS = pa.table(
    {
        "id": [1, 2, 3],
        "text": ["a", "bb", None],
        "n": [10, 20, 30],
        "vector": pa.array([[1.0, 2.0], [3.0], []], pa.list_(pa.float32())),
    }
)


def mapped(fn: Any, *, table: pa.Table = TEXTS, **options: Any) -> pa.Table:
    return run_stage(row_stage("map", fn, **options), table)


def column(fn: Any, **options: Any) -> list[Any]:
    return mapped(fn, **options)["out"].to_pylist()


# What a function gets


GIVEN: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "columns by name": (lambda n, text: f"{text}{n}", {}, ["a10", "bb20", "None30"]),
    "a column of another name": (lambda a, b=1: f"{a + b}", {"columns": {"a": "n"}},
                                 ["11", "21", "31"]),
    "two of them": (lambda a, b=1: f"{a + b}", {"columns": {"a": "n", "b": "id"}},
                    ["11", "22", "33"]),
    "keyword-only": (lambda *, n, id: f"{n - id}", {}, ["9", "18", "27"]),
    "arguments": (lambda text, end, *, times: (text or "") * times + end,
                  {"fn_kwargs": {"end": "!", "times": 2}}, ["aa!", "bbbb!", "!"]),
    "an argument between": (lambda text, sep, n: f"{text}{sep}{n}", {"fn_kwargs": {"sep": "-"}},
                            ["a-10", "bb-20", "None-30"]),
    "a partial": (functools.partial(lambda factor, n: str(factor * n), factor=3), {},
                  ["30", "60", "90"]),
    "a row": (lambda row: f"{sorted(row)}{row['n']}", {"columns": ["n"]},
              ["['n']10", "['n']20", "['n']30"]),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_what_a_function_gets(case):
    fn, options, expected = GIVEN[case]
    assert column(fn, schema="VARCHAR", **options) == expected


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        (None, "list"),
        (np.ndarray, "ndarray"),
        (Optional[np.ndarray], "ndarray"),  # noqa: UP045  # a form of users
    ],
)
def test_lists_are_lists_unless_the_function_takes_arrays(annotation, kind):
    def fn(vector) -> str:
        return type(vector).__name__

    if annotation is not None:
        fn.__annotations__["vector"] = annotation
    assert column(fn) == [kind] * 3


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(pa.float32()), [[1, 2], None, []]),
        (pa.list_(pa.uint8(), 2), [[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_arrays_have_the_type_of_the_elements_and_can_be_written_into(kind, values):
    def described(vector: np.ndarray) -> str:
        if vector is not None:
            vector += 1
        return str(None if vector is None else vector.dtype)

    table = TEXTS.set_column(3, "vector", pa.array(values, kind))
    found = mapped(described, table=table, include_columns=["vector"])
    expected = kind.value_type.to_pandas_dtype()
    kinds = [None if value is None else np.dtype(expected).name for value in values]
    assert found["out"].to_pylist() == [str(each) for each in kinds]
    assert found["vector"].to_pylist() == values


# What it returns


class Point(NamedTuple):
    x: int
    label: str


@dataclasses.dataclass
class Labelled:
    label: str
    points: list[Point]


class Typed(TypedDict):
    label: str
    score: float


class Model(pydantic.BaseModel):
    label: str
    score: float | None


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Vector:
    values: list[float]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda n: Point(n, "p"), {"x": [10, 20, 30], "label": ["p"] * 3}),
        (lambda n: Typed(label="t", score=n / 4), {"label": ["t"] * 3, "score": [2.5, 5.0, 7.5]}),
        (lambda n: Model(label="m", score=None), {"label": ["m"] * 3, "score": [None] * 3}),
        (
            lambda n: Labelled("l", [Point(n, "p")]),
            {"label": ["l"] * 3, "points": [[{"x": n, "label": "p"}] for n in (10, 20, 30)]},
        ),
    ],
)
def test_objects_become_columns_or_one_struct(fn, expected):
    kinds = {"x": Point, "score": Typed, "points": Labelled}
    fn.__annotations__["return"] = next(
        Model if "m" in expected.get("label", []) else kind
        for name, kind in kinds.items()
        if name in expected
    )
    assert mapped(fn).drop_columns(["id"]).to_pydict() == expected
    structs = mapped(fn, output_column="doc")
    assert structs.column_names == ["id", "doc"]
    assert structs["doc"].to_pylist() == [
        dict(zip(expected, row)) for row in zip(*expected.values())
    ]


def pointed(n: int) -> Point | None:
    return None if n == 20 else Point(n, "p")


def test_none_is_null_in_the_columns_of_an_object():
    found = mapped(pointed).drop_columns(["id"])
    assert found.to_pydict() == {"x": [10, None, 30], "label": ["p", None, "p"]}


@pytest.mark.parametrize("single", [True, False])
def test_a_schema_of_one_column_takes_values_and_dicts(single):
    def fn(n):
        return n * 2 if single else {"doubled": n * 2, "beyond": 1}

    assert mapped(fn, schema={"doubled": "BIGINT"})["doubled"].to_pylist() == [20, 40, 60]


def test_a_generator_yields_the_one_value_of_a_row():
    def fn(n: int) -> Iterator[int]:
        yield n + 1

    async def later(n: int) -> AsyncIterator[int]:
        yield n + 1

    assert column(fn) == column(later) == [11, 21, 31]


def many(n: int) -> Iterator[int]:
    yield from (n, n)


@pytest.mark.parametrize(
    ("method", "fn", "options", "words"),
    [
        ("map", many, {}, r"2 values for one row.*flat_map"),
        ("flat_map", lambda text: "ab", {"id": "part", "schema": "VARCHAR"},
         "returned str; expected a list"),
        ("filter", lambda n: n, {}, "returned int; expected a bool"),
    ],
)  # fmt: skip
def test_a_result_of_another_number_or_kind_is_refused(method, fn, options, words):
    with pytest.raises(vd.errors.UdfError, match=words):
        run_stage(row_stage(method, fn, **options), TEXTS)


# Rows that fail


def odd(n: int) -> int:
    if n == 20:
        raise ValueError(f"bad {n}")
    return n


async def odd_later(n: int) -> int:
    await asyncio.sleep(0)
    return odd(n)


@pytest.mark.parametrize("fn", [odd, odd_later])
def test_the_error_of_a_row_is_its_own(fn):
    stage = row_stage("map", fn, on_error="quarantine", max_error_rate=0.5)
    assert run_stage(stage, TEXTS).to_pydict() == {"id": [1, 3], "out": [10, 30]}
    with pytest.raises(ValueError, match="bad 20"):
        mapped(fn)


class Unreadable(dict[str, int]):
    def items(self) -> Any:
        raise ValueError("cannot be copied")


@pytest.mark.parametrize("bad", [odd, lambda n: Unreadable() if n == 20 else n])
def test_an_error_of_a_row_causes_no_second_call(bad):
    seen: list[int] = []

    def fn(n: int) -> int:
        seen.append(n)
        return bad(n)

    stage = row_stage("map", fn, on_error="quarantine", max_error_rate=0.5)
    assert run_stage(stage, TEXTS).to_pydict() == {"id": [1, 3], "out": [10, 30]}
    assert seen == [10, 20, 30]


def test_a_slow_row_is_timed_out_alone():
    async def fn(n: int) -> int:
        await asyncio.sleep(30 if n == 20 else 0)
        return n

    stage = row_stage("map", fn, on_error="quarantine", max_error_rate=0.5, timeout_s=0.2)
    started = time.monotonic()
    assert run_stage(stage, TEXTS, retries=0)["out"].to_pylist() == [10, 30]
    assert time.monotonic() - started < 10


class OneAtATime(Reversed):
    """Lets one row a tenth of a second begin, as a limit of requests per minute does."""

    begun = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        type(self).begun += 1
        await asyncio.sleep(self.begun / 10)
        yield


def test_waiting_for_a_limit_takes_no_time_of_a_row():
    stage = row_stage("prompt", "{n}", provider=OneAtATime, model="m", timeout_s=0.15)
    assert run_stage(stage, TEXTS, retries=0)["out"].to_pylist() == ["01", "02", "03"]


class RefusesATurn(Reversed):
    asked = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        type(self).asked += 1
        if self.asked == 2:
            raise ConnectionError("no replica is ready")
        yield


def test_the_error_of_a_turn_is_that_of_its_row():
    given = {"on_error": "quarantine", "max_error_rate": 0.5}
    stage = row_stage("prompt", "{n}", provider=RefusesATurn, model="m", **given)
    assert run_stage(stage, TEXTS, retries=0)["out"].to_pylist() == ["01", "03"]


def test_an_error_of_the_stage_ends_the_calls_for_other_rows():
    seen: list[int] = []

    async def fn(n: int) -> int:
        seen.append(n)
        raise StageError("rejected key")

    table = pa.table({"id": range(50), "n": range(50)})
    with pytest.raises(StageError, match="rejected key"):
        column(fn, table=table, max_concurrency=2, on_error="quarantine")
    assert len(seen) <= 2


@pytest.mark.parametrize("style", ["sync", "async"])
def test_a_revoked_lease_ends_the_wait_before_a_retry(style, monkeypatch):
    monkeypatch.setattr("vane_dagster.retries.CALLS", Backoff(60.0, 60.0))
    stopped = threading.Event()

    def fn(text: str) -> str:
        threading.Timer(0.3, stopped.set).start()
        raise ConnectionError

    async def later(text: str) -> str:
        return fn(text)

    began = time.monotonic()
    stage = row_stage("map", fn if style == "sync" else later)
    assert run_stage(stage, TEXTS.slice(0, 1), revoked=stopped.is_set, retries=1) is None
    assert time.monotonic() - began < 10


# Results that are reused


class Imaged:
    """An object that numpy reads without a copy, as an image."""

    def __init__(self) -> None:
        self.numbers = bytearray(b"a")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.frombuffer(self.numbers, np.uint8)


REUSED: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {
    "array": (np.ones(2), lambda v: v.fill(2), [1, 1]),
    "list": ([None, ["a"]], lambda v: v[1].append("b"), [None, ["a"]]),
    "dict": ({"a": ["b"]}, lambda v: v["a"].append("c"), {"a": ["b"]}),
    "dataclass": (Vector([1.0]), lambda v: v.values.append(2.0), {"values": [1.0]}),
    "bytearray": (bytearray(b"a"), lambda v: v.append(1), bytearray(b"a")),
    "image": (Imaged(), lambda v: v.numbers.__setitem__(0, 1), [97]),
    "tensor": (lambda: LazyModule("torch").ones(2), lambda v: v.fill_(2), [1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("case", REUSED)
def test_a_result_may_be_changed_after_it_was_returned(case):
    value, change, expected = REUSED[case]
    value = value() if callable(value) else value
    found = kept(value)
    change(value)
    assert (found.tolist() if hasattr(found, "tolist") else found) == expected


# Results that fit by themselves


def test_rows_of_several_types_fit_if_each_does():
    numbers = {10: Decimal("1.5"), 20: 2.0, 30: 3}
    schema = "DECIMAL(10, 2)"
    expected = [column(lambda n: numbers[n], table=TEXTS[i : i + 1], schema=schema) for i in (0, 2)]
    table = TEXTS.take([0, 2, 0])
    assert column(lambda n: numbers[n], table=table, schema=schema) == [
        *expected[0], *expected[1], *expected[0],
    ]  # fmt: skip

    def shade(n: int) -> str:
        return "light" if n == 10 else Colour.RED  # type: ignore[return-value]  # a mixture

    assert column(shade) == ["light", "red", "red"]


@pytest.mark.parametrize("bad", [{3, 4, 20}, set(range(50))])
def test_each_result_that_does_not_fit_is_the_error_of_its_row(bad):
    def fn(n: int) -> list[int]:
        return [n, "x", n] if n in bad else [n] * (n % 3)  # type: ignore[list-item]  # the mistake

    table = pa.table({"id": range(50), "n": range(50)})
    stage = row_stage("flat_map", fn, id="part", on_error="quarantine", max_error_rate=1)
    found = run_stage(stage, table).select(["id", "out"]).to_pylist()
    assert found == [{"id": n, "out": n} for n in range(50) if n not in bad for _ in range(n % 3)]


# The ids of results


@pytest.mark.parametrize("size", [1, 3])
def test_a_declared_id_of_a_new_row_has_to_be_in_every_row(size):
    def fn(n: int) -> list[dict[str, Any]]:
        return [{"part": f"p{n}", "c": n}] if n != 20 else [{"c": n}]

    stage = row_stage(
        "flat_map", fn, id="part", schema={"part": "VARCHAR", "c": "BIGINT"},
        on_error="quarantine", max_error_rate=1,
    )  # fmt: skip
    parts = [run_stage(stage, TEXTS[i : i + size]) for i in range(0, 3, size)]
    found = pa.concat_tables(parts)
    assert found.select(["part", "id", "c"]).to_pylist() == [
        {"part": f"p{n}", "id": i, "c": n} for i, n in ((1, 10), (3, 30))
    ]


def test_a_row_has_its_own_id_whatever_is_returned():
    def fn(row: dict[str, Any]):
        other = {1: {"id": 1}, 2: {}, 3: {"id": 1}}[row["id"]]
        return {**other, "c": row["n"]}

    schema = {"id": "BIGINT", "c": "BIGINT"}
    assert mapped(fn, schema=schema).to_pydict() == {"id": [1, 2, 3], "c": [10, 20, 30]}


def test_rows_keep_their_ids_though_the_function_gets_none():
    table = pa.table({"id": [7, 8, 9], "text": ["a b", "", "c"], "more": [1, 2, 3]})

    def words(row: dict[str, str]) -> list[str]:
        assert set(row) == {"text"}
        return row["text"].split()

    def is_empty(row: dict[str, str]) -> bool:
        return not row["text"]

    split = row_stage("flat_map", words, id="word_id", columns=["text"], include_columns=["more"])
    found = run_stage(split, table).select(["word_id", "id", "out", "more"])
    assert found.to_pydict() == {
        "word_id": ["7-0", "7-1", "9-0"],
        "id": [7, 7, 9],
        "out": ["a", "b", "c"],
        "more": [1, 1, 3],
    }
    kept = row_stage("filter", is_empty, columns=["text"], include_columns=["more"])
    assert run_stage(kept, table).to_pydict() == {"id": [8], "more": [2]}


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


@pytest.mark.parametrize("output", [None, "label"])
def test_a_schema_of_the_output_column_alone_is_its_type(output):
    made = mapped(lambda text: text, schema={"label": "VARCHAR"}, output_column=output)
    assert made.schema.field("label").type == pa.string()


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
