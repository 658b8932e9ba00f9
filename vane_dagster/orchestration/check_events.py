"""Stage checks as Dagster asset checks, and their results as check evaluations."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dagster as dg

from vane_dagster.engine.check_runner import CheckRunner
from vane_dagster.errors import StoreError, VaneError, first_line, names
from vane_dagster.orchestration.asset_specs import stage_key
from vane_dagster.orchestration.event_log import EventLog, Target, events_grouped
from vane_dagster.orchestration.partition_order import DagsterOrder
from vane_dagster.pipeline.pipeline import Pipeline, Stage
from vane_dagster.storage.manifest import CheckResult, Manifest
from vane_dagster.storage.reader import find
from vane_dagster.storage.store import Store


def check_specs(pipeline: Pipeline) -> list[dg.AssetCheckSpec]:
    """Return the check specs of all stages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.PreviewWarning)  # for partitions_def
        return [
            dg.AssetCheckSpec(
                check.name,
                asset=stage_key(pipeline, stage.name),
                blocking=check.blocking,
                description=check.description,
                partitions_def=pipeline.partitions_def,
            )
            for stage in pipeline
            for check in (*pipeline._checks_of(stage.name), *pipeline._reproducible(stage.name))
        ]


Blocked = tuple[str, str | None, CheckResult]
"""The stage, the partition, and the blocking check that failed there."""


@dataclass(frozen=True)
class _Pending:
    """A check result to write; `evaluated` is False if no version was evaluated."""

    partition: str | None
    result: CheckResult
    evaluated: bool


class CheckLog:
    """Collects check evaluations, one per check and partition.

    Evaluations that a step yields have no partition, so this class writes them itself.

    Attributes:
        blocked: Failed blocking checks.
    """

    def __init__(self, context: dg.AssetExecutionContext, pipeline: Pipeline) -> None:
        self._context, self._pipeline = context, pipeline
        self._selected = context.selected_asset_check_keys
        self._evaluated = _evaluated_before(context)
        self._pending: dict[str, list[_Pending]] = {}
        self.blocked: list[Blocked] = []

    def found(self, stage: str, partition: str | None, results: Iterable[CheckResult]) -> None:
        """Add the check results of a partition.

        Args:
            stage: The stage's name.
            partition: The partition key; None for an unpartitioned pipeline.
            results: The results of its checks.
        """
        listed = list(results)
        for result in listed:
            if result.blocking and not result.passed:
                self.blocked.append((stage, partition, result))
        self._add(stage, partition, listed, evaluated=True)

    def failed(self, stage: str, partition: str | None, error: VaneError) -> None:
        """Add the check that a partition failed by, if any; its other checks are not evaluated.

        The evaluation refers to no materialization, because no version was committed.

        Args:
            stage: The stage's name.
            partition: The partition key; None for an unpartitioned pipeline.
            error: The partition's error.
        """
        results = [
            CheckResult(c.name, False, c.blocking, c.severity, first_line(error), {}, "")
            for c in self._pipeline._checks_of(stage)
            if c.name == error.failed_check
        ]
        self._add(stage, partition, results, evaluated=False)

    def replaced(self, stage: str, partitions: Collection[str | None]) -> None:
        """Detach pending results from versions that another run has replaced.

        Args:
            stage: The stage's name.
            partitions: The partitions with a replaced version.
        """
        if partitions and stage in self._pending:
            self._pending[stage] = [
                replace(each, evaluated=False) if each.partition in partitions else each
                for each in self._pending[stage]
            ]

    def _add(
        self,
        stage: str,
        partition: str | None,
        results: Sequence[CheckResult],
        *,
        evaluated: bool,
    ) -> None:
        key = stage_key(self._pipeline, stage)
        wanted = [
            _Pending(partition, result, evaluated)
            for result in results
            if dg.AssetCheckKey(key, result.name) in self._selected
        ]
        if wanted:
            self._pending.setdefault(stage, []).extend(wanted)

    @property
    def pending(self) -> list[str]:
        """The stages with evaluations to write."""
        return list(self._pending)

    def write(self, stage: str, written: Mapping[str | None, Target]) -> None:
        """Write a stage's evaluations inside a group.

        Args:
            stage: The stage's name.
            written: References to the materializations just written. An evaluation that names no
                materialization does not count for its partition.
        """
        key = stage_key(self._pipeline, stage)
        pending = self._pending.pop(stage, [])
        evaluated = dict.fromkeys(each.partition for each in pending if each.evaluated)
        others = [partition for partition in evaluated if partition not in written]
        log = EventLog(self._context.instance)
        targets = {**written, **(log.targets(key, others) if others else {})}
        evaluations = [
            dg.AssetCheckEvaluation(
                asset_key=key,
                check_name=each.result.name,
                passed=each.result.passed,
                metadata={n: _shown(value) for n, value in each.result.metadata.items()},
                target_materialization_data=(
                    targets.get(each.partition) if each.evaluated else None
                ),
                severity=dg.AssetCheckSeverity[each.result.severity],
                description=each.result.description,
                blocking=each.result.blocking,
                partition=each.partition,
            )
            for each in pending
        ]
        for evaluation in evaluations:
            if _identity(evaluation) not in self._evaluated:
                self._context.log_event(evaluation)

    def flush(self) -> None:
        """Write all pending evaluations, for partitions materialized earlier."""
        with events_grouped(self._context.instance):
            for stage in self.pending:
                self.write(stage, {})

    def outputs(self) -> Iterator[dg.Output[None]]:
        """Yield an output for each selected check.

        Dagster assumes that a check without an output returned no result. An output alone adds no
        evaluation to those already written for each partition.
        """
        for name, spec in self._context.assets_def.node_check_specs_by_output_name.items():
            if spec.key in self._selected:
                yield dg.Output(None, output_name=name)


def _evaluated_before(context: dg.AssetExecutionContext) -> set[tuple[Any, ...]]:
    """Return the evaluations that an earlier attempt of this step wrote."""
    if not context.retry_number:
        return set()
    kind = dg.DagsterEventType.ASSET_CHECK_EVALUATION
    entries = context.instance.all_logs(context.run.run_id, of_type=kind)
    events = [entry.dagster_event for entry in entries]
    return {_identity(event.asset_check_evaluation_data) for event in events if event}


def _identity(evaluation: dg.AssetCheckEvaluation) -> tuple[Any, ...]:
    target = evaluation.target_materialization_data
    return (
        evaluation.asset_check_key,
        evaluation.partition,
        evaluation.passed,
        evaluation.description,
        target.storage_id if target else None,
    )


def _shown(value: Any) -> Any:
    """Convert a value of a check's metadata for display in Dagster."""
    if isinstance(value, str) and "\n" in value:
        return dg.MetadataValue.md(f"````\n{value}\n````")  # plain text would lose its line breaks
    if isinstance(value, list) and _is_table(value):
        return dg.MetadataValue.table(
            records=[dg.TableRecord(dict(row)) for row in value],
            schema=dg.TableSchema([dg.TableColumn(name) for name in value[0]]),
        )
    return value


def _is_table(rows: list[Any]) -> bool:
    return bool(rows) and all(
        isinstance(row, Mapping)
        and row.keys() == rows[0].keys()
        and all(isinstance(value, (str, int, float)) for value in row.values())
        for row in rows
    )


def describe_blocked(found: Sequence[Blocked]) -> str:
    """Describe the blocking checks that failed in materialized partitions."""
    lines = []
    for stage, partition, result in found[:5]:
        where = "" if partition is None else f", partition {partition!r}"
        lines.append(f"stage {stage!r}{where}: {result.name}: {result.description}")
    return f"{len(found)} blocking checks failed\n" + "\n".join(lines)


def make_check_runner(
    context: dg.AssetExecutionContext, pipeline: Pipeline, store: Store
) -> CheckRunner:
    """Return a check runner that orders partitions as Dagster does.

    Args:
        context: The context of the step.
        pipeline: The pipeline.
        store: The store with the evaluated rows.
    """
    order = DagsterOrder(pipeline.partitions_def, context.instance)
    return CheckRunner(pipeline, store, order, context.run.run_id)


def evaluate_alone(
    context: dg.AssetExecutionContext,
    log: CheckLog,
    pipeline: Pipeline,
    store: Store,
    check_runner: CheckRunner,
) -> None:
    """Evaluate the selected checks of stages that this run does not materialize.

    Without a partition, this covers all materialized partitions.

    Args:
        context: The context of the step.
        log: Receives the evaluations.
        pipeline: The pipeline.
        store: The store with the evaluated rows.
        check_runner: Evaluates the checks.

    Raises:
        StoreError: If a partition was never materialized.
        dg.Failure: If a blocking check failed, as in Dagster. It gates everything selected.
    """
    checks = context.selected_asset_check_keys
    for stage in pipeline:
        chosen = {
            dg.AssetCheckKey(stage.key, c.name) for c in pipeline._checks_of(stage.name)
        } & checks
        if not chosen or stage.key in context.selected_asset_keys:
            continue
        manifests = stored_manifests(pipeline, store, stage, run_partitions(context))
        for partition, manifest in manifests.items():
            results = check_runner.results(manifest)
            wanted = [r for r in results if dg.AssetCheckKey(stage.key, r.name) in checks]
            log.found(stage.name, partition, wanted)
        log.flush()
    if log.blocked:
        raise dg.Failure(describe_blocked(log.blocked), allow_retries=False)


def run_partitions(context: dg.AssetExecutionContext) -> list[str] | None:
    """Return the partitions that a run names; None if it names none."""
    named = context.has_partition_key or context.has_partition_key_range
    return list(context.partition_keys) if named else None


def stored_manifests(
    pipeline: Pipeline, store: Store, stage: Stage, partitions: Sequence[str] | None
) -> dict[str | None, Manifest]:
    """Return a stage's manifests in force by partition.

    Args:
        pipeline: The pipeline.
        store: The store.
        stage: The stage.
        partitions: Partition keys; None for all materialized partitions.

    Raises:
        StoreError: If a partition was never materialized.
    """
    manifests = find(store, stage.key.path, partitions)
    if missing := [key for key in partitions or [] if key not in manifests] or not manifests:
        which = f", partition {names(missing)}," if isinstance(missing, list) else ""
        raise StoreError(
            f"stage '{pipeline.name}/{stage.name}'{which} was never materialized, so there is "
            "nothing to check; materialize it first"
        )
    return manifests
