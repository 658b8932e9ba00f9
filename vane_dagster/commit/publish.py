"""Publishing: a `write` stage's parts, put into a plain folder of Parquet that any tool reads.

Workers write into a folder of the target that readers pass over. A commit moves the files into the
target, puts the manifest in force, and only then removes the files of the manifest before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import PartInfo
from vane_dagster.declare.source import ParquetSource
from vane_dagster.declare.stage import StageSpec, WriteSpec

_STAGING = "_vane_staging"


def publish_folders(spec: StageSpec, partition: str | None) -> tuple[Location, Location] | None:
    """Target folder and staging folder of a `write` stage in a partition; None for other stages."""
    if not isinstance(spec, WriteSpec):
        return None
    target = Location(ParquetSource(spec.url).url_for(partition), spec.storage_options)
    return target, target.child(_STAGING)


def promote(target: Location, staging: Location, parts: Iterable[PartInfo]) -> None:
    """Moves staged parts into the target; those already there are left."""
    present = target.names()
    staged = staging.names()
    for part in parts:
        if part.name in staged:
            staging.move(part.name, target, part.name)
        elif part.name not in present:
            raise FileNotFoundError(target.file_url(part.name))


def retire(target: Location, old: Iterable[PartInfo], new: Iterable[PartInfo]) -> None:
    """Removes from the target the files that only the former manifest names."""
    kept = {part.name for part in new}
    target.delete([part.name for part in old if part.name not in kept])
