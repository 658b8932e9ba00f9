"""The results of checks, and the counts and statistics that they read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from vane_dagster._texts import count

if TYPE_CHECKING:
    import pyarrow as pa

Severity = Literal["ERROR", "WARN"]


@dataclass(frozen=True)
class CheckOutcome:
    """The result of evaluating a check.

    Attributes:
        passed: Whether the partition passed.
        description: The result in a sentence. Default: the first line of the docstring of the
            check's class; without one, the metadata.
        metadata: Texts, numbers, booleans, and tables as lists of mappings. They are stored with
            the partition and shown in Dagster.
        severity: "ERROR" or "WARN" for a failed check. Default: the check's own.
    """

    passed: bool
    description: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    severity: Severity | None = None


@dataclass(frozen=True)
class PartCounts:
    """Row counts of one part (a stage's output for one fragment), or of many parts.

    Attributes:
        rows: Output rows.
        rows_in: Input rows.
        filtered: Input rows without output, dropped by the stage.
        quarantined: Input rows without output because of errors.
        nulled: Output rows that are null because of errors.
        unread: Of the quarantined and nulled rows, those that the source could not read.
    """

    rows: int = 0
    rows_in: int = 0
    filtered: int = 0
    quarantined: int = 0
    nulled: int = 0
    unread: int = 0

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
        zero: Other vectors with a norm of 0; 0 for other types.
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
        current: The versions in the run's workers, else the one installed in this process; empty if
            there is none.
    """

    name: str
    recorded: Sequence[str]
    current: Sequence[str]

    @property
    def outdated(self) -> list[str]:
        """The recorded versions that are not current; empty if no current version is known."""
        return [each for each in self.recorded if self.current and each not in self.current]


@dataclass(frozen=True)
class RowOutcomes:
    """The output of a stage for some input rows.

    Attributes:
        table: The output rows.
        input_id: The column of `table` with the id of the input row.
        failed: The error of each input row that was quarantined or came out as nulls, by its id.
    """

    table: pa.Table
    input_id: str
    failed: Mapping[Any, str]

    @functools.cached_property
    def places(self) -> Mapping[Any, Sequence[int]]:
        """The positions in `table` of the output rows of each input row that has any, by its id."""
        places: dict[Any, list[int]] = {}
        for place, id in enumerate(self.table.column(self.input_id).to_pylist()):
            places.setdefault(id, []).append(place)
        return places

    def describe(self, id: Any) -> str:
        """Describe the outcome of an input row."""
        if id in self.failed:
            return f"failed: {self.failed[id]}"
        return count(len(self.places.get(id, ())), "row")


@dataclass(frozen=True)
class RecomputedRows:
    """Input rows of one fragment, with their stored output and their recomputed output.

    Attributes:
        ids: The ids of the input rows.
        stored: The stored output.
        computed: The recomputed output.
    """

    ids: Sequence[Any]
    stored: RowOutcomes
    computed: RowOutcomes


@dataclass(frozen=True)
class Recomputation:
    """A random sample of recomputed input rows.

    Attributes:
        read: Reads the sampled rows of each fragment. Raises VaneError if they could not be
            computed, or parts are unreadable.
        code_changed: Whether the stage's code has changed since the rows were stored.
        source_changed: Whether source files have changed since, so that nothing was sampled.
    """

    read: Callable[[], Sequence[RecomputedRows]]
    code_changed: bool = False
    source_changed: bool = False
