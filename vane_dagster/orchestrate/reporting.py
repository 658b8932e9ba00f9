"""A run's events as Dagster's: one materialization a partition, the failed ones failed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from vane_dagster.commit.manifest import Manifest, ManifestName
from vane_dagster.commit.store import Store
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.declare.stage import SOURCE
from vane_dagster.errors import StoreError, names
from vane_dagster.execute.events import (
    Committed,
    Event,
    Failed,
    Noticed,
    Planned,
    Printed,
    Progress,
    StageStats,
    Unchanged,
    WaveStarted,
    WorkerReady,
)
from vane_dagster.execute.judging import Judge
from vane_dagster.masking import masked
from vane_dagster.orchestrate.check_events import CheckLog, told_blocked
from vane_dagster.orchestrate.event_log import DATA_VERSION
from vane_dagster.orchestrate.observing import SourceLog
from vane_dagster.orchestrate.provenance import Provenance
from vane_dagster.orchestrate.read_ahead import ReadAhead
from vane_dagster.orchestrate.specs import code_version, stage_key
from vane_dagster.plan.plan import RunPlan
from vane_dagster.report.metadata import PoolUse, stage_metadata
from vane_dagster.report.progress import ProgressReport

# Dagster writes events of its own for what a step yields, for all partitions of a range with one
# data version. A result that carries this mark is taken for one whose events are logged already:
# none are written, and the steps below still run.
LOGGED_ALREADY = {"__source_asset_observation__": True}


class RunReport:
    """Listens to a run's events, and gives Dagster its results."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        store: Store,
        partitions: Sequence[str | None],
        judging: Judge,
    ) -> None:
        self._context = context
        self._judging = judging
        self._checks = CheckLog(context, pipeline)
        self._pipeline = pipeline
        self._store = store
        self._partitions = partitions
        self._log = context.log
        self._progress = ProgressReport(context.log.info)
        self._uses: dict[str, PoolUse] = {}
        self._failed: list[Failed] = []
        self._done: ReadAhead | None = None
        self._before = _logged_before(context)
        self._provenance = Provenance(context, partitions)
        self._source = _source_log(context, pipeline, partitions)

    def listen(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Planned):
            self._planned(event.plan)
        elif isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, Committed):
            self._materialized(event, event.manifest, event.stats)
            self._checks.found(event.stage, event.partition, event.manifest.checks)
        elif isinstance(event, Unchanged):
            self._unchanged(event)
        elif isinstance(event, Failed):
            self._failed.append(event)
            self._checks.not_made(event.stage, event.partition, event.error)
            if event.because is None:
                self._log.error(_told(event))
        elif isinstance(event, WorkerReady):
            self._worker_ready(event)
        elif isinstance(event, WaveStarted) and event.count > 1:
            models = f", models {', '.join(event.models)}" if event.models else ""
            self._log.info(
                f"wave {event.index} of {event.count}: {', '.join(event.stages)}{models}"
            )
        elif isinstance(event, Printed):
            self._log.info(f"{event.stage} printed:\n{masked(event.text.rstrip())}")
        elif isinstance(event, Noticed):
            self._log.warning(masked(event.text))

    def _worker_ready(self, event: WorkerReady) -> None:
        """Logs each load, and of warm workers the first of a model: there may be hundreds."""
        report = event.report
        first = not any(self._uses[stage].warm for stage in event.stages if stage in self._uses)
        if first or not report.warm:
            state = "is warm" if report.warm else f"loaded in {report.seconds:.1f} s"
            self._log.info(
                f"{event.model} {state} (worker {event.worker}, pid {report.pid}, {report.device})"
            )
        for stage in event.stages:
            use = self._uses.setdefault(stage, PoolUse())
            use.loads += not report.warm
            use.warm += report.warm
            use.load_seconds = max(use.load_seconds, report.seconds)

    def _planned(self, plan: RunPlan) -> None:
        """Tells Dagster which source files the run has found, so that nothing below is stale."""
        self._log.info(str(plan))
        self._done = ReadAhead(self._store, plan)
        if self._source is None:
            return
        listed = {partition.key: partition.found for partition in plan.partitions}
        if changed := self._source.tell(listed):
            self._provenance.observed(self._source.key, changed)

    def _unchanged(self, event: Unchanged) -> None:
        assert self._done is not None
        try:
            manifest = self._done.next(event.stage, event.partition)
        except StoreError as error:
            self.listen(Failed(event.stage, event.partition, error))
            return
        key = stage_key(self._pipeline, event.stage)
        if (key, event.partition, event.name.content) not in self._before:
            self._materialized(event, manifest, StageStats())
        self._checks.found(event.stage, event.partition, self._judging.results(manifest))

    def _materialized(
        self, event: Committed | Unchanged, manifest: Manifest, stats: StageStats
    ) -> None:
        spec = self._pipeline[event.stage].spec
        use = self._uses.get(event.stage)
        key = stage_key(self._pipeline, event.stage)
        above = {u: ManifestName.parse(text) for u, text in manifest.upstream.items()}
        versions = {stage_key(self._pipeline, u): name.content for u, name in above.items() if name}
        partition, id = event.partition, self._pipeline[event.stage].id
        metadata = stage_metadata(
            spec, id, partition, manifest, event.name, self._store, stats, use, self._key_of
        )
        self._context.log_event(
            dg.AssetMaterialization(
                asset_key=key,
                partition=partition,
                metadata=metadata,
                tags={
                    DATA_VERSION: event.name.content,
                    "dagster/data_version_is_user_provided": "true",
                    "dagster/code_version": code_version(manifest.definition),
                    **self._provenance.tags(key, partition, versions),
                    **_dimension_tags(partition),
                },
            )
        )

    def _key_of(self, node: str) -> dg.AssetKey:
        return stage_key(self._pipeline, node)

    def close(self) -> None:
        """Ends what draws in the terminal, and what reads ahead."""
        self._progress.close()
        if self._done is not None:
            self._done.close()

    def results(self) -> Iterator[dg.MaterializeResult[Any]]:
        """What the step yields: each stage of which no partition failed.

        Raises:
            dg.Failure: If a partition failed; the others are materialized all the same.
        """
        failed = {failure.stage for failure in self._failed}
        failed |= {stage for stage, _, _ in self._checks.blocked}
        for stage in self._pipeline.stages:
            key = stage_key(self._pipeline, stage)
            if key in self._context.selected_asset_keys and stage not in failed:
                yield dg.MaterializeResult(asset_key=key, metadata=LOGGED_ALREADY)
        if self._failed:
            raise self._failure()
        if self._checks.blocked:
            raise dg.Failure(told_blocked(self._checks.blocked), allow_retries=False)

    def _failure(self) -> dg.Failure:
        roots = [failure for failure in self._failed if failure.because is None]
        keys = dict.fromkeys(failure.partition for failure in self._failed)
        if len(self._partitions) == 1:
            description = "\n\n".join(map(_told, roots))
        else:
            shown = "\n\n".join(_told(f) for f in roots[:5])
            description = (
                f"{len(keys)} of {len(self._partitions)} partitions failed ({names(keys)}); the "
                f"others are materialized. Finished parts are kept.\n\n{shown}"
            )
        return dg.Failure(
            description=description,
            metadata={"failed_stages": ", ".join(dict.fromkeys(f.stage for f in self._failed))},
        )


def _dimension_tags(partition: str | None) -> dict[str, str]:
    """What Dagster tags the event of a multi-partition with."""
    keys: Mapping[str, str] = getattr(partition, "keys_by_dimension", {})
    return {f"dagster/partition/{dimension}": key for dimension, key in keys.items()}


def _source_log(
    context: dg.AssetExecutionContext, pipeline: Pipeline, partitions: Sequence[str | None]
) -> SourceLog | None:
    """The source's observations, where it is observed and the run reads it."""
    reads = any(
        SOURCE in stage.spec.upstream and stage.key in context.selected_asset_keys
        for stage in pipeline
    )
    return SourceLog(context, pipeline, partitions) if reads and pipeline.is_observed else None


def _logged_before(
    context: dg.AssetExecutionContext,
) -> set[tuple[dg.AssetKey | None, str | None, str | None]]:
    """What a former attempt of this step has logged: assets, partitions and data versions."""
    if not context.retry_number:
        return set()
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    records = context.instance.get_records_for_run(context.run.run_id, of_type=kind).records
    events = [record.asset_materialization for record in records]
    return {(e.asset_key, e.partition, (e.tags or {}).get(DATA_VERSION)) for e in events if e}


def _told(failure: Failed) -> str:
    """The error, with its stage and partition in front where it does not begin with its stage."""
    text = str(failure.error)
    if text.startswith("stage "):
        return text
    where = "" if failure.partition is None else f", partition {failure.partition!r}"
    return f"stage {failure.stage!r}{where}: {text}"
