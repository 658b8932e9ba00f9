"""One name for one option, in every kind of stage."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import vane_dagster as vd

METHODS = ("map_batches", "prompt", "embed", "classify", "project", "write", "join")
TYPES = {
    "concurrency": "int | tuple[int, int] | None",
    "max_concurrency": "int",
    "gpus": "float",
    "num_cpus": "float",
    "memory": "int",
    "include_columns": "Sequence[str]",
}


def parameters() -> dict[str, dict[str, inspect.Parameter]]:
    methods: dict[str, Any] = {name: getattr(vd.Pipeline, name) for name in METHODS}
    return {name: dict(inspect.signature(m).parameters) for name, m in methods.items()}


@pytest.mark.parametrize("option", TYPES)
def test_an_option_has_one_type_in_every_stage(option):
    found = {m: str(p[option].annotation) for m, p in parameters().items() if option in p}
    assert len(found) > 1
    assert set(found.values()) == {TYPES[option]}, found


def test_no_option_has_a_second_name():
    former = {"gpus_per_actor", "num_gpus", "keep", "keep_columns", "workers", "num_workers"}
    assert not {(m, name) for m, p in parameters().items() for name in p if name in former}


@pytest.mark.parametrize("method", ["map_batches", "prompt", "embed", "classify"])
def test_a_former_name_is_refused_with_the_new_one(method):
    pipeline = vd.Pipeline("docs", source=vd.parquet("nowhere.parquet"), id="id")
    arguments: dict[str, tuple[Any, ...]] = {
        "map_batches": ("s", len),
        "prompt": ("s", "{text}"),
        "embed": ("s", "text"),
        "classify": ("s", "text", ["a", "b"]),
    }
    asked = {"provider": "openai", "model": "m"}
    options: dict[str, Any] = {"schema": {"x": "BIGINT"}} if method == "map_batches" else asked
    with pytest.raises(vd.DefinitionError, match=r"'gpus_per_actor' is now called 'gpus'"):
        getattr(pipeline, method)(*arguments[method], gpus_per_actor=1, **options)
