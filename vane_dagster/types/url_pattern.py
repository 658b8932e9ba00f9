"""URLs of a pipeline's data, with placeholders for the partition's key."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vane_dagster._arguments import PLACEHOLDER
from vane_dagster.errors import DefinitionError, names

if TYPE_CHECKING:
    import dagster as dg


def url_fields(url: str) -> tuple[str, ...]:
    """The placeholders of a URL, as ``partition_key`` or ``partition_key.<dimension>``."""
    return tuple(PLACEHOLDER.findall(url))


def url_for(url: str, partition_key: str | None, escape: Callable[[str], str] = str) -> str:
    """A URL with its placeholders filled in.

    Args:
        url: The URL with placeholders.
        partition_key: The partition's key; a multi-partition's key knows its dimensions.
        escape: Converts a key, or a dimension's key, to the text that stands in the URL.
    """

    def value(match: re.Match[str]) -> str:
        dimension = match.group(1).partition(".")[2]
        keys = getattr(partition_key, "keys_by_dimension", {})
        return escape(keys[dimension] if dimension else str(partition_key))

    return PLACEHOLDER.sub(value, url)


def url_of_all(url: str) -> str:
    """A URL as a glob that matches the data of all partitions."""
    return PLACEHOLDER.sub("*", url)


def check_placeholders(
    where: str, url: str, partitions_def: dg.PartitionsDefinition[Any] | None
) -> None:
    """Checks that a URL has a placeholder exactly where a pipeline has partitions.

    Args:
        where: The pipeline or stage, for the message.
        url: The URL.
        partitions_def: The pipeline's partitions; None for an unpartitioned one.

    Raises:
        DefinitionError: If it does not, or names an unknown dimension.
    """
    fields = url_fields(url)
    if partitions_def is None and fields:
        raise DefinitionError(
            f"{where}: {url!r} has {{{fields[0]}}}, but the pipeline has no "
            "partitions_def; give it one, or take the placeholder out"
        )
    if partitions_def is not None and not fields:
        raise DefinitionError(
            f"{where}: {url!r} has no {{partition_key}}, so that every partition "
            "would have the same files; put it in, or leave partitions_def out"
        )
    dimensions = [f.partition(".")[2] for f in fields if "." in f]
    known = [d.name for d in getattr(partitions_def, "partitions_defs", ())]
    if unknown := [d for d in dimensions if d not in known]:
        raise DefinitionError(
            f"{where}: {url!r} names the dimension {unknown[0]!r}; the partitions "
            f"have {names(known)}"
        )
