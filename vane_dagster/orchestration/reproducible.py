"""Checks of stages that a run does not materialize; some recompute a sample of their rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import dagster as dg

from vane_dagster.checks.context import Recomputation
from vane_dagster.checks.reproducible import Reproducible
from vane_dagster.engine.inference import pinned
from vane_dagster.orchestration.check_events import CheckLog, describe_checks, run_partitions
from vane_dagster.orchestration.progress import log_text
from vane_dagster.orchestration.resources import Compute
from vane_dagster.orchestration.run import RunContext, recomputed
from vane_dagster.orchestration.run_options import RunOptions
from vane_dagster.pipeline.pipeline import Pipeline, Stage
from vane_dagster.planning.sample_plan import plan_sample
from vane_dagster.storage.manifest import CheckResult, Manifest
from vane_dagster.storage.reader import find_all

MAX_PARTITIONS = 4
"""Number of partitions, chosen at random, that a run without partitions samples."""


def evaluate_alone(
    context: dg.AssetExecutionContext,
    log: CheckLog,
    pipeline: Pipeline,
    run: RunContext,
    compute: Compute,
    config: RunOptions,
) -> None:
    """Evaluate the selected checks of stages that this run does not materialize.

    Without a partition, this covers all materialized partitions; checks that recompute rows choose
    some of them.
    """
    for stage in pipeline:
        keys = context.selected_asset_check_keys
        chosen = {key.name for key in keys if key.asset_key == stage.key}
        if not chosen or stage.key in context.selected_asset_keys:
            continue
        if not chosen.isdisjoint(check.name for check in pipeline._checks_of(stage.name)):
            manifests = find_all(run.store, stage.key.path, run_partitions(context))
            for partition, manifest in manifests.items():
                results = run.check_runner.results(manifest)
                log.record(stage.name, partition, [r for r in results if r.name in chosen])
        for check in pipeline._reproducible(stage.name):
            if isinstance(check, Reproducible) and check.name in chosen:
                for key, result in _recomputed(context, run, compute, stage, check, config):
                    log.record(stage.name, key, [result])
        log.flush()
    if log.blocked:
        raise dg.Failure(f"blocking {describe_checks(log.blocked)}", allow_retries=False)


def _recomputed(
    context: dg.AssetExecutionContext,
    run: RunContext,
    compute: Compute,
    stage: Stage,
    check: Reproducible,
    config: RunOptions,
) -> Iterator[tuple[str | None, CheckResult]]:
    """Compute a sample of a stage's rows again; yield the result for each partition."""
    asked = config.reproduce_partitions
    named: list[str | None] | None = [*asked] or run_partitions(context)
    seed = random.Random(run.run_id).getrandbits(32)
    manifests: Mapping[str | None, Manifest] = find_all(run.store, stage.key.path, named)
    if not named and len(manifests) > MAX_PARTITIONS:
        keys = random.Random(seed).sample(list(manifests), MAX_PARTITIONS)
        manifests = {key: manifests[key] for key in keys}
    rows = dict.fromkeys(manifests, check.rows)
    pipeline = pinned(stage.pipeline, stage.name, run.store)
    sample = plan_sample(pipeline, stage.name, manifests, run.store, rows, seed)
    run = replace(run, listen=partial(log_text, context.log))
    with recomputed(run, sample, compute) as read:
        for key, manifest in manifests.items():
            recomputation = Recomputation(
                read=partial(read, key),
                code_changed=manifest.definition != sample.plan.definitions[stage.name],
                source_changed=key in sample.changed,
            )
            yield key, run.check_runner.recomputed(check, manifest, recomputation)
