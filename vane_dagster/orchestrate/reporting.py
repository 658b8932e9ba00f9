"""A run's events as Dagster's: one materialization a partition, the failed ones failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from vane_dagster.commit.manifest import Manifest, ManifestName
from vane_dagster.commit.store import Store
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.errors import names
from vane_dagster.execute.events import (
    Committed,
    Event,
    Failed,
    Noticed,
    Printed,
    Progress,
    StageStats,
    Unchanged,
    WaveStarted,
    WorkerReady,
)
from vane_dagster.orchestrate.provenance import Provenance
from vane_dagster.report.metadata import PoolUse, stage_metadata
from vane_dagster.report.progress import ProgressReport

# Dagster writes an event of its own for each partition of a range, all with one data version. A
# result that carries this mark is taken for an observation and writes none, while the steps below
# still run; the events are logged here, each with its own data version.
_LOGGED_ALREADY = {"__source_asset_observation__": True}


class RunReport:
    """Listens to a run's events, and gives Dagster its results."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        store: Store,
        partitions: Sequence[str | None],
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._store = store
        self._partitions = partitions
        self._log = context.log
        self._progress = ProgressReport(context.log.info)
        self._uses: dict[str, PoolUse] = {}
        self._failed: list[Failed] = []
        self._single: dict[str, dg.MaterializeResult[Any]] = {}
        keys = [key for key in partitions if key is not None]
        self._provenance = Provenance(context, keys) if len(keys) > 1 else None

    def listen(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Progress):
            self._progress(event)
        elif isinstance(event, Committed):
            self._materialized(event.stage, event.manifest, event.name, event.stats)
        elif isinstance(event, Unchanged):
            manifest = self._store.read(
                self._pipeline.name, event.stage, event.partition, event.name
            )
            self._materialized(event.stage, manifest, event.name, StageStats())
        elif isinstance(event, Failed):
            self._failed.append(event)
            if event.because is None:
                self._log.error(_told(event))
        elif isinstance(event, WorkerReady):
            self._worker_ready(event)
        elif isinstance(event, WaveStarted):
            models = f", models {', '.join(event.models)}" if event.models else ""
            self._log.info(
                f"wave {event.index} of {event.count}: {', '.join(event.stages)}{models}"
            )
        elif isinstance(event, Printed):
            self._log.info(f"{event.stage} printed:\n{event.text.rstrip()}")
        elif isinstance(event, Noticed):
            self._log.warning(event.text)

    def _worker_ready(self, event: WorkerReady) -> None:
        report = event.report
        state = "was warm" if report.warm else f"loaded in {report.seconds:.1f} s"
        self._log.info(
            f"{event.model} {state} (worker {event.worker}, pid {report.pid}, {report.device})"
        )
        for stage in event.stages:
            use = self._uses.setdefault(stage, PoolUse())
            use.loads += not report.warm
            use.warm += report.warm
            use.load_seconds = max(use.load_seconds, report.seconds)

    def _materialized(
        self, stage: str, manifest: Manifest, name: ManifestName, stats: StageStats
    ) -> None:
        spec = self._pipeline[stage].spec
        use = self._uses.get(stage)
        metadata = stage_metadata(spec, self._pipeline.id, manifest, name, self._store, stats, use)
        key = dg.AssetKey([self._pipeline.name, stage])
        version = name.content
        if self._provenance is None or manifest.partition is None:
            self._single[stage] = dg.MaterializeResult(
                asset_key=key, metadata=metadata, data_version=dg.DataVersion(version)
            )
            return
        above = {u: ManifestName.parse(text) for u, text in manifest.upstream.items()}
        versions = {
            dg.AssetKey([self._pipeline.name, upstream]): name.content
            for upstream, name in above.items()
            if name
        }
        tags = {
            "dagster/data_version": version,
            "dagster/data_version_is_user_provided": "true",
            "dagster/code_version": manifest.definition[:16],
            **self._provenance.tags(key, manifest.partition, versions),
        }
        self._context.log_event(
            dg.AssetMaterialization(
                asset_key=key, partition=manifest.partition, metadata=metadata, tags=tags
            )
        )

    def close(self) -> None:
        """Ends what draws in the terminal."""
        self._progress.close()

    def results(self) -> Iterator[dg.MaterializeResult[Any]]:
        """What the step yields.

        Raises:
            dg.Failure: If a partition failed; the others are materialized all the same.
        """
        failed = {failure.stage for failure in self._failed}
        selected = [k for k in self._pipeline.stages if self._is_selected(k)]
        for stage in selected:
            if len(self._partitions) == 1:
                if stage in self._single:
                    yield self._single[stage]
            elif stage not in failed and not self._failed:
                yield dg.MaterializeResult(
                    asset_key=dg.AssetKey([self._pipeline.name, stage]), metadata=_LOGGED_ALREADY
                )
        if self._failed:
            raise self._failure()

    def _is_selected(self, stage: str) -> bool:
        return dg.AssetKey([self._pipeline.name, stage]) in self._context.selected_asset_keys

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


def _told(failure: Failed) -> str:
    """The error, with its stage and partition in front where it does not begin with its stage."""
    text = str(failure.error)
    if text.startswith("stage "):
        return text
    where = "" if failure.partition is None else f", partition {failure.partition!r}"
    return f"stage {failure.stage!r}{where}: {text}"
