"""Helpers for the results of Dagster runs."""

from __future__ import annotations

import ast
import re
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
        partition: str | Sequence[str] | None = None,
        select: Sequence[str] | dg.AssetSelection | None = None,
        raises: bool = True,
        instance: dg.DagsterInstance | None = None,
        config: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> dg.ExecuteInProcessResult:
        assets = pipeline.build_assets()
        step = f"{pipeline.name}_pipeline"
        store = vd.FragmentStore(root=str(folder / "store"))
        keys = [partition] if isinstance(partition, str) else partition or ()
        if not isinstance(select, dg.AssetSelection | None):
            select = dg.AssetSelection.assets(*(pipeline[name].key for name in select))
        of_keys = over(*keys)
        tags = {**of_keys.pop("tags", {}), **(tags or {})}
        return dg.materialize(
            [assets],
            selection=select,
            resources={"compute": compute, "store": store},
            raise_on_error=raises,
            instance=instance,
            tags=tags,
            run_config={"ops": {step: {"config": dict(config)}}} if config else None,
            **of_keys,
        )

    return run


def over(*partitions: str) -> dict[str, Any]:
    """Return arguments of `dg.materialize`: for a partition, the range of several, or none."""
    if len(partitions) < 2:
        return {"partition_key": partitions[0]} if partitions else {}
    edges = {"start": partitions[0], "end": partitions[-1]}
    return {"tags": {f"dagster/asset_partition_range_{edge}": key for edge, key in edges.items()}}


def evaluations(
    result: dg.ExecuteInProcessResult, instance: dg.DagsterInstance
) -> dict[tuple[str, str, str | None], dg.AssetCheckEvaluation]:
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    events = [entry.dagster_event for entry in instance.all_logs(result.run_id, of_type=kind)]
    found = [event.asset_check_evaluation_data for event in events]
    keyed = {(e.asset_key.path[-1], e.check_name, e.partition): e for e in found}
    assert len(keyed) == len(found), "an evaluation was logged twice"
    return keyed


def statuses(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey, keys: Sequence[str]
) -> dict[str, set[str]]:
    """Return the partitions of each status, as Dagster counts them for the asset's page."""
    definition = dg.StaticPartitionsDefinition(list(keys))
    state = instance.event_log_storage.get_asset_check_state([(key, definition)])[key]
    return {
        status.value: set(subset.value.get_partition_keys())
        for status, subset in state.subsets.items()
        if not subset.is_empty
    }


def metadata(result: dg.ExecuteInProcessResult, stage: str) -> dict[str, Any]:
    found = [
        event.materialization
        for event in result.get_asset_materialization_events()
        if event.materialization.asset_key.path[-1] == stage
    ]
    assert len(found) == 1, f"{len(found)} materializations of {stage}"
    return entries(found[0].metadata)


def entries(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata of a materialization as plain values, with the figures of its details."""
    found = {name: getattr(value, "value", value) for name, value in metadata.items()}
    for line in found.get("details", "").partition("\n\n")[0].splitlines()[2:]:
        name, _, text = line[2:-2].replace("\\", "").partition(" | ")
        is_number = re.fullmatch(r"[\d,]+(\.\d+)?(e-\d+)?", text) and name != "computed by run"
        value = ast.literal_eval(text.replace(",", "")) if is_number else text
        found.setdefault(name.replace(" ", "_"), value)
    return found


def failure(result: dg.ExecuteInProcessResult) -> str:
    assert not result.success
    data = next(event.step_failure_data for event in result.all_events if event.is_step_failure)
    description = data.user_failure_data.description if data.user_failure_data else None
    return description or str(data.error)
