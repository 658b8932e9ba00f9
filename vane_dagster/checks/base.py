"""What all checks have in common: a name, how they are evaluated, and a digest of thresholds."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias, Union

import pyarrow as pa

from vane_dagster._arguments import list_of_names, one_of
from vane_dagster.checks.context import CheckContext, CheckOutcome, Severity
from vane_dagster.errors import DefinitionError, names
from vane_dagster.fingerprint.hashing import combine
from vane_dagster.fingerprint.objects import value_digest

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
    """A rule for a stage's partition, shown in Dagster as an asset check.

    A subclass defines `evaluate`, and its thresholds as fields. `vane_dagster.checks` has an
    example.

    Attributes:
        name: Its name at the stage's asset in Dagster. Default: the name of the class, as
            ``few_duplicates`` of ``FewDuplicates``.
        blocking: Whether the stages below are not committed if it fails.
        severity: "ERROR" or "WARN", of a result that did not pass. A blocking check is an error.
    """

    name: str = ""
    blocking: bool = False
    severity: Severity = "ERROR"

    compares: ClassVar[bool] = False
    """Whether it asks for the previous partition, which is then committed first."""
    lasting: ClassVar[bool] = True
    """Whether its result holds as long as the rows and its definition stay the same.

    If not, it is evaluated in every run of the partition.
    """

    # Of built-in checks, whose definitions must not depend on their code:
    kind: ClassVar[str]
    """Its name in digests, which stays however the class is called."""
    thresholds: ClassVar[Mapping[str, str]] = {}
    """What else counts in digests: the name there, which stays too, and the attribute."""
    formula: ClassVar[int] = 1
    """Raised when the same thresholds come to mean something else, so that it is evaluated anew."""

    def __post_init__(self) -> None:
        if self.name == "":
            self._set(name=_words(type(self).__name__))
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise DefinitionError(
                f"{self._culprit}: name is {self.name!r}; expected letters, digits and '_'"
            )
        if not isinstance(self.blocking, bool):
            raise DefinitionError(
                f"{self._culprit}: blocking is {self.blocking!r}; expected True or False"
            )
        if self.blocking and self.rows_to_recompute:
            raise DefinitionError(
                f"{self._culprit}: blocking=True, but it is evaluated after the commit and "
                "withholds nothing; leave it out"
            )
        one_of(self._culprit, "severity", self.severity, ("ERROR", "WARN"))
        if self.blocking:
            object.__setattr__(self, "severity", "ERROR")

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Evaluate the check for a partition.

        It is called in the run's process before the partition is committed. If it raises, the check
        has failed with the error, and is evaluated again in the next run.

        Args:
            context: The stage's partition.
        """
        raise NotImplementedError(f"{type(self).__qualname__} defines no evaluate(self, context)")

    @property
    def description(self) -> str:
        """What the check asks for, in a sentence. Default: the first line of the class's docs."""
        text = (vars(type(self)).get("__doc__") or "").strip().partition("\n")[0].rstrip(".")
        return self.name if text.startswith(f"{type(self).__name__}(") else text or self.name

    @property
    def rows_to_recompute(self) -> int:
        """Input rows that are computed again for `CheckContext.recomputed`.

        If it is not 0, the check is evaluated when it is executed alone, and not at a commit.
        """
        return 0

    @property
    def definition(self) -> str:
        """Digest of what decides a result: the code and the fields.

        Of a built-in check, its kind and thresholds; 16 hex digits, the same in every process.
        """
        return self.definitions[0]

    @property
    def definitions(self) -> tuple[str, ...]:
        """The definition, then those of former versions, whose results are kept."""
        return self._digests()

    @property
    def is_built_in(self) -> bool:
        """Whether the class is one of ours, whose code is not part of its definition."""
        return type(self).__module__.partition(".")[0] == __name__.partition(".")[0]

    def opened(self) -> Check:
        """The check with what it needs from files read; the definition is the same."""
        return self

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        """Validate the check where a stage declares its schema. Default: nothing.

        Args:
            schema: The stage's schema.
            culprit: The stage, for messages.

        Raises:
            DefinitionError: If a column that the check names is missing or of another type.
        """

    @property
    def _culprit(self) -> str:
        return f"vd.checks.{type(self).__name__}"

    def _digests(self, **replaced: Any) -> tuple[str, ...]:
        """The definitions, some thresholds with other values than the attributes have."""
        if not self.is_built_in:
            return (self._code_digest(replaced),)
        names = {**_COMMON, **self.thresholds}
        values = {name: getattr(self, attribute) for name, attribute in names.items()} | replaced
        lines = [f"{name}={_token(value)}" for name, value in values.items()]
        heads = [f"version {_VERSION} {self.kind}"]
        if self.kind in _VERSION_1:  # which had the name of the class; nothing else has changed
            heads.append(_VERSION_1[self.kind])
        texts = ["\n".join([f"{head} {self.formula}", *lines, ""]) for head in heads]
        return tuple(hashlib.blake2b(t.encode(), digest_size=8).hexdigest() for t in texts)

    def _code_digest(self, replaced: Mapping[str, Any]) -> str:
        """Digest of a user's class: its code, and the values of an instance."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | vars(self)
        state = {
            name: value
            for name, value in {**values, **replaced}.items()
            if name not in _COMMON and not _is_cached(type(self), name)
        }
        path = f"check {self.name!r}"
        common = [f"{name}={_token(getattr(self, name))}" for name in _COMMON]
        common.append(f"formula={self.formula}")  # of a built-in class that it inherits from
        return combine("check", *common, value_digest([type(self), state], path))[:16]

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


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(inspect.getattr_static(kind, name, None), functools.cached_property)


def _words(name: str) -> str:
    """A class's name in lower case with underscores."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _token(value: Any) -> str:
    """A field's value as a text that is the same in every process."""
    if isinstance(value, Mapping):
        value = sorted(value.items())
    return repr(value)
