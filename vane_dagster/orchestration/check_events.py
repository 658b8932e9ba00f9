"""Stage checks as Dagster asset checks, and their results as check evaluations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from vane_dagster._texts import EqualErrors, in_partition, listed
from vane_dagster.orchestration.asset_specs import stage_key
from vane_dagster.orchestration.event_log import EventLog, events_grouped
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.manifest import CheckResult

_SHOWN = 5

Checked = tuple[str, str | None, CheckResult]
"""The stage, the partition, and the result of a check there."""


class CheckLog:
    """Collects check evaluations, one per check and partition.

    Evaluations that a step yields have no partition, so this class writes them itself.

    Attributes:
        blocked: Failed blocking checks.
    """

    def __init__(self, context: dg.AssetExecutionContext, pipeline: Pipeline) -> None:
        self._context, self._pipeline = context, pipeline
        self._selected = context.selected_asset_check_keys
        self._pending: dict[str, list[tuple[str | None, CheckResult]]] = {}
        self.blocked: list[Checked] = []

    def record(self, stage: str, partition: str | None, results: Iterable[CheckResult]) -> None:
        """Add the check results of a partition."""
        key = stage_key(self._pipeline, stage)
        for result in results:
            if result.blocks:
                self.blocked.append((stage, partition, result))
            if dg.AssetCheckKey(key, result.name) in self._selected:
                self._pending.setdefault(stage, []).append((partition, result))

    def write(self, stage: str) -> None:
        """Write a stage's pending evaluations inside a group, after its materializations."""
        if not (pending := self._pending.pop(stage, [])):
            return
        key, partitions = stage_key(self._pipeline, stage), {p: None for p, _ in pending}
        targets = EventLog(self._context.instance).targets(key, [*partitions])
        for partition, result in pending:
            self._context.log_event(
                dg.AssetCheckEvaluation(
                    asset_key=key,
                    check_name=result.name,
                    passed=result.passed,
                    metadata={n: _shown(value) for n, value in result.metadata.items()},
                    target_materialization_data=targets.get(partition),
                    severity=dg.AssetCheckSeverity[result.severity],
                    description=result.description,
                    blocking=result.blocking,
                    partition=partition,
                )
            )

    def flush(self) -> None:
        """Write all pending evaluations, for partitions materialized earlier."""
        with events_grouped(self._context.instance):
            for stage in list(self._pending):
                self.write(stage)

    def outputs(self) -> Iterator[dg.Output[None]]:
        """Yield an output for each selected check.

        Dagster assumes that a check without an output returned no result. An output alone adds no
        evaluation to those already written for each partition.
        """
        for name, spec in self._context.assets_def.node_check_specs_by_output_name.items():
            if spec.key in self._selected:
                yield dg.Output(None, output_name=name)


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


def describe_checks(evaluated: Sequence[Checked]) -> str:
    """Describe the results of checks: how many passed, and those that did not."""
    states, errors = Counter[str](), EqualErrors()
    for stage, partition, result in evaluated:
        state = "passed" if result.passed else "failed" if result.severity == "ERROR" else "warned"
        states[state] += 1
        if not result.passed:
            where = f"stage {stage!r}{in_partition(partition)}: {result.name} {state}"
            errors.add(partition, f"{where}: {result.description}", stage, result.name)
    counts = ", ".join(f"{number:,} {state}" for state, number in states.most_common())
    return listed([f"checks: {counts}", *errors.texts()], _SHOWN + 1, "\n    ")


def run_partitions(context: dg.AssetExecutionContext) -> list[str | None] | None:
    """Return the partitions that a run names; None if it names none."""
    named = context.has_partition_key or context.has_partition_key_range
    return list(context.partition_keys) if named else None
