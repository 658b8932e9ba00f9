"""The backend of a run, before the cluster that computes it is started."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from vane_dagster.compute.api import Capacity
from vane_dagster.errors import ComputeError, PreflightError
from vane_dagster.orchestration.run import _Diagnosis


class Model:
    """Returns its batch."""

    def __call__(self, batch):
        return {"n": batch["n"]}


class Unstarted(vd.RayCompute):
    """A cluster of eight CPUs that does not run, and does not start either."""

    def is_up(self):
        return False

    def planned_capacity(self):
        return Capacity(({"CPU": 8.0},), 0)

    def backend(self, warn):
        raise ComputeError("the cluster was started")


@pytest.mark.parametrize("subprocess", ["subprocess_actor", None])
def test_subprocess_stages_do_not_keep_a_cluster_from_starting(tmp_path, subprocess):
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    docs.map_batches(
        "own", Model, schema={"n": "BIGINT"}, concurrency=vd.Workers(execution_backend=subprocess)
    )
    docs.map_batches("large", Model, schema={"n": "BIGINT"}, gpus=2)
    store = vd.FragmentStore(root=str(tmp_path)).open()
    look = _Diagnosis(docs, ["own", "large"], [None], Unstarted(), store, print)
    with pytest.raises(ComputeError, match="the cluster was started"):
        look.backend(["own"])
    with pytest.raises(PreflightError, match="stage 'docs/large': Model: 1 worker of 2 GPU was"):
        look.backend(["own", "large"])
