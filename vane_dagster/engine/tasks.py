"""Tasks that wait for a worker, and the work built from them: inputs, operation and target."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import pyarrow as pa

from vane_dagster.compute.api import Worker
from vane_dagster.engine.fragment_state import (
    FragmentState,
    StageTaskState,
    TaskKind,
    input_id,
)
from vane_dagster.engine.row_lookups import written_groups
from vane_dagster.engine.slicing import SliceSizer
from vane_dagster.engine.worker_group import WorkerQueue
from vane_dagster.fingerprint.bundle import pickled
from vane_dagster.pipeline.map_spec import MapBatchesSpec
from vane_dagster.pipeline.options import AUTO
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.records import Failures
from vane_dagster.pipeline.specs import JoinSpec, ProjectSpec, StageSpec, WriteSpec
from vane_dagster.pipeline.stage_kind import SOURCE
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.source_code import pack_source
from vane_dagster.retries import TIMED_OUT, Policy, RetriedRows
from vane_dagster.storage.manifest import FileRecord
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.store import Store
from vane_dagster.worker.protocol import (
    Arrange,
    CallUdf,
    Gather,
    Join,
    Op,
    PartRows,
    Project,
    Quarantined,
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
from vane_dagster.worker.reports import Tally

_Inputs = tuple[Rows, ...]


class WorkBuilder:
    """Builds work for one lease."""

    def __init__(
        self,
        plan: RunPlan,
        store: Store,
        parts: Mapping[tuple[int, str], Mapping[int, Part]],
        lease: str,
        run_id: str,
        allowed: Callable[[int, str], int],
        floors: Mapping[str, int] | None = None,
    ) -> None:
        """Build work for a lease."""
        self._floors = floors or {}
        self._plan = plan
        self._run_id = run_id
        self._allowed = allowed
        self._pipeline: Pipeline = plan.pipeline
        self._store = store
        self._parts = parts
        self._lease = lease
        self._ops: dict[str, Op] = {}
        self._packed: bytes | None = None

    def load(
        self,
        run: FragmentState,
        task_state: StageTaskState,
        worker: str,
        shares: int,
        is_costly: bool = True,
    ) -> tuple[Work, list[Any]]:
        """Build work that loads a map's input into shared memory, for its slices."""
        upstream = task_state.spec.upstream[0]
        rows, tables = self._input(run, task_state, upstream, 0)
        schema = self._upstream_schema(run, task_state.spec, upstream)
        op: Op = Gather()
        if run.is_arranged(spec := task_state.spec):
            known = self._known(run, task_state, is_costly)
            op = Arrange(spec.row_order, shares, self._keying(run, spec), known)
        return self._work(run, task_state, worker, op, (rows,), schema=schema), tables

    def whole(
        self, run: FragmentState, task_state: StageTaskState, worker: str, is_costly: bool = True
    ) -> tuple[Work, list[Any]]:
        """Build work that computes and writes a fragment's part in one call."""
        rows: list[Rows] = []
        tables: list[Any] = []
        for upstream in task_state.spec.upstream:
            given, held = self._input(run, task_state, upstream, len(tables))
            rows.append(given)
            tables += held
        op, spec = self.op(run, task_state.spec), task_state.spec
        keying = self._keying(run, spec)
        if keying and spec.runs_udf and isinstance(op, CallUdf):
            known = self._known(run, task_state, is_costly)
            own = spec.made_columns(self._pipeline, spec.schema)
            op = ReuseAndCall(Arrange(keying=keying, known=known), Restore(op, own, known))
        return self._part(run, task_state, worker, op, tuple(rows)), tables

    def _known(
        self, run: FragmentState, task_state: StageTaskState, is_costly: bool
    ) -> RowLookup | None:
        """Where a map's rows are looked up: in earlier results, and in parts of this run.

        The latter takes half a microsecond a row, which fast functions do not repay.
        """
        stage = task_state.spec.name
        known = run.known.get(stage)
        if known is not None and is_costly:
            plan = self._plan.partitions[run.partition].stages[stage]
            parts = list(self._parts[run.partition, stage].values())
            own = written_groups(parts, len(plan.parts), input_id(self._pipeline, stage))
            known = replace(known, groups=(*own, *known.groups))
        task_state.known = known
        return known

    def slice(
        self, run: FragmentState, task_state: StageTaskState, worker: str, start: int, stop: int
    ) -> tuple[Work, list[Any]]:
        """Build work that calls the user's code on some rows of a map's input."""
        rows = self._slice(run, task_state, start, stop)
        return self._work(run, task_state, worker, self.op(run, task_state.spec), (rows,)), [
            task_state.given
        ]

    def _slice(
        self, run: FragmentState, task_state: StageTaskState, start: int, stop: int
    ) -> TableRows:
        """Rows of a map's input, without the column that arranged rows have in addition."""
        if not run.is_arranged(spec := task_state.spec):
            return TableRows(0, start, stop)
        columns = tuple(self._upstream_schema(run, spec, spec.upstream[0]).names)
        return TableRows(0, start, stop, columns)

    def reject(
        self,
        run: FragmentState,
        task_state: StageTaskState,
        worker: str,
        retry: RetriedRows,
    ) -> tuple[Work, list[Any]]:
        """Build work that rejects a row of a map's input, which ends its workers."""
        call, spec = self.op(run, task_state.spec), task_state.spec
        assert isinstance(call, CallUdf)
        assert spec.runs_udf
        assert retry.error is not None
        message = f"ended {retry.deaths} workers, each while processing only this row"
        if retry.error == TIMED_OUT:
            message = f"took longer than timeout_s={spec.failures.timeout_s:g}, and so {message}"
        message += f"; the last one: {retry.why}" if retry.why else ""
        op = Reject(call, spec.udf.name, retry.error, message, retry.deaths)
        rows = self._slice(run, task_state, retry.start, retry.start + 1)
        return self._work(run, task_state, worker, op, (rows,)), [task_state.given]

    def gather(
        self, run: FragmentState, task_state: StageTaskState, worker: str
    ) -> tuple[Work, list[Any]]:
        """Build work that concatenates a map's slices and writes the part."""
        tables = [table for _, (table, _) in sorted(task_state.pieces.items())]
        rows: _Inputs = tuple(TableRows(i) for i in range(len(tables)))
        spec, tally = task_state.spec, task_state.tally
        if not run.is_arranged(spec):
            return self._part(run, task_state, worker, Gather(), rows, tally=tally), tables
        call = self.op(run, spec)
        assert spec.runs_udf
        assert isinstance(call, CallUdf)
        op = Restore(call, spec.made_columns(self._pipeline, spec.schema), task_state.known)
        rows, tables = (*rows, TableRows(len(tables))), [*tables, task_state.given]
        return self._part(run, task_state, worker, op, rows, tally=tally), tables

    def op(self, run: FragmentState, spec: StageSpec) -> Op:
        """The operation of a stage, with how many rows may still fail in the partition."""
        if spec.name not in self._ops:
            self._ops[spec.name] = self._operation(spec)
        op = self._ops[spec.name]
        if isinstance(op, CallUdf) and op.policy.on_error != "raise":
            return replace(op, max_faults=self._allowed(run.partition, spec.name))
        if isinstance(op, Join):
            return replace(op, quarantined=self._quarantined(run, spec, op))
        return op

    def _operation(self, spec: StageSpec) -> Op:
        op = operation(spec, self._pipeline)
        files = self._plan.files.get(spec.name)
        if not files or not spec.runs_udf or not isinstance(op, CallUdf):
            return op
        arguments = pickled(dict(spec.udf.kwargs), files)
        return replace(op, arguments=arguments, files=self._store.root)

    def _quarantined(
        self, run: FragmentState, spec: StageSpec, op: Join
    ) -> dict[str, tuple[Quarantined, ...]]:
        """Quarantined rows between the parent and its children, for each list of a left join."""
        found: dict[str, tuple[Quarantined, ...]] = {}
        base = self._pipeline._keys_of(op.shape.base)
        for upstream_name, stages in spec.quarantining(self._pipeline).items():
            for stage in stages:
                part = self._parts[run.partition, stage][run.index]
                if not part.info.faults:
                    continue
                keys = self._pipeline._keys_of(self._pipeline[stage].spec.upstream[0])
                common = min(len(keys), len(base))
                parent = None if len(keys) == common else keys[-common].column
                faults = PartRows(part.folder, part.info.faults)
                rows = Quarantined(faults, parent, base[-common].column)
                found[upstream_name] = (*found.get(upstream_name, ()), rows)
        return found

    def location(self, run: FragmentState, stage: str) -> str:
        """Stage, partition and fragment, for messages."""
        partition, fragment = self._plan.partitions[run.partition], run.fragment
        where = "" if partition.key is None else f", partition {partition.key!r}"
        label = f"stage '{self._pipeline.name}/{stage}'{where}"
        return f"{label}, fragment {run.index} ({fragment})"

    def _part(
        self,
        run: FragmentState,
        task_state: StageTaskState,
        worker: str,
        op: Op,
        rows: tuple[Rows, ...],
        tally: Tally | None = None,
    ) -> Work:
        """Work with a result to write, and to keep in memory if a downstream stage reads it."""
        work = self._work(run, task_state, worker, op, rows)
        return replace(
            work,
            target=self._target(run, task_state),
            keep=task_state.readers > 0,
            new_ids=task_state.spec.makes_rows,
            tally=tally,
            keying=self._keying(run, task_state.spec),
        )

    def _keying(self, run: FragmentState, spec: StageSpec) -> RowKeying | None:
        """How a stage's input rows are recorded; None if they have no keys."""
        if (
            not spec.runs_udf
            or not self._plan.partitions[run.partition].stages[spec.name].row_definition
        ):
            return None
        return RowKeying(
            spec.key_columns(self._pipeline),
            spec.file_columns(self._pipeline),
            spec.udf.name,
            self._plan.definitions[spec.name],
            self._floors.get(spec.name, 0),
        )

    def _work(
        self,
        run: FragmentState,
        task_state: StageTaskState,
        worker: str,
        op: Op,
        rows: tuple[Rows, ...],
        schema: pa.Schema | None = None,
    ) -> Work:
        """Work with a result to keep; its schema is that of the stage unless another is given."""
        stage = task_state.spec.name
        names_files = self._plan.source.names_files
        opens_files = names_files and isinstance(op, (CallUdf, Arrange, ReuseAndCall))
        return Work(
            location=self.location(run, stage),
            op=op,
            inputs=rows,
            schema=self._schema(run, task_state) if schema is None else schema,
            id=self._pipeline[stage].id,
            target=None,
            keep=True,
            lease=self._lease,
            run_id=self._run_id,
            worker=worker,
            stage=f"{self._pipeline.name}/{stage}",
            fragment=run.fragment.record_label,
            source_files=self._source_files(run) if opens_files else None,
        )

    def _schema(self, run: FragmentState, task_state: StageTaskState) -> pa.Schema:
        return self._plan.partitions[run.partition].schemas[task_state.spec.name]

    def folder(self, run: FragmentState, spec: StageSpec) -> Any:
        """Folder to which a stage's parts of a partition are written."""
        return self._folder(run, spec)[0]

    def _folder(self, run: FragmentState, spec: StageSpec) -> tuple[Any, str | None]:
        """Folder of a stage's parts of a partition, and their codec if it is not our own."""
        key = self._plan.partitions[run.partition].key
        if publisher := spec.publisher(key):
            return publisher.staging, publisher.compression
        return self._store.parts(self._pipeline.name, spec.name, key), None

    def _target(self, run: FragmentState, task_state: StageTaskState) -> PartTarget:
        spec = task_state.spec
        plan = self._plan.partitions[run.partition].stages[spec.name]
        salt = secrets.token_hex(8) if run.index in plan.leaving else None
        (folder, compression), key = self._folder(run, spec), plan.keys[run.index]
        measured = spec.made_columns(self._pipeline, self._schema(run, task_state))
        id = self._pipeline[spec.name].id
        sums = {} if (usage := spec.usage) is None else usage.sums
        return PartTarget(folder, key, id, measured, compression, salt, sums)

    def _input(
        self, run: FragmentState, task_state: StageTaskState, upstream: str, position: int
    ) -> tuple[Rows, list[Any]]:
        columns = self._columns(run, task_state.spec, upstream)
        if upstream == SOURCE:
            schema = self._upstream_schema(run, task_state.spec, upstream)
            rows: SourceRows | PartRows
            ids = self._plan.id_rule(self._plan.partitions[run.partition])
            files, id = self._files(run), self._pipeline.id
            rows = SourceRows(self._source(), run.fragment, schema, files, id, ids)
            return self._sampled(run, task_state, upstream, rows), []
        if (held := run.task_states.get(upstream)) is not None and held.table is not None:
            return TableRows(position), [held.table]
        part = self._parts[run.partition, upstream][run.index]
        rows = PartRows(part.folder, part.info.name, columns)
        return self._sampled(run, task_state, upstream, rows), []

    def _files(self, run: FragmentState) -> tuple[FileRecord, ...]:
        """The source's files of a fragment, as they were planned."""
        listed = self._plan.partitions[run.partition].listed
        return tuple(listed[span.url] for span in run.fragment.spans)

    def _source_files(self, run: FragmentState) -> SourceFiles:
        """The files for code that opens them."""
        files, touched = self._files(run), self._plan.partitions[run.partition].touched
        own = {file.url: touched[file.url] for file in files if file.url in touched}
        return SourceFiles(self._source(), files, own)

    def _source(self) -> bytes:
        """The source for the workers, pickled once."""
        if self._packed is None:
            self._packed = pack_source(self._plan.source)
        return self._packed

    def _sampled(
        self,
        run: FragmentState,
        task_state: StageTaskState,
        upstream: str,
        rows: SourceRows | PartRows,
    ) -> Rows:
        """The rows that a stage reads, limited to the sample if there is one.

        Of a sample only the stage's base is limited; of a preview each part.
        """
        partition = self._plan.partitions[run.partition]
        if partition.preview and isinstance(rows, PartRows):
            first = self._parts[run.partition, upstream][run.index].info.rows
            return SampledRows(rows, tuple(range(first)))
        sample = partition.sample
        if not sample or upstream != task_state.spec.base_node(self._pipeline):
            return rows
        return SampledRows(rows, sample[run.index])

    def _upstream_schema(self, run: FragmentState, spec: StageSpec, upstream: str) -> pa.Schema:
        """The schema of the columns that a stage reads from an upstream stage."""
        schema = self._plan.partitions[run.partition].schemas[upstream]
        wanted = self._columns(run, spec, upstream)
        return schema if wanted is None else pa.schema([schema.field(name) for name in wanted])

    def _columns(
        self, run: FragmentState, spec: StageSpec, upstream: str
    ) -> tuple[str, ...] | None:
        """The columns of an upstream stage that a stage needs; None for all."""
        schema = self._plan.partitions[run.partition].schemas[upstream]
        ids = [key.column for key in self._pipeline._keys_of(upstream)]
        return spec.columns_read(upstream, schema, ids)


def _policy(failures: Failures) -> Policy:
    return Policy(
        failures.on_error or "raise",
        failures.max_retries or 0,
        tuple(map(str, failures.retry_on)),
        failures.timeout_s,
    )


@functools.singledispatch
def operation(spec: StageSpec, pipeline: Pipeline) -> Op:
    """Return the worker operation of a kind of stage."""
    raise TypeError(f"stages of kind {spec.kind!r} have no worker operation; register one here")


@operation.register
def _write(spec: WriteSpec, pipeline: Pipeline) -> Op:
    return Gather()


@operation.register
def _project(spec: ProjectSpec, pipeline: Pipeline) -> Op:
    return Project(spec.columns, spec.where, bool(spec.include))


@operation.register
def _join(spec: JoinSpec, pipeline: Pipeline) -> Op:
    return Join(spec.how, spec.shape(pipeline), spec.upstream, spec.columns)


@operation.register
def _call_udf(spec: MapBatchesSpec, pipeline: Pipeline) -> Op:
    ids = tuple(key.column for key in pipeline._keys_of(spec.upstream[0]))
    return CallUdf(
        cloudpickle.dumps(dict(spec.udf.kwargs)),
        spec.columns_given(pipeline),
        spec.contract,
        AUTO if spec.auto_batch else spec.batch_size,
        spec.cardinality,
        spec.max_concurrency,
        ids,
        tuple(spec.schema.names),
        ids[0] if spec.children else None,
        spec.udf.method,
        spec.udf.style,
        _policy(spec.failures),
        pinned=spec.pinned,
        servers=tuple(spec.udf.servers),
    )


@dataclass(frozen=True)
class Task:
    """A task that waits for a worker: loading a map's input, its slices, gathering, or whole work.

    A slice gets its rows at assignment, unless `retry` gives them.
    """

    run: FragmentState
    epoch: int
    stage: str
    kind: TaskKind
    retry: RetriedRows | None = None

    @property
    def exclusive(self) -> bool:
        """Whether it is one row that may end its worker; no other row may then be blamed for it."""
        return self.retry is not None and self.retry.rows == 1 and self.retry.error is None

    @property
    def is_current(self) -> bool:
        """Whether its fragment is still in progress, and has not started over."""
        return self.epoch == self.run.epoch and self.stage in self.run.task_states


@dataclass(frozen=True)
class InFlightTask:
    """A call in flight.

    Attributes:
        worker: The worker.
        task: The task.
        start: The first row.
        rows: Number of rows.
        began: Monotonic time at which it was sent, in seconds.
    """

    worker: Worker
    task: Task
    start: int
    rows: int
    began: float


class TaskBuilder:
    """Builds work from the tasks of worker queues."""

    def __init__(
        self, work_builder: WorkBuilder, slice_sizer: SliceSizer, workers: Callable[[str], int]
    ) -> None:
        self._work_builder, self._slice_sizer, self._workers = work_builder, slice_sizer, workers

    def take_next(
        self, task: Task, worker_queue: WorkerQueue, worker: Worker, last: bool
    ) -> tuple[Work, list[Any], int, int]:
        """Take the next rows of a worker queue's first task; dequeue it with its last rows."""
        run, task_state = task.run, task.run.task_states[task.stage]
        if task.retry is not None:
            worker_queue.pop()
            start, rows = task.retry.start, task.retry.rows
            if task.retry.error is None:
                given = run, task_state, worker.name, start, start + rows
                return *self._work_builder.slice(*given), start, rows
            given_up = self._work_builder.reject(run, task_state, worker.name, task.retry)
            return *given_up, start, rows
        if task.kind == "slice":
            spec, last = task_state.spec, last and len(worker_queue) == 1
            assert spec.runs_udf
            wanted = self._slice_sizer.slice_rows(
                spec, task_state.rows_left, worker_queue.size, last
            )
            share = worker_queue.place(worker) if len(task_state.left) > 1 else 0
            start, stop = task_state.take(share, lambda most: min(wanted, most))
            task_state.slices_in_flight += 1
            if not task_state.rows_left:
                worker_queue.pop()
            work, tables = self._work_builder.slice(run, task_state, worker.name, start, stop)
            return work, tables, start, stop - start
        worker_queue.pop()
        place = run, task_state, worker.name
        is_costly = self._slice_sizer.is_costly(task.stage)
        if task.kind == "load":
            shares = self._workers(task.stage)
            work, tables = self._work_builder.load(*place, shares, is_costly)
        elif task.kind == "gather":
            work, tables = self._work_builder.gather(*place)
        else:
            work, tables = self._work_builder.whole(*place, is_costly)
        return work, tables, 0, 0
