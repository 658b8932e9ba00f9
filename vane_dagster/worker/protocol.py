"""The records that a driver and its workers exchange: operations on rows, pools, and reports."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, Union

import pyarrow as pa

from vane_dagster._secrets import masked
from vane_dagster.errors import (
    BudgetError,
    ClusterLostError,
    CodeIdentityError,
    ComputeError,
    DamagedPartError,
    DefinitionError,
    IntegrityError,
    ModelLoadError,
    NewerFormatError,
    PlanError,
    PreflightError,
    SchemaError,
    SourceError,
    StoreError,
    TraceError,
    UdfError,
    VaneError,
)
from vane_dagster.pipeline.keys import JoinShape
from vane_dagster.pipeline.options import BatchFormat, Cardinality, JoinHow, RowOrder, Upkeep
from vane_dagster.pipeline.udf import CallStyle
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord, PartInfo
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.worker.retry import Policy, RowLoss

IDLE_SECONDS = 600.0
"""How long a pool stays warm without a lease, by default."""


@dataclass(frozen=True)
class Tally:
    """What became of the rows that a stage was given.

    Attributes:
        rows_in: Rows given.
        filtered: Of which nothing came out, as the stage declares.
        quarantined: Of which nothing came out, because of errors.
        nulled: Of which nulls came out, because of errors.
        workers: Names of the workers that computed them.
        seconds: Time that they took, all together.
        wasted: What rows took of which nothing came out; see `CostlyError`.
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
        )


@dataclass(frozen=True)
class SourceRows:
    """The rows of a fragment of the source, read by the worker.

    Attributes:
        source: The source, as `planning.source_code.pack_source` pickled it.
        fragment: The fragment.
        schema: What is read.
        files: The fragment's files as they were planned, which they must still be.
        id: Name of the source's id column.
    """

    source: bytes = field(repr=False)
    fragment: FragmentRecord
    schema: pa.Schema
    files: tuple[FileRecord, ...]
    id: str

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.fragment.stop - self.fragment.start


@dataclass(frozen=True)
class PartRows:
    """The rows of a part, read by the worker; `columns` None for all."""

    folder: Location
    name: str
    columns: tuple[str, ...] | None = None


@dataclass(frozen=True)
class HeldRows:
    """Rows of a table that comes by reference: its position among them, and the range."""

    index: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class SampledRows:
    """Some rows of a fragment of the source or of a part, by their places."""

    rows: Union[SourceRows, PartRows]
    places: tuple[int, ...]


Rows = Union[SourceRows, PartRows, HeldRows, SampledRows]


@dataclass(frozen=True)
class Project:
    """SQL columns and a filter over one input."""

    columns: tuple[tuple[str, str], ...]
    where: str | None


@dataclass(frozen=True)
class CallUdf:
    """The worker's own function or model over batches of one input.

    Attributes:
        ids: The input's keys, its id first.
        parent: Where many rows come of one, the output column with the input's id.
        carried: The input's columns that are passed on.
        policy: What is done about errors.
        most_faults: Rows that may be set aside before the call is given up.
        version: The code that is called, where the worker may have several; see `ModelSpec`.
    """

    arguments: bytes = field(repr=False)
    columns: tuple[str, ...] | None
    batch_format: BatchFormat
    batch_size: int | Literal["auto"] | None
    cardinality: Cardinality
    max_concurrency: int
    ids: tuple[str, ...]
    parent: str | None = None
    carried: tuple[str, ...] = ()
    policy: Policy = field(default_factory=Policy)
    most_faults: int = 0
    version: str = ""


@dataclass(frozen=True)
class Join:
    """Inputs put side by side by id.

    Attributes:
        how: Which rows are kept.
        shape: How the nodes fit together.
        nodes: The nodes, in the order of the inputs.
        columns: Output and input columns of the nodes from which not all are taken.
        quarantined: For each list, the rows that were quarantined on the way to its children.
    """

    how: JoinHow
    shape: JoinShape
    nodes: tuple[str, ...]
    columns: Mapping[str, tuple[tuple[str, str], ...]]
    quarantined: Mapping[str, tuple[Quarantined, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrange:
    """One input in another order, in a share for each worker."""

    order: RowOrder
    shares: int


@dataclass(frozen=True)
class Restore:
    """Inputs put one below the other, and in the order that rows had before they were arranged.

    The last input is the rows as they were arranged, whose id is `id`.
    """

    id: str


@dataclass(frozen=True)
class Faults:
    """The rows that a part has set aside or kept as nulls: where their records are."""

    folder: Location
    name: str


@dataclass(frozen=True)
class Quarantined:
    """Quarantined rows, and how they lead to the rows of a join's base.

    Attributes:
        faults: Their records.
        parent: Which of the records' parents is compared; None for their own id.
        column: The base's column that it is compared with.
    """

    faults: Faults
    parent: str | None
    column: str


@dataclass(frozen=True)
class Pick:
    """Of one input the rows that failed before."""

    faults: Faults
    id: str


@dataclass(frozen=True)
class Mend:
    """A former part with rows that are computed now.

    The inputs are the former part, what the stage reads, in whose order the rows stand, and the
    new rows. `id` is the column of the rows with the id of what the stage reads.
    """

    faults: Faults
    id: str
    given: str


@dataclass(frozen=True)
class Reject:
    """A row that is not computed any more, because it ends its worker.

    Attributes:
        call: The call that it would have been given to.
        model: What would have been called, for the record.
        error: What it is at fault of.
        message: What happened.
        attempts: Workers that it ended.
    """

    call: CallUdf
    model: str
    error: RowLoss
    message: str
    attempts: int


@dataclass(frozen=True)
class Gather:
    """Inputs of the same schema put one below the other."""


Op = Union[Project, CallUdf, Join, Gather, Arrange, Restore, Pick, Mend, Reject]


@dataclass(frozen=True)
class Work:
    """One call of a worker.

    Attributes:
        culprit: Stage and fragment, for messages.
        op: What is done.
        inputs: The rows that it is done to.
        schema: What comes out.
        id: Name of the id column.
        target: Where the result is written as a part; None to only hand it on.
        keep: Whether the rows are handed on by reference.
        lease: The lease under which the work is done.
        new_ids: Whether the ids are of this stage's making, so that they are checked as a whole.
        tally: What is known of how the rows came about, where the work only puts them together.
        run_id: The run.
        worker: Name of the worker that does it.
        stage: Pipeline and stage, for records.
        fragment: File and rows, for records.
    """

    culprit: str
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


FaultKind = Literal[
    "BudgetError",
    "ClusterLostError",
    "CodeIdentityError",
    "ComputeError",
    "DamagedPartError",
    "DefinitionError",
    "IntegrityError",
    "ModelLoadError",
    "NewerFormatError",
    "PlanError",
    "PreflightError",
    "SchemaError",
    "SourceError",
    "StoreError",
    "TraceError",
    "UdfError",
    "VaneError",
]
"""The error that a driver raises for what failed in a worker."""

ERRORS: Mapping[FaultKind, type[VaneError]] = {
    "BudgetError": BudgetError,
    "ClusterLostError": ClusterLostError,
    "CodeIdentityError": CodeIdentityError,
    "ComputeError": ComputeError,
    "DamagedPartError": DamagedPartError,
    "DefinitionError": DefinitionError,
    "IntegrityError": IntegrityError,
    "ModelLoadError": ModelLoadError,
    "NewerFormatError": NewerFormatError,
    "PlanError": PlanError,
    "PreflightError": PreflightError,
    "SchemaError": SchemaError,
    "SourceError": SourceError,
    "StoreError": StoreError,
    "TraceError": TraceError,
    "UdfError": UdfError,
    "VaneError": VaneError,
}
_KINDS = {error: kind for kind, error in ERRORS.items()}


def fault_kind(error: VaneError) -> FaultKind:
    """The name of an error's class, or of its nearest base that a driver knows."""
    return next(_KINDS[base] for base in type(error).__mro__ if base in _KINDS)


@dataclass(frozen=True)
class Fault:
    """An error that a worker met, as text, so that no class of the user's need be unpickled.

    Secrets that the worker knows are masked in it.

    Attributes:
        kind: The error to raise.
        message: What to say.
        traceback: The user's own traceback, or the worker's.
        part: Name of the file, where a part in the store is damaged.
    """

    kind: FaultKind
    message: str
    traceback: str = ""
    part: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", masked(self.message))
        object.__setattr__(self, "traceback", masked(self.traceback))

    def error(self) -> VaneError:
        """The exception to raise in the driver; a `VaneError` for a kind that it does not know."""
        text = f"{self.message}\n\n{self.traceback}".rstrip()
        if self.kind == "DamagedPartError":
            return DamagedPartError(text, self.part)
        error = ERRORS.get(self.kind)
        return error(text) if error is not None else VaneError(f"{self.kind}: {text}")


@dataclass(frozen=True)
class Computed:
    """The rows that an operation made; it stays in the worker, which makes a `Report` of it.

    Attributes:
        rows: The rows.
        tally: See `Report`.
        aside: Records of the rows that were set aside; None if there are none.
        cancelled: Whether only some of the batches were computed, as the lease had ended.
        shares: See `Report`, and so are the others.
    """

    rows: pa.Table
    tally: Tally
    aside: pa.Table | None = None
    cancelled: bool = False
    shares: tuple[int, ...] = ()
    call_seconds: float = 0.0
    batches: int = 0
    retries: int = 0
    fits: int | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What the driver learns of a piece of work: a few numbers, never rows.

    Attributes:
        tally: What became of the rows given.
        rows_out: Rows that came out.
        shares: Where the rows of each worker's share end, if they were arranged.
        bytes_out: Bytes of the rows that are handed on in memory.
        seconds: Time that the worker took.
        call_seconds: Of which in the user's code.
        batches: Calls of the user's code.
        retries: Of which repeated after an error that may pass.
        fits: The batch size that the worker has found, or that fitted into memory.
        faults: What went wrong with the first rows that were set aside.
        part: The part that was written.
        output: What the user's code printed.
        fault: Why it failed.
        cancelled: Whether the lease had ended, so that nothing was done.
        sick: Why the worker has to be replaced at once; `fault` then is of the rows at work, if any
            were.
        spent: Why the worker is to be replaced when it has nothing more to do.
    """

    tally: Tally = field(default_factory=Tally)
    rows_out: int = 0
    shares: tuple[int, ...] = ()
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
    sick: str = ""
    spent: str = ""

    @property
    def is_vain(self) -> bool:
        """Whether user code was called for rows, and none of them came through."""
        if self.fault is not None:
            return self.fault.kind == "UdfError"
        return 0 < self.tally.rows_in == self.tally.quarantined + self.tally.nulled

    def done_by(self, worker: str) -> Tally:
        """The tally, with who did the work and how long it took."""
        return replace(self.tally, workers=(worker,), seconds=self.seconds)


@dataclass(frozen=True)
class ModelSpec:
    """What a pool's worker constructs.

    Attributes:
        label: The user's class or function, for people.
        stateful: Whether it is a class.
        style: How a call answers; see `pipeline.udf`.
        code: Digest of the archive.
        payload: The pickled class or function with its constructor's arguments.
        packages: The installed packages that the code imports, whose versions parts record.
        shares_state: Whether a worker that has constructed it may call other versions of its code
            on the same state; see `fingerprint.constructor`.
        exact: Whether nothing may be used that other code has constructed.
    """

    label: str
    stateful: bool
    style: CallStyle
    code: str
    payload: bytes = field(repr=False)
    packages: tuple[str, ...] = ()
    shares_state: bool = False
    exact: bool = False

    @property
    def version(self) -> str:
        """Names the code that calls run, where a worker may have several; else empty."""
        return self.content if self.shares_state else ""

    @property
    def content(self) -> str:
        """Digest of all that travels."""
        parts = (self.code.encode(), self.payload, self.style.encode())
        return hashlib.sha256(b"".join(hashlib.sha256(p).digest() for p in parts)).hexdigest()


@dataclass(frozen=True)
class PoolSpec:
    """A pool of workers: what a lease asks for.

    Attributes:
        identity: Digest of the model definition; stages with the same share the workers.
        label: Name for people.
        workers: Workers wanted, (min, max).
        bundle: What each reserves, under Ray's resource names.
        slots: Calls that one worker does at the same time.
        threads: Threads that a worker computes with; 0 for its share of the node.
        model: What it constructs; None for workers that only read, project, join and write.
        archive: The user's modules, as a zip.
        env_vars: Names of environment variables to forward.
        upkeep: When a worker is given up, or made anew.
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
    upkeep: Upkeep = field(default_factory=Upkeep)


@dataclass(frozen=True)
class LoadReport:
    """What a worker says when it is ready.

    Attributes:
        warm: Whether the model was there already.
        seconds: How long its construction took, now or then.
        pid: Process id.
        device: Where it computes: "cpu", or the GPU's name.
        node: The host's name.
        output: What the user's code printed meanwhile.
        fault: Why it could not be constructed.
        row_seconds: What a row took it in the last calls; None before the first.
        sick: Why a model that was there already has to be replaced.
        outdated: Why a warm worker cannot run this run's version of the code; empty if it can.
    """

    warm: bool
    seconds: float
    pid: int
    device: str
    node: str
    output: str = ""
    fault: Fault | None = None
    row_seconds: float | None = None
    sick: str = ""
    outdated: str = ""


@dataclass(frozen=True)
class Starting:
    """What a worker says while it constructs its model.

    Attributes:
        seconds: Since when it does; None if it does not.
        at: The stack of the thread that does.
    """

    seconds: float | None = None
    at: str = ""


def load_failed(fault: Fault) -> LoadReport:
    """The answer to a load of which no answer came."""
    return LoadReport(warm=False, seconds=0.0, pid=0, device="", node="", fault=fault)


@dataclass(frozen=True)
class Claim:
    """What a lease asks of one pool."""

    identity: str
    label: str
    workers: tuple[int, int]
    bundle: Mapping[str, float]
    slots: int
    threads: int = 0
    idle_seconds: float = IDLE_SECONDS


WorkerState = Literal["busy", "ready", "starting", "dead"]


class WorkerInfo(TypedDict, total=False):
    """What `vane-dagster pools` shows of a worker, in plain values, as its code may be another."""

    name: str
    state: WorkerState
    pid: int
    node: str
    device: str | None
    load_seconds: float | None
    batches: int


@dataclass(frozen=True)
class LoadCall:
    """A call of `Host.load`, as a driver sends it to a worker process of its own."""

    model: ModelSpec | None
    archive: bytes
    threads: int
    env: Mapping[str, str]
    upkeep: Upkeep


@dataclass(frozen=True)
class RunCall:
    """A call of `Host.run`; tables are in Arrow files."""

    work: Work
    tables: tuple[str, ...]


@dataclass(frozen=True)
class StartingCall:
    """A question how the construction of the model goes."""


@dataclass(frozen=True)
class Request:
    """What a driver sends to a worker process."""

    ticket: int
    call: Union[LoadCall, RunCall, StartingCall]


@dataclass(frozen=True)
class Reply:
    """The answer to a `Request`; `table` is the path of the Arrow file with the rows."""

    ticket: int
    report: Union[Report, LoadReport, Starting]
    table: str | None = None
