"""Classes and functions under `vd.cls`, `vd.method` and `vd.func`, where they are declared."""

from __future__ import annotations

import asyncio
import copy
import functools
import importlib
import inspect
import pickle
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import dagster as dg
import numpy as np
import numpy.typing as npt
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.udf_calls import IDS, row_stage, run_stage
from vane_dagster._worker_process import become_worker
from vane_dagster.errors import DefinitionError, SchemaError
from vane_dagster.pipeline.contracts import ColumnsCall
from vane_dagster.pipeline.decorators import CallOptions
from vane_dagster.pipeline.lazy_instances import LazyInstance
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.udf import make_udf

MADE: list[str] = []


@vd.cls(gpus=1, cpus=2, max_concurrency=3, max_retries=1, on_error="log", name_override="whisper")
class Transcriber:
    """Transcribes."""

    SUFFIX = "!"

    def __init__(self, model: str, *, scale: int = 1) -> None:
        MADE.append(model)
        self.model, self.scale = model, scale

    @vd.method(return_dtype="VARCHAR", max_retries=5)
    def transcribe(self, text: str) -> str:
        return self.model + text * self.scale + self.SUFFIX

    @vd.method.batch(return_dtype="BIGINT", batch_size=8)
    def count(self, text: list[str]) -> list[int]:
        return [len(each) for each in text]

    def plain(self, text: str) -> str:
        return text

    async def later(self, text: str) -> str:
        return self.model + text

    def __call__(self, text: str) -> str:
        return text.upper()

    @staticmethod
    def version() -> int:
        return 3

    @classmethod
    def small(cls) -> Any:
        return cls("small")

    @property
    def width(self) -> int:
        return 1


@vd.cls
class Larger(Transcriber):
    def __init__(self, model: str) -> None:
        super().__init__(model + "-large", scale=2)

    def whole(self, text: str) -> Any:
        return Transcriber("inner")


class Undecorated(Transcriber):
    pass


class Alone:
    def __init__(self, n: int) -> None:
        self.n = n

    def add(self, x: int) -> int:
        return x + self.n


@vd.cls
@dataclass
class Record:
    model: str
    size: int = 1

    def grow(self, x: int) -> int:
        return x * self.size


@vd.cls
class Empty:
    def one(self) -> int:
        return 1


@vd.func(return_dtype="BIGINT", gpus=0, max_retries=2, name_override="adder", cpus=1)
def add(a: int, b: int) -> int:
    return a + b


@vd.func.batch(return_dtype="BIGINT", batch_size=4)
def add_all(a: Any, b: Any) -> Any:
    return a + b


@pytest.fixture(autouse=True)
def nothing_made() -> None:
    MADE.clear()


def test_calling_the_class_constructs_nothing() -> None:
    lazy = Transcriber("m", scale=2)
    assert isinstance(lazy, LazyInstance)
    assert "Transcriber, not constructed here" in repr(lazy)
    assert "Transcriber.transcribe, not constructed here" in repr(lazy.transcribe)
    assert lazy.version() == 3
    assert isinstance(lazy.small(), LazyInstance)
    assert isinstance(Larger("m"), LazyInstance)
    assert MADE == []
    assert type(Undecorated("m")) is Undecorated, "a subclass is lazy only if it is decorated"


def test_a_method_that_is_called_with_values_constructs_once_in_each_process() -> None:
    lazy = Transcriber("m", scale=2)
    assert lazy.transcribe("a") == "maa!"
    assert lazy("a") == "A"
    assert asyncio.run(lazy.later("a")) == "ma"
    method = pickle.loads(pickle.dumps(lazy.transcribe))
    assert MADE == ["m"]
    assert method("a") == "maa!"
    assert MADE == ["m", "m"]
    assert type(Larger("m").whole("a")) is Transcriber, "code that a method runs constructs"
    assert Empty().one() == 1


@pytest.mark.parametrize("name", ["scale", "width", "SUFFIX", "nothing"])
def test_of_an_instance_that_is_not_constructed_only_methods_can_be_named(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no method '{name}'.*only its methods"):
        getattr(Transcriber("m"), name)


def test_a_wrong_argument_fails_where_it_is_written() -> None:
    with pytest.raises(DefinitionError, match=r"Transcriber\(model: 'str'.*argument 'modle'"):
        Transcriber("m", modle="m")  # type: ignore[call-arg]  # the mistake
    with pytest.raises(DefinitionError, match=r"Larger\(model: 'str'\)"):
        Larger("m", scale=2)  # type: ignore[call-arg]  # the mistake
    with pytest.raises(DefinitionError, match="too many positional arguments"):
        Record("m", 1, 2)  # type: ignore[call-arg]  # the mistake


def test_the_class_is_the_same_object_and_has_its_own_signature() -> None:
    assert pickle.loads(pickle.dumps(Transcriber)) is Transcriber
    assert Transcriber.__doc__ == "Transcribes."
    assert str(inspect.signature(Transcriber)) == "(model: 'str', *, scale: 'int' = 1)"
    assert str(inspect.signature(Larger)) == "(model: 'str')"
    assert str(inspect.signature(Undecorated)) == str(inspect.signature(Transcriber))
    assert str(inspect.signature(Record)) == "(model: 'str', size: 'int' = 1)"
    assert pickle.loads(pickle.dumps(add)) is add
    assert add(1, 2) == 3


# What a stage is given


def test_a_stage_is_given_a_class_or_one_of_its_methods() -> None:
    lazy = Transcriber("m", scale=2)
    found = make_udf("a/b", lazy, (), None)
    assert (found.target, found.method) == (Transcriber, "__call__")
    assert (found.constructor_args, found.constructor_kwargs) == (("m",), {"scale": 2})
    found = make_udf("a/b", lazy.transcribe, (), {})
    assert (found.target, found.method) == (Transcriber, "transcribe")
    found = make_udf("a/b", functools.partial(Transcriber, "m"))
    assert (found.target, found.method, found.constructor_args) == (Transcriber, "__call__", ("m",))
    found = make_udf("a/b", add, (), {})
    assert (found.target, found.constructor_args) == (add, ())
    assert make_udf("a/b", Transcriber.version, (), {}).target is Transcriber.version
    found = make_udf("a/b", functools.partial(lazy.plain, n=1))
    assert (found.target, found.method, found.kwargs) == (Transcriber, "plain", {"n": 1})


@pytest.mark.parametrize(
    ("fn", "given"),
    [
        (Transcriber(Empty()).plain, {}),
        (Transcriber([Empty().one]).plain, {}),
        (functools.partial(Undecorated, model={"a": Empty()}), {}),
        (add, {"fn_kwargs": {"b": Empty()}}),
        (add, {"fn_kwargs": {"b": (1, Empty())}}),
    ],
)
def test_an_instance_that_is_not_constructed_is_no_argument(fn: Any, given: dict[str, Any]) -> None:
    found = r"is <Empty(.one)?, not constructed here>.*Call Empty\(...\) in the __init"
    with pytest.raises(DefinitionError, match=found):
        row_stage("map", fn, columns={"text": "t"} if not given else None, schema="INT", **given)


def test_with_a_version_it_is_an_argument_and_constructs_where_it_is_called() -> None:
    def use(n: int, model: Any) -> int:
        return n + int(model.one())

    stage = row_stage("map", use, fn_kwargs={"model": Empty()}, version="1")
    assert run_stage(stage, IDS)["out"].to_pylist() == [11, 21, 31]


WRONG = {
    "ray": (lambda: vd.cls(ray_options={"a": 1})(Alone), "are arguments of the stage"),
    "errors": (lambda: vd.cls(on_error="skip")(Alone), "'raise', 'log' or 'ignore'"),
    "rows of a function": (lambda: vd.func(batch_size=2), "an argument of .*batch"),
    "no type of a batch": (lambda: vd.method.batch(batch_size=2), "lacks .*'return_dtype'"),
    "a function": (lambda: vd.cls(lambda x: x), "use @vd.func for a function"),
    "a class": (lambda: vd.func(Alone), "not a function"),
    "an unknown one": (
        lambda: vd.func(gpu=1),
        "unknown argument 'gpu' of @vd.func or @vd.method. Did you mean 'gpus'",
    ),
    "a constructor": (
        lambda: vd.cls(type("Own", (), {"__new__": lambda cls: 1})),
        "defines or inherits __new__.*Move its code to __init__",
    ),
    "a base's constructor": (
        lambda: vd.cls(type("Pair", (tuple,), {})),
        "defines or inherits __new__",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(DefinitionError, match=f"(?s){message}"):
        make()
    assert not hasattr(Alone, "__vane_options__")


# Stages


def docs() -> vd.Pipeline:
    pipeline = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    pipeline.project("clean", {"text": "text::VARCHAR", "a": "a::BIGINT", "b": "b::BIGINT"})
    return pipeline


def spec(fn: Any, name: str = "out", method: str = "map", **options: Any) -> MapBatchesSpec:
    found = getattr(docs()["clean"], method)(name, fn, **options).spec
    assert isinstance(found, MapBatchesSpec)
    return found


def test_options_of_the_method_and_then_of_the_class_are_the_defaults_of_a_stage() -> None:
    found = spec(Transcriber("m").transcribe)
    assert (found.gpus, found.workers.num_cpus, found.concurrency) == (1, 2, (3, 3))
    assert (found.failures.max_retries, found.failures.on_error) == (5, "null")
    assert found.udf.name == "whisper"
    assert found.schema == pa.schema({"out": pa.string()})
    found = spec(Transcriber("m").count)
    assert (found.batch_size, found.failures.max_retries) == (8, 1)
    assert found.contract == ColumnsCall(("text",), "pyarrow", (), "out")
    found = spec(Transcriber("m").later)
    assert (found.concurrency, found.max_concurrency) == ((1, 1), 3)
    found = spec(add_all, columns={"b": "a", "a": "b"})
    assert isinstance(found.contract, ColumnsCall)
    assert found.contract.columns == ("b", "a")
    found = spec(Transcriber("m").plain, method="map_batches", schema={"x": "BIGINT"})
    assert (found.gpus, found.udf.method) == (1, "plain")
    assert make_udf("a/b", Undecorated).options == CallOptions()

    @vd.cls(gpus=1)
    class Both:
        @vd.method(gpus=2)
        def own(self, n: int) -> int:
            return n

    assert spec(Both().own, columns={"n": "a"}).gpus == 2
    assert spec(add).failures.max_retries == 2


@pytest.mark.parametrize(
    ("annotation", "format"),
    [
        (np.ndarray, "numpy"),
        (npt.NDArray[np.float32], "numpy"),
        (pd.Series, "pandas"),
        (pl.Series, "polars"),
        (pa.Array, "pyarrow"),
        (list[int], "pyarrow"),
        ("daft.Series", "pyarrow"),
        (None, "pyarrow"),
    ],
)
def test_columns_are_arrays_of_the_library_that_an_annotation_names(
    annotation: Any, format: str
) -> None:
    def double(a: Any, b: Any) -> Any:
        return a * 2

    double.__annotations__ = {} if annotation is None else {"b": annotation}
    contract = spec(vd.func.batch(return_dtype="BIGINT")(double)).contract
    assert isinstance(contract, ColumnsCall)
    assert contract.format == format


@dataclass
class Answer:
    text: str
    score: float


STRUCT = pa.struct([("text", pa.string()), ("score", pa.float64())])
TYPES: dict[str, tuple[dict[str, Any], pa.Schema]] = {
    "SQL": ({"return_dtype": "FLOAT[2]"}, pa.schema({"out": pa.list_(pa.float32(), 2)})),
    "Arrow": ({"return_dtype": pa.int8()}, pa.schema({"out": pa.int8()})),
    "an annotation": ({"return_dtype": list[int]}, pa.schema({"out": pa.list_(pa.int64())})),
    "a struct": ({"return_dtype": STRUCT}, pa.schema({"out": STRUCT})),
    "a class": ({"return_dtype": Answer}, pa.schema({"out": STRUCT})),
    "fields": ({"return_dtype": Answer, "unnest": True}, pa.schema(list(STRUCT))),
    "columns": ({"return_dtype": {"text": "VARCHAR", "score": float}}, pa.schema(list(STRUCT))),
    "the annotation": ({}, pa.schema({"out": pa.int64()})),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_the_type_of_a_result_is_what_the_decorator_or_the_annotation_says(kind: str) -> None:
    options, schema = TYPES[kind]

    def answer(text) -> int:  # type: ignore[no-untyped-def]  # the annotation of the result counts
        return 1

    assert spec(vd.func(**options)(answer)).schema == schema
    if options:
        assert spec(vd.func.batch(**options)(answer)).schema == schema


def test_methods_of_a_class_have_keys_of_their_own_and_one_pool() -> None:
    pipeline = docs()
    lazy = Transcriber("m")
    names = ("transcribe", "count", "plain", "later")
    specs = [pipeline["clean"].map(n, getattr(lazy, n)).spec for n in names]
    assert len({str(each.components(pipeline)) for each in specs}) == 4
    assert len({each.worker_code(pipeline) for each in specs}) == 1


REFUSED = {
    "a method of a class": (
        lambda: spec(Transcriber.plain), "Transcriber.plain was given as a method.* with @vd.cls"
    ),
    "batches": (
        lambda: spec(Transcriber("m").count, method="map_batches", schema={"x": "INT"}),
        r"whisper expects an array for each column.*map\('out', ...\)",
    ),
    "a filter": (lambda: spec(add_all, method="filter"), "row by row: use map, or leave out"),
    "a whole row": (
        lambda: spec(vd.func.batch(return_dtype="INT")(lambda row: row)),
        "array for each column, by position; name its parameters",
    ),
    "fields of a number": (
        lambda: spec(vd.func(return_dtype="INT", unnest=True)(lambda a: a)), "unnest=True.*int32"
    ),
    "an unknown type": (
        lambda: spec(vd.func(return_dtype="NUMBER")(lambda a: a)), "return_dtype is 'NUMBER'"
    ),
    "the wrong arguments of calls": (
        lambda: spec(Transcriber("m").plain, fn_kwargs={"n": 1}), "unexpected keyword argument 'n'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stage_refuses_is_named(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises((DefinitionError, SchemaError, AttributeError), match=f"(?s){message}"):
        make()


def test_a_worker_does_not_repeat_dagsters_notes_on_definitions(monkeypatch):
    def raw() -> None: ...

    monkeypatch.setenv("VANE_DAGSTER_WORKER", "")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        become_worker()
        dg.asset(backfill_policy=dg.BackfillPolicy.single_run())(raw)
        warnings.warn("theirs", stacklevel=1)
    assert [str(each.message) for each in said] == ["theirs"]


def test_a_worker_constructs_at_once_except_what_a_module_declares(tmp_path, monkeypatch):
    (tmp_path / "lazy_defs.py").write_text(
        "import vane_dagster as vd\n"
        "@vd.cls\nclass Model:\n"
        "    def __init__(self, n):\n        self.n = n\n"
        "    def inner(self):\n        return Model(2)\n"
        "    def imported(self):\n        from lazy_later import MODEL\n        return MODEL\n"
        "MODEL = Model(1)\n"
    )
    (tmp_path / "lazy_later.py").write_text("import lazy_defs\nMODEL = lazy_defs.Model(5)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("lazy_defs", "lazy_later"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    defs = importlib.import_module("lazy_defs")
    assert isinstance(defs.Model(1), LazyInstance)
    monkeypatch.setenv("VANE_DAGSTER_WORKER", "")  # is restored after the test
    become_worker()
    made = defs.Model(1)
    assert type(made) is defs.Model
    assert type(made.inner()) is defs.Model
    assert copy.copy(made).n == 1
    assert isinstance(defs.MODEL, LazyInstance)
    assert isinstance(made.imported(), LazyInstance)  # of a module that declares a pipeline
