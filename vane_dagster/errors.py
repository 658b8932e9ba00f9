"""Exceptions: each message names the location, expected against actual, and the fix."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from vane_dagster._secrets import masked
from vane_dagster._texts import listed


class VaneError(Exception):
    """Base of every error that vane_dagster raises on purpose. Known secrets are masked in it.

    Attributes:
        is_permanent: Whether a retry of the step would fail in the same way, so that Dagster makes
            none.
    """

    is_permanent = False

    def __init__(self, *args: object) -> None:
        super().__init__(*(masked(arg) if isinstance(arg, str) else arg for arg in args))


class DefinitionError(VaneError):
    """A pipeline or stage is declared incorrectly. Raised where the user wrote it."""

    is_permanent = True


class SchemaError(VaneError):
    """A column or type does not match what a stage declared or needs."""

    is_permanent = True


class CodeIdentityError(DefinitionError):
    """A dependency of a UDF has no stable identity."""


class SourceError(VaneError):
    """A source is missing or unreadable, or its rows violate the rules for ids."""


class PlanError(VaneError):
    """A run cannot be planned from the selection and the content of the store."""


class StoreError(VaneError):
    """The store cannot be read or written."""


class NewerFormatError(StoreError):
    """A newer release wrote a file of the store in a format that this release does not support."""


class DamagedPartError(StoreError):
    """A part in the store is damaged or missing.

    Attributes:
        part: The name of its file.
    """

    def __init__(self, text: str, part: str = "") -> None:
        super().__init__(text)
        self.part = part


class TraceError(VaneError):
    """The row to trace, its stage or its partition does not exist."""


class ComputeError(VaneError):
    """The cluster or a worker cannot do what a stage requires."""


class ClusterLostError(ComputeError):
    """The cluster itself is lost, so a run can neither continue nor wait."""


class PreflightError(ComputeError):
    """A run failed preflight validation; nothing was computed.

    Attributes:
        findings: One message for each problem.
    """

    def __init__(self, message: str, findings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class BudgetError(VaneError):
    """A run has exhausted a stage's budget, or would exceed a limit of its config."""

    is_permanent = True


class IntegrityError(VaneError):
    """Rows of a stage are missing, unexpected or duplicated."""


class UdfError(VaneError):
    """A user's function raised an exception, or its result was rejected."""


class FailedRowsError(UdfError):
    """More rows of a partition failed in a stage than may fail."""


class CostlyError(ValueError):
    """An error of a row that incurred costs despite failing.

    Attributes:
        used: The resources used, under the names by which the row's stage sums them up.
    """

    used: Mapping[str, int] = MappingProxyType({})


class RowErrors(Exception):
    """Raised by a user's code for the failed rows of a batch, with the results of the others.

    Without it, one bad row would repeat a whole expensive call, such as a request to an API. With
    it, computed rows are kept, transient errors are retried for their rows only, and other errors
    are handled as the stage's `on_error` specifies.

    Args:
        errors: The error of each failed row, by its position in the batch.
        rows: The results of the other rows, in the batch's order, in any form that a call may
            return.
        used: Resources that the failed rows used before their errors, beside those that the errors
            themselves have; see `CostlyError`.
    """

    def __init__(
        self,
        errors: Mapping[int, BaseException],
        rows: Any = None,
        *,
        used: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        super().__init__(f"{len(errors)} rows failed")
        self.errors = {operator.index(place): error for place, error in errors.items()}
        self.rows = rows
        self.used = used


class StageError(Exception):
    """Raised by a user's code for an error that no row causes, such as a rejected API key.

    It fails the partition regardless of the stage's `on_error`.
    """


class ModelLoadError(UdfError):
    """A user's class could not be imported or constructed in the worker."""


def names(items: Iterable[object], limit: int = 5) -> str:
    """List items for a message, truncated after `limit`: ``'a', 'b' and 3 more``.

    Args:
        items: The items.
        limit: The maximum number of items to list.
    """
    return listed([repr(item) for item in items], limit) or "none"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its class if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def described(error: BaseException | str, name: str | None = None) -> str:
    """Return the class and the message of an error, ``ValueError: no header``.

    Of an error without a message, such as many an `EOFError`, it returns the class alone.

    Args:
        error: The error, or its message.
        name: The name of the class. Default: that of `error`.
    """
    message = str(error).strip()
    kind = name or type(error).__name__
    return f"{kind}: {message}" if message else kind
