"""A stage's checks as Dagster's asset checks, and what they found as its evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import dagster as dg
from dagster._core.definitions.asset_checks.asset_check_evaluation import (
    AssetCheckEvaluationTargetMaterializationData as Target,
)

from vane_dagster.commit.manifest import CheckResult
from vane_dagster.commit.reading import find
from vane_dagster.commit.store import Store
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.errors import StoreError, VaneError, names
from vane_dagster.execute.judging import Earlier, Judge
from vane_dagster.orchestrate.specs import stage_key


def check_specs(pipeline: Pipeline) -> list[dg.AssetCheckSpec]:
    """The checks of all stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)  # of partitions_def
        return [
            dg.AssetCheckSpec(
                check.name,
                asset=stage_key(pipeline, stage.name),
                blocking=check.blocking,
                description=check.description,
                partitions_def=pipeline.partitions_def,
            )
            for stage in pipeline
            for check in pipeline.checks(stage.name)
        ]


Blocked = tuple[str, str | None, CheckResult]
"""A stage, a partition, and the blocking check that failed there."""


class CheckLog:
    """Logs evaluations, each for its partition; those yielded by a step would have none."""

    def __init__(self, context: dg.AssetExecutionContext, pipeline: Pipeline) -> None:
        self._context, self._pipeline = context, pipeline
        self._selected = context.selected_asset_check_keys
        self.blocked: list[Blocked] = []

    def found(self, stage: str, partition: str | None, results: Iterable[CheckResult]) -> None:
        """Logs what the checks of a partition have found, once it is materialized."""
        listed = list(results)
        for result in listed:
            if result.blocking and not result.passed:
                self.blocked.append((stage, partition, result))
        self._log(stage, partition, listed)

    def not_made(self, stage: str, partition: str | None, error: VaneError) -> None:
        """Logs the checks of a partition that failed: Dagster would have them planned for ever."""
        told = f"not evaluated, as the partition was not made: {error}"
        checks = self._pipeline.checks(stage)
        results = [CheckResult(c.name, False, c.blocking, c.severity, told, {}, "") for c in checks]
        self._log(stage, partition, results)

    def _log(self, stage: str, partition: str | None, results: Sequence[CheckResult]) -> None:
        key = stage_key(self._pipeline, stage)
        wanted = [r for r in results if dg.AssetCheckKey(key, r.name) in self._selected]
        target = self._target(key, partition) if wanted else None
        for result in wanted:
            self._context.log_event(
                dg.AssetCheckEvaluation(
                    asset_key=key,
                    check_name=result.name,
                    passed=result.passed,
                    metadata=dict(result.metadata),
                    target_materialization_data=target,
                    severity=dg.AssetCheckSeverity[result.severity],
                    description=result.description,
                    blocking=result.blocking,
                    partition=partition,
                )
            )

    def _target(self, key: dg.AssetKey, partition: str | None) -> Target | None:
        """The latest materialization: of a partition, an evaluation without it counts as none."""
        partitions = None if partition is None else [partition]
        wanted = dg.AssetRecordsFilter(asset_key=key, asset_partitions=partitions)
        found = self._context.instance.fetch_materializations(wanted, limit=1).records
        return _pointer(found[0]) if found else None


def _pointer(record: dg.EventLogRecord) -> Target:
    return Target(storage_id=record.storage_id, run_id=record.run_id, timestamp=record.timestamp)


def told_blocked(found: Sequence[Blocked]) -> str:
    """What blocking checks have found in partitions that are materialized."""
    lines = []
    for stage, partition, result in found[:5]:
        where = "" if partition is None else f", partition {partition!r}"
        lines.append(f"stage {stage!r}{where}: {result.name}: {result.description}")
    return f"{len(found)} blocking checks failed\n" + "\n".join(lines)


def judge(context: dg.AssetExecutionContext, pipeline: Pipeline, store: Store) -> Judge:
    """What evaluates checks, with the partitions in the order that Dagster has them in."""
    return Judge(pipeline, store, _earlier(context, pipeline))


def evaluate_alone(
    context: dg.AssetExecutionContext, pipeline: Pipeline, store: Store, judging: Judge
) -> None:
    """Evaluates the selected checks of stages that are not to be materialized.

    Without a partition, of all partitions that were.

    Raises:
        StoreError: If one was never materialized.
        dg.Failure: If a blocking check failed, as Dagster does; it gates all that is selected.
    """
    log = CheckLog(context, pipeline)
    checks = context.selected_asset_check_keys
    chosen = {key.asset_key for key in checks}
    named = context.has_partition_key or context.has_partition_key_range
    partitions = list(context.partition_keys) if named else None
    for stage in pipeline:
        if stage.key not in chosen - context.selected_asset_keys:
            continue
        manifests = find(store, stage.key.path, partitions)
        if missing := [key for key in partitions or [] if key not in manifests] or not manifests:
            which = f", partition {names(missing)}," if isinstance(missing, list) else ""
            raise StoreError(
                f"stage '{pipeline.name}/{stage.name}'{which} was never materialized, so there is "
                "nothing to check; materialize it first"
            )
        for partition, manifest in manifests.items():
            results = judging.results(manifest)
            wanted = [r for r in results if dg.AssetCheckKey(stage.key, r.name) in checks]
            log.found(stage.name, partition, wanted)
    if log.blocked:
        raise dg.Failure(told_blocked(log.blocked), allow_retries=False)


def _earlier(context: dg.AssetExecutionContext, pipeline: Pipeline) -> Earlier:
    places: dict[str, int] = {}
    keys: list[str] = []

    def earlier(partition: str) -> Iterator[str]:
        if not keys and pipeline.partitions_def is not None:
            store = context.instance
            keys.extend(pipeline.partitions_def.get_partition_keys(dynamic_partitions_store=store))
            places.update({key: place for place, key in enumerate(keys)})
        others = _other_dimensions(pipeline.partitions_def, partition)
        for key in reversed(keys[: places.get(partition, 0)]):
            if _other_dimensions(pipeline.partitions_def, key) == others:
                yield key

    return earlier


def _other_dimensions(partitions_def: Any, partition: str) -> dict[str, str]:
    """Of a multi-partition, the keys of the dimensions beside the one that has an order.

    It is that of time, else the last one.
    """
    dimensions = getattr(partitions_def, "partitions_defs", ())
    if not dimensions:
        return {}
    ordered = [d.name for d in dimensions if hasattr(d.partitions_def, "cron_schedule")]
    along = ordered[0] if ordered else dimensions[-1].name
    keys = partitions_def.get_partition_key_from_str(str(partition)).keys_by_dimension
    return {name: key for name, key in keys.items() if name != along}
