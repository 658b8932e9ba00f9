"""Ray Data's strategies are refused with the line to write."""

from __future__ import annotations

import pytest
from ray.data import ActorPoolStrategy, TaskPoolStrategy

import vane_dagster as vd


class Model:
    def __call__(self, batch):
        return batch


@pytest.mark.parametrize("compute", [ActorPoolStrategy(size=2), TaskPoolStrategy()])
def test_a_strategy_is_refused_with_the_argument_to_write(compute):
    docs = vd.Pipeline("docs", source=vd.parquet("/data"), id="id")
    with pytest.raises(vd.DefinitionError, match=r"unknown argument 'compute' of map_batches") as e:
        docs.map_batches("m", Model, schema={"y": "FLOAT"}, compute=compute)
    assert "write concurrency=N, or concurrency=(min, max)" in str(e.value)
