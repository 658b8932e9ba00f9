"""Runs the checks that recompute rows: a sample of each partition."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import dagster as dg

from vane_dagster._dataclass import dataclass
from vane_dagster.checks.base import Check
from vane_dagster.checks.context import Recomputation
from vane_dagster.engine.inference import pinned
from vane_dagster.errors import names
from vane_dagster.events import Event, PoolLoads, WorkerReady
from vane_dagster.orchestration.check_events import CheckLog, run_partitions
from vane_dagster.orchestration.progress import log_text
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.run import RunContext, recomputed
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.pipeline.pipeline import Pipeline, Stage
from vane_dagster.planning.sample_plan import plan_sample
from vane_dagster.storage.manifest import Manifest
from vane_dagster.storage.reader import find_all

MAX_PARTITIONS = 4
"""Number of partitions, chosen at random, that a run without partitions samples."""


@dataclass(frozen=True)
class ReproducibilityRunner:
    """Recomputes samples of a pipeline's rows.

    Attributes:
        context: The context of the step.
        pipeline: The pipeline.
        run: What the plans of the samples are executed with.
        compute: The compute resource.
        config: The run config.
    """

    context: dg.AssetExecutionContext
    pipeline: Pipeline
    run: RunContext
    compute: Compute
    config: RunOptions

    def evaluate(self, log: CheckLog) -> None:
        """Evaluate the selected checks of stages that this run does not materialize."""
        context = self.context
        for stage in self.pipeline:
            if stage.key in context.selected_asset_keys:
                continue  # this run computes its rows
            for check in self.pipeline._reproducible(stage.name):
                if dg.AssetCheckKey(stage.key, check.name) in context.selected_asset_check_keys:
                    self._evaluate(stage, check, log)
        log.flush()

    def _evaluate(self, stage: Stage, check: Check, log: CheckLog) -> None:
        seed = random.Random(self.run.run_id).getrandbits(32)
        manifests = self._manifests(stage, seed)
        rows = dict.fromkeys(manifests, check.rows_to_recompute)
        pipeline = pinned(self.pipeline, stage.name, self.run.store)
        sample = plan_sample(pipeline, stage.name, manifests, self.run.store, rows, seed)
        loads = PoolLoads()

        def listen(event: Event) -> None:
            if isinstance(event, WorkerReady) and event.stages and not event.server:
                loads.add(event.report)
            log_text(self.context.log, event)

        with recomputed(replace(self.run, listen=listen), sample, self.compute) as results:
            for key, manifest in manifests.items():
                sampled = sample.sampled.get(key)
                recomputation = Recomputation(
                    read=partial(results.read, key),
                    loads=loads.loads,
                    warm=loads.warm,
                    code_changed=manifest.definition != sample.plan.definitions[stage.name],
                    fragments=sampled.fragments if sampled else 0,
                    sampled_fragments=len(sampled.stored.parts) if sampled else 0,
                    changed_fragments=sampled.changed if sampled else 0,
                    error=results.failed.get(key),
                )
                result = self.run.check_runner.recomputed(check, manifest, recomputation)
                log.found(stage.name, key, [result])

    def _manifests(self, stage: Stage, seed: int) -> Mapping[str | None, Manifest]:
        """Return the manifests of the run's partitions, or of a random sample if it names none."""
        asked = self.config.reproduce_partitions
        named: list[str | None] | None = [*asked] or run_partitions(self.context)
        manifests = find_all(self.run.store, stage.key.path, named)
        if named or len(manifests) <= MAX_PARTITIONS:
            return manifests
        keys = random.Random(seed).sample(list(manifests), MAX_PARTITIONS)
        self.context.log.info(
            f"stage '{self.pipeline.name}/{stage.name}': the run names no partition; "
            f"{names(keys)} are sampled of {len(manifests):,}"
        )
        return {key: manifests[key] for key in keys}
