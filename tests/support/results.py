"""Helpers for the results of Dagster runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dagster as dg

import vane_dagster as vd

Run = Callable[..., dg.ExecuteInProcessResult]


def materializing(folder: Path) -> Run:
    """Return a function that materializes a pipeline through Dagster, with a store in a folder."""

    def run(
        pipeline: vd.Pipeline,
        compute: Any,
        partition: str | None = None,
        select: Sequence[str] | None = None,
        raises: bool = True,
        instance: dg.DagsterInstance | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        assets = pipeline.build_assets()
        step = f"{pipeline.name}_pipeline"
        store = vd.FragmentStore(root=str(folder / "store"))
        return dg.materialize(
            [assets],
            selection=None if select is None else [pipeline[name].key for name in select],
            partition_key=partition,
            resources={"compute": compute, "store": store},
            raise_on_error=raises,
            instance=instance,
            tags=tags,
            run_config={"ops": {step: {"config": dict(config)}}} if config else None,
        )

    return run


def metadata(result: dg.ExecuteInProcessResult, stage: str) -> dict[str, Any]:
    """Return metadata of the materialization of a stage, as plain values."""
    found = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.materialization.asset_key.path[-1] == stage
    ]
    assert len(found) == 1, f"{len(found)} materializations of {stage}"
    return {name: value.value for name, value in found[0].metadata.items()}


def failure(result: dg.ExecuteInProcessResult) -> str:
    """Return the description of the failed step's error."""
    assert not result.success
    data = next(event.step_failure_data for event in result.all_events if event.is_step_failure)
    description = data.user_failure_data.description if data.user_failure_data else None
    return description or str(data.error)
