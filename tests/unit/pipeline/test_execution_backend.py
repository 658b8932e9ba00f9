"""The argument `execution_backend` of stages: what it accepts, and what it changes."""

from __future__ import annotations

from typing import Any

import pytest

import vane_dagster as vd
from vane_dagster.planning.definition import pool_identity, stage_definition


class Model:
    """Returns its batch."""

    def __call__(self, batch):
        return {"n": batch["n"]}


def function(batch):
    return {"n": batch["n"]}


def stage(fn: Any, backend: Any) -> vd.Stage:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    return docs.map_batches(
        "out", fn, schema={"n": "BIGINT"}, concurrency=vd.Workers(execution_backend=backend)
    )


@pytest.mark.parametrize(
    ("fn", "backend", "on_driver"),
    [
        (Model, None, False),
        (Model, "ray_actor", False),
        (Model, "subprocess_actor", True),
        (function, None, False),
        (function, "ray_task", False),
        (function, "subprocess_task", True),
        (Model, "ray_task", False),
        (Model, "subprocess_task", True),
        (function, "ray_actor", False),
    ],
)
def test_it_names_a_place(fn, backend, on_driver):
    assert stage(fn, backend).spec.on_driver == on_driver


MODEL: Any = {"model": "m", "provider": "openai"}
CONTRACTS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("map", (lambda n: n,), {"schema": "BIGINT"}),
    ("flat_map", (lambda n: [n],), {"schema": "BIGINT", "id": "new_id"}),
    ("filter", (lambda n: n > 0,), {}),
    ("predict_batch", (lambda: abs,), {"return_type": "bigint", "columns": ["n"]}),
    ("prompt", ("{text}",), MODEL),
    ("embed", ("text",), MODEL),
    ("classify", ("text", ["a", "b"]), MODEL),
]


@pytest.mark.parametrize(("method", "values", "given"), CONTRACTS)
def test_all_contracts_take_it(method, values, given):
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    workers = vd.Workers(execution_backend="subprocess_task")
    assert getattr(docs, method)("s", *values, concurrency=workers, **given).spec.on_driver


def test_it_changes_no_keys_and_only_a_subprocess_has_workers_of_its_own():
    specs = [stage(Model, each) for each in (None, "ray_actor", "subprocess_actor")]
    assert len({stage_definition(each.pipeline, each.spec) for each in specs}) == 1
    plain, ray, subprocess = (pool_identity(each.pipeline, each.spec) for each in specs)
    assert plain == ray != subprocess
