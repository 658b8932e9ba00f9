"""What all checks have in common: a name, what follows from them, and a digest of thresholds."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, Union

import pyarrow as pa

from vane_dagster._arguments import list_of_names, one_of
from vane_dagster.errors import DefinitionError, names

Severity = Literal["ERROR", "WARN"]

_NAME = re.compile(r"[A-Za-z0-9_]+")
_VERSION = 2
"""Raised when digests are computed in another way; `Check.definitions` has the former ones."""
_VERSION_1 = {
    "ids_complete": "IdsComplete",
    "error_rate": "ErrorRate",
    "null_rate": "NullRate",
    "vectors": "Vectors",
    "text": "Text",
    "drift": "Drift",
    "golden": "Golden",
}
_COMMON = {"name": "name", "blocking": "blocking", "severity": "severity"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """What all checks have.

    Attributes:
        name: Its name at the stage's asset in Dagster.
        blocking: Whether what lies below is withheld where it does not pass.
        severity: "ERROR" or "WARN", of a result that did not pass. What blocks is an error.
    """

    name: str = ""
    blocking: bool = False
    severity: Severity = "ERROR"

    kind: ClassVar[str]
    """Its name in digests, which stays however the class is called."""
    thresholds: ClassVar[Mapping[str, str]]
    """What else counts in digests: the name there, which stays too, and the attribute."""
    formula: ClassVar[int] = 1
    """Raised when the same thresholds come to mean something else, so that it is evaluated anew."""
    compares: ClassVar[bool] = False
    """Whether it looks at the previous partition, which has to be committed first."""
    lasting: ClassVar[bool] = True
    """Whether what it found once holds as long as rows and thresholds stay the same."""
    at_commit: ClassVar[bool] = True
    """Whether it is evaluated when a partition is committed; else only when it is executed."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise DefinitionError(
                f"{self._culprit}: name is {self.name!r}; expected letters, digits and '_'"
            )
        if not isinstance(self.blocking, bool):
            raise DefinitionError(
                f"{self._culprit}: blocking is {self.blocking!r}; expected True or False"
            )
        one_of(self._culprit, "severity", self.severity, ("ERROR", "WARN"))
        if self.blocking:
            object.__setattr__(self, "severity", "ERROR")

    @property
    def definition(self) -> str:
        """Digest of the kind and the thresholds; 16 hex digits, the same in every process."""
        return self.definitions[0]

    @property
    def definitions(self) -> tuple[str, ...]:
        """The definition, then those of former versions, whose results are kept."""
        return self._digests()

    @property
    def description(self) -> str:
        """What it asks for, in a sentence."""
        raise NotImplementedError

    def opened(self) -> Check:
        """The check with what it needs from files read; the definition is the same."""
        return self

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        """Raises DefinitionError where a column that it names is missing or of another kind."""

    @property
    def _culprit(self) -> str:
        return f"vd.checks.{type(self).__name__}"

    def _digests(self, **replaced: Any) -> tuple[str, ...]:
        """The definitions, some thresholds with other values than the attributes have."""
        names = {**_COMMON, **self.thresholds}
        values = {name: getattr(self, attribute) for name, attribute in names.items()} | replaced
        lines = [f"{name}={_token(value)}" for name, value in values.items()]
        heads = [f"version {_VERSION} {self.kind}"]
        if self.kind in _VERSION_1:  # which had the name of the class; nothing else has changed
            heads.append(_VERSION_1[self.kind])
        texts = ["\n".join([f"{head} {self.formula}", *lines, ""]) for head in heads]
        return tuple(hashlib.blake2b(t.encode(), digest_size=8).hexdigest() for t in texts)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _require(
        self,
        schema: pa.Schema,
        culprit: str,
        columns: Sequence[str] | None,
        is_kind: Callable[[pa.DataType], bool] | None = None,
        kind: str = "",
    ) -> None:
        """Raises where a column is missing or, unnamed ones too, none is of the kind."""
        if missing := [name for name in columns or () if name not in schema.names]:
            raise DefinitionError(
                f"{culprit}: check {self.name!r} names the column {missing[0]!r}; the stage has "
                f"{names(schema.names)}"
            )
        if is_kind is None:
            return
        if columns is None and not any(is_kind(each.type) for each in schema):
            raise DefinitionError(
                f"{culprit}: check {self.name!r} is of {kind}; the stage has none. Leave it out"
            )
        for name in columns or ():
            if not is_kind(found := schema.field(name).type):
                raise DefinitionError(
                    f"{culprit}: check {self.name!r} is of {kind}; column {name!r} is {found}"
                )


@dataclass(frozen=True)
class Off:
    """Turns off the check of a name that a stage has by default.

    Attributes:
        name: The check's name, as "null_rate".
    """

    name: str


CheckLike: TypeAlias = Union[Check, Off]


def share(culprit: str, name: str, value: Any) -> float:
    """A share from 0 to 1; raises DefinitionError for anything else."""
    if not _is_number(value) or not 0 <= value <= 1:
        raise DefinitionError(f"{culprit}: {name} is {value!r}; expected a share from 0 to 1")
    return float(value)


def bound(culprit: str, name: str, value: Any) -> float:
    """A finite number from 0 up; raises DefinitionError for anything else."""
    if not _is_number(value) or not 0 <= value < math.inf:
        raise DefinitionError(f"{culprit}: {name} is {value!r}; expected a number from 0 up")
    return float(value)


def checked_columns(culprit: str, columns: Sequence[str] | None) -> tuple[str, ...] | None:
    """The columns of a check as a tuple, None for all; raises DefinitionError for an empty list."""
    found = list_of_names(culprit, "columns", columns)
    if found == ():
        raise DefinitionError(f"{culprit}: columns is empty; name one, or leave it out for all")
    return found


def listed(columns: Sequence[str] | None) -> str:
    """The columns of a check, for people."""
    return names(columns) if columns else "each column"


def percent(share: float) -> str:
    """A share as a percentage, as ``1%`` or ``0.05%``."""
    return f"{100 * share:g}%"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _token(value: Any) -> str:
    """A field's value as a text that is the same in every process."""
    if isinstance(value, Mapping):
        value = sorted(value.items())
    return repr(value)
