"""Executes the checks that compute rows again: a sample of each partition, and what came of it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from vane_dagster._secrets import masked
from vane_dagster.checks.recomputed import Difference
from vane_dagster.checks.reproducible import Reproducible
from vane_dagster.engine.check_runner import Judge
from vane_dagster.engine.recompute import Compared, compare_sample, delete_parts
from vane_dagster.errors import PlanError, VaneError, names
from vane_dagster.events import (
    Event,
    Failed,
    Noticed,
    Printed,
    Recomputed,
    Waiting,
    WorkerReady,
)
from vane_dagster.orchestration.check_events import CheckLog, run_partitions, stored_manifests
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.run import recompute
from vane_dagster.pipeline.pipeline import Pipeline, Stage
from vane_dagster.planning.plan import Part
from vane_dagster.planning.sample_plan import SamplePlan, plan_sample
from vane_dagster.storage.manifest import CheckResult, Manifest
from vane_dagster.storage.store import Store

MOST_PARTITIONS = 4
"""Partitions that are sampled by a run that names none, chosen at random."""

_SHOWN = 50
_NAMED = 5


@dataclass
class _Results:
    """What a run of samples tells."""

    log: dg.DagsterLogManager
    made: dict[str | None, Sequence[Part]] = field(default_factory=dict)
    failed: dict[str | None, VaneError] = field(default_factory=dict)
    loads: int = 0
    warm: int = 0

    def listen(self, event: Event) -> None:
        if isinstance(event, Recomputed):
            self.made[event.partition] = event.parts
        elif isinstance(event, Failed):
            self.failed[event.partition] = event.error
        elif isinstance(event, WorkerReady) and event.stages:
            self.loads += not event.report.warm
            self.warm += event.report.warm
        elif isinstance(event, Printed):
            self.log.info(f"{event.stage} printed:\n{masked(event.text.rstrip())}")
        elif isinstance(event, Noticed):
            self.log.warning(masked(event.text))
        elif isinstance(event, Waiting):
            self.log.info(masked(event.text))


@dataclass(frozen=True)
class Reproduction:
    """Computes samples of a pipeline's rows again.

    Attributes:
        context: The step.
        pipeline: The pipeline.
        store: Where the rows are.
        compute: Where they are computed.
        check: Called every few seconds; what it raises stops the run.
        priority: Where runs compete for workers, the one with the highest goes first.
        partitions: The partitions that are sampled, in place of the run's.
        rows: Rows of each partition, in place of a check's own.
        seed: Chooses the rows; None for others each time.
    """

    context: dg.AssetExecutionContext
    pipeline: Pipeline
    store: Store
    compute: Compute
    check: Callable[[], None]
    priority: int = 0
    partitions: Sequence[str] = ()
    rows: int | None = None
    seed: int | None = None

    def evaluate(self, log: CheckLog, judging: Judge) -> None:
        """Evaluates the selected checks of stages that are not to be materialized.

        Raises:
            VaneError: If a partition was never materialized, or the cluster cannot be used.
        """
        context = self.context
        for stage in self.pipeline:
            if stage.key in context.selected_asset_keys:
                continue  # its rows are computed in this run
            for check in self.pipeline.reproducible(stage.name):
                if dg.AssetCheckKey(stage.key, check.name) in context.selected_asset_check_keys:
                    self._evaluate(stage, check, log, judging)
        log.flush()

    def _evaluate(self, stage: Stage, check: Reproducible, log: CheckLog, judging: Judge) -> None:
        seed = secrets.randbits(32) if self.seed is None else self.seed
        manifests = self._manifests(stage, seed)
        rows = self.rows or check.rows
        sample = plan_sample(self.pipeline, stage.name, manifests, self.store, rows, seed)
        results = _Results(self.context.log, failed=dict(sample.plan.failed))
        try:
            if sample.plan.partitions:
                recompute(
                    sample.plan,
                    self.compute,
                    self.store,
                    self.context.run.run_id,
                    results.listen,
                    self.context.log.info,
                    self.check,
                    judging,
                    self.priority,
                )
            for key, manifest in manifests.items():
                found = self._result(check, manifest, sample, results, seed)
                log.found(stage.name, key, [found])
        finally:
            delete_parts(sample.plan, self.store)

    def _manifests(self, stage: Stage, seed: int) -> Mapping[str | None, Manifest]:
        """The partitions of the run, or some of all if it names none."""
        if self.partitions and self.pipeline.partitions_def is None:
            raise PlanError(
                f"pipeline {self.pipeline.name!r}: reproduce_partitions is {self.partitions!r}, "
                "but it has no partitions; leave it out"
            )
        named = list(self.partitions) or run_partitions(self.context)
        manifests = stored_manifests(self.pipeline, self.store, stage, named)
        if named or len(manifests) <= MOST_PARTITIONS:
            return manifests
        keys = random.Random(seed).sample(list(manifests), MOST_PARTITIONS)
        self.context.log.info(
            f"{check_label(stage)}: the run names no partition; {names(keys)} are sampled of "
            f"{len(manifests):,}"
        )
        return {key: manifests[key] for key in keys}

    def _result(
        self,
        check: Reproducible,
        manifest: Manifest,
        sample: SamplePlan,
        results: _Results,
        seed: int,
    ) -> CheckResult:
        """What was found in a partition."""
        key = manifest.partition
        metadata: dict[str, Any] = {"loads": results.loads, "warm": results.warm}
        metadata["seed"] = str(seed)  # Dagster would plot a number
        metadata["code_changed"] = manifest.definition not in sample.definitions
        if error := results.failed.get(key):
            return _failed(check, "The rows could not be computed again", error, metadata)
        try:
            compared = self._compared(check, key, sample, results)
        except VaneError as unread:
            told = "The rows could not be compared with what is stored"
            return _failed(check, told, unread, metadata)
        sampled = sample.sampled[key]
        metadata |= {
            "rows": compared.rows,
            "differing": len(compared.differing),
            "fragments": len(sampled.stored.parts),
            "fragments_with_changed_source": sampled.changed,
        }
        skipped = ""
        if sampled.changed:
            skipped = (
                f". The source files of {sampled.changed:,} of {sampled.fragments:,} fragments "
                "have changed since, so their rows were not compared; materialize it again"
            )
        if compared.differences:
            metadata["differences"] = _table(compared.differences)
            described = _described(compared, metadata["code_changed"])
            return _checked(check, False, check.severity, f"{described}{skipped}", metadata)
        if not compared.rows and sampled.changed:
            return _checked(check, False, "WARN", f"Nothing could be compared{skipped}", metadata)
        described = _same(compared.rows)
        return _checked(check, True, check.severity, f"{described}{skipped}", metadata)

    def _compared(
        self, check: Reproducible, key: str | None, sample: SamplePlan, results: _Results
    ) -> Compared:
        plan = sample.plan
        partition = next((each for each in plan.partitions if each.key == key), None)
        if partition is None:  # there is no row to compute
            return Compared(0, ())
        given = (sample.sampled[key], results.made[key], self.store, check)
        return compare_sample(plan, partition, *given)


def check_label(stage: Stage) -> str:
    """A stage, for messages."""
    return f"stage '{stage.pipeline.name}/{stage.name}'"


def _checked(
    check: Reproducible, passed: bool, severity: str, description: str, metadata: Mapping[str, Any]
) -> CheckResult:
    given = (check.name, passed, check.blocking, severity, description, metadata)
    return CheckResult(*given, check.definition)


def _failed(
    check: Reproducible, told: str, error: VaneError, metadata: Mapping[str, Any]
) -> CheckResult:
    text = masked(str(error))
    described = f"{told}: {text.partition(chr(10))[0]}"
    shown = dg.MetadataValue.md(f"````\n{text}\n````")  # as text, it would lose its lines
    return _checked(check, False, check.severity, described, {**metadata, "error": shown})


def _same(rows: int) -> str:
    if rows < 2:
        one = "1 row was computed again and matches the stored row"
        return one if rows else "The partition has no row to compute again"
    return f"{rows:,} rows were computed again; all match the stored rows"


def _described(compared: Compared, code_changed: bool) -> str:
    differing = compared.differing
    more = f" and {len(differing) - _NAMED:,} more" if len(differing) > _NAMED else ""
    ids = ", ".join(str(id) for id in differing[:_NAMED])
    columns = names(dict.fromkeys(each.column for each in compared.differences))
    since = "; the stage's code has changed since" if code_changed else ""
    return (
        f"{len(differing):,} of {compared.rows:,} rows differ from the stored rows: "
        f"ids {ids}{more}, in {columns}{since}"
    )


def _table(differences: Sequence[Difference]) -> dg.TableMetadataValue:
    columns = ("id", "column", "stored", "computed")
    return dg.MetadataValue.table(
        records=[
            dg.TableRecord({name: masked(str(getattr(each, name))) for name in columns})
            for each in differences[:_SHOWN]
        ],
        schema=dg.TableSchema([dg.TableColumn(name) for name in columns]),
    )
