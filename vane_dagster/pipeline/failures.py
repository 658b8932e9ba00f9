"""What a stage says of calls and rows that fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vane_dagster._arguments import one_of, seconds
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.options import Failures, OnError


def parse_failures(
    culprit: str,
    on_error: OnError,
    max_error_rate: float,
    max_retries: int,
    retry_on: Sequence[type[BaseException] | str],
    timeout_s: float | None,
) -> Failures:
    """Validates the arguments.

    Raises:
        DefinitionError: If one does not fit.
    """
    one_of(culprit, "on_error", on_error, ("raise", "quarantine", "null"))
    number = isinstance(max_error_rate, (int, float)) and not isinstance(max_error_rate, bool)
    if not number or not 0 <= max_error_rate <= 1:
        raise DefinitionError(
            f"{culprit}: max_error_rate is {max_error_rate!r}; expected a share from 0 to 1"
        )
    if type(max_retries) is not int or max_retries < 0:
        raise DefinitionError(
            f"{culprit}: max_retries is {max_retries!r}; expected a whole number from 0 up"
        )
    if isinstance(retry_on, (str, type)):
        raise DefinitionError(f"{culprit}: retry_on is {retry_on!r}; expected a list of classes")
    names = tuple(_name(culprit, kind) for kind in retry_on)
    limit = seconds(culprit, "timeout_s", timeout_s)
    return Failures(on_error, float(max_error_rate), max_retries, names, limit)


def _name(culprit: str, kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, BaseException):
        return kind.__qualname__
    if isinstance(kind, str) and kind:
        return kind.rpartition(".")[2]
    raise DefinitionError(
        f"{culprit}: retry_on holds {kind!r}; expected exception classes or their names"
    )
