"""The checks that come with a stage, and how they are put together with those given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from vane_dagster._arguments import mapping, positive
from vane_dagster.checks.base import (
    Check,
    CheckLike,
    Off,
    Severity,
    checked_columns,
    listed,
    percent,
    share,
)
from vane_dagster.errors import DefinitionError, names
from vane_dagster.types.kinds import is_floats, is_text

__all__ = [
    "Check",
    "CheckLike",
    "ErrorRate",
    "IdsComplete",
    "NullRate",
    "Off",
    "PackagesUnchanged",
    "Text",
    "Vectors",
    "defaults_for",
    "merge",
]

DEFAULT_ERROR_RATE = 0.01
"""The share of rows that may be quarantined where a stage says nothing else."""


@dataclass(frozen=True)
class IdsComplete(Check):
    """Every row that went in came out, was filtered or was quarantined; none was invented."""

    kind: ClassVar[str] = "ids_complete"
    thresholds: ClassVar[Mapping[str, str]] = {}

    name: str = field(default="ids_complete", kw_only=True)
    blocking: bool = field(default=True, kw_only=True)

    @property
    def description(self) -> str:
        return "Every input row is in the output, filtered or quarantined, and no row is new"


@dataclass(frozen=True)
class ErrorRate(Check):
    """The share of rows that errors took away.

    Attributes:
        max_rate: The largest share, of the rows that went in, that may be quarantined.
    """

    kind: ClassVar[str] = "error_rate"
    thresholds: ClassVar[Mapping[str, str]] = {"max_rate": "max_rate"}

    max_rate: float = DEFAULT_ERROR_RATE
    name: str = field(default="error_rate", kw_only=True)
    blocking: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(max_rate=share(self._culprit, "max_rate", self.max_rate))

    @property
    def description(self) -> str:
        return f"At most {percent(self.max_rate)} of the rows fail"


@dataclass(frozen=True)
class NullRate(Check):
    """The share of nulls in each column.

    Attributes:
        max_rate: The largest share, for all columns or by column. By column, only those named are
            checked unless `columns` names more, which then may have no null.
        columns: The columns that are checked; by default all but the ids.
    """

    kind: ClassVar[str] = "null_rate"
    thresholds: ClassVar[Mapping[str, str]] = {"max_rate": "max_rate", "columns": "columns"}

    max_rate: float | Mapping[str, float] = field(default=0.5, hash=False)
    columns: Sequence[str] | None = None
    name: str = field(default="null_rate", kw_only=True)
    severity: Severity = field(default="WARN", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        columns = checked_columns(self._culprit, self.columns)
        if not isinstance(self.max_rate, Mapping):
            self._set(columns=columns, max_rate=share(self._culprit, "max_rate", self.max_rate))
            return
        given = mapping(self._culprit, "max_rate", self.max_rate)
        if not given:
            raise DefinitionError(f"{self._culprit}: max_rate names no column")
        rates = {name: share(self._culprit, f"max_rate[{name!r}]", r) for name, r in given.items()}
        self._set(columns=tuple(dict.fromkeys([*(columns or ()), *rates])), max_rate=rates)

    def rate_of(self, column: str) -> float:
        """The largest share of nulls in a column."""
        if isinstance(self.max_rate, Mapping):
            return self.max_rate.get(column, 0.0)
        return self.max_rate

    @property
    def description(self) -> str:
        if isinstance(self.max_rate, Mapping):
            columns = self.columns or ()
            each = ", ".join(f"{name} {percent(self.rate_of(name))}" for name in columns)
            return f"The share of nulls is at most: {each}"
        return f"At most {percent(self.max_rate)} of the values are null in {listed(self.columns)}"

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        self._require(schema, culprit, self.columns or ())


@dataclass(frozen=True)
class Vectors(Check):
    """Vectors have one dimension, finite numbers, and a norm that is not zero.

    Attributes:
        columns: The columns that are checked; by default fixed-size lists of floating-point
            numbers or, without any, lists of them.
        dimension: Their dimension; by default any, but the same in every row.
        max_rate: The largest share of vectors that may be zero or hold a null, NaN or infinity.
            The dimension may differ in none.
    """

    kind: ClassVar[str] = "vectors"
    thresholds: ClassVar[Mapping[str, str]] = {
        "columns": "columns",
        "dimension": "dimension",
        "max_rate": "max_rate",
    }

    columns: Sequence[str] | None = None
    dimension: int | None = None
    max_rate: float = 0.0
    name: str = field(default="vectors", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            columns=checked_columns(self._culprit, self.columns),
            dimension=positive(self._culprit, "dimension", self.dimension),
            max_rate=share(self._culprit, "max_rate", self.max_rate),
        )

    @property
    def description(self) -> str:
        dimension = f"dimension {self.dimension}" if self.dimension else "one dimension"
        return (
            f"Vectors in {listed(self.columns)} have {dimension}, and at most "
            f"{percent(self.max_rate)} of them are zero or hold a null, NaN or infinity"
        )

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        self._require(schema, culprit, self.columns, is_floats, "lists of floating-point numbers")


@dataclass(frozen=True)
class Text(Check):
    """The share of texts that are empty, or nothing but white space.

    Attributes:
        max_empty_rate: The largest share of the texts that are not null.
        columns: The columns that are checked; by default all texts but the ids.
    """

    kind: ClassVar[str] = "text"
    thresholds: ClassVar[Mapping[str, str]] = {
        "max_empty_rate": "max_empty_rate",
        "columns": "columns",
    }

    max_empty_rate: float = 0.5
    columns: Sequence[str] | None = None
    name: str = field(default="text", kw_only=True)
    severity: Severity = field(default="WARN", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(
            max_empty_rate=share(self._culprit, "max_empty_rate", self.max_empty_rate),
            columns=checked_columns(self._culprit, self.columns),
        )

    @property
    def description(self) -> str:
        most = percent(self.max_empty_rate)
        return f"At most {most} of the texts are empty in {listed(self.columns)}"

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        self._require(schema, culprit, self.columns, is_text, "texts")


@dataclass(frozen=True)
class PackagesUnchanged(Check):
    """Rows that are kept were computed with the versions of packages that there are now.

    Versions are no part of a fragment key, so that an upgrade recomputes nothing by itself. Those
    of the packages that the stage's code imports are recorded with each part, as the workers have
    them. With `Reproducible` it shows whether an upgrade makes a difference.
    """

    name: str = field(default="packages_unchanged", kw_only=True)
    severity: Severity = field(default="WARN", kw_only=True)

    kind: ClassVar[str] = "packages_unchanged"
    thresholds: ClassVar[Mapping[str, str]] = {}
    lasting: ClassVar[bool] = False

    @property
    def description(self) -> str:
        return "Packages that the code imports have the versions that the rows were computed with"


def merge(defaults: Sequence[Check], given: Sequence[CheckLike], culprit: str) -> tuple[Check, ...]:
    """The checks of a stage: those given replace defaults of the same name, `Off` removes one.

    Raises:
        DefinitionError: If one is no check, two have one name, or `Off` names no default.
    """
    if isinstance(given, (Check, Off)) or not isinstance(given, Sequence):
        raise DefinitionError(
            f"{culprit}: checks is {given!r}; expected a list, as [vd.checks.NullRate(0.1)]"
        )
    merged = {check.name: check for check in defaults}
    seen = set()
    for each in given:
        if not isinstance(each, (Check, Off)):
            hint = " Add ()" if isinstance(each, type) else ""
            raise DefinitionError(
                f"{culprit}: {each!r} in checks is no check; expected one of vd.checks, as "
                f"vd.checks.NullRate(0.1), or vd.checks.Off('null_rate').{hint}"
            )
        if each.name in seen:
            raise DefinitionError(
                f"{culprit}: two checks are named {each.name!r}; give one another name="
            )
        seen.add(each.name)
        if isinstance(each, Check):
            merged[each.name] = each
        elif merged.pop(each.name, None) is None:
            raise DefinitionError(
                f"{culprit}: Off({each.name!r}) turns off no check; the stage has by default "
                f"{names(check.name for check in defaults)}"
            )
    return tuple(merged.values())


def defaults_for(
    columns: pa.Schema | None,
    kind: str,
    nullable: bool = False,
    max_error_rate: float = DEFAULT_ERROR_RATE,
) -> tuple[Check, ...]:
    """The checks that a stage has where nothing is said.

    Args:
        columns: The columns that the stage makes, without ids; None where they are not known when
            it is declared.
        kind: "project", "map_batches", "join" or "write".
        nullable: Whether the stage makes nulls of its own, as a left join does.
        max_error_rate: The largest share of rows that may be quarantined.
    """
    found: list[Check] = [IdsComplete(), ErrorRate(max_error_rate)]
    if kind == "map_batches":
        found.append(PackagesUnchanged())
    if kind == "write" or (kind == "join" and not nullable):
        return tuple(found)
    if columns is None or len(columns):
        found.append(NullRate())
    if columns is not None and kind != "join":
        if any(pa.types.is_fixed_size_list(f.type) and is_floats(f.type) for f in columns):
            found.append(Vectors())
        if any(is_text(f.type) for f in columns):
            found.append(Text())
    return tuple(found)
