"""What workers do with rows, as data: where the rows are, and the operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Union

import pyarrow as pa

from vane_dagster.pipeline.keys import JoinShape
from vane_dagster.pipeline.specs import BatchFormat, Cardinality, JoinHow, RowOrder
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import FileRecord, FragmentRecord
from vane_dagster.worker.retry import Policy, RowLoss


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
