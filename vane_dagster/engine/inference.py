"""Inference of the schemas that stages do not declare, from the results for their first rows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from vane_dagster.engine.recompute import delete_parts
from vane_dagster.errors import SchemaError, VaneError
from vane_dagster.events import Noticed
from vane_dagster.pipeline.contracts import TYPES
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.stage_kind import with_upstream
from vane_dagster.planning.definition import inference_definition
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.planner import plan_run
from vane_dagster.planning.preview_plan import EVERY, MOST, previews, with_rows
from vane_dagster.sources.base import Connect
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.quarantine import first_faults
from vane_dagster.storage.schema_pins import SchemaPin, keep_pin, latest_pin, read_pin
from vane_dagster.storage.store import Store
from vane_dagster.types.schema import merged_types, read_schema

INFERRED_ROWS = 16
"""Input rows from which a schema is inferred; more if a filter upstream drops these."""
_MANY = 16
_MOST_COMPUTED = 64

Execute = Callable[[RunPlan], tuple[Mapping[str, Sequence[Part]], VaneError | None]]
"""Executes the plan of a preview.

Returns the parts of its stages, and the error of those that were not computed.
"""


@dataclass(frozen=True)
class FirstRows:
    """The rows that a stage made of its first input rows.

    Attributes:
        tables: The rows of each fragment.
        rows_in: The number of input rows.
        given: The schema of the input.
        error: The error of one of the rows that could not be computed; empty if there is none.
        plan: The plan that computed them.
        parts: The parts of all of its stages; they are deleted after the inference.
    """

    tables: Sequence[pa.Table]
    rows_in: int
    given: pa.Schema
    error: str
    plan: RunPlan
    parts: Mapping[str, Sequence[Part]]

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(table.num_rows for table in self.tables)


@dataclass(frozen=True)
class SchemaInference:
    """Finds the schemas of stages: pinned ones in the store, others from their first rows.

    What its previews compute is deleted at the end of the `with` block. Until then, rows that one
    of them has computed are copied by later ones, as far as the stage has row keys.

    Attributes:
        store: The store.
        execute: Executes previews.
        run_id: The run, for the record.
        listen: Called with a notice of each schema that was inferred, and if none are pinned, of
            each pinned one that was found.
        selected: The selected stages; those that a preview adds to the pipeline too.
        partitions: The run's partitions.
        pins: Whether inferred schemas are pinned, and all else that the first run decides is kept.
        connect: Connects to the run's cluster; see `plan_run`.
        computed: The parts that its previews have computed so far, by stage.
    """

    store: Store
    execute: Execute
    run_id: str
    listen: Callable[[Noticed], None]
    selected: Collection[str]
    partitions: Sequence[str | None]
    pins: bool = True
    connect: Connect = lambda room: False
    computed: dict[str, list[Part]] = field(default_factory=dict)
    _executed: list[RunPlan] = field(default_factory=list)

    def __enter__(self) -> SchemaInference:
        return self

    def __exit__(self, *_: object) -> None:
        for plan in self._executed:
            delete_parts(plan, self.store)

    def resolve(self, pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with the schemas of all selected stages.

        Pinned schemas of other stages upstream count too, because pins depend on them: a stage has
        the same pin whether its upstream stages are selected with it or not.
        """
        declared = [stage for stage in self.selected if stage in pipeline.stages]
        above = set[str]().union(*(with_upstream(pipeline, stage) for stage in declared))
        for stage in list(pipeline):
            if stage.name not in above or not stage.spec.is_inferred:
                continue
            if stage.name not in self.selected:
                pipeline = _with_pin(pipeline, stage.name, self.store)
                continue
            definition = inference_definition(pipeline, stage.name)
            place = (self.store, pipeline.name, stage.name, definition)
            known = read_pin(*place)
            pin = known or self._infer(pipeline, stage.name)
            if known is None and self.pins:
                pin = keep_pin(*place, pin)
            pipeline = pipeline._with_schema(stage.name, pin.schema)
            spec = pipeline[stage.name].spec
            if spec.runs_udf and (known is None or not self.pins):
                text = f"its schema was inferred from {pin.rows:,} rows"
                self.listen(Noticed(f"stage {stage.name!r}: {text}: {spec.schema_code}", False))
        return pipeline

    def first_rows(
        self, pipeline: Pipeline, stage: str, rows: int, most: int = MOST
    ) -> FirstRows | None:
        """Compute the first rows of a stage, from at most `most` times as many input rows.

        If a filter upstream drops most of many rows, those that have reached the stage are enough.
        """
        computed: FirstRows | None = None
        for plan in previews(self._planned(pipeline, stage), stage, rows, most):
            computed = self._computed(plan, stage)
            enough = 1 if sum(plan.partitions[0].preview) >= _MANY * rows else rows
            if computed.rows_in >= enough and (computed.rows or computed.error):
                break
        return computed

    def matching_rows(
        self, pipeline: Pipeline, filter: str, rows: int, files: Collection[str] = ()
    ) -> FirstRows | None:
        """Compute a stage that filters, until so many rows have passed, or none are left.

        The rows may be those of some files, by their URLs.

        If models compute its input, at most 64 times as many input rows are read.
        """
        computed: FirstRows | None = None
        for plan in previews(self._planned(pipeline, filter), filter, rows, EVERY, files):
            if calls_models(plan) and sum(plan.partitions[0].preview) > _MOST_COMPUTED * rows:
                break
            computed = self._computed(plan, filter)
            if computed.rows >= rows:
                break
        return computed

    def rows_of(
        self, pipeline: Pipeline, stage: str, read: FirstRows, files: Collection[str] = ()
    ) -> FirstRows:
        """Compute a stage from as many of the first rows as were read before, or of the files."""
        size = sum(read.plan.partitions[0].preview)
        plans = previews(self._planned(pipeline, stage), stage, size, files=files)
        return self._computed(next(plans), stage)

    def _computed(self, plan: RunPlan, stage: str) -> FirstRows:
        (partition,) = plan.partitions
        known = {s: tuple(parts) for s, parts in self.computed.items()}
        stages = {s: replace(p, set_aside=known.get(s, ())) for s, p in partition.stages.items()}
        plan = replace(plan, partitions=[replace(partition, stages=stages)])
        self._executed.append(plan)
        made, error = self.execute(plan)
        for name in plan.needed():
            self.computed.setdefault(name, []).extend(made.get(name, ()))
        if error is not None:
            raise error
        parts = made[stage]
        return FirstRows(
            [read_part(part.folder, part.info.name) for part in parts],
            sum(part.info.rows_in for part in parts),
            partition.schemas[plan.pipeline[stage].spec.upstream[0]],
            next((text for p in parts for text in first_faults(p.folder, [p.info], 1)), ""),
            plan,
            made,
        )

    def _infer(self, pipeline: Pipeline, stage: str) -> SchemaPin:
        spec, location = pipeline[stage].spec, f"stage '{pipeline.name}/{stage}'"
        assert spec.runs_udf
        probing = pipeline._with_spec(spec.probe())
        probing._checks = {**probing._checks, stage: ()}  # they may name columns
        computed = self.first_rows(probing, stage, INFERRED_ROWS)
        if computed is None or not computed.rows:
            why = "there are no input rows"
            if computed is not None and computed.rows_in:
                why = f"none of the first {computed.rows_in:,} rows could be computed"
            cause = computed.error if computed is not None else ""
            error = SchemaError(
                f"{location}: its schema cannot be inferred, because {why}"
                f"{f': {cause}' if cause else ''}. Declare {spec.schema_argument}"
            )
            error.is_permanent = not cause  # rows may fail by a transient error
            raise error
        records = dict.fromkeys(
            record for table in computed.tables for record in table.column(TYPES).to_pylist()
        )
        types = merged_types(map(read_schema, records), location)
        schema = spec.inferred_schema(pipeline, types, computed.given, computed.rows_in)
        return SchemaPin(schema, computed.rows_in, self.run_id, time.time())

    def _planned(self, pipeline: Pipeline, stage: str) -> RunPlan:
        """Plan the stage and selected stages upstream, in the first partitions with rows."""
        wanted = {*with_upstream(pipeline, stage).intersection(self.selected), stage}
        chosen: RunPlan | None = None
        for partition in self.partitions:
            planned = plan_run(
                pipeline,
                wanted,
                [partition],
                self.store,
                expand=True,
                keep=self.pins,
                connect=self.connect,
            )
            if with_rows(planned, stage):
                return planned
            chosen = planned if chosen is None or planned.partitions else chosen
        assert chosen is not None, "a run has a partition"
        if not chosen.partitions:
            raise next(iter(chosen.failed.values()))
        return chosen


def calls_models(plan: RunPlan) -> bool:
    """Whether a plan computes a stage that runs user code or calls a model."""
    return any(plan.pipeline[stage].spec.runs_udf for stage in plan.needed())


def pinned(pipeline: Pipeline, stage: str, store: Store) -> Pipeline:
    """Return the pipeline with the pinned schemas of a stage and of those upstream of it."""
    pipeline = with_pins(pipeline, [stage], store)
    if pipeline[stage].spec.is_inferred:
        raise SchemaError(
            f"stage '{pipeline.name}/{stage}': its code has changed since its schema was inferred. "
            "Materialize it first"
        )
    return pipeline


def with_pins(
    pipeline: Pipeline,
    stages: Collection[str],
    store: Store,
    assume: Callable[[str], None] | None = None,
) -> Pipeline:
    """Return the pipeline with the pinned schemas of stages and of those upstream of them.

    With `assume`, those of `stages` without a pin have the schema that their former code has pinned
    last, and `assume` is called with their names.
    """
    above = set[str]().union(*(with_upstream(pipeline, stage) for stage in stages))
    for each in list(pipeline):
        if each.name in above and each.spec.is_inferred:
            pipeline = _with_pin(pipeline, each.name, store)
            is_open = each.name in stages and pipeline[each.name].spec.is_inferred
            if assume and is_open:
                with contextlib.suppress(VaneError):  # it is damaged, or does not fit
                    if last := latest_pin(store, pipeline.name, each.name):
                        pipeline = pipeline._with_schema(each.name, last.schema)
                        assume(each.name)
    return pipeline


def _with_pin(pipeline: Pipeline, stage: str, store: Store) -> Pipeline:
    """Return the pipeline with the pinned schema of a stage, if there is one."""
    definition = inference_definition(pipeline, stage)
    pin = read_pin(store, pipeline.name, stage, definition)
    return pipeline if pin is None else pipeline._with_schema(stage, pin.schema)
