"""The host: the one generic object that runs in every worker, Ray actor or subprocess.

It unpacks the user's modules by digest, constructs the model once, and runs one task after another.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from vane_dagster import _failpoints
from vane_dagster._private_folder import worker_folder
from vane_dagster._secrets import keep_arguments, keep_variables, masked
from vane_dagster._user_errors import contained, hinted, is_shutdown
from vane_dagster.errors import (
    DamagedPartError,
    IntegrityError,
    ModelLoadError,
    StageError,
    VaneError,
    described,
)
from vane_dagster.pipeline.lazy_instances import construct
from vane_dagster.pipeline.options import WorkerLifecycle
from vane_dagster.providers.base import EndpointRefused
from vane_dagster.servers.directory import SERVER_MOVED, directory
from vane_dagster.servers.launch import own_node_id
from vane_dagster.servers.process import ServerProcess
from vane_dagster.sources.planned_read import fitted
from vane_dagster.storage.manifest import PartInfo, PartProvenance
from vane_dagster.storage.part_file import PartTarget, write_part
from vane_dagster.storage.quarantine import attach, detach, write_faults
from vane_dagster.storage.row_records import write_records
from vane_dagster.types.casts import cast_table
from vane_dagster.types.schema import empty_table
from vane_dagster.worker import operators, row_reuse, unread_rows, user_code
from vane_dagster.worker.calls import LoadCall
from vane_dagster.worker.database import connection
from vane_dagster.worker.frameworks import device, set_threads, share_gpus, unused_gpu
from vane_dagster.worker.gpu_use import GpuMeter
from vane_dagster.worker.health import UnhealthyModelError
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.isolation import check_descriptors, one_process
from vane_dagster.worker.lifecycle import Startup, recycle_reason
from vane_dagster.worker.output import OutputTap
from vane_dagster.worker.pools import ModelSpec
from vane_dagster.worker.protocol import (
    Arrange,
    CallUdf,
    Gather,
    Join,
    Project,
    Reject,
    Restore,
    ReuseAndCall,
    Work,
)
from vane_dagster.worker.provenance import with_provenance
from vane_dagster.worker.reports import (
    Computed,
    Fault,
    LoadReport,
    Output,
    SharedSeconds,
    Tally,
    WorkerStatus,
    WorkReport,
)
from vane_dagster.worker.retry import BatchError
from vane_dagster.worker.row_errors import rejected, user_frames
from vane_dagster.worker.source_rows import known_files
from vane_dagster.worker.udf_caller import UdfCaller

_Begin = Callable[[range], None]


class Host:
    """The model of a worker process, and the tasks that run on it. One instance per process.

    Attributes:
        instance: The constructed model, or the function; None before.
        loaded: The report of its construction; None before.
        leases: The leases that use the worker.
        startup: The state of the model's construction.
        served: Calls of the model, or tasks of a worker without one, completed so far.
        running: The tasks that are running, each with its lease.
    """

    def __init__(self) -> None:
        self.instance: Any = None
        self._caller: UdfCaller | None = None
        self._content = ""  # of what the model was constructed from
        self.loaded: LoadReport | None = None
        self.leases: set[str] = set()
        self._revoked: set[str] = set()
        self.running: dict[object, str] = {}
        self._lock = threading.Lock()
        self._printed = OutputTap.installed()
        self._row_seconds: float | None = None
        self._lifecycle = WorkerLifecycle()
        self.startup = Startup()
        self.served = 0
        self._shared = SharedSeconds()

    def load(self, call: LoadCall) -> LoadReport:
        """Construct the model, unless it is loaded. A failure is reported, not raised."""
        model = call.model
        self.leases |= {call.lease} - self._revoked
        directory.update(call.endpoints)
        with self._lock:
            _failpoints.follow(call.env)
            given = {name: value for name, value in call.env.items() if value is not None}
            for name in call.env.keys() - given:
                os.environ.pop(name, None)
            os.environ.update(given)
            keep_variables(given)
            self._lifecycle = call.lifecycle
            if self.loaded is not None and self.loaded.fault is None:
                return self._loaded_before(self.loaded, model)
            if model is not None:
                pa.array([])  # imports pandas, if installed; no load or call is charged with it
            started, began = time.perf_counter(), time.monotonic()
            fault, unhealthy_reason = None, ""
            try:
                self._construct(call)
                if model is not None and (reason := recycle_reason(call.lifecycle, 0)):
                    raise ModelLoadError(
                        f"{model.label}: its worker {reason}, before the first batch; it would "
                        "be replaced after each one. Raise max_rss"
                    )
            except BaseException as error:  # a user's constructor may raise anything
                if is_shutdown(error):
                    raise
                fault = load_fault(model, contained(error))
                if not directory.probe([*call.endpoints], began):  # the crash was the server's
                    unhealthy_reason = f"a server did not answer: {fault.message}"
            self.loaded = LoadReport(
                warm=False,
                seconds=time.perf_counter() - started,
                pid=os.getpid(),
                device=device(),
                node=socket.gethostname(),
                output=self._printed.drain(),
                fault=fault,
                unhealthy_reason=unhealthy_reason,
                server=self.status().server,
            )
            return self.loaded

    def _construct(self, call: LoadCall) -> None:
        set_threads(call.threads)
        share_gpus()
        with self.startup.watched(call.lifecycle.startup_timeout_s):
            if (model := call.model) is None:
                connection()
                return
            if model.is_kept:
                raise ModelLoadError(
                    f"{model.label}: the instance of its former code has ended. Preview again"
                )
            with directory.constructing():
                root = worker_folder("code")
                user_code.activate(user_code.unpack(call.archive, root))
                target, args, kwargs = user_code.load(model.payload, model.files)
                keep_arguments(args, kwargs)
                _failpoints.at_load(model.label)
                with one_process():
                    made = construct(target, args, kwargs) if model.stateful else target
                self.hold(model, made)

    def hold(self, model: ModelSpec, made: Any) -> None:
        """Store a constructed model, or a function. Its modules are already imported."""
        self.instance, self._content = made, model.content
        self._caller = UdfCaller(model, made)

    def _loaded_before(self, load: LoadReport, model: ModelSpec | None) -> LoadReport:
        """Return the report for a model that an earlier run has loaded."""
        unhealthy_reason = outdated = ""
        if directory.is_outdated:
            unhealthy_reason = SERVER_MOVED
        elif model is not None and model.exact and model.content != self._content:
            outdated = "holds a model that was constructed by other code"
        elif self._caller is not None:
            try:
                self._caller.health.check()
            except UnhealthyModelError as error:
                unhealthy_reason = masked(f"its model reported that it is dead: {error}")
        return replace(
            load,
            warm=True,
            output=Output(),
            row_seconds=self._row_seconds,
            unhealthy_reason=unhealthy_reason,
            outdated=outdated,
            server=self.status().server,
        )

    @property
    def server(self) -> ServerProcess | None:
        """The server, if the worker's model is one; also while it starts."""
        made = self.instance
        return made if isinstance(made, ServerProcess) else ServerProcess.starting

    def status(self) -> WorkerStatus:
        """Return what the worker is doing. Called from other threads."""
        status_here, server = self.startup.status(), self.server
        if server is None:
            waits = self._caller.open_calls.describe() if self._caller else ""
            return replace(status_here, waits=masked(waits))
        status = server.status()
        if status.endpoint is not None:
            endpoint = replace(status.endpoint, node_id=own_node_id())
            status = replace(status, endpoint=endpoint)
        return replace(status_here, server=status)

    def revoke(self, lease: str) -> None:
        """Stop the running and queued tasks of a lease at the next batch."""
        self._revoked.add(lease)
        self.leases.discard(lease)

    def works_for(self, lease: str) -> bool:
        """Return whether a task of a lease is running."""
        return lease in [*self.running.values()]

    def run(
        self,
        work: Work,
        *tables: pa.Table,
        record: _Begin = lambda rows: None,
    ) -> tuple[pa.Table | None, WorkReport]:
        """Run a task. A failure is reported, not raised.

        `record` is told which rows a call alone begins to compute, before this process may end.
        """
        at: range | None = None

        def begin(rows: range) -> None:
            nonlocal at
            at = rows
            if work.alone:
                record(rows)

        if work.lease in self._revoked:
            return None, WorkReport(cancelled=True)
        started, call, meter = time.perf_counter(), object(), GpuMeter()
        self._change_calls(call, 1)
        self.running[call] = work.lease
        try:
            computed = self._do(work, tables, begin)
            if computed.report.cancelled:
                return None, computed.report
            if work.new_ids and (wrong := repeated_or_null(computed.rows.column(work.id))):
                raise IntegrityError(
                    f"{work.location}: returned {wrong} in {work.id!r}; expected unique ids "
                    "without nulls. Return such ids, or leave the column out of the schema"
                )
            table: pa.Table | None = computed.rows
            part = None
            if computed.report.pending is not None:
                table = None
            elif work.target:
                part = self._write(computed, work, work.target, started)
            else:
                table = attach(computed.rows, computed.fault_records)
        except UnhealthyModelError as error:
            fault = work_fault(work, error.cause) if error.rows else None
            return None, WorkReport(
                unhealthy_reason=masked(str(error)),
                at=at,
                fault=fault,
                output=self._printed.drain(),
            )
        except BaseException as error:  # from the user's code or its inputs
            if is_shutdown(error):
                raise
            fault = work_fault(work, contained(error))
            report = error.report if isinstance(error, BatchError) else WorkReport()
            return None, replace(report, fault=fault, output=self._printed.drain())
        finally:
            del self.running[call]
            seconds = self._change_calls(call, -1)
            gpus = meter.stop(seconds)
            check_descriptors()
        calls_model = _calls_model(work)
        made = computed.called or computed
        rows_in = made.report.tally.rows_in
        self.served += made.report.batches if calls_model else 1
        if calls_model and rows_in:
            self._row_seconds = seconds / rows_in
        share = seconds / (time.perf_counter() - started)
        report = replace(
            made.report,
            rows_out=made.rows.num_rows,
            bytes_out=table.nbytes if work.keep and table is not None else 0,
            call_seconds=share * made.report.call_seconds,
            seconds=seconds,
            part=part,
            output=self._printed.drain(),
            recycle_reason=recycle_reason(self._lifecycle, self.served),
            unused_gpu=unused_gpu() if _calls_model(work) and made.report.tally.rows_in else "",
            gpus=gpus,
        )
        return (table if work.keep else None), report

    def _change_calls(self, call: object, calls: int) -> float:
        """Begin or end a call; return its share of the time since it began."""
        with self._lock:
            return self._shared.change(call, calls, time.perf_counter())

    def _do(self, work: Work, tables: Sequence[pa.Table], begin: _Begin) -> Computed:
        op = work.op
        if isinstance(op, CallUdf):
            return self._call(op, operators.resolve(work.inputs[0], tables, work), work, begin)
        if isinstance(op, ReuseAndCall):
            return self._reuse_and_call(op, operators.resolve(work.inputs[0], tables, work), work)
        return without_code(work, tables)

    def _call(
        self, op: CallUdf, rows: pa.Table, work: Work, begin: _Begin = lambda rows: None
    ) -> Computed:
        revoked = functools.partial(self._revoked.__contains__, work.lease)
        assert self._caller is not None, "a worker without a model was given a call"
        with known_files(rows, work):
            return self._caller.call(op, rows, work, revoked, begin)

    def _reuse_and_call(self, op: ReuseAndCall, rows: pa.Table, work: Work) -> Computed:
        marked, wanted, _ = row_reuse.mark(rows, op.arrange, work.source_files)
        called = Computed(empty_table(work.schema), WorkReport())
        if len(wanted):
            call = op.restore.call
            made = replace(work, schema=call.made_schema(work))  # the marked rows have the others
            called = self._call(call, row_reuse.taken(call.read_columns(rows), wanted), made)
        if called.report.cancelled or called.report.pending is not None:
            return called
        work = replace(work, tally=called.report.tally)
        restored = row_reuse.restore([called.rows], marked, op.restore, work, called.fault_records)
        return replace(restored, called=called)

    def _write(
        self, computed: Computed, work: Work, target: PartTarget, started: float
    ) -> PartInfo:
        tally, faults = computed.report.tally, computed.fault_records
        folder, key, records = target.folder, target.key, computed.row_records
        faults_name = "" if faults is None else write_faults(folder, key, faults)
        records_name = "" if records is None else write_records(folder, key, records)
        seconds = tally.seconds + time.perf_counter() - started
        workers = tally.workers or (work.worker,)
        by = (work.run_id, workers, time.time(), seconds, tally.packages, target.definition)
        return write_part(
            computed.rows,
            target,
            tally.wasted,
            rows_in=tally.rows_in,
            filtered=tally.filtered,
            quarantined=tally.quarantined,
            nulled=tally.nulled,
            unread=tally.unread,
            faults=faults_name,
            made=PartProvenance(*by),
            row_records=records_name,
            copied=computed.copied,
            inherited=computed.inherited,
        )


def without_code(work: Work, tables: Sequence[pa.Table]) -> Computed:
    """Do a task that calls no code of the user."""
    op = work.op
    if isinstance(op, Project):
        return unread_rows.computed(*operators.project(op, work.inputs[0], tables, work), work)
    inputs = [operators.resolve(rows, tables, work) for rows in work.inputs]
    if isinstance(op, Join):
        return unread_rows.computed(*operators.join(op, inputs, work), work)
    if isinstance(op, Reject):
        return rejected(op, inputs[0], work)
    if isinstance(op, Arrange):
        return row_reuse.arrange(inputs[0], op, work.source_files)
    faults = detach(inputs)
    if isinstance(op, Restore):
        return row_reuse.restore(inputs[:-1], inputs[-1], op, work, faults)
    assert isinstance(op, Gather)
    table = operators.gather(inputs, work)
    if work.target is None:
        report = WorkReport(Tally(table.num_rows))
        return Computed(fitted(table, work.schema), report, faults)
    if work.tally is None:
        table, unread = unread_rows.split_unread(table)
        if op.provenance is not None:
            table = with_provenance(table, op.provenance, work.schema)
        return unread_rows.computed(table, table.num_rows, unread, work)
    return Computed(cast_table(table, work.schema), WorkReport(work.tally), faults)


def _calls_model(work: Work) -> bool:
    return isinstance(work.op, (CallUdf, ReuseAndCall))


def load_fault(model: ModelSpec | None, error: BaseException) -> Fault:
    """Convert the error of a failed construction to a `Fault`."""
    if isinstance(error, ModelLoadError):
        return Fault("ModelLoadError", str(error))
    label = model.label if model else "worker"
    return Fault(
        "ModelLoadError",
        f"{label} could not be constructed in a worker: {described(hinted(error))}",
        user_frames(error),
    )


def work_fault(work: Work, error: BaseException) -> Fault:
    """Convert the error of a failed task to a `Fault`."""
    where, kind = work.location, "UdfError" if _calls_model(work) else "ComputeError"
    if isinstance(error, BatchError):
        kind = "FailedRowsError" if error.reason else kind
        of_rows = not isinstance(error.cause, StageError)
        where, error = f"{where}: {error}" if of_rows else where, error.cause
    if isinstance(error, DamagedPartError):
        return Fault("DamagedPartError", str(error), part=error.part)
    if isinstance(error, VaneError):
        return Fault(type(error).__name__, str(error))
    is_permanent = isinstance(error, StageError)
    said = (is_permanent and str(error).strip()) or described(error)
    of_stage = isinstance(error, EndpointRefused)
    return Fault(kind, f"{where}: {said}", user_frames(error), "", of_stage, is_permanent)
