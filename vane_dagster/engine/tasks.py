"""Tasks that wait for a worker, and the work made of them: inputs, operation, where it goes."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle
import pyarrow as pa

from vane_dagster.compute.api import Worker
from vane_dagster.engine.failures import Again
from vane_dagster.engine.fragment_state import FragmentRun, Node, TaskKind
from vane_dagster.engine.slicing import Pacing
from vane_dagster.engine.worker_group import Lane
from vane_dagster.pipeline.options import AUTO, Failures
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import SOURCE, JoinSpec, MapBatchesSpec, ProjectSpec, StageSpec
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.source_code import pack_source
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.store import Store
from vane_dagster.worker.protocol import (
    Arrange,
    CallUdf,
    Faults,
    Gather,
    HeldRows,
    Join,
    Mend,
    Op,
    PartRows,
    Pick,
    Project,
    Quarantined,
    Reject,
    Restore,
    Rows,
    SampledRows,
    SourceRows,
    Tally,
    Work,
)
from vane_dagster.worker.retry import TIMED_OUT, Policy, RowLoss

_Inputs = tuple[Rows, ...]


class Requests:
    """Makes work for one lease."""

    def __init__(
        self,
        plan: RunPlan,
        store: Store,
        parts: Mapping[tuple[int, str], Mapping[int, Part]],
        lease: str,
        run_id: str,
        allowed: Callable[[int, str], int],
        versions: Mapping[str, str],
    ) -> None:
        """Makes work for `lease`.

        `allowed` tells how many rows of a partition may still fail; `versions` names the code that
        each stage calls.
        """
        self._plan = plan
        self._versions = versions
        self._run_id = run_id
        self._allowed = allowed
        self._pipeline: Pipeline = plan.pipeline
        self._store = store
        self._parts = parts
        self._lease = lease
        self._ops: dict[str, Op] = {}
        self._packed: bytes | None = None

    def load(
        self, run: FragmentRun, node: Node, worker: str, shares: int
    ) -> tuple[Work, list[Any]]:
        """Brings a map's input into shared memory, for its slices; so many workers share it."""
        upstream = node.spec.upstream[0]
        rows, tables = self._input(run, node, upstream, 0)
        schema = self._upstream_schema(run, node.spec, upstream)
        order = run.order_of(node.spec)
        op: Op = Gather() if order is None else Arrange(order, shares)
        if former := run.mends.get(node.spec.name):
            id = self._pipeline.keys(upstream)[0].column
            op = Pick(Faults(former.folder, former.info.faults), id)
        return self._work(run, node, worker, op, (rows,), schema=schema), tables

    def whole(self, run: FragmentRun, node: Node, worker: str) -> tuple[Work, list[Any]]:
        """Computes and writes a fragment's part in one piece: for all but maps."""
        rows: list[Rows] = []
        tables: list[Any] = []
        for upstream in node.spec.upstream:
            given, held = self._input(run, node, upstream, len(tables))
            rows.append(given)
            tables += held
        return self._part(run, node, worker, self.op(run, node.spec), tuple(rows)), tables

    def slice(
        self, run: FragmentRun, node: Node, worker: str, start: int, stop: int
    ) -> tuple[Work, list[Any]]:
        """Calls the user's code on some rows of a map's input."""
        rows = HeldRows(0, start, stop)
        return self._work(run, node, worker, self.op(run, node.spec), (rows,)), [node.given]

    def reject(
        self, run: FragmentRun, node: Node, worker: str, row: int, error: RowLoss, told: str
    ) -> tuple[Work, list[Any]]:
        """Sets a row of a map's input aside that ends its workers."""
        call, spec = self.op(run, node.spec), node.spec
        assert isinstance(call, CallUdf)
        assert spec.runs_udf
        op = Reject(call, spec.udf.name, error, told, run.losses[spec.name, row])
        return self._work(run, node, worker, op, (HeldRows(0, row, row + 1),)), [node.given]

    def gather(self, run: FragmentRun, node: Node, worker: str) -> tuple[Work, list[Any]]:
        """Puts a map's slices together and writes the part."""
        tables = [table for _, (table, _) in sorted(node.pieces.items())]
        rows: _Inputs = tuple(HeldRows(i) for i in range(len(tables)))
        if former := run.mends.get(node.spec.name):
            return self._mend(run, node, worker, former, rows), tables
        if tables and run.order_of(node.spec) is not None:
            op = Restore(self._pipeline.keys(node.spec.upstream[0])[0].column)
            rows = (*rows, HeldRows(len(tables)))
            return self._part(run, node, worker, op, rows, tally=node.tally), [*tables, node.given]
        return self._part(run, node, worker, Gather(), rows, tally=node.tally), tables

    def _mend(self, run: FragmentRun, node: Node, worker: str, former: Part, rows: _Inputs) -> Work:
        """Puts what is computed now into a former part, in the place of what had failed."""
        spec, info = node.spec, former.info
        upstream = spec.upstream[0]
        read, _ = self._input(run, node, upstream, 0)
        keys = [key.column for key in self._pipeline.keys(spec.name)]
        given = self._pipeline.keys(upstream)[0].column
        faults = Faults(former.folder, info.faults)
        op = Mend(faults, keys[1] if spec.makes_rows else keys[0], given)
        again = node.tally
        before = info.made.packages if info.made else ()
        tally = replace(
            again, rows_in=info.rows_in, filtered=info.filtered + again.filtered,
            workers=again.workers or (worker,), packages=tuple(sorted({*before, *again.packages})),
        )  # fmt: skip
        inputs = (PartRows(former.folder, info.name), read, *rows)
        return self._part(run, node, worker, op, inputs, tally=tally)

    def op(self, run: FragmentRun, spec: StageSpec) -> Op:
        """A stage's operation, with the rows that may still fail in the partition."""
        if spec.name not in self._ops:
            version = self._versions.get(spec.name, "")
            self._ops[spec.name] = _operation(spec, self._pipeline, version)
        op = self._ops[spec.name]
        if isinstance(op, CallUdf) and op.policy.on_error != "raise":
            return replace(op, most_faults=self._allowed(run.partition, spec.name))
        if isinstance(op, Join):
            return replace(op, quarantined=self._quarantined(run, spec, op))
        return op

    def _quarantined(
        self, run: FragmentRun, spec: StageSpec, op: Join
    ) -> dict[str, tuple[Quarantined, ...]]:
        """For each list of a left join, what was quarantined on the way to its children."""
        found: dict[str, tuple[Quarantined, ...]] = {}
        base = self._pipeline.keys(op.shape.base)
        for node, stages in spec.quarantining(self._pipeline).items():
            for stage in stages:
                part = self._parts[run.partition, stage][run.index]
                if not part.info.faults:
                    continue
                keys = self._pipeline.keys(self._pipeline[stage].spec.upstream[0])
                common = min(len(keys), len(base))
                parent = None if len(keys) == common else keys[-common].column
                faults = Faults(part.folder, part.info.faults)
                rows = Quarantined(faults, parent, base[-common].column)
                found[node] = (*found.get(node, ()), rows)
        return found

    def culprit(self, run: FragmentRun, stage: str) -> str:
        """Stage, partition and fragment, for messages."""
        partition, fragment = self._plan.partitions[run.partition], run.fragment
        where = "" if partition.key is None else f", partition {partition.key!r}"
        label = f"stage '{self._pipeline.name}/{stage}'{where}"
        return f"{label}, fragment {run.index} ({fragment})"

    def _part(
        self,
        run: FragmentRun,
        node: Node,
        worker: str,
        op: Op,
        rows: tuple[Rows, ...],
        tally: Tally | None = None,
    ) -> Work:
        """Work whose result is written, and handed on where a stage below is at hand."""
        work = self._work(run, node, worker, op, rows)
        return replace(
            work,
            target=self._target(run, node),
            keep=node.readers > 0,
            new_ids=node.spec.makes_rows,
            tally=tally,
        )

    def _work(
        self,
        run: FragmentRun,
        node: Node,
        worker: str,
        op: Op,
        rows: tuple[Rows, ...],
        schema: pa.Schema | None = None,
    ) -> Work:
        """Work whose result is handed on; its schema is the stage's unless another is given."""
        stage = node.spec.name
        return Work(
            culprit=self.culprit(run, stage),
            op=op,
            inputs=rows,
            schema=self._schema(run, node) if schema is None else schema,
            id=self._pipeline[stage].id,
            target=None,
            keep=True,
            lease=self._lease,
            run_id=self._run_id,
            worker=worker,
            stage=f"{self._pipeline.name}/{stage}",
            fragment=run.fragment.record_label,
        )

    def _schema(self, run: FragmentRun, node: Node) -> pa.Schema:
        return self._plan.partitions[run.partition].schemas[node.spec.name]

    def folder(self, run: FragmentRun, spec: StageSpec) -> Any:
        """Where a stage's parts of a partition are written."""
        return self._folder(run, spec)[0]

    def _folder(self, run: FragmentRun, spec: StageSpec) -> tuple[Any, str | None]:
        """Where a stage's parts of a partition are written, and their codec if it is not ours."""
        key = self._plan.partitions[run.partition].key
        if publisher := spec.publisher(key):
            return publisher.staging, publisher.compression
        return self._store.parts(self._pipeline.name, spec.name, key), None

    def _target(self, run: FragmentRun, node: Node) -> PartTarget:
        spec = node.spec
        plan = self._plan.partitions[run.partition].stages[spec.name]
        salt = secrets.token_hex(8) if run.index in plan.leaving else None
        (folder, compression), key = self._folder(run, spec), plan.keys[run.index]
        measured = spec.made_columns(self._pipeline, self._schema(run, node))
        id = self._pipeline[spec.name].id
        return PartTarget(folder, key, id, measured, compression, salt, spec.sums)

    def _input(
        self, run: FragmentRun, node: Node, upstream: str, position: int
    ) -> tuple[Rows, list[Any]]:
        columns = self._columns(run, node.spec, upstream)
        if upstream == SOURCE:
            schema = self._upstream_schema(run, node.spec, upstream)
            listed = self._plan.partitions[run.partition].listed
            files = tuple(listed[span.url] for span in run.fragment.spans)
            rows: SourceRows | PartRows
            rows = SourceRows(self._source(), run.fragment, schema, files, self._pipeline.id)
            return self._sampled(run, node, upstream, rows), []
        if (held := run.nodes.get(upstream)) is not None and held.table is not None:
            return HeldRows(position), [held.table]
        part = self._parts[run.partition, upstream][run.index]
        rows = PartRows(part.folder, part.info.name, columns)
        return self._sampled(run, node, upstream, rows), []

    def _source(self) -> bytes:
        """The source for the workers, pickled once."""
        if self._packed is None:
            self._packed = pack_source(self._plan.source)
        return self._packed

    def _sampled(
        self, run: FragmentRun, node: Node, upstream: str, rows: SourceRows | PartRows
    ) -> Rows:
        """The rows that a stage is based on, where some of them alone are computed."""
        sample = self._plan.partitions[run.partition].sample
        if not sample or upstream != node.spec.base_node(self._pipeline):
            return rows
        return SampledRows(rows, sample[run.index])

    def _upstream_schema(self, run: FragmentRun, spec: StageSpec, upstream: str) -> pa.Schema:
        """The schema of what a stage reads of an upstream."""
        schema = self._plan.partitions[run.partition].schemas[upstream]
        wanted = self._columns(run, spec, upstream)
        return schema if wanted is None else pa.schema([schema.field(name) for name in wanted])

    def _columns(self, run: FragmentRun, spec: StageSpec, upstream: str) -> tuple[str, ...] | None:
        """The columns of an upstream that a stage needs; None for all."""
        schema = self._plan.partitions[run.partition].schemas[upstream]
        ids = [key.column for key in self._pipeline.keys(upstream)]
        return spec.columns_read(upstream, schema, ids)


def _policy(failures: Failures) -> Policy:
    return Policy(failures.on_error, failures.max_retries, failures.retry_on, failures.timeout_s)


@functools.singledispatch
def _operation(spec: StageSpec, pipeline: Pipeline, version: str) -> Op:
    """What workers do for a kind of stage. Default: its rows are those that it reads."""
    return Gather()


@_operation.register
def _project(spec: ProjectSpec, pipeline: Pipeline, version: str) -> Op:
    return Project(spec.columns, spec.where)


@_operation.register
def _join(spec: JoinSpec, pipeline: Pipeline, version: str) -> Op:
    return Join(spec.how, spec.shape(pipeline), spec.upstream, spec.columns)


@_operation.register
def _call_udf(spec: MapBatchesSpec, pipeline: Pipeline, version: str) -> Op:
    return CallUdf(
        cloudpickle.dumps((spec.udf.args, dict(spec.udf.kwargs))),
        spec.columns,
        spec.batch_format,
        AUTO if spec.auto_batch else spec.batch_size,
        spec.cardinality,
        spec.max_concurrency,
        tuple(key.column for key in pipeline.keys(spec.upstream[0])),
        spec.children[1] if spec.children else None,
        spec.carried,
        _policy(spec.failures),
        version=version,
    )


@dataclass(frozen=True)
class Item:
    """Something that waits for a worker: loading a map's input, its slices, or whole work.

    A slice has no rows yet, unless they are given out `again`.
    """

    run: FragmentRun
    epoch: int
    stage: str
    kind: TaskKind
    again: Again | None = None

    @property
    def alone(self) -> bool:
        """Whether it is a row that may end its worker, so that no other may be blamed for it."""
        return self.again is not None and self.again.rows == 1 and self.again.error is None

    @property
    def wanted(self) -> bool:
        """Whether its fragment is still under way, and has not started over."""
        return self.epoch == self.run.epoch and self.stage in self.run.nodes


@dataclass(frozen=True)
class Flight:
    """A call at work, on `rows` rows from `start` on, since `began` by the monotonic clock."""

    worker: Worker
    item: Item
    start: int
    rows: int
    began: float


class Dispatch:
    """Makes work of the items of lanes.

    Args:
        requests: Makes work for a worker.
        pacing: Tells how many rows it gets.
        workers: How many workers a map has.
    """

    def __init__(self, requests: Requests, pacing: Pacing, workers: Callable[[str], int]) -> None:
        self._requests, self._pacing, self._workers = requests, pacing, workers

    def work(
        self, item: Item, lane: Lane, worker: Worker, last: bool
    ) -> tuple[Work, list[Any], int, int]:
        """Takes work from a lane's first item; the item leaves the lane with its last rows.

        Args:
            item: The item.
            lane: Its lane.
            worker: Who will do it.
            last: Whether nothing else will wait in the lane.

        Returns:
            The work, the tables that it needs, and the rows that it is about.
        """
        run, node = item.run, item.run.nodes[item.stage]
        if item.again is not None:
            lane.pop()
            return self._again(run, node, worker.name, item.again)
        if item.kind == "slice":
            spec, last = node.spec, last and len(lane) == 1
            assert spec.runs_udf
            wanted = self._pacing.slice_rows(spec, node.rows_left, lane.size, last)
            start, stop = node.take(lane.place(worker), lambda most: min(wanted, most))
            node.flying += 1
            if not node.rows_left:
                lane.pop()
            work, tables = self._requests.slice(run, node, worker.name, start, stop)
            return work, tables, start, stop - start
        lane.pop()
        if item.kind == "load":
            return *self._requests.load(run, node, worker.name, self._workers(item.stage)), 0, 0
        make = self._requests.gather if item.kind == "gather" else self._requests.whole
        return *make(run, node, worker.name), 0, 0

    def _again(
        self, run: FragmentRun, node: Node, worker: str, again: Again
    ) -> tuple[Work, list[Any], int, int]:
        start, rows = again.start, again.rows
        if again.error is None:
            work, tables = self._requests.slice(run, node, worker, start, start + rows)
        else:
            ended = run.losses[node.spec.name, start]
            told = f"ended {ended} workers, each of which had no other row at work"
            if again.error == TIMED_OUT:
                told = f"took longer than timeout_s={node.spec.timeout_s:g}, and so {told}"
            told += f"; the last one: {again.why}" if again.why else ""
            work, tables = self._requests.reject(run, node, worker, start, again.error, told)
        return work, tables, start, rows
