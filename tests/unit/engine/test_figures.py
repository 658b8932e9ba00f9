"""What a partition's computation took."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from support.manifests import manifest
from vane_dagster.engine.figures import computation_figures
from vane_dagster.events import StageStats


@pytest.mark.parametrize(("rows", "has_rate"), [(12, True), (0, False)])
def test_only_a_partition_with_computed_rows_has_a_rate(rows, has_rate):
    pipeline = vd.Pipeline("docs", source=vd.parquet("docs"), id="id")
    stage = pipeline.map("length", lambda text: len(text), schema={"length": "BIGINT"})
    stats = StageStats(computed=2, rows_in=rows, rows_out=rows, copied=12 - rows, seconds=0.2)
    figures = computation_figures(stage.spec, manifest(), stats)
    assert ("rows_per_second" in figures) == has_rate
