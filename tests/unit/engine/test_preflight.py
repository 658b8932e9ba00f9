"""What preflight refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import vane_dagster as vd
from vane_dagster.compute import versions
from vane_dagster.compute.api import Capacity
from vane_dagster.engine.preflight import (
    PreflightFinding,
    misplaced,
    refuse,
    too_large,
    too_large_to_start,
)
from vane_dagster.errors import PreflightError


def test_one_finding_stands_alone():
    with pytest.raises(PreflightError) as caught:
        refuse([PreflightFinding("a", "b", "c"), PreflightFinding("a", "b", "c")])
    assert str(caught.value) == "a: b. c"
    assert caught.value.findings == ("a: b. c",)
    refuse([])


# Versions


@pytest.mark.parametrize("name", ["python", "ray", "pyarrow", "code"])
def test_versions_that_differ_are_named(name):
    here = versions.installed()
    assert list(versions.disagreements({"n": here})) == []
    other = replace(here, **{name: "0.1"})
    ((node, problem, fix),) = versions.disagreements({"good": here, "bad": other})
    assert node == "node bad"
    driver, worker = problem.split("; ")
    assert getattr(here, name) in driver
    assert worker.endswith(" 0.1")
    assert "driver's versions" in fix


def test_a_node_that_cannot_run_a_worker_is_named():
    ((node, problem, _),) = versions.disagreements({"n": "No module named 'vane_dagster'"})
    assert (node, "No module named 'vane_dagster'" in problem) == ("node n", True)


# Places


class Model:
    """Returns its batch."""

    def __call__(self, batch):
        return {"n": batch["n"]}


MACHINE = Capacity(({"CPU": 2.0, "license": 1.0},), 0, is_cluster=False)
CLUSTER = Capacity(({"CPU": 8.0, "GPU": 2.0},), 0, driver=MACHINE)


def declared(**stages: dict[str, Any]) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet("/nowhere"), id="id")
    for name, given in stages.items():
        docs.map_batches(name, Model, schema={"n": "BIGINT"}, **given)
    return docs


def test_a_stage_for_ray_is_refused_without_a_cluster():
    names = {None: "plain", "ray_actor": "ray", "subprocess_actor": "own"}
    docs = declared(**{name: {"execution_backend": each} for each, name in names.items()})
    (finding,) = misplaced(docs, list(names.values()), MACHINE)
    assert str(finding) == (
        "stage 'docs/ray': declares execution_backend='ray_actor', but the compute resource of "
        'this run is LocalCompute, which has no Ray cluster. Write execution_backend="subprocess_'
        'actor", or leave it out to compute where the resource says; or give the run a RayCompute'
    )
    assert misplaced(docs, list(names.values()), CLUSTER) == []


def test_what_a_stage_reserves_is_compared_with_its_place():
    gpu, own = {"gpus": 1}, {"execution_backend": "subprocess_actor"}
    license = {"resources": {"license": 1}}
    docs = declared(
        there=gpu, here={**gpu, **own}, license_there=license, license_here={**license, **own}
    )
    stages = ["there", "here", "license_there", "license_here"]
    here, there = sorted(str(found) for found in too_large(docs, stages, CLUSTER))
    assert here.startswith(
        "stage 'docs/here': Model: 1 worker of 1 GPU was asked for; this machine has 0 GPU "
        "for subprocesses. Lower concurrency or what a worker reserves, or use a larger machine. "
        "GPUs that this machine gives to the Ray cluster do not count"
    )
    assert there.startswith("stage 'docs/license_there': Model: 1 worker of 1 license was")
    assert too_large(docs, stages[3:], MACHINE) == []


def test_subprocesses_are_not_validated_against_a_cluster_that_is_not_started():
    docs = declared(
        there={"gpus": 3},
        own={"gpus": 3, "execution_backend": "subprocess_actor"},
        fits={"gpus": 2},
    )
    docs.project("plain", ["id"])
    planned = Capacity(({"CPU": 8.0, "GPU": 2.0},), 0)
    (finding,) = too_large_to_start(docs, ["there", "own", "fits", "plain"], planned)
    assert str(finding).startswith(
        "stage 'docs/there': Model: 1 worker of 3 GPU was asked for; the cluster has 2 GPU"
    )
