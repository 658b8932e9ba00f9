"""Whether a run reports what its source holds: where the code location observes the source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._check import CheckError

import vane_dagster as vd
from vane_dagster.orchestration.reporting import _is_observed

RESOURCES = {
    "compute": vd.LocalCompute(num_cpus=1),
    "store": vd.FragmentStore(root="/nowhere"),
}


class InProcess:
    """A step's context without a code location, as of `dg.materialize`."""

    def __init__(self, pipeline: vd.Pipeline, *others: Any) -> None:
        assets = pipeline.build_assets()
        job = dg.define_asset_job("job", dg.AssetSelection.assets(assets))
        definitions = dg.Definitions([assets, *others], jobs=[job], resources=RESOURCES)
        self.job_def = definitions.resolve_job_def("job")

    @property
    def repository_def(self) -> Any:
        raise CheckError("No repository definition was set on the step context")


def docs(**given: Any) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet("/data", **given), id="id")
    docs.project("kept", ["text"])
    return docs


def in_location(*assets: Any) -> Any:
    definitions = dg.Definitions(list(assets), resources=RESOURCES)
    return SimpleNamespace(repository_def=definitions.get_repository_def())


@pytest.mark.parametrize("is_observed", [True, False])
def test_a_run_asks_its_code_location(is_observed):
    pipeline = docs()
    source = pipeline.build_source()
    assets = [pipeline.build_assets(), *([source] if is_observed else [])]
    assert _is_observed(in_location(*assets), pipeline) == is_observed


def test_building_the_source_changes_nothing():
    pipeline = docs()
    before = dict(vars(pipeline))
    pipeline.build_source()
    assert vars(pipeline) == before


@pytest.mark.parametrize("is_observed", [True, False])
def test_a_run_in_process_asks_its_job(is_observed):
    pipeline = docs()
    others = [pipeline.build_source()] if is_observed else []
    context: Any = InProcess(pipeline, *others)
    assert _is_observed(context, pipeline) == is_observed


def test_a_run_in_process_observes_no_source_that_an_asset_writes():
    pipeline = docs(asset="raw")
    context: Any = InProcess(pipeline, dg.AssetSpec("raw"))
    assert not _is_observed(context, pipeline)
