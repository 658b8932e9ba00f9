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


def test_all_contracts_take_it():
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    workers = vd.Workers(execution_backend="subprocess_task")
    call: Any = {"schema": "BIGINT", "concurrency": workers}
    stages = [
        docs.map("mapped", lambda n: n, reuse=vd.Reuse(version="1"), **call),
        docs.flat_map("many", lambda n: [n], id="new_id", reuse=vd.Reuse(version="1"), **call),
        docs.filter(
            "kept",
            lambda n: n > 0,
            concurrency=workers,
            reuse=vd.Reuse(version="1"),
        ),
        docs.predict_batch(
            "predicted",
            lambda: abs,
            return_type="bigint",
            concurrency=vd.Workers(execution_backend="subprocess_actor"),
            reuse=vd.Reuse(version="1"),
            columns=["n"],
        ),
    ]
    model: Any = {"model": "m", "provider": "openai", "concurrency": workers}
    stages += [
        docs.prompt("prompted", "{text}", **model),
        docs.embed("embedded", "text", **model),
        docs.classify("classified", "text", ["a", "b"], **model),
    ]
    assert all(stage.spec.on_driver for stage in stages)


def test_it_changes_no_keys_and_only_a_subprocess_has_workers_of_its_own():
    specs = [stage(Model, each) for each in (None, "ray_actor", "subprocess_actor")]
    assert len({stage_definition(each.pipeline, each.spec) for each in specs}) == 1
    plain, ray, subprocess = (pool_identity(each.pipeline, each.spec) for each in specs)
    assert plain == ray != subprocess
