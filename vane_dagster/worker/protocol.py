"""The records that a driver and its workers exchange: operations, pools, and reports."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, Union

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster import errors
from vane_dagster._secrets import masked
from vane_dagster.errors import DamagedPartError, VaneError
from vane_dagster.pipeline.contracts import CALL, CallStyle, Contract
from vane_dagster.pipeline.keys import JoinShape
from vane_dagster.pipeline.options import (
    Cardinality,
    JoinHow,
    RowOrder,
    WorkerLifecycle,
)
from vane_dagster.retries import Policy, RowLoss
from vane_dagster.servers.directory import Endpoints
from vane_dagster.servers.launch import ServerStatus
from vane_dagster.sources.row_ids import IdRule
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord, PartInfo
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.row_records import RecordedPart
from vane_dagster.types.schema import ERROR_COLUMN

IDLE_SECONDS = 600.0
"""Seconds that a pool stays warm without a lease, by default."""

Places = npt.NDArray[np.int64]
"""Positions of rows in a table."""


@dataclass(frozen=True)
class Tally:
    """Counts of the rows that a stage read, by outcome.

    Attributes:
        rows_in: Input rows.
        filtered: Input rows without output, as the stage declares.
        quarantined: Input rows without output, because of errors.
        nulled: Input rows with nulls as output, because of errors.
        unread: Of the quarantined and nulled rows, those that the source could not read.
        workers: Names of the workers that computed them.
        seconds: Seconds that all workers took together.
        wasted: Amounts spent on rows without output, such as tokens; see `CostlyError`.
        packages: The installed packages that the user's code imports, as "name==version".
    """

    rows_in: int = 0
    filtered: int = 0
    quarantined: int = 0
    nulled: int = 0
    workers: tuple[str, ...] = ()
    seconds: float = 0.0
    wasted: Counter[str] = field(default_factory=Counter)
    packages: tuple[str, ...] = ()
    unread: int = 0

    @property
    def faults(self) -> int:
        """Rows that failed."""
        return self.quarantined + self.nulled

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rows_in + other.rows_in,
            self.filtered + other.filtered,
            self.quarantined + other.quarantined,
            self.nulled + other.nulled,
            tuple(dict.fromkeys((*self.workers, *other.workers))),
            self.seconds + other.seconds,
            self.wasted + other.wasted,
            tuple(sorted({*self.packages, *other.packages})),
            self.unread + other.unread,
        )


@dataclass(frozen=True)
class SourceRows:
    """The rows of a fragment of the source, read by the worker.

    Attributes:
        source: The source's reader, as pickled by `planning.source_code.pack_source`.
        fragment: The fragment.
        schema: The columns to read.
        files: The fragment's files as they were planned. They must not have changed.
        id: Name of the source's id column.
        id_rule: How it is computed; None if the source has it.
    """

    source: bytes = field(repr=False)
    fragment: FragmentRecord
    schema: pa.Schema
    files: tuple[FileRecord, ...]
    id: str
    id_rule: IdRule | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.fragment.stop - self.fragment.start


@dataclass(frozen=True)
class SourceFiles:
    """The source's files that the rows of a task come from, which the user's code may open.

    Attributes:
        source: The source's reader, as pickled by `planning.source_code.pack_source`.
        files: The files as they were planned. They must not have changed.
        touched: The former records of those that were touched but not changed, by URL; the row keys
            have their identities.
    """

    source: bytes = field(repr=False)
    files: tuple[FileRecord, ...]
    touched: Mapping[str, FileRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class PartRows:
    """The rows of a part, read by the worker.

    Attributes:
        folder: The folder of the part.
        name: The part's file name.
        columns: The columns to read; None for all.
    """

    folder: Location
    name: str
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class TableRows:
    """Rows `start` to `stop` of a table that is passed by reference.

    Attributes:
        index: Position of the table among those passed.
        start: The first row.
        stop: The row after the last; None for all.
        columns: Their columns; None for all.
    """

    index: int
    start: int = 0
    stop: int | None = None
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class SampledRows:
    """Some rows of an input, by their positions."""

    rows: Union[SourceRows, PartRows, TableRows]
    places: tuple[int, ...]


Rows = Union[SourceRows, PartRows, TableRows, SampledRows]


@dataclass(frozen=True)
class Project:
    """SQL columns and a filter over one input.

    Attributes:
        columns: Output columns and their expressions.
        where: The filter; None for none.
        includes: Whether further columns of the output are columns of the input.
    """

    columns: tuple[tuple[str, str], ...]
    where: str | None
    includes: bool = False


@dataclass(frozen=True)
class CallUdf:
    """A call of the worker's own function or model over batches of one input.

    Attributes:
        arguments: The pickled keyword arguments of each call.
        columns: Exactly the input columns that the code gets; None for all.
        contract: How the code is called with rows.
        batch_size: Rows of a batch; "auto" to measure the best size, None for one batch.
        cardinality: Number of output rows for each input row.
        max_concurrency: Calls in flight, for async code.
        ids: The input's key columns, its id first.
        made: The output columns that the code returns.
        parent: The output column with the input's id, if one row yields many.
        method: The method of the model that is called.
        style: How a call produces its result; see `pipeline.udf`.
        policy: How errors are handled.
        max_faults: Rows that may fail before the whole call does.
        files: The store with the local files among the arguments; None without such files.
        pinned: Whether the schema was inferred, and results with further columns are refused.
        servers: The keys of the servers that the code calls.
    """

    arguments: bytes = field(repr=False)
    columns: tuple[str, ...] | None
    contract: Contract
    batch_size: int | Literal["auto"] | None
    cardinality: Cardinality
    max_concurrency: int
    ids: tuple[str, ...]
    made: tuple[str, ...]
    parent: str | None = None
    method: str = CALL
    style: CallStyle = "plain"
    policy: Policy = field(default_factory=Policy)
    max_faults: int = 0
    files: Location | None = None
    pinned: bool = False
    servers: tuple[str, ...] = ()

    @property
    def is_async(self) -> bool:
        """Whether several calls can run at the same time."""
        return self.style in ("async", "async_generator")

    def carried(self, work: Work) -> tuple[str, ...]:
        """Return the input columns that are passed on, besides the ids."""
        own = {work.id, self.parent, *self.ids, *self.made}
        if self.policy.on_error == "null":
            own.add(ERROR_COLUMN)
        return tuple(name for name in work.schema.names if name not in own)


@dataclass(frozen=True)
class Join:
    """A join of inputs by id.

    Attributes:
        how: Which rows are kept.
        shape: How the inputs fit together.
        nodes: The names of the inputs, in their order.
        columns: Output and input columns of the inputs that are not taken as a whole.
        quarantined: For each list, the rows that were quarantined on the way to its children.
    """

    how: JoinHow
    shape: JoinShape
    nodes: tuple[str, ...]
    columns: Mapping[str, tuple[tuple[str, str], ...]]
    quarantined: Mapping[str, tuple[Quarantined, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RowKeying:
    """How the input rows of a keyed stage are recorded beside its parts; see `row_records`.

    Attributes:
        columns: The columns whose values are the key, in the order in which they count.
        files: Those of them with paths of files of the source.
        model: The class or function that is called, for the record.
        code: The stage's definition, for the record.
        epoch: The stage's floor: rows of this run are found until it is raised.
    """

    columns: tuple[str, ...]
    files: tuple[str, ...]
    model: str
    code: str
    epoch: int = 0


@dataclass(frozen=True)
class RecordGroup:
    """Parts of one partition, in which rows are looked up.

    Attributes:
        parts: The parts that have row records.
        id: The parts' column with the id of the stage's input.
        is_own: Whether it is the partition that is computed, so that failures are inherited.
    """

    parts: tuple[RecordedPart, ...]
    id: str
    is_own: bool


@dataclass(frozen=True)
class RowLookup:
    """Where the outcomes of rows may be found.

    Attributes:
        groups: Where they are looked up, in this order.
        floor: Records of an earlier epoch are not found.
        inherits_failures: Whether rows that failed before are not computed again.
    """

    groups: tuple[RecordGroup, ...] = ()
    floor: int = 0
    inherits_failures: bool = False

    def sources(self) -> list[tuple[RecordedPart, str]]:
        """Return all parts, each with its column of the input's ids."""
        return [(part, group.id) for group in self.groups for part in group.parts]


@dataclass(frozen=True)
class RowRetry:
    """An earlier part for the same input, without row records.

    Only the rows that failed in it are computed again.

    Attributes:
        part: The part.
        id: The part's column with the id of the stage's input.
    """

    part: RecordedPart
    id: str

    def sources(self) -> list[tuple[RecordedPart, str]]:
        """Return the part, with its column of the input's ids."""
        return [(self.part, self.id)]


KnownRows = Union[RowLookup, RowRetry]


@dataclass(frozen=True)
class Arrange:
    """One input: first the rows to compute, in an order and divided into shares, then the others.

    The result has an additional last column, which `Restore` reads; see `row_reuse`.

    Attributes:
        id: The id column.
        order: The order of the rows to compute; None for their own.
        shares: Number of workers.
        keying: The row keys; None for rows without keys.
        known: Where the outcomes of rows may be found; None to compute all.
    """

    id: str
    order: RowOrder | None = None
    shares: int = 1
    keying: RowKeying | None = None
    known: KnownRows | None = None


@dataclass(frozen=True)
class Restore:
    """The rows that were computed and the known ones, in the order of the stage's input.

    The last input is the arranged rows, the others are what was computed of them.

    Attributes:
        call: The call that computed them.
        own: The output columns that the code makes, and that a copy of a row takes.
        known: Where known rows are copied from.
    """

    call: CallUdf
    own: tuple[str, ...]
    known: KnownRows | None = None


@dataclass(frozen=True)
class ReuseAndCall:
    """All of a keyed fragment in one call: known rows are copied, and the others computed.

    Attributes:
        arrange: How its rows are looked up.
        restore: How they are computed, and put together.
    """

    arrange: Arrange
    restore: Restore


@dataclass(frozen=True)
class Faults:
    """The location of the records of rows of a part that were quarantined or kept as nulls."""

    folder: Location
    name: str


@dataclass(frozen=True)
class Quarantined:
    """Quarantined rows, and how they relate to the rows of a join's base.

    Attributes:
        faults: The location of their records.
        parent: Which of the records' parents is compared; None for their own id.
        column: The base's column to compare it with.
    """

    faults: Faults
    parent: str | None
    column: str


@dataclass(frozen=True)
class Reject:
    """A row that is not computed any more, because it ends its worker.

    Attributes:
        call: The call that would have computed it.
        model: The class or function to call, for the record.
        error: The kind of its error.
        message: A description of the error.
        attempts: Number of workers that the row ended.
    """

    call: CallUdf
    model: str
    error: RowLoss
    message: str
    attempts: int


@dataclass(frozen=True)
class Gather:
    """A concatenation of inputs of the same schema."""


Op = Union[Project, CallUdf, Join, Gather, Arrange, Restore, ReuseAndCall, Reject]


@dataclass(frozen=True)
class Work:
    """One call of a worker: a task.

    Attributes:
        location: Stage and fragment, for messages.
        op: The operation.
        inputs: The rows that it reads.
        schema: The output's schema.
        id: Name of the id column.
        target: Where the result is written as a part; None to only pass it on.
        keep: Whether the rows are passed on by reference.
        lease: The lease that the task belongs to.
        new_ids: Whether this stage makes new ids, which are then checked as a whole.
        tally: The counts of the rows' computation, for a task that only combines rows.
        run_id: The run.
        worker: Name of the worker that runs the task.
        stage: Pipeline and stage, for records.
        fragment: File and rows, for records.
        source_files: The files that the user's code may open, if rows of the source name files.
        keying: How the input rows are recorded, for a task that writes a part of a keyed stage.
    """

    location: str
    op: Op
    inputs: tuple[Rows, ...]
    schema: pa.Schema
    id: str
    target: PartTarget | None
    keep: bool
    lease: str = ""
    new_ids: bool = False
    tally: Tally | None = None
    run_id: str = ""
    worker: str = ""
    stage: str = ""
    fragment: str = ""
    source_files: SourceFiles | None = None
    keying: RowKeying | None = None


ERRORS: Mapping[str, type[VaneError]] = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, VaneError)
}
"""The classes of errors that a driver raises for failures in workers."""


def fault_kind(error: VaneError) -> str:
    """Return the name of an error's class, or of its nearest base that a driver knows."""
    names = (base.__name__ for base in type(error).__mro__ if base in ERRORS.values())
    return next(names)


@dataclass(frozen=True)
class Fault:
    """An error in a worker as text, which avoids unpickling classes of the user.

    Secrets that the worker knows are masked.

    Attributes:
        kind: The class of the error to raise.
        message: The error message.
        traceback: The traceback, from the user's first frame on if there is one.
        part: Name of the damaged part, if a part in the store is damaged.
    """

    kind: str
    message: str
    traceback: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", masked(self.message))
        object.__setattr__(self, "traceback", masked(self.traceback))

    def error(self) -> VaneError:
        """Return the exception to raise in the driver; a plain `VaneError` for an unknown kind."""
        text = f"{self.message}\n\n{self.traceback}".rstrip()
        if self.kind == "DamagedPartError":
            return DamagedPartError(text, self.part)
        error = ERRORS.get(self.kind)
        return error(text) if error is not None else VaneError(f"{self.kind}: {text}")


@dataclass(frozen=True)
class WorkReport:
    """The report of a task to the driver: a few numbers, never rows.

    Attributes:
        tally: Counts of the input rows by outcome, without those that were copied.
        rows_out: Output rows, without those that were copied.
        shares: The row at which each worker's share ends, if rows were arranged. What follows the
            last share is not computed.
        found_elsewhere: Rows that were found in other partitions, if rows were looked up.
        bytes_out: Bytes of the rows that are passed on in memory.
        seconds: Seconds that the worker took.
        call_seconds: Seconds of these in the user's code.
        batches: Calls of the user's code.
        retries: Calls of these that repeat one after a transient error.
        fits: The batch size that the worker measured, or that fit into memory.
        faults: Messages of the first rows that failed.
        part: The part that was written.
        output: Text that the user's code printed.
        fault: Why the task failed.
        cancelled: Whether the lease had ended, so the task was not done.
        unhealthy_reason: Why the worker must be replaced at once. `fault` is then that of the rows
            being computed, if any.
        recycle_reason: Why the worker should be replaced when it is idle.
        unused_gpu: Why the user's code uses no GPU; empty if it does, or if that is unknown.
    """

    tally: Tally = field(default_factory=Tally)
    rows_out: int = 0
    shares: tuple[int, ...] = ()
    found_elsewhere: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    call_seconds: float = 0.0
    batches: int = 0
    retries: int = 0
    fits: int | None = None
    faults: tuple[str, ...] = ()
    part: PartInfo | None = None
    output: str = ""
    fault: Fault | None = None
    cancelled: bool = False
    unhealthy_reason: str = ""
    recycle_reason: str = ""
    unused_gpu: str = ""

    @property
    def all_rows_failed(self) -> bool:
        """Whether user code was called for rows, and all of them failed."""
        if self.fault is not None:
            return self.fault.kind == "UdfError"
        return 0 < self.tally.rows_in == self.tally.quarantined + self.tally.nulled

    def done_by(self, worker: str) -> Tally:
        """Return the tally, with the worker's name and the seconds that the task took."""
        return replace(self.tally, workers=(worker,), seconds=self.seconds)


@dataclass(frozen=True)
class Computed:
    """The result of an operation in a worker.

    Attributes:
        rows: The rows.
        report: The counts of the operation, for the driver.
        fault_records: Records of the quarantined or nulled rows; None if there are none.
        called: What the user's code computed, if other rows may have been copied.
        row_records: Row records of the input rows; None if they have no keys.
        copied: See `PartInfo`.
        inherited: See `PartInfo`.
    """

    rows: pa.Table
    report: WorkReport
    fault_records: pa.Table | None = None
    called: Computed | None = None
    row_records: pa.Table | None = None
    copied: int = 0
    inherited: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """The model that a pool's workers construct.

    Attributes:
        label: The user's class or function, for people.
        stateful: Whether it is constructed.
        code: Digest of the archive.
        payload: The pickled class or function with its constructor's arguments.
        packages: The installed packages that the code imports. Parts record their versions.
        exact: Whether a model that other code constructed must not be used.
        files: The store with the local files among its arguments; None without such files.
    """

    label: str
    stateful: bool
    code: str
    payload: bytes = field(repr=False)
    packages: tuple[str, ...] = ()
    exact: bool = False
    files: Location | None = None

    @property
    def content(self) -> str:
        """Digest of everything that is sent to the worker."""
        parts = (self.code.encode(), self.payload)
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()


@dataclass(frozen=True)
class PoolSpec:
    """A pool of workers, as a lease requests it.

    Attributes:
        identity: Digest of the model definition; stages with the same share the workers.
        label: Name for people.
        workers: Number of workers wanted, (min, max).
        bundle: The resources that each worker reserves, under Ray's resource names.
        slots: Calls that one worker runs at the same time.
        threads: Threads that a worker computes with; 0 for its share of the machine's CPUs.
        model: The model to construct; None for workers that only read, project, join and write.
        archive: The user's modules, as a zip.
        env_vars: Names of environment variables to forward.
        unset_vars: Names of those that the workers must not have, because the driver has none and
            that counts in keys.
        lifecycle: When a worker times out, or is replaced.
        on_driver: Whether the workers are subprocesses on the driver's machine, wherever the run
            computes.
        uses: Identities of the pools of servers that the code calls, by the servers' keys.
        server: Name of the server that each worker runs; empty for a pool of models.
        stop_seconds: Seconds that a worker needs at most to stop its server.
        per_node: Maximum number of workers on one node; None for any number.
        idle_seconds: Seconds that the pool stays warm without a lease; None for the backend's.
    """

    identity: str
    label: str
    workers: tuple[int, int]
    bundle: Mapping[str, float] = field(default_factory=dict)
    slots: int = 1
    threads: int = 0
    model: ModelSpec | None = None
    archive: bytes = field(default=b"", repr=False)
    env_vars: tuple[str, ...] = ()
    unset_vars: tuple[str, ...] = ()
    lifecycle: WorkerLifecycle = field(default_factory=WorkerLifecycle)
    on_driver: bool = False
    uses: Mapping[str, str] = field(default_factory=dict)
    server: str = ""
    stop_seconds: float = 0.0
    per_node: int | None = None
    idle_seconds: float | None = None

    def request(self, idle_seconds: float = IDLE_SECONDS) -> PoolRequest:
        """Return what the pool manager needs."""
        shared = {each.name: getattr(self, each.name) for each in fields(PoolRequest)}
        if self.idle_seconds is None:
            shared["idle_seconds"] = idle_seconds
        return PoolRequest(**shared)


@dataclass(frozen=True)
class LoadReport:
    """The report of a worker that is ready, or failed to start.

    Attributes:
        warm: Whether the model was already loaded.
        seconds: Seconds that its construction took, in this run or an earlier one.
        pid: Process id.
        device: The device that it computes on: "cpu", or the GPU's name.
        node: Host name of the machine.
        output: Text that the user's code printed during construction.
        fault: Why the model could not be constructed.
        row_seconds: Seconds per row in the last task; None before the first.
        unhealthy_reason: Why a warm worker must be replaced.
        outdated: Why a warm worker cannot run this run's version of the code; empty if it can.
        server: The state of the server, if the worker runs one.
        ray_node: Id of its Ray node; empty for a subprocess.
    """

    warm: bool
    seconds: float
    pid: int
    device: str
    node: str
    output: str = ""
    fault: Fault | None = None
    row_seconds: float | None = None
    unhealthy_reason: str = ""
    outdated: str = ""
    server: ServerStatus | None = None
    ray_node: str = ""


@dataclass(frozen=True)
class WorkerStatus:
    """What a worker is doing, answered while it works.

    Attributes:
        seconds: Seconds since the construction of its model began; None if none is running.
        at: The stack of the thread that constructs it.
        server: The state of the server, if the worker runs one.
    """

    seconds: float | None = None
    at: str = ""
    server: ServerStatus | None = None


def load_failed(fault: Fault) -> LoadReport:
    """Return the report of a load that was never answered."""
    return LoadReport(warm=False, seconds=0.0, pid=0, device="", node="", fault=fault)


@dataclass(frozen=True)
class PoolRequest:
    """The part of a `PoolSpec` that the pool manager needs.

    Attributes:
        identity: See `PoolSpec`.
        label: See `PoolSpec`.
        workers: See `PoolSpec`.
        bundle: See `PoolSpec`.
        slots: See `PoolSpec`.
        threads: See `PoolSpec`.
        idle_seconds: Seconds that the pool stays warm without a lease.
        per_node: See `PoolSpec`.
        server: See `PoolSpec`.
        stop_seconds: See `PoolSpec`.
    """

    identity: str
    label: str
    workers: tuple[int, int]
    bundle: Mapping[str, float]
    slots: int
    threads: int = 0
    idle_seconds: float = IDLE_SECONDS
    per_node: int | None = None
    server: str = ""
    stop_seconds: float = 0.0


WorkerState = Literal["busy", "ready", "starting", "dead"]


class WorkerInfo(TypedDict, total=False):
    """The state of a worker for `vane-dagster pools`.

    It has plain values only, because the worker may run another release. `server` is a
    `ServerStatus` with the fields of its endpoint in it, but for the key, and the worker's GPUs.
    """

    name: str
    state: WorkerState
    pid: int
    node: str
    device: str | None
    load_seconds: float | None
    batches: int
    server: dict[str, Any]


@dataclass(frozen=True)
class LoadCall:
    """A request to construct the model, unless it is loaded.

    Attributes:
        model: The model; None for a worker without one.
        archive: The user's modules, as a zip.
        threads: Threads that the worker computes with.
        env: Environment variables to set, or to unset if None.
        lifecycle: When the worker times out, or is replaced.
        endpoints: The endpoints of the servers that its code calls.
    """

    model: ModelSpec | None
    archive: bytes = b""
    threads: int = 0
    env: Mapping[str, str | None] = field(default_factory=dict)
    lifecycle: WorkerLifecycle = field(default_factory=WorkerLifecycle)
    endpoints: Endpoints = field(default_factory=dict)


@dataclass(frozen=True)
class RunCall:
    """A call of `Host.run`; `tables` are the paths of Arrow files."""

    work: Work
    tables: tuple[str, ...]


@dataclass(frozen=True)
class StatusCall:
    """A request for a `WorkerStatus`, answered while the worker works."""


@dataclass(frozen=True)
class AnnounceCall:
    """The endpoints of servers that the worker's code calls. It is not answered."""

    endpoints: Endpoints


@dataclass(frozen=True)
class StopCall:
    """Stop the server that the worker runs, and end. It is not answered."""


@dataclass(frozen=True)
class WorkerRequest:
    """A request from a driver to a worker subprocess."""

    ticket: int
    call: Union[LoadCall, RunCall, StatusCall, AnnounceCall, StopCall]


@dataclass(frozen=True)
class WorkerReply:
    """The answer to a `WorkerRequest`; `table` is the path of the Arrow file with the rows."""

    ticket: int
    report: Union[WorkReport, LoadReport, WorkerStatus]
    table: str | None = None
