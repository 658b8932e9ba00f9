"""Arguments that a stage does not take: each is refused with the names that there are."""

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


def docs() -> vd.Pipeline:
    return vd.Pipeline("docs", source=vd.parquet("/data"), id="id")


def adding(method: str, *values: Any, **always: Any) -> Callable[..., vd.Stage]:

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
prompted = adding("prompt", "{text}", provider=Provider, model="m")
embedded = adding("embed", "text", provider=Provider, model="m")
projected = adding("project", ["x"])
NO_STAGES = (declared, vd.cls, vd.method, vd.method.batch, vd.func, vd.func.batch)


def refusal(declare: Callable[..., Any], **given: Any) -> str:
    with pytest.raises(vd.errors.DefinitionError) as caught:
        declare(**given)
    message = str(caught.value)
    assert message.startswith("stage 'docs/s': ") != (declare in NO_STAGES)
    return message.removeprefix("stage 'docs/s': ")


REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    # Names of other systems
    (mapped, "num_gpus", ": write gpus=..."),
    (embedded, "compute", ": write concurrency=N, or concurrency=(min, max)"),
    (by_row, "fn_args", ': write fn_kwargs={"parameter": value}'),
    (by_row, "zero_copy_batch", "of map: its options are"),
    (mapped, "zero_copy_batch", ": leave it out; each call gets its own copy"),
    (filtered, "expr", ": write rows.project(name, columns, where=...), in SQL"),
    (mapped, "runtime_env", ": write vd.RayCompute(address=..., ray_init_options={'runtime_env'"),
    (mapped, "ray_remote_args", "its options are 'name', 'fn', 'schema'"),
    (prompted, "zzz", "its options are 'name', 'messages', 'model'"),
    # Fields of records
    (mapped, "max_error_rate", ": write on_error=vd.Failures(max_error_rate=...)"),
    (by_row, "version", ": write reuse=vd.Reuse(version=...)"),
    (embedded, "per_row", ": write reuse=vd.Reuse(per_row=...)"),
    (prompted, "temperature", ': write sampling_params={"temperature": ...}'),
    (embedded, "temperature", "its options are 'name', 'column', 'model'"),
    (mapped, "id", ": write cardinality=vd.Children(id=...)"),
    (projected, "description", ": write asset=vd.Asset(description=...)"),
    # Misspelt names
    (mapped, "Batch_Size", "Did you mean 'batch_size'"),
    (joined, "source_column", "Did you mean 'source_columns'"),
    # Arguments of another method
    (filtered, "schema", "of filter"),
    (by_row, "cardinality", "of map"),
    # Before the type that is missing
    (untyped, "cardinality", "of map: its options are"),
    # Pipelines and decorators
    (declared, "fragment_row", "of vd.Pipeline. Did you mean"),
    (declared, "num_gpus", "All others are arguments of its stages"),
    (vd.cls, "gpu", "of @vd.cls. Did you mean 'gpus'?"),
    (vd.cls, "batch_size", "write it at @vd.func.batch or @vd.method.batch"),
    (vd.cls, "return_dtype", "write it at its method, @vd.method"),
    (vd.method, "return_type", "Did you mean 'return_dtype'?"),
    (vd.func, "zzz", "its options are 'function', 'cpus', 'gpus', "),
]


@pytest.mark.parametrize(("declare", "name", "line"), REFUSED)
def test_an_unknown_argument_is_refused_with_what_to_write(declare, name, line):
    message = refusal(declare, **{name: 1})
    assert message.startswith(f"unknown argument {name!r} of ")
    assert line in message


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("request_per_minute", ". Did you mean 'requests_per_minute' or 'tokens_per_minute'?"),
        ("zzz", ": its options are 'base_url', 'api_key_env', 'timeout', 'max_connections', "),
        ("seed", ': write sampling_params={"seed": ...}'),
    ],
)
def test_an_unknown_option_of_a_provider_is_refused_with_what_to_write(name, line):
    given = {"provider": "openai", "model": vd.Model("m", options={name: "planted"})}
    message = refusal(adding("prompt", "{text}"), **given)
    assert message.startswith(f"unknown argument {name!r} of vd.Model(options={{...}}){line}")
    assert "planted" not in message


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
    with pytest.raises(vd.errors.DefinitionError, match=r"'zzz' of build_source: it"):
        docs().build_source(zzz=1)
    assert refusal(by_row, batch_size=3).startswith("map takes no batch_size: it calls")


def test_no_value_that_may_be_secret_is_in_a_message():
    message = refusal(
        prompted, base_url="https://u:secret@host", runtime_env={"env_vars": {"K": "secret"}}
    )
    assert "those of its provider go into model=vd.Model(..., options={...})" in message
    assert "secret" not in message


def nothing(row: dict) -> None: ...


@pytest.mark.parametrize(
    ("method", "values", "given", "lines"),
    [
        ("prompt", ["{text}"], {"model": "m"}, ["provider is missing; expected one"]),
        (
            "classify", ["text"], {"lables": ["a"], "provider": Provider, "model": "m"},
            ["of classify. Did you mean 'labels'", "classify: missing a required arg"],
        ),
        ("map_batches", [nothing], {}, ['schema={"label": "VARCHAR"}, or write schema="infer"']),
        (
            "predict_batch", [make_predict], {"columns": ["x"], "returnType": "int"},
            ["Did you mean 'return_type'?", "missing a required argument: 'return_type'"],
        ),
        ("write", [], {"uri": "/out"}, ["Did you mean 'url'?", "a required argument: 'url'"]),
    ],
)  # fmt: skip
def test_a_missing_argument_is_named_with_a_misspelt_one(method, values, given, lines):
    message = refusal(adding(method, *values), **given)
    for line in lines:
        assert line in message


def test_workers_of_a_provider_with_limits_are_counted():
    given = {"provider": "openai", "model": "m", "concurrency": "auto"}
    message = refusal(adding("prompt", "{text}"), **given)
    assert 'concurrency="auto" cannot divide the limits of' in message
