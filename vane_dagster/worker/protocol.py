"""What the driver asks of a worker: a task of operations on rows."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Union

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster.pipeline.contracts import CALL, Contract
from vane_dagster.pipeline.keys import JoinShape
from vane_dagster.pipeline.options import Cardinality, JoinHow
from vane_dagster.retries import Policy, RowLoss
from vane_dagster.sources.base import ROW_ERROR
from vane_dagster.sources.row_ids import IdRule
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import FileRecord, FragmentRecord, PartInfo
from vane_dagster.storage.part_file import PartTarget
from vane_dagster.storage.row_records import RecordedPart
from vane_dagster.types.schema import ERROR_COLUMN
from vane_dagster.worker.reports import Tally

if TYPE_CHECKING:
    from vane_dagster.providers.template import Template
    from vane_dagster.providers.usage import UsageAccount

Places = npt.NDArray[np.int64]
"""Positions of rows in a table."""


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

    folder: StoragePath
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
        max_concurrency: Calls in flight, for async code; requests, if each row is one.
        ids: The input's key columns, its id first.
        made: The output columns that the code returns.
        parent: The output column with the input's id, if one row yields many.
        method: The method of the model that is called.
        is_async: Whether the code is async, so that several calls can run at the same time.
        policy: How errors are handled.
        max_faults: Rows that may fail before the whole call does.
        files: The store with the local files among the arguments; None without such files.
        pinned: Whether the schema was inferred, and results with further columns are refused.
        servers: The keys of the servers that the code calls.
        kept: The pickled class whose methods the worker's model has in place of its own; empty for
            its own.
        batches: The folder of batches in which requests without an answer are recorded; None if
            there are none.
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
    is_async: bool = False
    policy: Policy = field(default_factory=Policy)
    max_faults: int = 0
    files: StoragePath | None = None
    pinned: bool = False
    servers: tuple[str, ...] = ()
    kept: bytes = field(default=b"", repr=False)
    batches: StoragePath | None = None

    @property
    def origin(self) -> str:
        """The output column with the input's id."""
        return self.parent or self.ids[0]

    def carried(self, work: Work) -> tuple[str, ...]:
        """Return the input columns that are passed on, besides the ids."""
        own = {work.id, self.parent, *self.ids, *self.made}
        return tuple(name for name in work.schema.names if name not in own)

    def made_schema(self, work: Work) -> pa.Schema:
        """Return the output columns that are not passed on."""
        own = {ERROR_COLUMN} if self.policy.on_error == "null" else set()
        passed = {*self.carried(work)} - own
        return pa.schema([field for field in work.schema if field.name not in passed])

    def read_columns(self, rows: pa.Table) -> pa.Table:
        """Return the columns that the code reads, the ids, and errors of the source."""
        wanted = {*(self.columns or rows.column_names), *self.ids, ROW_ERROR}
        return rows.select([name for name in rows.column_names if name in wanted])


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
        code: The stage's definition and its row definition; see `computed_by`.
        epoch: The stage's epoch, which rows of this run are recorded with.
        versions: For columns that name something else, the versions of what each value names.
    """

    columns: tuple[str, ...]
    files: tuple[str, ...]
    model: str
    code: str
    epoch: int = 0
    versions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class RecordGroup:
    """Parts of one partition, in which rows are looked up.

    Each fragment of a partition is sent with the same groups, which may have thousands of parts. So
    a process encodes and decodes a group once.

    Attributes:
        parts: The parts that have row records.
        id: The parts' column with the id of the stage's input.
        is_own: Whether it is the partition that is computed, so that failures are inherited.
    """

    parts: tuple[RecordedPart, ...]
    id: str
    is_own: bool

    @functools.cached_property
    def _encoded(self) -> tuple[tuple[StoragePath, ...], str]:
        """The folders, and the other fields of each part as JSON, with the place of its folder."""
        folders = tuple(dict.fromkeys(part.folder for part in self.parts))
        parts = [(folders.index(p.folder), p.part, p.records, p.faults, p.rows) for p in self.parts]
        return folders, json.dumps(parts)

    def __reduce__(self) -> Any:
        return _record_group, (*self._encoded, self.id, self.is_own)


@functools.lru_cache(maxsize=64)
def _record_group(
    folders: tuple[StoragePath, ...], parts: str, id: str, is_own: bool
) -> RecordGroup:
    decoded = (RecordedPart(folders[folder], *other) for folder, *other in json.loads(parts))
    return RecordGroup(tuple(decoded), id, is_own)


@dataclass(frozen=True)
class RowLookup:
    """Where the outcomes of rows may be found.

    Attributes:
        groups: Where they are looked up, in this order.
        floor: Records of an earlier epoch are not found.
        inherits_failures: Whether rows that failed before are not computed again.
        equal_rows: The row definitions whose rows are found.
    """

    groups: tuple[RecordGroup, ...] = ()
    floor: int = 0
    inherits_failures: bool = False
    equal_rows: tuple[str, ...] = ()

    def sources(self) -> list[tuple[RecordedPart, str]]:
        """Return all parts, each with its column of the input's ids."""
        return [(part, group.id) for group in self.groups for part in group.parts]


@dataclass(frozen=True)
class Arrange:
    """One input: first the rows to compute, in an order, then the others.

    The result has an additional last column, which `Restore` reads; see `row_reuse`.

    Attributes:
        order: The template of the prompts that order the rows to compute; None for their own order.
        keying: The row keys; None for rows without keys.
        known: Where the outcomes of rows may be found; None to compute all.
    """

    order: Template | None = None
    keying: RowKeying | None = None
    known: RowLookup | None = None


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
    known: RowLookup | None = None


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
class Quarantined:
    """Quarantined rows, and how they relate to the rows of a join's base.

    Attributes:
        faults: The part with their records.
        parent: Which of the records' parents is compared; None for their own id.
        column: The base's column to compare it with.
    """

    faults: PartRows
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
class Provenance:
    """How a stage has made the rows that a `write` stage publishes.

    Attributes:
        id: The rows' column with the ids of the stage's input.
        folder: The folder of the stage's part.
        part: The part. Without row records, what is known of it holds for all rows.
        model: The stage's class or function.
        code: The stage's definition.
        usage: The usage of a model's answers; None without it.
    """

    id: str
    folder: StoragePath
    part: PartInfo
    model: str
    code: str
    usage: UsageAccount | None = None


@dataclass(frozen=True)
class Gather:
    """A concatenation of inputs of the same schema.

    Attributes:
        provenance: What is known of the rows, to be added to them; None for none.
    """

    provenance: Provenance | None = None


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
        alone: Id of a call that has the worker for itself, also from other runs; empty for others.
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
    alone: str = ""
