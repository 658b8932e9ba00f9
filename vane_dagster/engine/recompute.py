"""What came of a sample of rows that were computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from vane_dagster.checks.recomputed import Difference, compare, read_outcome
from vane_dagster.checks.reproducible import Reproducible
from vane_dagster.pipeline.specs import SOURCE, is_one_to_many
from vane_dagster.planning.inputs import base_node
from vane_dagster.planning.plan import Part, PartitionPlan, RunPlan
from vane_dagster.planning.sample_plan import Sampled
from vane_dagster.planning.source_code import pack_source
from vane_dagster.storage.store import Store
from vane_dagster.worker.operations import Gather, PartRows, SampledRows, SourceRows
from vane_dagster.worker.operators import resolve
from vane_dagster.worker.protocol import Work


@dataclass(frozen=True)
class Compared:
    """A partition's sample, compared.

    Attributes:
        rows: Input rows that were computed again.
        differences: Where they differ from the stored rows.
    """

    rows: int
    differences: Sequence[Difference]

    @property
    def differing(self) -> list[object]:
        """The ids of the input rows whose output differs from what is stored."""
        return list(dict.fromkeys(each.id for each in self.differences))


def compare_sample(
    plan: RunPlan,
    partition: PartitionPlan,
    sampled: Sampled,
    made: Sequence[Part],
    store: Store,
    check: Reproducible,
) -> Compared:
    """Compares the parts of a sample with those that are stored.

    Args:
        plan: The plan of the sample.
        partition: The partition in it.
        sampled: Where the sample comes from.
        made: The parts that were computed, one a fragment.
        store: Where parts are.
        check: What is compared.

    Raises:
        VaneError: If something cannot be read.
    """
    (stage,) = plan.selected
    pipeline, spec = plan.pipeline, plan.pipeline[stage].spec
    given = pipeline.keys(stage)[1 if is_one_to_many(spec) else 0].column
    folder = store.parts(pipeline.name, stage, partition.key)
    rows, found = 0, []
    for index, (before, now) in enumerate(zip(sampled.stored.parts, made)):
        ids = _sampled_ids(plan, partition, index, store)
        stored = read_outcome(folder, before, given, ids)
        computed = read_outcome(now.folder, now.info, given, ids)
        found += compare(stored, computed, ids.to_pylist(), check.columns, check.bounds)
        rows += len(ids)
    return Compared(rows, found)


def delete_parts(plan: RunPlan, store: Store) -> None:
    """Deletes all that a sample has written, also where it came to no end.

    Raises:
        StoreError: If the store refuses.
    """
    (stage,) = plan.selected
    for partition in plan.partitions:
        folder = store.parts(plan.pipeline.name, stage, partition.key)
        keys = partition.stages[stage].keys  # of this sample alone
        folder.delete([name for name in folder.names() if name.startswith(keys)])


def _sampled_ids(plan: RunPlan, partition: PartitionPlan, index: int, store: Store) -> pa.Array:
    """The ids of a fragment's sampled rows, read as the workers read them."""
    (stage,) = plan.selected
    pipeline, spec = plan.pipeline, plan.pipeline[stage].spec
    base, fragment = base_node(pipeline, spec), partition.fragments[index]
    id = pipeline.keys(base)[0].column
    schema = pa.schema([partition.schemas[base].field(id)])
    rows: SourceRows | PartRows
    if base == SOURCE:
        files = tuple(partition.listed[span.url] for span in fragment.spans)
        rows = SourceRows(pack_source(plan.source), fragment, schema, files, id)
    else:
        made_from = partition.inputs[base]
        folder = store.parts(pipeline.name, made_from.stage, partition.key)
        rows = PartRows(folder, made_from.parts[index].name, (id,))
    sample = SampledRows(rows, partition.sample[index])
    culprit = f"stage '{pipeline.name}/{stage}'"
    work = Work(culprit, Gather(), (sample,), schema, id, target=None, keep=False)
    return resolve(sample, (), work).column(id).combine_chunks()
