"""The argument `execution_backend` of stages: what it accepts, and what it changes."""

from __future__ import annotations

import re
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
    ],
)
def test_it_names_a_place(fn, backend, on_driver):
    assert stage(fn, backend).spec.on_driver == on_driver


@pytest.mark.parametrize(
    ("fn", "backend", "message"),
    [
        (Model, "ray_task", 'but Model is constructed once and stays loaded; '
         'write execution_backend="ray_actor"'),
        (Model, "subprocess_task", 'write execution_backend="subprocess_actor"'),
        (function, "ray_actor", 'but function is a function; write '
         'execution_backend="ray_task", or make it a class'),
        (function, "subprocess_actor", 'write execution_backend="subprocess_task"'),
        (function, "ray", "execution_backend is 'ray'"),
        (Model, ["ray_actor"], "execution_backend is ['ray_actor']"),
    ],
)  # fmt: skip
def test_what_contradicts_the_function_is_refused(fn, backend, message):
    with pytest.raises(vd.DefinitionError, match=re.escape(message)) as raised:
        stage(fn, backend)
    where = str(raised.value).partition(": execution_backend")[0]
    assert where in ("stage 'docs/out'", "vd.Workers")


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
    assert all(stage.spec.on_driver for stage in stages)
    with pytest.raises(vd.DefinitionError, match='write execution_backend="ray_task", or make it'):
        docs.map(
            "wrong",
            lambda n: n,
            schema="BIGINT",
            concurrency=vd.Workers(execution_backend="ray_actor"),
            reuse=vd.Reuse(version="1"),
        )


@pytest.mark.parametrize("kind", ["prompt", "embed", "classify"])
def test_stages_of_models_take_it_too(kind):
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    given = {"model": "m", "provider": "openai"}
    column = [["a", "b"]] if kind == "classify" else []

    def add(name: str, backend: str) -> vd.Stage:
        workers = vd.Workers(execution_backend=backend)
        return getattr(docs, kind)(name, "text", *column, concurrency=workers, **given)

    assert add("out", "subprocess_actor").spec.on_driver
    with pytest.raises(vd.DefinitionError, match='write execution_backend="ray_actor"'):
        add("other", "ray_task")


def test_it_changes_no_keys_and_only_a_subprocess_has_workers_of_its_own():
    specs = [stage(Model, each) for each in (None, "ray_actor", "subprocess_actor")]
    assert len({stage_definition(each.pipeline, each.spec) for each in specs}) == 1
    plain, ray, subprocess = (pool_identity(each.pipeline, each.spec) for each in specs)
    assert plain == ray != subprocess
