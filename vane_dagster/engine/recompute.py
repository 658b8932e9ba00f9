"""Comparison data of a recomputed sample: the stored rows and the recomputed ones."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.checks.context import RecomputedRows, RowOutcomes
from vane_dagster.engine.fragment_state import input_id
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.plan import Part, PartitionPlan, RunPlan
from vane_dagster.sources.planned_read import read_planned
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import Manifest, PartInfo
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.store import Store


def read_sample(
    plan: RunPlan,
    partition: PartitionPlan,
    manifest: Manifest,
    made: Sequence[Part],
    store: Store,
) -> list[RecomputedRows]:
    """Read a sample's rows as stored and as recomputed now."""
    (stage,) = plan.selected
    given = input_id(plan.pipeline, stage)
    folder = store.parts_of(manifest)
    samples = []
    for index, (before, now) in enumerate(zip(manifest.parts, made)):
        ids = _sampled_ids(plan, partition, index, store)
        stored = read_row_outcomes(folder, before, given, ids)
        computed = read_row_outcomes(now.folder, now.info, given, ids)
        samples.append(RecomputedRows(ids.to_pylist(), stored, computed))
    return samples


def read_row_outcomes(
    folder: StoragePath, part: PartInfo, given: str, ids: pa.Array
) -> RowOutcomes:
    """Read the output rows and errors of some input rows from a part."""
    table = read_part(folder, part.name)
    owners = table.column(given)
    table = table.filter(pc.is_in(owners, value_set=ids.cast(owners.type)))
    failed = {}
    if part.faults:
        records = read_part(folder, part.faults, ["id", "error"]).to_pylist()
        wanted = set(ids.to_pylist())
        failed = {each["id"]: each["error"] for each in records if each["id"] in wanted}
    return RowOutcomes(table, given, failed)


def delete_parts(plan: RunPlan, store: Store) -> None:
    """Delete everything that a sample has written, even if it did not complete."""
    for partition in plan.partitions:
        for stage, stage_plan in partition.stages.items():
            keys = tuple(stage_plan.keys[index] for index in stage_plan.missing)
            if keys:  # of this sample alone
                folder = store.parts(plan.pipeline.name, stage, partition.key)
                folder.delete([name for name in folder.names() if name.startswith(keys)])


def _sampled_ids(plan: RunPlan, partition: PartitionPlan, index: int, store: Store) -> pa.Array:
    """The ids of a fragment's sampled rows, with the same checks as in the workers."""
    (stage,) = plan.selected
    pipeline, spec = plan.pipeline, plan.pipeline[stage].spec
    base, fragment = spec.base_node(pipeline), partition.fragments[index]
    id = pipeline._key_columns(base)[0]
    if base == SOURCE:
        schema = pa.schema([partition.schemas[base].field(id)])
        files = partition.files_of(fragment)
        location = f"stage '{pipeline.name}/{stage}'"
        rows = read_planned(plan.source, fragment, schema, files, location, plan.id_rule(partition))
    else:
        made_from = partition.inputs[base]
        folder = store.parts_of(made_from)
        rows = read_part(folder, made_from.parts[index].name, (id,))
    sampled = rows.take(pa.array(partition.sample[index], pa.int64()))
    return sampled.column(id).combine_chunks()
