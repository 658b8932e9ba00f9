"""Values that the records of a stage's arguments refuse, or keep a copy of."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import vane_dagster as vd

REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (vd.Workers, {"env_vars": ["KEY=sk-1"]}, "env_vars has 'KEY' with a value, or an empty name"),
    (vd.Workers, {"keyed_env_vars": [""]}, "keyed_env_vars has '' with a value, or an empty name"),
    (vd.Workers, {"accelerator_type": ["A100"]}, "accelerator_type is ['A100']; expected a name"),
    (vd.Workers, {"num_cpus": 1e-7}, "num_cpus is 1e-07; expected 0 or a number from 0.0001 up"),
    (vd.Workers, {"execution_backend": "ray"}, "execution_backend is 'ray'"),
    (vd.Workers, {"resources": {"GPU": 1}}, "resources names 'GPU'; use num_cpus"),
    (vd.Failures, {"retry_on": ["x."]}, "retry_on holds ''; expected exception classes"),
    (vd.Reuse, {"mode": "row"}, "mode is 'row'; expected one of 'rows', 'fragments', 'none'"),
    (vd.Reuse, {"version": ""}, "version is ''; expected a non-empty text"),
    (vd.Asset, {"kinds": "gpu"}, "kinds is 'gpu'; expected a list of names"),
]


@pytest.mark.parametrize(("record", "given", "message"), REFUSED)
def test_a_wrong_value_is_refused_where_it_is_written(record, given, message):
    expected = re.escape(f"vd.{record.__name__}: {message}")
    with pytest.raises(vd.errors.DefinitionError, match=expected) as raised:
        record(**given)
    assert "sk-1" not in str(raised.value)


def test_a_record_does_not_follow_what_it_was_made_of():
    names, resources, tags = ["A", "A"], {"disk": 1.0}, {"team": "a"}
    workers, asset = vd.Workers(env_vars=names, resources=resources), vd.Asset(tags=tags)
    names.append("B")
    resources["disk"] = 2.0
    tags["team"] = "b"
    assert (workers.env_vars, workers.resources) == (("A",), {"disk": 1.0})
    assert asset.tags == {"team": "a"}


@pytest.mark.parametrize("columns", ["text", {"text", "id"}, {"text": "id"}, iter(["text"])])
def test_columns_have_an_order_and_can_be_read_again(columns):
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    with pytest.raises(vd.errors.DefinitionError, match=r"columns is .*; expected a list of names"):
        docs.map_batches("out", len, schema={"x": "BIGINT"}, columns=columns)


def test_an_option_of_another_record_names_that_record():
    message = "unknown argument 'max_retries' of vd.Workers: write on_error=vd.Failures("
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        vd.Workers(max_retries=3)  # type: ignore[call-arg]  # the mistake


# One name for one option, in every kind of stage

METHODS = (
    "map_batches", "map", "flat_map", "filter", "predict_batch", "prompt", "embed", "classify",
    "project", "write", "join",
)  # fmt: skip
TYPES = {
    "concurrency": "int | tuple[int, int] | Literal['auto'] | Workers | None",
    "gpus": "float | None",
    "on_error": "OnError | Failures | None",
    "include_columns": "bool | Sequence[str]",
    "reuse": "ReuseMode | Reuse | None",
    "model": "str | os.PathLike[str] | ModelServer | Model",
    "asset": "Asset | None",
}


def parameters() -> dict[str, dict[str, inspect.Parameter]]:
    methods: dict[str, Any] = {name: getattr(vd.Pipeline, name) for name in METHODS}
    return {name: dict(inspect.signature(m).parameters) for name, m in methods.items()}


@pytest.mark.parametrize("option", TYPES)
def test_an_option_has_one_type_in_every_stage(option):
    found = {m: str(p[option].annotation) for m, p in parameters().items() if option in p}
    assert len(found) > 1
    assert set(found.values()) == {TYPES[option]}, found
