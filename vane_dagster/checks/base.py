"""The base of all checks: names, evaluation, and definitions (digests of thresholds)."""

from __future__ import annotations

import abc
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import getattr_static
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, Union

import pyarrow as pa

from vane_dagster._arguments import flag, list_of_names, one_of, text, unexpected
from vane_dagster._keywords import require_columns
from vane_dagster.checks.context import CheckOutcome, Severity
from vane_dagster.errors import DefinitionError, names
from vane_dagster.fingerprint.files import LocalFiles
from vane_dagster.fingerprint.objects import value_digest

if TYPE_CHECKING:
    from vane_dagster.checks.partition import CheckContext

_NAME = re.compile(r"[A-Za-z0-9_]+")
_VERSION = 5
"""Increment if a built-in check or its digest changes its meaning; all are evaluated again."""
ANY = sys.float_info.max
"""The largest value of a field without a limit."""


@dataclass(frozen=True, kw_only=True)
class Check(abc.ABC):
    """A rule for a stage's partition, shown in Dagster as an asset check.

    A subclass defines `evaluate`, and its thresholds as fields. See `vane_dagster.checks` for an
    example.

    Attributes:
        name: The check's name at the stage's asset in Dagster. Default: the class name in snake
            case: ``few_duplicates`` for ``FewDuplicates``.
        blocking: Whether a failure prevents the commit of the downstream stages.
        severity: "ERROR" or "WARN", for a failed result. A blocking check is always an error.
    """

    name: str = ""
    blocking: bool = False
    severity: Severity = "ERROR"

    compares: ClassVar[bool] = False
    """Whether it reads the previous partition, which is then committed first."""
    lasting: ClassVar[bool] = True
    """Whether its result stays valid while the rows and its definition stay the same.

    If not, it is evaluated in every run of the partition.
    """
    _is_alone: ClassVar[bool] = False
    """Whether it is evaluated only when it is executed without the stage, as `Reproducible`."""
    fix: ClassVar[str] = ""
    """What to do about a failure, for a finding of a default check."""
    _bounds: ClassVar[Mapping[str, float]] = {}
    """The largest value of each field that has a number from 0."""

    def __post_init__(self) -> None:
        if self.name == "":
            self._set(name=_words(type(self).__name__))
        text(self._location, "name", self.name, "letters, digits and '_'", _NAME)
        flag(self._location, "blocking", self.blocking)
        if self.blocking and self._is_alone:
            raise DefinitionError(
                f"{self._location}: blocking=True, but it is evaluated after the commit and "
                "withholds nothing; leave it out"
            )
        one_of(self._location, "severity", self.severity, ("ERROR", "WARN"))
        if self.blocking:
            self._set(severity="ERROR")
        for each, most in self._bounds.items():
            if (value := getattr(self, each)) is not getattr(type(self), each):  # its default
                self._set(**{each: bound(self._location, each, value, most)})
        if self.is_built_in and (columns := getattr(self, "columns", None)) is not None:
            self._set(columns=list_of_names(self._location, "columns", columns) or None)

    @abc.abstractmethod
    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Evaluate the check for a partition.

        It is called in the run's process before the partition is committed, from several threads
        but never from two at the same time. If it raises, the check fails with this error, and is
        evaluated again in the next run.

        Args:
            context: The stage's partition.
        """

    @property
    def description(self) -> str:
        """The requirement in one sentence. Default: the first line of the class's docstring."""
        text = (vars(type(self)).get("__doc__") or "").strip().partition("\n")[0].rstrip(".")
        return self.name if text.startswith(f"{type(self).__name__}(") else text or self.name

    @property
    def definition(self) -> str:
        """Digest of everything that determines a result: the code and the fields.

        For a built-in check, its class name and fields. 16 hex digits, the same in every process.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)} | vars(self)
        state = {
            name: value
            for name, value in values.items()
            if not isinstance(getattr_static(type(self), name, None), cached_property)
        }
        own = [type(self).__name__, _VERSION] if self.is_built_in else type(self)
        files = LocalFiles(read=not self.is_built_in)
        return value_digest([own, state], f"check {self.name!r}", files)[:16]

    @property
    def is_built_in(self) -> bool:
        """Whether the class is built in; its code is then not part of its definition."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def fit(self, schema: pa.Schema, location: str) -> None:  # noqa: B027  # by default, none
        """Validate the check, where all columns are declared, else when a run is planned.

        Default: no validation.

        Args:
            schema: The stage's schema.
            location: The stage, for messages.

        Raises:
            DefinitionError: If a column that the check names is missing or has another type.
        """

    @property
    def _location(self) -> str:
        return f"vd.checks.{type(self).__name__}"

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _require(
        self,
        schema: pa.Schema,
        location: str,
        columns: Sequence[str] | None,
        is_kind: Callable[[pa.DataType], bool] | None = None,
        kind: str = "",
    ) -> None:
        """Raise DefinitionError if a named column is missing or has another type."""
        owner = f"{location}: check {self.name!r}: the stage"
        require_columns(owner, columns or (), schema.names, DefinitionError)
        for name in columns or ():
            if is_kind is not None and not is_kind(column_type := schema.field(name).type):
                raise DefinitionError(
                    f"{location}: check {self.name!r} is of {kind}; column {name!r} is "
                    f"{column_type}"
                )


@dataclass(frozen=True)
class Off:
    """Turns off a check that a stage has by default, or one of its findings.

    Attributes:
        name: The name, such as "quality" or "null_rate".
    """

    name: str


CheckLike: TypeAlias = Union[Check, Off]


def bound(location: str, name: str, value: Any, most: float = ANY) -> float:
    """Validate a number from 0 to `most`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:
        raise unexpected(location, name, value, f"a number from 0 to {most:g}")
    return float(value)


def listed(columns: Sequence[str] | None) -> str:
    """Format the columns of a check for a message."""
    return names(columns) if columns else "each column"


def _words(name: str) -> str:
    """Convert a class name to snake case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
