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


def docs() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("/data"), id="id")


def adding(method: str, *values: Any, **always: Any) -> Callable[..., vd.Stage]:
    """Return a function that adds a stage with further arguments."""

    def add(**given: Any) -> vd.Stage:
        stage: vd.Stage = getattr(docs(), method)("s", *values, **{**always, **given})
        return stage

    return add


def joined(**given: Any) -> vd.Stage:
    pipeline = docs()
    stages = [pipeline.project(name, ["x"]) for name in ("a", "b")]
    return pipeline.join("s", *stages, **given)


def declared(**given: Any) -> vd.Pipeline:
    return vd.Pipeline("docs", **{"source": vd.parquet("/data"), "id": "id", **given})


mapped = adding("map_batches", Model, schema={"y": "FLOAT"})
by_row = adding("map", Shout)
untyped = adding("map", lambda text: text)
filtered = adding("filter", bool)
predicted = adding("predict_batch", make_predict, return_type="float", columns=["x"])
prompted = adding("prompt", "{text}", provider=Provider, model="m")
embedded = adding("embed", "text", provider=Provider, model="m")
classified = adding("classify", "text", ["a", "b"], provider=Provider, model="m")
projected = adding("project", ["x"])
written = adding("write", "/out")
NO_STAGES = (declared, vd.cls, vd.method, vd.method.batch, vd.func, vd.func.batch)


def refusal(declare: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(vd.DefinitionError) as caught:
        declare(**given)
    message = str(caught.value)
    assert message.startswith("stage 'docs/s': ") != (declare in NO_STAGES)
    return message.removeprefix("stage 'docs/s': ")


REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    # Ray Data
    (mapped, "num_gpus", "write gpus=..."),
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
    # Fields of records
    (mapped, "max_error_rate", ": write on_error=vd.Failures(max_error_rate=...)"),
    (by_row, "timeout_s", ": write on_error=vd.Failures(timeout_s=...)"),
    (by_row, "version", ": write reuse=vd.Reuse(version=...)"),
    (embedded, "per_row", ": write reuse=vd.Reuse(per_row=...)"),
    (predicted, "max_rss", ": write concurrency=vd.Workers(max_rss=...)"),
    (mapped, "id", ": write cardinality=vd.Children(id=...)"),
    (prompted, "prices", ": write model=vd.Model(prices=...)"),
    (prompted, "explain_errors", ": write on_error=vd.Failures(explain_errors=...)"),
    (projected, "description", ": write asset=vd.Asset(description=...)"),
    (written, "owners", ": write asset=vd.Asset(owners=...)"),
    # Misspelt names
    (mapped, "Batch_Size", "Did you mean 'batch_size'"),
    (mapped, "descripton", "Did you mean 'description'"),
    (prompted, "sampling_param", "Did you mean 'sampling_params'"),
    (embedded, "dimension", "Did you mean 'dimensions'"),
    (projected, "wher", "Did you mean 'where'"),
    (written, "compresion", "Did you mean 'compression'"),
    (by_row, "output_colum", "Did you mean 'output_column'"),
    (predicted, "input_tensor_shape", "Did you mean 'input_tensor_shapes'"),
    (joined, "source_column", "Did you mean 'source_columns'"),
    # Arguments of another method
    (filtered, "schema", "of filter"),
    (filtered, "output_column", "of filter"),
    (filtered, "cardinality", "of filter"),
    (by_row, "cardinality", "of map"),
    (by_row, "contract", "of map"),
    (predicted, "schema", "of predict_batch"),
    (predicted, "inputs", "of predict_batch"),
    (classified, "return_format", "of classify"),
    # Before the type that is missing
    (untyped, "return_dtype", 'of map: write schema={"<column>": "<SQL type>"}'),
    (untyped, "returnType", 'of map: write schema={"<column>": "<SQL type>"}'),
    # Pipelines and decorators
    (declared, "fragment_row", "of vd.Pipeline. Did you mean"),
    (declared, "sorce", "Did you mean 'source'?"),
    (declared, "num_gpus", "All others are arguments of its stages"),
    (vd.cls, "gpu", "of @vd.cls. Did you mean 'gpus'?"),
    (vd.cls, "num_cpus", "write cpus=..."),
    (vd.cls, "batch_size", "write it at @vd.func.batch or @vd.method.batch"),
    (vd.cls, "memory", "All others are arguments of the stage"),
    (vd.cls, "return_dtype", "write it at its method, @vd.method"),
    (vd.method, "return_type", "Did you mean 'return_dtype'?"),
    (vd.method.batch, "return_type", "Did you mean 'return_dtype'?"),
    (vd.func, "zzz", "its options are 'function', 'cpus', 'gpus', "),
    (vd.func.batch, "return_type", "Did you mean 'return_dtype'?"),
]


@pytest.mark.parametrize(("declare", "name", "line"), REFUSED)
def test_an_unknown_argument_is_refused_with_the_line_to_write(declare, name, line):
    message = refusal(declare, **{name: 1})
    assert message.startswith(f"unknown argument {name!r} of ")
    assert line in message


def test_several_arguments_are_refused_at_once():
    message = refusal(mapped, num_gpus=1, batchsize=8)
    assert message == (
        "unknown argument 'batchsize' of map_batches. Did you mean 'batch_size' or 'max_batches'?\n"
        "unknown argument 'num_gpus' of map_batches: write gpus=..."
    )


def test_an_argument_like_no_other_is_refused_with_the_names_that_there_are():
    message = refusal(projected, zzz=1)
    assert message.startswith("unknown argument 'zzz' of project: its options are 'name', 'col")
    assert message.endswith("'include_columns', 'asset'")
    with pytest.raises(vd.DefinitionError, match=r"'zzz' of build_source: it"):
        docs().build_source(zzz=1)
    assert refusal(by_row, batch_size=3).startswith("map takes no batch_size: it calls")


def test_no_value_that_may_be_secret_is_in_a_message():
    message = refusal(
        prompted, base_url="https://u:secret@host", runtime_env={"env_vars": {"K": "secret"}}
    )
    assert "those of its provider go into model=vd.Model(..., options={...})" in message
    assert "env_vars=[" in message
    assert "secret" not in message


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
    message = refusal(adding(method, *values), **given)
    for line in lines:
        assert line in message
