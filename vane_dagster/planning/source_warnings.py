"""Warnings of a source: rows that no partition has, and partitions whose columns differ."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from vane_dagster._texts import count, in_partitions
from vane_dagster.errors import names
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.planning.plan import PartitionPlan
from vane_dagster.sources import Source
from vane_dagster.types.schema import type_name

_SHOWN = 3


def left_out(pipeline: Pipeline, source: Source, planned: Collection[str | None]) -> list[str]:
    """Return a warning of the rows that no partition has, if there are some."""
    rows = source._rows_by_key()
    keys = {key for key in rows.keys() - {*planned} if key is not None}
    unknown = _unknown(pipeline.partitions_def, keys) if keys else set()
    if not unknown:
        return []
    number, of = count(sum(rows[key] for key in unknown), "row"), names(sorted(unknown), _SHOWN)
    return [
        f"pipeline {pipeline.name!r}: {source.place} has {number} of {of}, which no run computes: "
        f"no partition has this key. Partition keys look like {min(map(str, planned))!r}"
    ]


def _unknown(partitions_def: Any, keys: set[str]) -> set[str]:
    """Return the keys of no partition, except later time windows, which may be added."""
    import dagster as dg

    if isinstance(partitions_def, dg.DynamicPartitionsDefinition):
        return set()  # a key may be added
    if isinstance(partitions_def, dg.MultiPartitionsDefinition):
        dimensions = partitions_def.partitions_defs  # in the order of the keys
        split = {key: key.split("|") for key in keys}
        whole = [texts for texts in split.values() if len(texts) == len(dimensions)]
        strange = [
            _unknown(each.partitions_def, {texts[at] for texts in whole})
            for at, each in enumerate(dimensions)
        ]
        return {
            key
            for key, texts in split.items()
            if len(texts) != len(dimensions) or any(map(set.__contains__, strange, texts))
        }
    known = partitions_def.get_partition_keys()
    unknown = keys.difference(known)
    if isinstance(partitions_def, dg.TimeWindowPartitionsDefinition):
        last = known[-1] if known else None
        return {key for key in unknown if not _is_later(key, last, partitions_def.fmt)}
    return unknown


def _is_later(key: str, last: str | None, form: str) -> bool:
    """Return whether a text is a key in the form of time windows, and follows the last one."""
    with contextlib.suppress(ValueError):
        start = dt.datetime.strptime(key, form)
        after = last is None or start > dt.datetime.strptime(last, form)
        return after and start.strftime(form) == key
    return False


def mixed_types(
    pipeline: Pipeline, stages: Sequence[str], planned: Sequence[PartitionPlan]
) -> list[str]:
    """Return a warning of the first stage whose columns have other types in some partitions."""
    for stage in stages:
        schemas = [each.schemas[stage] for each in planned if stage in each.schemas]
        if all(schema.equals(schemas[0]) for schema in schemas):  # fast, for many partitions
            continue
        kinds: dict[str, dict[str, list[str | None]]] = defaultdict(lambda: defaultdict(list))
        for each in planned:
            for field in each.schemas.get(stage, ()):
                kinds[field.name][type_name(field.type)].append(each.key)
        if mixed := [name for name, keys in kinds.items() if len(keys) > 1]:
            texts = (f"{kind} in {in_partitions(keys)}" for kind, keys in kinds[mixed[0]].items())
            several = f"columns {names(mixed)} have different types in some partitions: "
            return [
                f"stage '{pipeline.name}/{stage}': {several if len(mixed) > 1 else ''}column "
                f"{mixed[0]!r} is {' and '.join(texts)}; partitions with different types cannot be "
                "read together"
            ]
    return []
