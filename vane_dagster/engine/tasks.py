"""The work for a node of a fragment: which inputs, which operation, where the result goes."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import cloudpickle
import pyarrow as pa

from vane_dagster.engine.fragment_state import FragmentRun, Node
from vane_dagster.pipeline.options import AUTO, Failures
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.pipeline.specs import SOURCE, JoinSpec, MapBatchesSpec, ProjectSpec, StageSpec
from vane_dagster.planning.plan import Part, RunPlan
from vane_dagster.planning.source_code import pack_source
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.publish.parquet import publisher_of
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
from vane_dagster.worker.retry import Policy, RowLoss

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
        key = self._plan.partitions[run.partition].key
        if publisher := publisher_of(spec, key):
            return publisher.staging
        return self._store.parts(self._pipeline.name, spec.name, key)

    def _target(self, run: FragmentRun, node: Node) -> PartTarget:
        spec = node.spec
        plan = self._plan.partitions[run.partition].stages[spec.name]
        compression = spec.compression if spec.publishes else None
        salt = secrets.token_hex(8) if run.index in plan.leaving else None
        folder, key = self.folder(run, spec), plan.keys[run.index]
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
