"""One family of exceptions: a message names the culprit, expected against actual, and the fix."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from vane_dagster._secrets import masked


class VaneError(Exception):
    """Base of every error that vane_dagster raises on purpose. Its text tells no known secret."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))


class DefinitionError(VaneError):
    """A pipeline or a stage is declared wrongly. Raised where the user wrote it."""


class SchemaError(VaneError):
    """A column or a type is not what a stage declared or needs."""


class CodeIdentityError(DefinitionError):
    """Something that a UDF depends on has no stable identity."""


class SourceError(VaneError):
    """A source is missing, unreadable, or its rows break the rules of ids."""


class PlanError(VaneError):
    """A run cannot be planned from what is selected and what the store holds."""


class StoreError(VaneError):
    """The store cannot be read or written."""


class NewerFormatError(StoreError):
    """A newer release has written a file of the store, in a format that this one does not know."""


class DamagedPartError(StoreError):
    """A part in the store is damaged or gone; `part` is its file's name."""

    def __init__(self, text: str, part: str = "") -> None:
        super().__init__(text)
        self.part = part


class TraceError(VaneError):
    """A row that is to be traced, its stage or its partition is not there."""


class ComputeError(VaneError):
    """The cluster or a worker cannot do what a stage asks."""


class ClusterLostError(ComputeError):
    """The cluster itself is gone, so that a run can neither go on nor wait."""


class PreflightError(ComputeError):
    """A run cannot be done, for all of the reasons that it names; nothing was computed.

    Attributes:
        findings: What stands in the way, one text for each.
    """

    def __init__(self, message: str, findings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class BudgetError(VaneError):
    """A run has used up what a stage may spend."""


class IntegrityError(VaneError):
    """Rows of a stage are missing, invented or there twice."""


class UdfError(VaneError):
    """A user's function raised, or what it returned is refused."""


class CostlyError(ValueError):
    """An error of a row that was paid for all the same.

    Attributes:
        used: What it took, by the names under which its stage adds up what rows took.
    """

    used: Mapping[str, int] = MappingProxyType({})


class RowErrors(Exception):
    """Raised by a user's code for the rows of a batch that it cannot compute, with the others.

    So that one bad row of a call that costs much, as to an API, doesn't make it be repeated: what
    is computed is kept, errors that may pass are tried again for their rows alone, and the others
    are dealt with as the stage's `on_error` says.

    Args:
        errors: The error of each row that failed, by its place in the batch.
        rows: What came out for the others, in the batch's order, in any form that a call may
            return. A pandas data frame keeps the batch's index or has the id.
    """

    def __init__(self, errors: Mapping[int, BaseException], rows: Any = None) -> None:
        super().__init__(f"{len(errors)} rows failed")
        self.errors = {_as_int(place): error for place, error in errors.items()}
        self.rows = rows


def _as_int(place: Any) -> Any:
    """An integer of any kind, as numpy's, as an int; what is none as it is."""
    try:
        return place if isinstance(place, bool) else operator.index(place)
    except TypeError:
        return place


class StageError(Exception):
    """Raised by a user's code for what no row is at fault of, as a key that is refused.

    It fails the partition whatever the stage's `on_error` says.
    """


class ModelLoadError(UdfError):
    """A user's class could not be imported or constructed in the worker."""


def names(items: Iterable[object], limit: int = 5) -> str:
    """Lists items for a message, cut after `limit`: ``'a', 'b' and 3 more``."""
    listed = [repr(item) for item in items]
    if not listed:
        return "none"
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
