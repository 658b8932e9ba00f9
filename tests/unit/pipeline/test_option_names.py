"""One name for one option, in every kind of stage."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import vane_dagster as vd

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
    "model": "str | ModelServer | Model",
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
