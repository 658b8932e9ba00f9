"""Reports a run's events to Dagster: a materialization per partition, and the failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import dagster as dg

from vane_dagster.engine.committer import BlockedError
from vane_dagster.errors import SourceError, StoreError, names
from vane_dagster.events import (
    Committed,
    Event,
    Failed,
    RunPlanned,
    Submitted,
    Unchanged,
    WaveStarted,
    WorkerReady,
)
from vane_dagster.orchestration.asset_specs import stage_key
from vane_dagster.orchestration.check_events import CheckLog, describe_checks
from vane_dagster.orchestration.event_log import (
    DATA_VERSION,
    FIGURES,
    SUMMARY,
    Provenance,
    events_grouped,
)
from vane_dagster.orchestration.metadata import column_metadata, stage_metadata
from vane_dagster.orchestration.progress import (
    SHOWN_ERRORS,
    RunLog,
    failure_message,
    first_line,
)
from vane_dagster.orchestration.source_asset import log_changes
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.plan import RunPlan
from vane_dagster.storage.adoptions import Adoption, latest
from vane_dagster.storage.manifest import ManifestName
from vane_dagster.storage.store import Store

# For results that a step yields, Dagster writes its own events, with one data version for all
# partitions of a range. This metadata marks a result as logged already: Dagster writes no event,
# and downstream steps still run.
LOGGED_ALREADY = {"__source_asset_observation__": True}

# Write pending events after this many partitions of stages, and every second.
_GROUP = 100


class RunReport:
    """Listens to a run's events and returns Dagster's results.

    The events arrive within the `with` block; the results are available after it.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        checks: CheckLog,
        pipeline: Pipeline,
        store: Store,
        partitions: Sequence[str | None],
        command_option: str = "",
    ) -> None:
        self._context = context
        self._command_option = command_option
        self._begun: set[str] = set()
        self._checks = checks
        self._pipeline = pipeline
        self._store = store
        self._partitions = partitions
        self._log = context.log
        self._run_log = RunLog(context.log, pipeline.name)
        self._summary = self._run_log.summary
        self._unfinished: set[str] = set()
        self._code_versions = {spec.key: spec.code_version for spec in context.assets_def.specs}
        self._is_planned = False
        self._adopted: Mapping[str, Sequence[Adoption]] = {}
        self._provenance = Provenance(context, partitions)
        self._observes_source = _observes_source(context, pipeline)
        self._shown: dict[str, Any] = {}  # by the step's last result, or by its failure
        self._pending: dict[str, list[Committed | Unchanged]] = {}

    def listen(self, event: Event) -> None:
        """Handle an event."""
        self._take(event)
        if sum(map(len, self._pending.values())) >= _GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the pending events.

        A stage's events precede those of its downstream stages. If a write fails, the remaining
        events are dropped: the next run of these partitions writes them.
        """
        if not self._pending:
            return
        pending, self._pending = self._pending, {}
        with events_grouped(self._context.instance):
            for stage in self._pipeline.stages:
                if stage in pending:
                    self._write(stage, pending[stage])
                self._checks.write(stage)

    def _write(self, stage: str, made: Sequence[Committed | Unchanged]) -> None:
        """Write materializations of a stage; only the last one contains the column metadata.

        Dagster shows the columns of the latest materialization, and they take up to nine tenths of
        an event's bytes.
        """
        key = stage_key(self._pipeline, stage)
        adopted = "".join(latest([each.since for each in self._adopted.get(stage, ())]))
        for each in made:
            manifest = each.manifest
            assert manifest is not None
            metadata = stage_metadata(
                self._pipeline[stage].spec,
                manifest,
                each.name,
                self._store,
                each.stats.computed if isinstance(each, Committed) else None,
                adopted,
            )
            if each is made[-1]:
                metadata |= column_metadata(manifest, self._pipeline[stage].id, self._key_of)
            above = {u: ManifestName.parse(name) for u, name in manifest.upstream.items()}
            versions = {self._key_of(u): name.content for u, name in above.items() if name}
            self._context.log_event(
                dg.AssetMaterialization(
                    asset_key=key,
                    partition=each.partition,
                    metadata=metadata,
                    tags={
                        DATA_VERSION: each.name.content,
                        "dagster/data_version_is_user_provided": "true",
                        "dagster/code_version": self._code_versions[key],
                        **self._provenance.tags(key, each.partition, versions),
                        **_dimension_tags(each.partition),
                    },
                )
            )
        self._provenance.read(key)

    def _take(self, event: Event) -> None:
        self._run_log.take(event)
        if isinstance(event, WaveStarted):
            self._begun.update(event.stages)
        if isinstance(event, RunPlanned):
            self._planned(event.plan)
        elif isinstance(event, (Committed, Unchanged)):
            self._materialized(event)
        elif isinstance(event, (Failed, Submitted)):
            self._not_materialized(event)
        elif isinstance(event, WorkerReady):
            self._worker_ready(event)
        elif isinstance(event, WaveStarted) and event.count > 1:
            models = f", models {', '.join(event.models)}" if event.models else ""
            self._log.info(
                f"wave {event.index} of {event.count}: stages {', '.join(event.stages)}{models}"
            )

    def _worker_ready(self, event: WorkerReady) -> None:
        """Log each model load, and the first warm worker of a model: there may be hundreds."""
        report = event.report
        is_known = report.warm and self._summary.models[event.model].warm > 1
        if event.is_function or is_known:
            return
        done = "started" if event.server else "loaded"
        state = "is warm" if report.warm else f"{done} in {report.seconds:.1f} s"
        if (server := report.server) is not None and (endpoint := server.endpoint) is not None:
            place = f"at {endpoint.url} (worker {event.worker}, node {endpoint.node})"
            log = f"`vane-dagster pools logs {event.server}`"
            if endpoint.node_id == endpoint.node:  # a subprocess of the run, not an actor
                log = f"{server.log_path}, until it stops"
            self._log.info(f"{event.model} {state} {place}. Its log: {log}")
            return
        self._log.info(
            f"{event.model} {state} (worker {event.worker}, pid {report.pid}, {report.device})"
        )

    def _not_materialized(self, event: Failed | Submitted) -> None:
        """Log why a partition is not materialized, as an observation of its asset."""
        self._unfinished.add(event.stage)
        metadata: dict[str, Any] = {"state": "failed"}
        if isinstance(event, Submitted):
            metadata["state"] = "submitted"
            if event.expected:
                metadata["expected_by"] = dg.MetadataValue.timestamp(event.expected)
        else:
            metadata["error"] = first_line(failure_message(event, self._pipeline.name))
            if command := self._logs(event):
                metadata["logs"] = dg.MetadataValue.md(command)
        self._context.log_event(
            dg.AssetObservation(
                asset_key=stage_key(self._pipeline, event.stage),
                partition=event.partition,
                metadata=metadata,
            )
        )

    def _logs(self, failure: Failed) -> str:
        """Return the command that shows what the failed workers wrote; empty if none caused it."""
        stage = failure.because or failure.stage
        if not self._pipeline[stage].spec.runs_udf or stage not in self._begun:
            return ""
        if isinstance(failure.error, SourceError | StoreError | BlockedError):
            return ""
        run = self._context.run.run_id[:8]
        return f"`vane-dagster logs {run} {self._pipeline.name}/{stage}{self._command_option}`"

    def _planned(self, plan: RunPlan) -> None:
        """Report the listed source files to Dagster, to keep downstream assets from being stale."""
        if plan.needed() or plan.failed:  # the summary has the rest
            self._log.info(str(plan))
        self._is_planned, self._adopted = True, plan.adopted
        if not self._observes_source:
            return
        listed = {each.key: tuple(each.listed.values()) for each in plan.partitions}
        if log_changes(self._context, self._pipeline, listed):
            self._provenance.read(self._key_of(SOURCE))

    def _materialized(self, event: Committed | Unchanged) -> None:
        self._pending.setdefault(event.stage, []).append(event)
        manifest = event.manifest
        assert manifest is not None, "run_pipeline adds it"
        self._checks.record(event.stage, event.partition, manifest.checks)

    def _key_of(self, node: str) -> dg.AssetKey:
        return stage_key(self._pipeline, node)

    def __enter__(self) -> RunReport:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the pending events; log a summary of a run that was planned."""
        self.flush()
        with events_grouped(self._context.instance):
            if self._is_planned:
                self._log.info(text := self._summary.text(kind is None))
                shown = dg.MetadataValue.md(f"~~~~\n{text}\n~~~~")
                self._shown = {SUMMARY: shown, FIGURES: self._summary.figures(kind is None)}

    def results(self) -> Iterator[Any]:
        """Yield the step's results.

        These are a result for each stage without a partition that failed or waits for batches; the
        events are logged.
        """
        # Dagster skips what is downstream of the others.
        others = self._unfinished | {stage for stage, _, _ in self._checks.blocked}
        done = [stage.key for stage in self._pipeline if stage.name not in others]
        keys = [key for key in done if key in self._context.selected_asset_keys]
        for key in keys:
            shown = self._shown if key == keys[-1] else {}
            yield dg.MaterializeResult(asset_key=key, metadata={**LOGGED_ALREADY, **shown})
        yield from self._checks.outputs()
        if self._run_log.failed or self._checks.blocked:
            raise self._failure()

    def _failure(self) -> dg.Failure:
        blocked, failures = self._checks.blocked, self._run_log.failed
        errors = self._run_log.errors.texts()
        keys = {failure.partition for failure in failures} | {key for _, key, _ in blocked}
        texts = errors[:SHOWN_ERRORS]
        if (more := len(errors) - SHOWN_ERRORS) > 0:
            texts.append(f"The log has {more} more errors")
        causes = [each for each in failures if each.because is None]
        commands = dict.fromkeys(map(self._logs, causes))
        if shown := list(filter(None, commands)):
            texts.append(f"Output of the workers: {', '.join(shown)}")
        if blocked:
            texts.append(f"blocking {describe_checks(blocked)}")
        if len(self._partitions) > 1:
            failed = names(key for key in self._partitions if key in keys)
            of = f"{len(keys)} of {len(self._partitions)} partitions failed ({failed})"
            texts.insert(0, f"{of}. Finished parts are kept.")
        is_transient = not all(each.error.is_permanent for each in causes)
        return dg.Failure("\n\n".join(texts), metadata=self._shown, allow_retries=is_transient)


def _dimension_tags(partition: str | None) -> dict[str, str]:
    """Return Dagster's tags for an event of a multi-partition."""
    keys: Mapping[str, str] = getattr(partition, "keys_by_dimension", {})
    return {f"dagster/partition/{dimension}": key for dimension, key in keys.items()}


def _observes_source(context: dg.AssetExecutionContext, pipeline: Pipeline) -> bool:
    """Whether the run reads the source, and `build_source` made an asset of it."""
    reads = any(
        SOURCE in stage.spec.upstream and stage.key in context.selected_asset_keys
        for stage in pipeline
    )
    if not reads or pipeline.source.asset:
        return False
    key, graph = stage_key(pipeline, SOURCE), context.job_def.asset_layer.asset_graph
    # A job that was made without the asset has a stub in its place.
    return graph.has(key) and not graph.get(key).assets_def.is_auto_created_stub
