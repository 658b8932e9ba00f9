"""The order of partitions as Dagster has it: time windows, declared keys, dimensions."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import dagster as dg

from vane_dagster.errors import DefinitionError, names
from vane_dagster.pipeline.pipeline import Pipeline


class DagsterOrder:
    """The partitions of a definition; they are listed once.

    Before a partition of several dimensions come those that differ from it in one alone: the time
    dimension, else the last one.
    """

    def __init__(self, partitions_def: Any, instance: dg.DagsterInstance | None) -> None:
        self._definition, self.instance = partitions_def, instance

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        if self._definition is None:
            return {}
        keys = self._definition.get_partition_keys(dynamic_partitions_store=self.instance)
        return {key: place for place, key in enumerate(keys)}

    def all(self) -> Sequence[str]:
        """Return all partitions."""
        return list(self._places)

    def sorted(self, keys: Sequence[str]) -> list[str]:
        """Return some partitions in the order; those that the definition lacks come last."""
        places = self._places
        return sorted(keys, key=lambda key: (places.get(key, len(places)), key))

    def ranges(self, keys: Sequence[str | None]) -> Iterator[tuple[str | None, str | None]]:
        """Yield the first and the last partition of each run: of neighbours in the order.

        Partitions that the definition lacks by now have no run.
        """
        if isinstance(self._definition, dg.MultiPartitionsDefinition) or None in keys:
            yield from ((key, key) for key in keys if key is None or key in self._places)
            return
        wanted, first, last = {*keys}, None, None
        for key in (*self.all(), None):
            if key in wanted:
                first, last = first or key, key
            elif last is not None:
                yield first, last
                first = last = None

    def before(self, partition: str) -> Iterator[str]:
        """Yield the partitions before one, the nearest first."""
        keys = self.all()
        others = self._other_dimensions(partition)
        for place in range(self._places.get(partition, 0) - 1, -1, -1):
            if self._other_dimensions(keys[place]) == others:
                yield keys[place]

    def _other_dimensions(self, partition: str) -> dict[str, str]:
        """Return the keys of a partition in all dimensions except the ordered one."""
        dimensions = getattr(self._definition, "partitions_defs", ())
        if not dimensions:
            return {}
        ordered = [d.name for d in dimensions if hasattr(d.partitions_def, "cron_schedule")]
        along = ordered[0] if ordered else dimensions[-1].name
        keys = self._definition.get_partition_key_from_str(str(partition)).keys_by_dimension
        return {name: key for name, key in keys.items() if name != along}


def partition_order(pipeline: Pipeline) -> DagsterOrder:
    """Return the order of a pipeline's partitions."""
    definition: Any = pipeline.partitions_def
    parts = [each.partitions_def for each in getattr(definition, "partitions_defs", ())]
    # The instance has the keys of partitions that are added at run time.
    is_dynamic = any(isinstance(d, dg.DynamicPartitionsDefinition) for d in (definition, *parts))
    return DagsterOrder(definition, dg.DagsterInstance.get() if is_dynamic else None)


def partition_keys(pipeline: Pipeline, partitions: Any, location: str) -> list[str | None]:
    """Return the partition keys that are asked for: one, several, "first..last", or all."""
    definition = pipeline.partitions_def
    if definition is None:
        if partitions is not None:
            raise DefinitionError(f"{location}: the pipeline has no partitions; leave them out")
        return [None]
    order = partition_order(pipeline)
    known = dict.fromkeys(order.all())
    if not known:
        raise DefinitionError(f"{location}: the pipeline has no partitions yet")
    if partitions is None:
        return list(known)
    chosen: list[str | None] = []
    for text in [partitions] if isinstance(partitions, str) else partitions:
        if text in known:
            chosen.append(text)
            continue
        first, dots, last = text.replace("...", "..").partition("..")  # as Dagster writes them
        edges = (first, last) if dots else (text, text)
        keys = list(known)
        if unknown := {*edges} - known.keys():
            raise DefinitionError(
                f"{location}: there is no partition {names(sorted(unknown))}; the first is "
                f"{keys[0]!r}, the last {keys[-1]!r}"
            )
        with dg.partition_loading_context(dynamic_partitions_store=order.instance):
            chosen += definition.get_partition_keys_in_range(dg.PartitionKeyRange(*edges))
    if not chosen:
        raise DefinitionError(f"{location}: {partitions!r} names no partition")
    return list(dict.fromkeys(chosen))


def range_tags(first: str | None, last: str | None) -> dict[str, str]:
    """Return the tags of a run over a range of partitions; none for a single one."""
    edges = {"start": first, "end": last} if first != last else {}
    return {f"dagster/asset_partition_range_{edge}": str(key) for edge, key in edges.items()}
