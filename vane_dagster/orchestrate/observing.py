"""What a pipeline's source holds, told to Dagster partition by partition as it changes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import dagster as dg

from vane_dagster.commit.manifest import FileRecord
from vane_dagster.declare.pipeline import Pipeline
from vane_dagster.declare.stage import SOURCE
from vane_dagster.errors import SourceError
from vane_dagster.orchestrate.event_log import DATA_VERSION, EventLog
from vane_dagster.orchestrate.specs import stage_key
from vane_dagster.plan.listing import list_source
from vane_dagster.plan.source import source_version


class SourceLog:
    """The source's observations: what Dagster knows of some partitions, and what it is told.

    Args:
        context: Of the step that observes.
        pipeline: Whose source it is.
        partitions: Keys; ``[None]`` for an unpartitioned pipeline.
    """

    def __init__(
        self,
        context: dg.AssetExecutionContext,
        pipeline: Pipeline,
        partitions: Sequence[str | None],
    ) -> None:
        self._context = context
        self._pipeline = pipeline
        self.key = stage_key(pipeline, SOURCE)
        self._known = EventLog(context.instance).versions(
            self.key, dg.DagsterEventType.ASSET_OBSERVATION, partitions
        )

    def tell(self, partition: str | None, files: Sequence[FileRecord]) -> bool:
        """Logs what a partition holds, where it is not what Dagster knows.

        Returns:
            Whether it was logged.
        """
        version = source_version(files)
        known = self._known.get(partition)
        if version == known or (known is None and not files):
            return False
        self._context.log_event(
            dg.AssetObservation(
                asset_key=self.key,
                partition=partition,
                tags={DATA_VERSION: version},
                metadata={
                    "dagster/uri": self._pipeline.source.url_for(partition),
                    "files": len(files),
                    "bytes": sum(file.size for file in files),
                },
            )
        )
        self._known[partition] = version
        return True


def observe(pipeline: Pipeline, partitions: Iterable[str | None], log: SourceLog) -> int:
    """Lists the source and logs the partitions that changed; those without files are passed over.

    Returns:
        How many changed.

    Raises:
        SourceError: If a partition cannot be listed; the others are logged first.
    """
    listed = list_source(pipeline.source, list(partitions), f"pipeline {pipeline.name!r}")
    errors = [files for files in listed.values() if isinstance(files, SourceError)]
    changed = sum(
        log.tell(key, files) for key, files in listed.items() if not isinstance(files, SourceError)
    )
    if errors:
        raise errors[0]
    return changed
