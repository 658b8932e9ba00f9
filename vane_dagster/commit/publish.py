"""Publishing: a `write` stage's parts, put into a plain folder of Parquet that any tool reads.

Workers write into a folder of the target that readers pass over. A commit moves the files into the
target, puts the manifest in force, and only then removes what former manifests named, and what a
killed run had announced and moved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from vane_dagster.commit.folders import published_folder
from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import PartInfo, parse_part_name
from vane_dagster.declare.source import ParquetSource
from vane_dagster.declare.stage import StageSpec, WriteSpec
from vane_dagster.errors import StoreError, names

_STAGING = "_vane_staging"
_MOVERS = 8


def publish_folders(spec: StageSpec, partition: str | None) -> tuple[Location, Location] | None:
    """Target folder and staging folder of a `write` stage in a partition; None for other stages."""
    if not isinstance(spec, WriteSpec):
        return None
    url = ParquetSource(spec.url).url_for(partition, escape=published_folder)
    target = Location(url, spec.storage_options)
    return target, target.child(_STAGING)


def promote(target: Location, staging: Location, parts: Sequence[PartInfo]) -> None:
    """Moves staged parts into the target; those already there are left.

    Raises:
        StoreError: If one is in neither.
    """
    staged = staging.names()
    with ThreadPoolExecutor(max_workers=_MOVERS) as threads:
        moved = [part.name for part in parts if part.name in staged]
        list(threads.map(lambda name: staging.move(name, target, name), moved))
    require_all(target, parts)


def require_all(target: Location, parts: Sequence[PartInfo]) -> None:
    """Sees that all parts are published.

    Raises:
        StoreError: If one is not.
    """
    present = target.names()
    if lost := [part.name for part in parts if part.name not in present]:
        raise StoreError(
            f"{target.url!r} lost {names(lost)} while it was published: another run published the "
            "same partition at the same time. Run it again"
        )


def retire(target: Location, former: Iterable[Collection[str]], parts: Iterable[PartInfo]) -> None:
    """Removes from the target what former manifests named and the one in force does not.

    Args:
        target: The folder.
        former: Part names of former manifests, opened one after the other as long as the target
            holds parts that none of those before named.
        parts: Parts of the manifest in force.
    """
    left = {name for name in target.names() if parse_part_name(name)} - {p.name for p in parts}
    for named in former if left else ():
        target.delete(sorted(left.intersection(named)))
        left.difference_update(named)
        if not left:
            break
