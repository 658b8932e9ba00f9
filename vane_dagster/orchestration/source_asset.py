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


def log_changes(
    context: dg.AssetExecutionContext,
    pipeline: Pipeline,
    listed: Mapping[str | None, Sequence[FileRecord]],
) -> list[str | None]:
    """Log the files of each partition that differs from its latest observation."""
    key = stage_key(pipeline, SOURCE)
    kind = dg.DagsterEventType.ASSET_OBSERVATION
    known = EventLog(context.instance).versions(key, kind, list(listed))
    changed = [
        partition
        for partition, files in listed.items()
        # A partition without files that was never observed is not reported.
        if source_version(files) != known.get(partition) and (files or partition in known)
    ]
    for start in range(0, len(changed), _GROUP):
        with events_grouped(context.instance):
            for partition in changed[start : start + _GROUP]:
                files = listed[partition]
                context.log_event(
                    dg.AssetObservation(
                        asset_key=key,
                        partition=partition,
                        tags={DATA_VERSION: source_version(files)},
                        metadata={
                            "dagster/uri": pipeline.source.url_for(partition),
                            "files": len(files),
                            "bytes": sum(file.size for file in files),
                        },
                    )
                )
    return changed


def observe(
    context: dg.AssetExecutionContext, pipeline: Pipeline, partitions: Iterable[str | None]
) -> None:
    """List the source and log the partitions that changed, skipping those without files."""
    keys = [*map(pipeline._partition, partitions)]
    listed = pipeline.source.list_files(keys, f"pipeline {pipeline.name!r}")
    errors = [files for files in listed.values() if isinstance(files, SourceError)]
    readable = {key: files for key, files in listed.items() if not isinstance(files, SourceError)}
    log_changes(context, pipeline, readable)
    if errors:
        raise errors[0]
