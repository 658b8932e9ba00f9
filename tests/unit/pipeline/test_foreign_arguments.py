"""Arguments that a stage does not take: each is refused with the line to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd


class Model:
    def __call__(self, batch: pa.Table) -> pa.Table:
        return batch


class Shout:
    def __call__(self, text: str) -> str:
        return text.upper()


def make_predict() -> Any:
    return lambda column: column


class Provider:
    def __init__(self, model: str, *, base_url: str | None = None, **options: Any) -> None: ...

    async def submit(self, request: Any) -> Any: ...

    async def embed(self, texts: list[str], dimensions: int | None) -> Any: ...

    async def classify(self, texts: list[str], labels: list[str]) -> Any: ...


class Strict:
    def __init__(self, model: str, *, address: str = "") -> None: ...

    async def submit(self, request: Any) -> Any: ...


def docs() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("/data"), id="id")


def mapped(**given: Any) -> vd.Stage:
    return docs().map_batches("s", Model, **{"schema": {"y": "FLOAT"}, **given})


def prompted(**given: Any) -> vd.Stage:
    return docs().prompt("s", "{text}", **{"provider": Provider, "model": "m", **given})


def embedded(**given: Any) -> vd.Stage:
    return docs().embed("s", "text", provider=Provider, model="m", **given)


def classified(**given: Any) -> vd.Stage:
    return docs().classify("s", "text", ["a", "b"], provider=Strict, model="m", **given)


def by_row(**given: Any) -> vd.Stage:
    return docs().map("s", Shout, **given)


def predicted(**given: Any) -> vd.Stage:
    return docs().predict_batch("s", make_predict, return_type="float", columns=["x"], **given)


def projected(**given: Any) -> vd.Stage:
    return docs().project("s", ["x"], **given)


def written(**given: Any) -> vd.Stage:
    return docs().project("p", ["x"]).write("s", "/out", **given)


def joined(**given: Any) -> vd.Stage:
    pipeline = docs()
    stages = [pipeline.project(name, ["x"]) for name in ("a", "b")]
    return pipeline.join("s", *stages, **given)


def refusal(declare: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(vd.DefinitionError) as caught:
        declare(**given)
    message = str(caught.value)
    assert message.startswith("stage 'docs/s': ")
    return message.removeprefix("stage 'docs/s': ")


FOREIGN: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    # Ray Data
    (mapped, {"num_gpus": 1}, "write gpus=1"),
    (mapped, {"num_gpus": 0.5}, "write gpus=0.5"),
    (mapped, {"num_gpus": 0}, "leave it out; that is the default"),
    (prompted, {"num_gpus": 2}, "write gpus=2"),
    (projected, {"num_gpus": 1}, "leave it out; project has no such argument"),
    (projected, {"num_cpus": 4}, "leave it out; project has no such argument"),
    (mapped, {"num_cpus": 2}, "write concurrency=vd.Workers(num_cpus=2)"),
    (mapped, {"compute": object()}, "write concurrency=N, or concurrency=(min, max); a class"),
    (mapped, {"compute": "actors"}, "a class stays loaded in its workers"),
    (mapped, {"fn_args": [1, 2]}, 'write fn_kwargs={"<parameter>": ...}, which passes'),
    (by_row, {"expr": "n > 1"}, "project(name, [...], where=...) filters by SQL"),
    # Hugging Face Datasets
    (by_row, {"batched": True}, 'call map_batches(name, fn, schema=..., batch_format="numpy")'),
    (by_row, {"batched": False}, "leave it out; that is the default"),
    (by_row, {"num_proc": 4}, "write concurrency=4"),
    (by_row, {"load_from_cache_file": False}, 'write reuse="none"'),
    (mapped, {"load_from_cache_file": True}, "leave it out, or write reuse="),
    (by_row, {"remove_columns": ["x"]}, "include_columns names; project(name, ...)"),
    # Ray Data
    (mapped, {"zero_copy_batch": True}, "leave it out; each call gets a copy"),
    (mapped, {"udf_modifying_row_count": True}, 'cardinality=vd.Children("<column of the new'),
    (mapped, {"udf_modifying_row_count": False}, "leave it out"),
    (mapped, {"scheduling_strategy": "SPREAD"}, "leave it out; workers are placed"),
    (mapped, {"max_calls": 100}, "write concurrency=vd.Workers(max_batches=100)"),
    (mapped, {"max_restarts": -1}, "leave it out; a worker that dies is replaced"),
    (
        mapped,
        {"ray_remote_args": {"num_gpus": 1, "num_cpus": 2, "lifetime": "detached"}},
        "write what a worker reserves as gpus=... and concurrency=vd.Workers(...)",
    ),
    # Daft
    (mapped, {"return_dtype": float}, 'write schema={"<column>": "<SQL type>"}'),
    (mapped, {"use_process": True}, "leave it out; each worker is a process"),
    (mapped, {"unnest": True}, "leave it out; each column"),
    (mapped, {"cpus": 2}, "write concurrency=vd.Workers(num_cpus=2)"),
    (mapped, {"ray_options": {"memory": 1024}}, "write what a worker reserves as gpus="),
    (embedded, {"provider_options": {"a": 1}}, "write model=vd.Model(options=...)"),
    # Spark
    (mapped, {"return_type": "array<float>"}, 'write schema={"<column>": "<SQL type>"}'),
    (by_row, {"batch_format": "numpy"}, "leave it out; this stage does not pass batches"),
    (by_row, {"num_gpus": 1}, "write gpus=1"),
    (by_row, {"return_dtype": list[float]}, 'write schema={"<column>": "<SQL type>"}'),
    (predicted, {"num_workers": 2}, "write concurrency=2"),
    (mapped, {"input_tensor_shapes": [[784]]}, "predict_batch("),
    # Vane
    (mapped, {"actor_number": 4}, "write concurrency=4"),
    (embedded, {"actor_number": 2}, "write concurrency=2"),
    (mapped, {"gpus_per_actor": 1}, "write gpus=1"),
    (mapped, {"memory_bytes": 10**9}, "write concurrency=vd.Workers(memory=1000000000)"),
    (mapped, {"num_workers": 4}, "write concurrency=4"),
    (mapped, {"target_max_batch_bytes": 1 << 20}, "leave it out; batch_size sets the rows"),
    (
        mapped,
        {"flat_map": True},
        'cardinality=vd.Children("<column of the new id>") if',
    ),
    (prompted, {"temperature": 0.2}, 'write sampling_params={"temperature": 0.2}'),
    (prompted, {"max_new_tokens": 64}, 'write sampling_params={"max_tokens": 64}'),
    (classified, {"max_concurrency_per_actor": 8}, "vd.Workers(max_concurrency=8)"),
    (prompted, {"system_message": "Be brief."}, "write system=..."),
    (prompted, {"preprocess": len}, "write messages=..., the function itself"),
    (prompted, {"postprocess": len}, 'add a stage: .map("<name>", postprocess, schema=...)'),
]


@pytest.mark.parametrize(("declare", "given", "line"), FOREIGN, ids=range(len(FOREIGN)))
def test_an_argument_of_another_system_is_refused_with_the_line_to_write(declare, given, line):
    message = refusal(declare, **given)
    (name,) = given
    assert message.startswith(f"unknown argument {name!r} of ")
    assert line in message


FLAT: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (mapped, {"max_error_rate": 0.1}, "write on_error=vd.Failures(max_error_rate=0.1)"),
    (mapped, {"max_retries": 2}, "write on_error=vd.Failures(max_retries=2)"),
    (by_row, {"timeout_s": 2.5}, "write on_error=vd.Failures(timeout_s=2.5)"),
    (by_row, {"version": "1"}, "write reuse=vd.Reuse(version=...)"),
    (embedded, {"per_row": True}, "write reuse=vd.Reuse(per_row=True)"),
    (predicted, {"max_rss": 10}, "write concurrency=vd.Workers(max_rss=10)"),
    (mapped, {"env_vars": ["KEY"]}, "write concurrency=vd.Workers(env_vars=...)"),
    (mapped, {"id": "new_id"}, "write cardinality=vd.Children(id=...)"),
    (prompted, {"prices": {"prompt": 1}}, "write model=vd.Model(prices=...)"),
    (prompted, {"explain_errors": 1}, "write on_error=vd.Failures(explain_errors=1)"),
    (projected, {"description": "d"}, "write asset=vd.Asset(description=...)"),
    (written, {"owners": ["a"]}, "write asset=vd.Asset(owners=...)"),
]


@pytest.mark.parametrize(("declare", "given", "line"), FLAT, ids=range(len(FLAT)))
def test_a_field_of_a_record_is_refused_with_the_record_to_write(declare, given, line):
    message = refusal(declare, **given)
    (name,) = given
    assert message.startswith(f"unknown argument {name!r} of ")
    assert message.endswith(f": {line}")


def test_an_option_of_a_provider_is_refused_with_the_place_to_write_it():
    message = refusal(prompted, base_url="https://u:secret@host")
    assert message.endswith("those of its provider go into model=vd.Model(..., options={...})")
    assert "secret" not in message


def test_several_arguments_are_refused_at_once():
    message = refusal(mapped, num_gpus=1, batchsize=8)
    assert message == (
        "unknown argument 'batchsize' of map_batches. Did you mean 'batch_size' or 'max_batches'?\n"
        "unknown argument 'num_gpus' of map_batches, known from Ray Data: write gpus=1"
    )


@pytest.mark.parametrize(
    ("declare", "name", "near"),
    [
        (mapped, "Batch_Size", "'batch_size'"),
        (mapped, "colums", "'columns'"),
        (mapped, "descripton", "'description'"),
        (prompted, "sampling_param", "'sampling_params'"),
        (embedded, "dimension", "'dimensions'"),
        (projected, "wher", "'where'"),
        (written, "compresion", "'compression'"),
        (by_row, "fn_kwarg", "'fn_kwargs'"),
        (by_row, "output_colum", "'output_column'"),
        (predicted, "input_tensor_shape", "'input_tensor_shapes'"),
        (joined, "source_column", "'source_columns'"),
    ],
)
def test_a_misspelt_argument_is_refused_with_similar_names(declare, name, near):
    message = refusal(declare, **{name: None})
    assert f"unknown argument {name!r} of " in message
    assert f"Did you mean {near}" in message


def test_an_argument_like_no_other_is_refused_with_the_names_that_there_are():
    message = refusal(projected, zzz=1)
    assert message.startswith("unknown argument 'zzz' of project: its options are 'where', ")
    assert message.endswith("'include_columns', 'asset'")
    with pytest.raises(vd.DefinitionError, match=r"'zzz' of build_source: it"):
        docs().build_source(zzz=1)


def test_no_value_that_may_be_secret_is_in_a_message():
    message = refusal(
        prompted, base_url="https://u:secret@host", runtime_env={"env_vars": {"K": "secret"}}
    )
    assert "secret" not in message
    assert "env_vars=[" in message


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"on_error": "log"}, "on_error is 'log', a value of Daft: write on_error=\"null\""),
        ({"on_error": "ignore"}, 'write on_error="null"'),
        ({"on_error": "skip"}, "expected one of 'raise', 'quarantine', 'null'"),
        ({"batch_format": "default"}, 'a value of Ray Data: write batch_format="numpy"'),
    ],
)
def test_values_of_other_systems(given, line):
    assert line in refusal(mapped, **given)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"adress": "x"}, "it takes 'address'. Did you mean 'address'?"),
        ({"concurrency": 2}, "'concurrency' is an argument of prompt: write concurrency=2 there"),
        ({"num_gpus": 1}, "'num_gpus' is known from Ray Data: write gpus=1"),
        ({"zzz": 1}, "it takes 'address'"),
    ],
)
def test_options_that_a_provider_does_not_take(options, line):
    message = refusal(prompted, provider=Strict, model=vd.Model("m", options=options))
    assert message.startswith(
        f"the options of the model have {next(iter(options))!r}, which Strict does"
    )
    assert message.endswith(line)


def test_a_range_of_workers_is_accepted():
    assert mapped(concurrency=(1, 4)).spec.concurrency == (1, 4)
    assert "write concurrency=(1, 4)" in refusal(mapped, concurrency=(1, 4, 2))


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("filter", {"schema": {"n": "BIGINT"}}, "unknown argument 'schema' of filter"),
        ("filter", {"output_column": "n"}, "unknown argument 'output_column' of filter"),
        ("filter", {"cardinality": "one_to_one"}, "unknown argument 'cardinality' of filter"),
        ("map", {"cardinality": "filter"}, "unknown argument 'cardinality' of map"),
        ("map", {"batch_size": 3}, "map takes no batch_size: it calls"),
        ("map", {"kind": "x"}, "unknown argument 'kind' of map"),
        ("map", {"contract": "x"}, "unknown argument 'contract' of map"),
    ],
)
def test_an_argument_of_another_method_is_refused(method, given, words):
    def fn(text: str) -> bool:
        return bool(text)

    pipeline = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    with pytest.raises(vd.DefinitionError, match=words):
        getattr(pipeline, method)("stage", fn, **given)


@pytest.mark.parametrize("name", ["schema", "inputs"])
def test_predict_batch_knows_its_types_and_names_its_columns(name):
    pipeline = vd.Pipeline("docs", source=vd.parquet("docs.parquet"), id="id")
    with pytest.raises(vd.DefinitionError, match=f"unknown argument {name!r} of predict_batch"):
        pipeline.predict_batch(
            "stage", lambda: len, return_type="int", columns=["text"], **{name: ["text"]}
        )


def test_a_misspelt_argument_of_another_system_has_the_line_to_write():
    with pytest.raises(vd.DefinitionError, match=r"'num_gpus' of Ray Data: write gpus=1$"):
        mapped(num_gpu=1)
    with pytest.raises(vd.DefinitionError, match=r"Did you mean 'batch_size' or "):
        mapped(batchsize=1)


def declared(**given: Any) -> vd.Pipeline:
    return vd.Pipeline("docs", **{"source": vd.parquet("/data"), "id": "id", **given})


@pytest.mark.parametrize(
    ("call", "name", "line"),
    [
        (declared, "fragment_row", "unknown argument 'fragment_row' of vd.Pipeline. Did you mean"),
        (declared, "sorce", "Did you mean 'source'?"),
        (declared, "num_gpus", "All others are arguments of its stages"),
        (vd.cls, "gpu", "unknown argument 'gpu' of @vd.cls. Did you mean 'gpus'?"),
        (vd.cls, "num_gpus", "known from Ray Data: write gpus=1"),
        (vd.cls, "num_cpus", "known from Ray Data: write cpus=1"),
        (vd.cls, "num_gpu", "Did you mean 'num_gpus' of Ray Data: write gpus=1"),
        (vd.cls, "batch_size", "write batch_size=1 at the decorator of its method, @vd.method.b"),
        (vd.cls, "memory", "All others are arguments of the stage"),
        (vd.method, "gpus", "write gpus=1 at the decorator of its class, @vd.cls"),
        (vd.method, "return_type", "Did you mean 'return_dtype'?"),
        (vd.method.batch, "return_type", "Did you mean 'return_dtype'?"),
        (vd.func, "gpu", "Did you mean 'gpus'?"),
        (vd.func, "batch_size", "write batch_size=1 at the decorator @vd.func.batch"),
        (vd.func, "options", "unknown argument 'options' of @vd.func. Did you mean"),
        (vd.func, "zzz", "of @vd.func: its options are 'return_dtype', 'unnest', "),
        (vd.func.batch, "return_type", "Did you mean 'return_dtype'?"),
    ],
)
def test_an_unknown_argument_of_a_pipeline_or_decorator(call, name, line):
    with pytest.raises(vd.DefinitionError) as refused:
        call(**{name: 1})
    assert str(refused.value).startswith(f"unknown argument {name!r} of ")
    assert line in str(refused.value)


def nothing(row: dict) -> None: ...


@pytest.mark.parametrize(
    ("method", "values", "given", "lines"),
    [
        ("prompt", ["{text}"], {"model": "m"}, ["provider is missing; expected one"]),
        ("prompt", ["{text}"], {}, ["prompt lacks its argument 'model'"]),
        (
            "prompt", ["{text}"], {"model": "m", "provder": Provider},
            ["'provder' of prompt. Did you mean 'provider'"],
        ),
        ("embed", ["text"], {"dimension": 3}, ["'dimensions'", "lacks its argument 'model'"]),
        (
            "classify", ["text"], {"lables": ["a"], "provider": Provider, "model": "m"},
            ["of classify. Did you mean 'labels'", "classify lacks its argument 'labels'"],
        ),
        ("flat_map", [nothing], {"schema": "INT"}, ["flat_map lacks its argument 'id'"]),
        ("map", [], {"function": nothing}, ["map lacks its argument 'fn'"]),
        ("map_batches", [nothing], {}, ['as schema={"label": "VARCHAR"}, or write schema="infer"']),
        (
            "map_batches", [Model], {"return_dtype": int},
            ['from Daft: write schema={"<column>": "<SQL type>"}', "lacks its argument 'schema'"],
        ),
        (
            "predict_batch", [make_predict], {"column": ["x"], "return_type": "int"},
            ["'column' of predict_batch. Did you mean 'columns'", "lacks its argument 'columns'"],
        ),
        (
            "predict_batch", [make_predict], {"columns": ["x"], "returnType": "int"},
            ["write return_type=", "lacks its argument 'return_type'"],
        ),
        ("project", [], {"columms": ["x"]}, ["Did you mean 'columns'", "lacks its argument"]),
        ("write", [], {"uri": "/out"}, ["Did you mean 'url'?", "write lacks its argument 'url'"]),
    ],
)  # fmt: skip
def test_a_missing_argument_is_named_with_a_misspelt_one(method, values, given, lines):
    def declare(**given: Any) -> Any:
        return getattr(docs(), method)("s", *values, **given)

    message = refusal(declare, **given)
    for line in lines:
        assert line in message


def untyped(text):
    return text


@pytest.mark.parametrize("name", ["return_dtype", "return_type", "returnType"])
def test_a_type_of_another_system_is_named_before_the_unknown_type(name):
    message = refusal(lambda **given: docs().map("s", untyped, **given), **{name: "int"})
    assert message.startswith(f"unknown argument {name!r} of map, known from ")
    assert 'write schema={"<column>": "<SQL type>"}' in message


@pytest.mark.parametrize("name", ["label", "return_format", "temperatur"])
def test_an_unknown_argument_of_classify_names_classify(name):
    assert refusal(classified, **{name: 1}).startswith(f"unknown argument {name!r} of classify")
