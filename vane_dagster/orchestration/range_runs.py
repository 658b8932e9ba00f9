"""Runs in this process, of stages in ranges of partitions, for the command line."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import dagster as dg

from vane_dagster.orchestration.assets import build_assets
from vane_dagster.orchestration.forecasts import partition_order
from vane_dagster.orchestration.partition_order import range_tags
from vane_dagster.pipeline.pipeline import Pipeline

_QUIET = {"loggers": {"console": {"config": {"log_level": "ERROR"}}}}


def materialize(
    pipeline: Pipeline,
    stages: Sequence[str],
    partitions: Sequence[str | None],
    resources: Mapping[str, Any],
    run_config: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[dg.ExecuteInProcessResult]:
    """Materialize stages by a run of each range of partitions, and yield the results.

    The runs are reported to the instance of ``$DAGSTER_HOME``, if it is set.
    """
    assets = build_assets(pipeline)
    instance = dg.DagsterInstance.get() if os.environ.get("DAGSTER_HOME") else None
    for first, last in partition_order(pipeline).ranges(partitions):
        yield dg.materialize(
            [assets],
            selection=[pipeline[stage].key for stage in stages],
            partition_key=first if first == last else None,
            tags=range_tags(first, last) or None,
            resources=resources,
            instance=instance,
            run_config={**_QUIET, **run_config},
            raise_on_error=False,
        )
