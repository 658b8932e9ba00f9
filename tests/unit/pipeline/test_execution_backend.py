"""The argument `execution_backend` of stages: what it accepts, and what it changes."""

from __future__ import annotations

from typing import Any

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


def test_it_names_a_place():
    for fn in (Model, function):
        for backend in (None, "ray_actor", "ray_task", "subprocess_actor", "subprocess_task"):
            on_driver = (backend or "").startswith("subprocess")
            assert stage(fn, backend).spec.on_driver == on_driver


def test_it_changes_no_keys_and_only_a_subprocess_has_workers_of_its_own():
    specs = [stage(Model, each) for each in (None, "ray_actor", "subprocess_actor")]
    assert len({stage_definition(each.pipeline, each.spec) for each in specs}) == 1
    plain, ray, subprocess = (pool_identity(each.pipeline, each.spec) for each in specs)
    assert plain == ray != subprocess
