"""What a check can ask about a stage's partition, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import VaneError

Severity = Literal["ERROR", "WARN"]


@dataclass(frozen=True)
class CheckOutcome:
    """The result of evaluating a check.

    Attributes:
        passed: Whether the partition passed.
        description: The result in a sentence.
        metadata: Texts, numbers, booleans and, as lists of mappings, tables. They are stored with
            the partition and shown in Dagster.
        severity: "ERROR" or "WARN" of a check that did not pass. Default: the check's own.
    """

    passed: bool
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None


@dataclass(frozen=True)
class PartCounts:
    """Row counts of a part, which is a stage's output for one fragment, or of many parts.

    Attributes:
        rows: Output rows.
        rows_in: Input rows.
        filtered: Input rows without output, as the stage declares.
        quarantined: Input rows without output because of errors.
        nulled: Output rows that are null because of errors.
        unknown: Output rows of parts that do not record their input.
    """

    rows: int = 0
    rows_in: int = 0
    filtered: int = 0
    quarantined: int = 0
    nulled: int = 0
    unknown: int = 0

    @classmethod
    def total(cls, parts: Iterable[PartCounts]) -> PartCounts:
        """Add up the counts of parts."""
        listed = list(parts)
        names = [each.name for each in fields(cls)]
        return cls(**{name: sum(getattr(part, name) for part in listed) for name in names})


@dataclass(frozen=True)
class ColumnStatistics:
    """Counts of a column's values, made while the rows were written.

    Attributes:
        nulls: Null values.
        empty: Texts that are empty or only white space; 0 for other types.
        not_finite: Vectors that hold a null, NaN or infinity; 0 for other types.
        zero: Other vectors whose norm is 0; 0 for other types.
        dim_min: The smallest dimension; None without vectors.
        dim_max: The largest dimension; None without vectors.
    """

    nulls: int = 0
    empty: int = 0
    not_finite: int = 0
    zero: int = 0
    dim_min: int | None = None
    dim_max: int | None = None


@dataclass(frozen=True)
class PackageVersions:
    """The versions of a package that the stage's code imports.

    Attributes:
        name: The package.
        recorded: The versions that the rows were computed with.
        current: The versions of the run's workers, else the one installed in this process; empty if
            there is none.
        outdated_parts: Parts that were computed with a version that is not current.
    """

    name: str
    recorded: Sequence[str]
    current: Sequence[str]
    outdated_parts: int

    @property
    def outdated(self) -> list[str]:
        """The recorded versions that are not current; empty if no current version is known."""
        return [each for each in self.recorded if self.current and each not in self.current]


@dataclass(frozen=True)
class RowOutcomes:
    """What a stage made of some input rows.

    Attributes:
        rows: The output rows by the id of the input row, in their order.
        failed: The error of each input row that was quarantined or came out as nulls, by its id.
        columns: The columns of the output rows.
    """

    rows: Mapping[Any, Sequence[Mapping[str, Any]]]
    failed: Mapping[Any, str]
    columns: Sequence[str]

    def told(self, id: Any) -> str:
        """What became of an input row."""
        if id in self.failed:
            return f"failed: {self.failed[id]}"
        count = len(self.rows.get(id, ()))
        return f"{count:,} row{'s' * (count != 1)}"


@dataclass(frozen=True)
class RecomputedRows:
    """Input rows of one fragment, with their stored output and the output computed now."""

    ids: Sequence[Any]
    stored: RowOutcomes
    computed: RowOutcomes


@dataclass(frozen=True)
class Recomputation:
    """A random sample of input rows that was computed again.

    Attributes:
        read: Reads the sampled rows of each fragment; raises VaneError for unreadable parts.
        seed: Seed of the sample.
        loads: Models that were loaded for it.
        warm: Models that were warm.
        code_changed: Whether the stage's code has changed since the rows were stored.
        fragments: Fragments of the partition.
        sampled_fragments: Fragments that the sample comes from.
        changed_fragments: Fragments without sampled rows because their source files have changed.
        error: Why nothing could be computed.
    """

    read: Callable[[], Sequence[RecomputedRows]]
    seed: int
    loads: int = 0
    warm: int = 0
    code_changed: bool = False
    fragments: int = 0
    sampled_fragments: int = 0
    changed_fragments: int = 0
    error: VaneError | None = None


class CheckContext(Protocol):
    """A stage's partition, as `Check.evaluate` sees it.

    Counts and statistics were recorded when the rows were written and cost nothing to ask for. The
    methods that return rows read the store.
    """

    @property
    def partition(self) -> str | None:
        """The partition's key; None in an unpartitioned pipeline."""

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows."""

    @property
    def id(self) -> str:
        """The column that identifies a row."""

    @property
    def keys(self) -> Sequence[str]:
        """The key columns: the id, then the ids of the rows that a row was made from."""

    @property
    def fan_out(self) -> bool:
        """Whether the stage makes several rows of one."""

    @property
    def counts(self) -> PartCounts:
        """The row and error counts of the partition."""

    @property
    def parts(self) -> Sequence[PartCounts]:
        """The row and error counts of each part."""

    @property
    def packages(self) -> Sequence[PackageVersions]:
        """The packages that the stage's code imports."""

    def statistics(self, columns: Sequence[str]) -> Mapping[str, ColumnStatistics]:
        """Return the statistics of columns.

        Raises:
            SchemaError: If there is no such column.
        """

    def batches(
        self, columns: Sequence[str] | None = None, where: pc.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows, a few thousand at a time.

        Args:
            columns: The columns to read. Default: all.
            where: A filter of `pyarrow.compute`, as ``pc.field("score") > 1``.

        Raises:
            SchemaError: If there is no such column.
        """

    def sample(self, columns: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Read rows chosen at random over the whole partition, the same ones at each call.

        Args:
            columns: The columns to read.
            rows: The number of rows, at most.

        Raises:
            SchemaError: If there is no such column.
        """

    def lookup(self, ids: pa.Array, columns: Sequence[str]) -> pa.Table:
        """Read the rows with some ids.

        Args:
            ids: The ids, of the id column's type.
            columns: The columns to read beside the id.

        Returns:
            The id and the columns, in the order of the partition, without ids that it lacks.

        Raises:
            SchemaError: If there is no such column.
        """

    def previous(self) -> CheckContext | None:
        """Return the nearest earlier partition that was materialized; None if there is none.

        Raises:
            DefinitionError: If the check does not set `Check.compares`.
        """

    def recomputed(self) -> Recomputation:
        """Return a sample of rows that was computed again.

        Raises:
            DefinitionError: If the check does not set `Check.rows_to_recompute`.
        """
