"""Reports changes of a pipeline's source to Dagster, partition by partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import dagster as dg

from vane_dagster.errors import SourceError
from vane_dagster.orchestration.asset_specs import stage_key
from vane_dagster.orchestration.event_log import DATA_VERSION, EventLog, events_grouped
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.sources.files import source_version
from vane_dagster.storage.manifest import FileRecord

_GROUP = 500


class SourceLog:
    """Compares partitions with their latest observations, and logs new ones."""

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        partitions: Sequence[str | None],
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self._partitions = partitions
        self.key = stage_key(pipeline, SOURCE)

    def tell(self, found: Mapping[str | None, Sequence[FileRecord]]) -> list[str | None]:
        """Log the files of each partition that differs from its latest observation."""
        kind = dg.DagsterEventType.ASSET_OBSERVATION
        known = EventLog(self._context.instance).versions(self.key, kind, self._partitions)
        changed = [
            partition
            for partition, files in found.items()
            # A partition without files that was never observed is not reported.
            if source_version(files) != known.get(partition) and (files or partition in known)
        ]
        for start in range(0, len(changed), _GROUP):
            with events_grouped(self._context.instance):
                for partition in changed[start : start + _GROUP]:
                    self._context.log_event(self._observation(partition, found[partition]))
        return changed

    def _observation(
        self, partition: str | None, files: Sequence[FileRecord]
    ) -> dg.AssetObservation:
        return dg.AssetObservation(
            asset_key=self.key,
            partition=partition,
            tags={DATA_VERSION: source_version(files)},
            metadata={
                "dagster/uri": self._pipeline.source.url_for(partition),
                "files": len(files),
                "bytes": sum(file.size for file in files),
            },
        )


def observe(pipeline: Pipeline, partitions: Iterable[str | None], log: SourceLog) -> int:
    """List the source and log the partitions that changed, skipping those without files."""
    listed = pipeline.source.list_files(list(partitions), f"pipeline {pipeline.name!r}")
    errors = [files for files in listed.values() if isinstance(files, SourceError)]
    found = {key: files for key, files in listed.items() if not isinstance(files, SourceError)}
    changed = log.tell(found)
    if errors:
        raise errors[0]
    return len(changed)
