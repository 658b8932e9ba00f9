"""Ray Data's strategies have the attributes from which the line to write is computed."""

from __future__ import annotations

import pytest
from ray.data import ActorPoolStrategy, TaskPoolStrategy

import vane_dagster as vd


class Model:
    def __call__(self, batch):
        return batch


@pytest.mark.parametrize(
    ("compute", "line"),
    [
        (ActorPoolStrategy(size=2), "write concurrency=2"),
        (ActorPoolStrategy(min_size=1, max_size=4), "write concurrency=(1, 4)"),
        (ActorPoolStrategy(), "write concurrency=(1, N)"),
        (TaskPoolStrategy(size=3), "write concurrency=3"),
        (TaskPoolStrategy(), "leave it out"),
    ],
    ids=["fixed", "range", "unbounded", "tasks", "any tasks"],
)
def test_a_strategy_is_refused_with_the_concurrency_to_write(compute, line):
    docs = vd.Pipeline("docs", source=vd.parquet("/data"), id="id")
    with pytest.raises(vd.DefinitionError, match=r"unknown argument 'compute' of map_batches") as e:
        docs.map_batches("m", Model, schema={"y": "FLOAT"}, compute=compute)
    assert line in str(e.value)
