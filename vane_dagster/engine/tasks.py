"""Tasks that wait for a worker, and the work built from them: inputs, operation and target."""

from __future__ import annotations

import functools
import secrets
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import pyarrow as pa

from vane_dagster._texts import in_partition
from vane_dagster.compute.api import Worker
from vane_dagster.engine.fragment_state import (
    FragmentState,
    StageTaskState,
    TaskKind,
    input_id,
)
from vane_dagster.engine.row_lookups import written_groups
from vane_dagster.engine.run_state import RunState
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.engine.worker_group import WorkerQueue
from vane_dagster.fingerprint.bundle import pickled
from vane_dagster.pipeline.options import AUTO
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import JoinSpec, ProjectSpec, StageSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.plan import Part, PartitionPlan
from vane_dagster.planning.source_code import pack_source
from vane_dagster.providers.template import Template
from vane_dagster.retries import TIMED_OUT, Policy, RetriedRows
from vane_dagster.storage.manifest import generation_number
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.row_records import computed_by
from vane_dagster.worker.protocol import (
    Arrange,
    CallUdf,
    Gather,
    Join,
    Op,
    PartRows,
    Project,
    Provenance,
    Quarantined,
    RecordGroup,
    Reject,
    Restore,
    ReuseAndCall,
    RowKeying,
    RowLookup,
    Rows,
    SampledRows,
    SourceFiles,
    SourceRows,
    TableRows,
    Work,
)

_Built = tuple[Work, list[Any]]
"""Work, and the tables in memory that it reads."""


@dataclass(frozen=True)
class Task:
    """A task that waits for a worker: loading a map's input, its slices, gathering, or whole work.

    A slice gets its rows at assignment, unless `retry` gives them.
    """

    fragment: FragmentState
    epoch: int
    stage: str
    kind: TaskKind
    retry: RetriedRows | None = None

    @property
    def state(self) -> StageTaskState:
        """The state of its stage."""
        return self.fragment.task_states[self.stage]

    @property
    def spec(self) -> StageSpec:
        """Its stage."""
        return self.state.spec

    @property
    def alone(self) -> bool:
        """Whether it may end its worker, so that no other call may be there meanwhile."""
        if self.retry is None or not self.retry.may_kill:
            return self.fragment.is_suspect
        return self.retry.error is None

    @property
    def is_current(self) -> bool:
        """Whether its fragment is still in progress, and has not started over."""
        return self.epoch == self.fragment.epoch and self.stage in self.fragment.task_states


@dataclass(frozen=True)
class InFlightTask:
    """A call in flight.

    Attributes:
        worker: The worker.
        task: The task.
        work: What the worker got.
        start: The first row.
        rows: Number of rows.
        began: Monotonic time at which it was sent, in seconds.
    """

    worker: Worker
    task: Task
    work: Work
    start: int
    rows: int
    began: float


class WorkBuilder:
    """Builds work from the tasks of worker queues, for one lease."""

    def __init__(self, state: RunState, lease: str, slice_sizer: SliceSizer) -> None:
        self._state, self._lease, self._slice_sizer = state, lease, slice_sizer
        self._plan, self._pipeline = state.plan, state.plan.pipeline
        self._ops: dict[tuple[str, int], Op] = {}
        self._groups = defaultdict[tuple[int, str], dict[Any, list[RecordGroup]]](dict)

    def take_next(
        self, task: Task, worker_queue: WorkerQueue, worker: Worker, last: bool
    ) -> tuple[Work, list[Any], int, int]:
        """Take the next rows of a worker queue's first task; dequeue it with its last rows."""
        state, retry, start, rows = task.state, task.retry, 0, 0
        if retry is not None:
            start, rows = retry.start, retry.rows
            call = self._reject(task, retry) if retry.error else self.op(task)
            built = self._slice(task, call, start, rows)
        elif task.kind == "slice":
            assert task.spec.runs_udf
            assert state.given
            last = last and len(worker_queue) == 1
            start = state.given.rows - state.rows_left
            rows = self._slice_sizer.slice_rows(
                task.spec, state.given.rows, state.rows_left, worker_queue.size, last
            )
            state.rows_left -= rows
            state.slices_in_flight += 1
            built = self._slice(task, self.op(task), start, rows)
        elif task.kind == "load":
            built = self.load(task, task.spec.row_order)
        elif task.kind == "gather":
            built = self.gather(task)
        else:
            built = self.whole(task)
        if retry is not None or task.kind != "slice" or not state.rows_left:
            worker_queue.pop()
        work, tables = built
        alone = secrets.token_hex(8) if task.alone else ""
        return replace(work, worker=worker.name, alone=alone), tables, start, rows

    def load(self, task: Task, order: Template | None) -> _Built:
        """Build work that loads a map's input, and looks up its rows if they have keys."""
        upstream = task.spec.upstream[0]
        rows, tables = self._input(task, upstream, 0)
        op: Op = Gather()
        if task.fragment.is_arranged(task.spec):
            op = Arrange(order, self._keying(task), self._known(task))
        return self._work(task, op, (rows,), self._upstream_schema(task, upstream)), tables

    def whole(self, task: Task) -> _Built:
        """Build work that computes and writes a fragment's part in one call."""
        rows: list[Rows] = []
        tables: list[Any] = []
        for upstream in task.spec.upstream:
            given, held = self._input(task, upstream, len(tables))
            rows.append(given)
            tables += held
        op, keying = self.op(task), self._keying(task)
        if keying and isinstance(op, CallUdf):
            known = self._known(task)
            op = ReuseAndCall(Arrange(keying=keying, known=known), self._restore(task, op))
        return self._part(task, op, tuple(rows)), tables

    def _known(self, task: Task) -> RowLookup | None:
        """Where a map's rows are looked up: in earlier results, and in parts of this run.

        The latter takes half a microsecond a row, which fast functions do not repay. Nor do they
        repay the search for equal rows of the fragment, if there is nothing else to look up.
        """
        fragment, known = task.fragment, task.fragment.known.get(task.stage)
        is_costly = self._slice_sizer.is_costly(task.stage)
        if known is not None and not is_costly and not known.groups:
            known = None
        if known is not None and is_costly:
            plan = self._partition(task).stages[task.stage]
            parts = list(self._state.parts[fragment.partition, task.stage].values())
            made = self._groups[fragment.partition, task.stage]
            own = written_groups(parts, len(plan.parts), input_id(self._pipeline, task.stage), made)
            known = replace(known, groups=(*own, *known.groups))
        if known is not None and fragment.unreadable:
            groups = [
                replace(
                    g, parts=tuple(p for p in g.parts if fragment.unreadable.isdisjoint(p.files))
                )
                for g in known.groups
            ]
            known = replace(known, groups=tuple(groups))
        task.state.known = known
        return known

    def _slice(self, task: Task, op: Op, start: int, rows: int) -> _Built:
        """Build work on some rows of a map's input, without the column that arranged rows have."""
        columns = None
        if task.fragment.is_arranged(task.spec):
            columns = tuple(self._upstream_schema(task, task.spec.upstream[0]).names)
        given = TableRows(0, start, start + rows, columns)
        return self._work(task, op, (given,)), [self._given(task)]

    def _given(self, task: Task) -> Any:
        """The reference to a map's input."""
        given = task.state.given
        assert given is not None
        return given.table

    def _reject(self, task: Task, retry: RetriedRows) -> Reject:
        """Return the operation that rejects a row of a map's input, which ends its workers."""
        call, spec = self.op(task), task.spec
        assert isinstance(call, CallUdf)
        assert spec.runs_udf
        assert retry.error is not None
        message = f"ended {retry.deaths} workers, each while processing only this row"
        if retry.error == TIMED_OUT:
            message = f"took longer than timeout_s={spec.failures.timeout_s:g} and {message}"
        message += f"; the last one: {retry.why}" if retry.why else ""
        return Reject(call, spec.udf.name, retry.error, message, retry.deaths)

    def gather(self, task: Task) -> _Built:
        """Build work that concatenates a map's slices and writes the part."""
        tables = [piece.table for _, piece in sorted(task.state.pieces.items())]
        op: Op = Gather()
        if task.fragment.is_arranged(task.spec):
            call = self.op(task)
            assert isinstance(call, CallUdf)
            op, tables = self._restore(task, call), [*tables, self._given(task)]
        rows = tuple(TableRows(i) for i in range(len(tables)))
        return replace(self._part(task, op, rows), tally=task.state.tally), tables

    def _restore(self, task: Task, call: CallUdf) -> Restore:
        spec = task.spec
        assert spec.runs_udf
        return Restore(call, spec.made_columns(self._pipeline), task.state.known)

    def op(self, task: Task) -> Op:
        """The operation of a stage, with how many rows may still fail in the partition."""
        generation = generation_number(self._partition(task).stages[task.stage].generation)
        if (place := (task.stage, generation)) not in self._ops:
            self._ops[place] = self._operation(task.spec, generation)
        op = self._ops[place]
        if isinstance(op, CallUdf) and op.policy.on_error != "raise":
            allowed = self._state.faults_allowed(task.fragment.partition, task.stage)
            return replace(op, max_faults=allowed)
        if isinstance(op, Join):
            return replace(op, quarantined=self._quarantined(task, op))
        if isinstance(op, Gather) and task.spec.publishes and task.spec.provenance:
            return Gather(self._provenance(task, task.spec.provenance))
        return op

    def _provenance(self, task: Task, stage: str) -> Provenance:
        """What is known of the rows that a stage has made of a fragment."""
        part, spec = self._stored(task, stage), self._pipeline[stage].spec
        assert spec.runs_udf
        above = self._partition(task).inputs.get(stage)
        return Provenance(
            input_id(self._pipeline, stage),
            part.folder,
            part.info,
            spec.udf.name,
            above.definition if above else self._plan.definitions[stage],
            spec.usage,
        )

    def _operation(self, spec: StageSpec, generation: int) -> Op:
        op = operation(spec, self._pipeline)
        if not spec.runs_udf or not isinstance(op, CallUdf):
            return op
        op = replace(op, kept=self._plan.kept.get(spec.name, b""))
        kwargs, files = dict(spec.udf.kwargs), self._plan.files.get(spec.name)
        if batches := self._state.pending.batches.get(spec.name):
            task = kwargs["model_task"]
            id = op.ids[0] if batches.own_answers else ""
            adds_id = bool(id) and op.columns is not None and id not in op.columns
            given = batches.answers(generation, id, adds_id)
            kwargs["model_task"] = replace(task, batches=given)
            columns = (*op.columns, id) if op.columns is not None and adds_id else op.columns
            arguments = cloudpickle.dumps(kwargs)
            op = replace(op, arguments=arguments, columns=columns, batches=given.folder)
        if not files:
            return op
        return replace(op, arguments=pickled(kwargs, files), files=self._state.store.root)

    def _quarantined(self, task: Task, op: Join) -> dict[str, tuple[Quarantined, ...]]:
        """Quarantined rows between the parent and its children, for each list of a left join."""
        quarantined: dict[str, tuple[Quarantined, ...]] = {}
        base = self._pipeline._keys_of(op.shape.base)
        for upstream_name, stages in task.spec.quarantining(self._pipeline).items():
            for stage in stages:
                part = self._stored(task, stage)
                if not part.info.faults:
                    continue
                keys = self._pipeline._keys_of(self._pipeline[stage].spec.upstream[0])
                common = min(len(keys), len(base))
                parent = None if len(keys) == common else keys[-common].column
                faults = PartRows(part.folder, part.info.faults)
                rows = Quarantined(faults, parent, base[-common].column)
                quarantined[upstream_name] = (*quarantined.get(upstream_name, ()), rows)
        return quarantined

    def _location(self, task: Task) -> str:
        """Stage, partition and fragment, for messages."""
        key, fragment = self._partition(task).key, task.fragment
        label = f"stage '{self._pipeline.name}/{task.stage}'{in_partition(key)}"
        return f"{label}, fragment {fragment.index} ({fragment.record})"

    def _part(self, task: Task, op: Op, rows: tuple[Rows, ...]) -> Work:
        """Work with a result to write, and to keep in memory if a downstream stage reads it."""
        return replace(
            self._work(task, op, rows),
            target=self._target(task),
            keep=task.fragment.is_read(task.stage),
            new_ids=task.spec.makes_rows,
            keying=self._keying(task),
        )

    def _keying(self, task: Task) -> RowKeying | None:
        """How a stage's input rows are recorded; None if they have no keys."""
        spec = task.spec
        rows = self._partition(task).stages[task.stage].row_definition
        if not spec.runs_udf or not rows:
            return None
        return RowKeying(
            spec.key_columns(self._pipeline),
            spec.file_columns(self._pipeline),
            spec.udf.name,
            computed_by(self._plan.definitions[task.stage], rows),
            max(
                self._state.epochs.get(task.stage, 0),
                self._state.row_floor(task.fragment.partition, task.stage) or 0,
            ),
            spec.row_versions(self._plan.files.get(task.stage, {})),
        )

    def _work(
        self, task: Task, op: Op, rows: tuple[Rows, ...], schema: pa.Schema | None = None
    ) -> Work:
        """Work with a result to keep; its schema is that of the stage unless another is given."""
        names_files = self._plan.source.names_files
        opens_files = names_files and isinstance(op, (CallUdf, Arrange, ReuseAndCall))
        return Work(
            location=self._location(task),
            op=op,
            inputs=rows,
            schema=self._partition(task).schemas[task.stage] if schema is None else schema,
            id=self._pipeline[task.stage].id,
            target=None,
            keep=True,
            lease=self._lease,
            run_id=self._state.run_id,
            stage=f"{self._pipeline.name}/{task.stage}",
            fragment=str(task.fragment.record),
            source_files=self._source_files(task) if opens_files else None,
        )

    def _partition(self, task: Task) -> PartitionPlan:
        return self._plan.partitions[task.fragment.partition]

    def _stored(self, task: Task, stage: str) -> Part:
        """The part of an upstream stage for a task's fragment."""
        return self._state.parts[task.fragment.partition, stage][task.fragment.index]

    def _target(self, task: Task) -> PartTarget:
        spec, partition, index = task.spec, self._partition(task), task.fragment.index
        plan = partition.stages[task.stage]
        folder = self._state.store.parts(self._pipeline.name, task.stage, partition.key)
        compression = None
        if publisher := spec.publisher(partition.key):
            folder, compression = publisher.staging, publisher.compression
        measured = spec.measured_columns(self._pipeline, partition.schemas[task.stage])
        id = self._pipeline[task.stage].id
        sums = {} if (usage := spec.usage) is None else usage.sums
        above = input_id(self._pipeline, task.stage)
        made = {"definition": self._plan.definitions.get(task.stage, ""), "input_id": above}
        return PartTarget(folder, plan.keys[index], id, measured, compression, sums=sums, **made)

    def _input(self, task: Task, upstream: str, position: int) -> tuple[Rows, list[Any]]:
        """The rows that a stage reads, from memory if they are there.

        Of a sample only the rows of the stage's base are limited; of a preview each part.
        """
        partition, fragment = self._partition(task), task.fragment
        rows: SourceRows | PartRows
        if upstream == SOURCE:
            schema, files = (
                self._upstream_schema(task, upstream),
                partition.files_of(fragment.record),
            )
            ids, id = self._plan.id_rule(partition), self._pipeline.id
            rows = SourceRows(self._source, fragment.record, schema, files, id, ids)
        elif (above := fragment.task_states.get(upstream)) and above.table:
            return TableRows(position), [above.table.table]
        else:
            part = self._stored(task, upstream)
            rows = PartRows(part.folder, part.info.name, self._columns(task, upstream))
            if partition.preview:
                return SampledRows(rows, tuple(range(part.info.rows))), []
        if partition.sample and upstream == task.spec.base_node(self._pipeline):
            return SampledRows(rows, partition.sample[fragment.index]), []
        return rows, []

    def _source_files(self, task: Task) -> SourceFiles:
        """The files for code that opens them."""
        partition = self._partition(task)
        files, touched = partition.files_of(task.fragment.record), partition.touched
        own = {file.url: touched[file.url] for file in files if file.url in touched}
        return SourceFiles(self._source, files, own)

    @functools.cached_property
    def _source(self) -> bytes:
        """The source for the workers."""
        return pack_source(self._plan.source)

    def _upstream_schema(self, task: Task, upstream: str) -> pa.Schema:
        """The schema of the columns that a stage reads from an upstream stage."""
        schema = self._partition(task).schemas[upstream]
        wanted = self._columns(task, upstream)
        return schema if wanted is None else pa.schema([schema.field(name) for name in wanted])

    def _columns(self, task: Task, upstream: str) -> tuple[str, ...] | None:
        """The columns of an upstream stage that a stage needs; None for all."""
        ids = self._pipeline._key_columns(upstream)
        return task.spec.columns_read(upstream, self._partition(task).schemas[upstream], ids)


def operation(spec: StageSpec, pipeline: Pipeline) -> Op:
    """Return the worker operation of a stage."""
    if isinstance(spec, ProjectSpec):
        return Project(spec.columns, spec.where, bool(spec.include))
    if isinstance(spec, JoinSpec):
        return Join(spec.how, spec.shape(pipeline), spec.upstream, spec.columns)
    if not spec.runs_udf:
        return Gather()
    ids, failures = pipeline._key_columns(spec.upstream[0]), spec.failures
    return CallUdf(
        cloudpickle.dumps(dict(spec.udf.kwargs)),
        spec.columns_given(pipeline),
        spec.contract,
        AUTO if spec.auto_batch else spec.batch_size,
        spec.cardinality,
        spec.rows_in_flight or spec.max_concurrency,
        ids,
        tuple(spec.schema.names),
        ids[0] if spec.children else None,
        spec.udf.method,
        spec.udf.is_async,
        Policy(
            failures.on_error or "raise",
            failures.max_retries or 0,
            tuple(map(str, failures.retry_on)),
            failures.timeout_s,
        ),
        pinned=spec.pinned,
        servers=tuple(spec.udf.servers),
    )
