"""Work as data: what the driver sends to a worker, and what comes back beside the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

import pyarrow as pa

from vane_dagster import errors
from vane_dagster.commit.location import Location
from vane_dagster.commit.manifest import FileRecord, PartInfo
from vane_dagster.commit.writer import PartTarget
from vane_dagster.declare.keys import JoinShape
from vane_dagster.declare.stage import BatchFormat, Cardinality, JoinHow
from vane_dagster.errors import VaneError
from vane_dagster.execute.attempts import Policy


@dataclass(frozen=True)
class FileRows:
    """Rows `start` to `stop` of a source file, read by the worker.

    Attributes:
        url: The file.
        start: First row.
        stop: Row after the last.
        schema: What is read.
        file: The file as it was planned, which it must still be.
        id: Name of the source's id column.
        storage_options: Options of the fsspec file system.
    """

    url: str
    start: int
    stop: int
    schema: pa.Schema
    file: FileRecord
    id: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


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


Rows = Union[FileRows, PartRows, HeldRows]


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
        policy: What is done about errors.
        most_faults: Rows that may be set aside before the call is given up.
    """

    arguments: bytes = field(repr=False)
    columns: tuple[str, ...] | None
    batch_format: BatchFormat
    batch_size: int | None
    cardinality: Cardinality
    max_concurrency: int
    ids: tuple[str, ...]
    parent: str | None = None
    policy: Policy = field(default_factory=Policy)
    most_faults: int = 0


@dataclass(frozen=True)
class Join:
    """Inputs put side by side by id.

    Attributes:
        how: Which rows are kept.
        shape: How the nodes fit together.
        nodes: The nodes, in the order of the inputs.
        columns: Output and input columns of the nodes from which not all are taken.
    """

    how: JoinHow
    shape: JoinShape
    nodes: tuple[str, ...]
    columns: Mapping[str, tuple[tuple[str, str], ...]]


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
    error: str
    message: str
    attempts: int


@dataclass(frozen=True)
class Gather:
    """Inputs of the same schema put one below the other."""


Op = Union[Project, CallUdf, Join, Gather, Reject]


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
    """

    rows_in: int = 0
    filtered: int = 0
    quarantined: int = 0
    nulled: int = 0
    workers: tuple[str, ...] = ()
    seconds: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rows_in + other.rows_in,
            self.filtered + other.filtered,
            self.quarantined + other.quarantined,
            self.nulled + other.nulled,
            tuple(dict.fromkeys((*self.workers, *other.workers))),
            self.seconds + other.seconds,
        )


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


@dataclass(frozen=True)
class Fault:
    """An error that a worker met, as text, so that no class of the user's need be unpickled.

    Attributes:
        kind: Name of the `VaneError` subclass to raise.
        message: What to say.
        traceback: The user's own traceback, or the worker's.
    """

    kind: str
    message: str
    traceback: str = ""

    def error(self) -> VaneError:
        """The exception to raise in the driver."""
        text = f"{self.message}\n\n{self.traceback}".rstrip()
        cls: type[VaneError] = getattr(errors, self.kind)
        return cls(text)


@dataclass(frozen=True)
class Report:
    """What the driver learns of a piece of work: a few numbers, never rows.

    Attributes:
        tally: What became of the rows given.
        rows_out: Rows that came out.
        bytes_out: Bytes of the rows that are handed on in memory.
        seconds: Time that the worker took.
        call_seconds: Of which in the user's code.
        batches: Calls of the user's code.
        retries: Of which repeated after an error that may pass.
        fits: The largest batch that fitted into memory, where one did not.
        faults: What went wrong with the first rows that were set aside.
        part: The part that was written.
        output: What the user's code printed.
        fault: Why it failed.
        cancelled: Whether the lease had ended, so that nothing was done.
    """

    tally: Tally = field(default_factory=Tally)
    rows_out: int = 0
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

    def done_by(self, worker: str) -> Tally:
        """The tally, with who did the work and how long it took."""
        return replace(self.tally, workers=(worker,), seconds=self.seconds)


@dataclass(frozen=True)
class ModelSpec:
    """What a pool's worker constructs.

    Attributes:
        label: The user's class or function, for people.
        stateful: Whether it is a class.
        style: How a call answers; see `declare.udf`.
        code: Digest of the archive.
        payload: The pickled class or function with its constructor's arguments.
    """

    label: str
    stateful: bool
    style: str
    code: str
    payload: bytes = field(repr=False)


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
    """

    warm: bool
    seconds: float
    pid: int
    device: str
    node: str
    output: str = ""
    fault: Fault | None = None
    row_seconds: float | None = None
