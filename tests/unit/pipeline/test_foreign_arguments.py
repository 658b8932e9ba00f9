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


FOREIGN: list[tuple[Callable[..., Any], str, str]] = [
    # Ray Data
    (mapped, "num_gpus", "write gpus=..."),
    (prompted, "num_gpus", "write gpus=..."),
    (by_row, "num_gpus", "write gpus=..."),
    (mapped, "num_cpus", "write concurrency=vd.Workers(num_cpus=...)"),
    (mapped, "compute", "write concurrency=N, or concurrency=(min, max)"),
    (mapped, "fn_args", "write fn_kwargs=..."),
    (by_row, "expr", "project(name, [...], where=...) filters by SQL"),
    (mapped, "udf_modifying_row_count", 'cardinality=vd.Children("<column of the new'),
    (mapped, "scheduling_strategy", "leave it out; workers are placed"),
    (mapped, "max_calls", "write concurrency=vd.Workers(max_batches=...)"),
    (mapped, "ray_remote_args", "gpus=... and concurrency=vd.Workers(...)"),
    # Hugging Face Datasets
    (by_row, "batched", 'map_batches(name, fn, schema=..., batch_format="numpy")'),
    (by_row, "num_proc", "write concurrency=N"),
    (by_row, "load_from_cache_file", 'write reuse="none"'),
    # Daft
    (mapped, "return_dtype", 'write schema={"<column>": "<SQL type>"}'),
    (mapped, "use_process", "leave it out; each worker is a process"),
    (mapped, "unnest", "leave it out; each column"),
    (mapped, "cpus", "write concurrency=vd.Workers(num_cpus=...)"),
    (mapped, "ray_options", "gpus=... and concurrency=vd.Workers(...)"),
    (embedded, "provider_options", "write model=vd.Model(options=...)"),
    # Spark
    (mapped, "return_type", 'write schema={"<column>": "<SQL type>"}'),
    (prompted, "return_type", "write return_format=..."),
    (by_row, "batch_format", "map_batches("),
    (mapped, "input_tensor_shapes", "predict_batch("),
    # Vane
    (mapped, "actor_number", "write concurrency=N"),
    (predicted, "num_workers", "write concurrency=N"),
    (mapped, "gpus_per_actor", "write gpus=..."),
    (mapped, "memory_bytes", "write concurrency=vd.Workers(memory=...)"),
    (mapped, "flat_map", 'cardinality=vd.Children("<column of the new id>") if'),
    (prompted, "temperature", 'write sampling_params={"temperature": ...'),
    (prompted, "max_new_tokens", '"max_tokens": ...}'),
    (classified, "max_concurrency_per_actor", "vd.Workers(max_concurrency=...)"),
    (prompted, "system_message", "write system=..."),
    (prompted, "preprocess", "write messages=..."),
    (prompted, "postprocess", 'add a stage: .map("<name>", postprocess)'),
]


@pytest.mark.parametrize(("declare", "name", "line"), FOREIGN)
def test_an_argument_of_another_system_is_refused_with_the_line_to_write(declare, name, line):
    message = refusal(declare, **{name: 1})
    assert message.startswith(f"unknown argument {name!r} of ")
    assert line in message


FLAT: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (mapped, {"max_error_rate": 0.1}, "write on_error=vd.Failures(max_error_rate=...)"),
    (mapped, {"max_retries": 2}, "write on_error=vd.Failures(max_retries=...)"),
    (by_row, {"timeout_s": 2.5}, "write on_error=vd.Failures(timeout_s=...)"),
    (by_row, {"version": "1"}, "write reuse=vd.Reuse(version=...)"),
    (embedded, {"per_row": True}, "write reuse=vd.Reuse(per_row=...)"),
    (predicted, {"max_rss": 10}, "write concurrency=vd.Workers(max_rss=...)"),
    (mapped, {"env_vars": ["KEY"]}, "write concurrency=vd.Workers(env_vars=...)"),
    (mapped, {"id": "new_id"}, "write cardinality=vd.Children(id=...)"),
    (prompted, {"prices": {"prompt": 1}}, "write model=vd.Model(prices=...)"),
    (prompted, {"explain_errors": 1}, "write on_error=vd.Failures(explain_errors=...)"),
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
        "unknown argument 'num_gpus' of map_batches: write gpus=..."
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
    assert message.startswith("unknown argument 'zzz' of project: its options are 'name', 'col")
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
        ({"on_error": "skip"}, "expected one of 'raise', 'quarantine', 'null'"),
        ({"batch_format": "default"}, "expected one of 'pyarrow', 'numpy'"),
    ],
)
def test_values_of_other_systems(given, line):
    assert line in refusal(mapped, **given)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"adress": "x"}, "got an unexpected keyword argument 'adress'"),
        ({"zzz": 1}, "got an unexpected keyword argument 'zzz'"),
    ],
)
def test_options_that_a_provider_does_not_take(options, line):
    message = refusal(prompted, provider=Strict, model=vd.Model("m", options=options))
    assert message.startswith("the options of the model: Strict(model: 'str', *, address: 'str' = ")
    assert message.endswith(line)


def test_a_range_of_workers_is_accepted():
    assert mapped(concurrency=(1, 4)).spec.concurrency == (1, 4)
    assert "or (min, max) with min <= max" in refusal(mapped, concurrency=(1, 4, 2))


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


def declared(**given: Any) -> vd.Pipeline:
    return vd.Pipeline("docs", **{"source": vd.parquet("/data"), "id": "id", **given})


@pytest.mark.parametrize(
    ("call", "name", "line"),
    [
        (declared, "fragment_row", "unknown argument 'fragment_row' of vd.Pipeline. Did you mean"),
        (declared, "sorce", "Did you mean 'source'?"),
        (declared, "num_gpus", "All others are arguments of its stages"),
        (vd.cls, "gpu", "unknown argument 'gpu' of @vd.cls. Did you mean 'gpus'?"),
        (vd.cls, "num_gpus", "write gpus=..."),
        (vd.cls, "num_cpus", "write cpus=..."),
        (vd.cls, "batch_size", "write it at @vd.func.batch or @vd.method.batch"),
        (vd.cls, "memory", "All others are arguments of the stage"),
        (vd.cls, "return_dtype", "write it at its method, @vd.method"),
        (vd.method, "return_type", "Did you mean 'return_dtype'?"),
        (vd.method.batch, "return_type", "Did you mean 'return_dtype'?"),
        (vd.func, "gpu", "Did you mean 'gpus'?"),
        (vd.func, "zzz", "its options are 'function', 'cpus', 'gpus', "),
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
        ("prompt", ["{text}"], {}, ["prompt: missing a required argument: 'model'"]),
        (
            "prompt", ["{text}"], {"model": "m", "provder": Provider},
            ["'provder' of prompt. Did you mean 'provider'"],
        ),
        ("embed", ["text"], {"dimension": 3}, ["'dimensions'", "required argument: 'model'"]),
        (
            "classify", ["text"], {"lables": ["a"], "provider": Provider, "model": "m"},
            ["of classify. Did you mean 'labels'", "classify: missing a required arg"],
        ),
        ("flat_map", [nothing], {"schema": "INT"}, ["flat_map: missing a required argument: 'id'"]),
        ("map", [], {"function": nothing}, ["map: missing a required argument: 'fn'"]),
        ("map_batches", [nothing], {}, ['as schema={"label": "VARCHAR"}, or write schema="infer"']),
        (
            "map_batches", [Model], {"return_dtype": int},
            ['write schema={"<column>": "<SQL type>"}', "missing a required argument: 'schema'"],
        ),
        (
            "predict_batch", [make_predict], {"column": ["x"], "return_type": "int"},
            ["'column' of predict_batch. Did you mean 'columns'", "required argument: 'columns'"],
        ),
        (
            "predict_batch", [make_predict], {"columns": ["x"], "returnType": "int"},
            ["write return_type=", "missing a required argument: 'return_type'"],
        ),
        ("project", [], {"columms": ["x"]}, ["Did you mean 'columns'", "a required argument"]),
        ("write", [], {"uri": "/out"}, ["Did you mean 'url'?", "a required argument: 'url'"]),
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
    assert message.startswith(f"unknown argument {name!r} of map: write ")
    assert 'write schema={"<column>": "<SQL type>"}' in message


@pytest.mark.parametrize("name", ["label", "return_format", "temperatur"])
def test_an_unknown_argument_of_classify_names_classify(name):
    assert refusal(classified, **{name: 1}).startswith(f"unknown argument {name!r} of classify")
