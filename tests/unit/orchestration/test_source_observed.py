"""Whether a run reports what its source holds: where the code location observes the source."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

import vane_dagster as vd
from vane_dagster.orchestration.reporting import _observes_source

RESOURCES = {
    "compute": vd.LocalCompute(num_cpus=1),
    "store": vd.FragmentStore(root="/nowhere"),
}


def context(pipeline: vd.Pipeline, *others: Any) -> Any:
    """What a step of a job has that materializes the pipeline alone."""
    assets = pipeline.build_assets()
    job = dg.define_asset_job("job", dg.AssetSelection.assets(assets))
    definitions = dg.Definitions([assets, *others], jobs=[job], resources=RESOURCES)
    job_def, keys = definitions.resolve_job_def("job"), {stage.key for stage in pipeline}
    return SimpleNamespace(job_def=job_def, selected_asset_keys=keys)


def docs(**given: Any) -> vd.Pipeline:
    docs = vd.Pipeline("docs", source=vd.parquet("/data", **given), id="id")
    docs.project("kept", ["text"])
    return docs


@pytest.mark.parametrize("is_observed", [True, False])
def test_a_run_asks_its_job(is_observed):
    pipeline = docs()
    others = [pipeline.build_source()] if is_observed else []
    assert _observes_source(context(pipeline, *others), pipeline) == is_observed
