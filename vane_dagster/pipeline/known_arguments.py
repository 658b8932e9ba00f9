"""Checks of the arguments of a call: unknown ones, missing ones, and those of other systems.

It imports little, because a user's module that only decorates functions does too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from vane_dagster._keywords import F, check_arguments
from vane_dagster.errors import names


def known_arguments(
    method: str,
    options: Collection[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    more: str = "",
    nested: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Callable[[F], F]:
    """Decorate a function so that it describes the keyword arguments that it does not take.

    Without it Python raises a TypeError that names one of them.

    Args:
        method: The function's name for users.
        options: The keyword arguments that it takes. Default: those that it declares.
        elsewhere: See `StageCall`.
        more: See `StageCall`.
        nested: See `StageCall`.
    """

    def describe(own: tuple[str, ...], unknown: Mapping[str, Any]) -> str:
        from vane_dagster.pipeline.foreign_arguments import StageCall, unknown_arguments

        call = StageCall(method, own, (), nested, False, elsewhere, more)
        return unknown_arguments(call, unknown)

    return check_arguments(method, describe, options)


def adds_stage(function: F) -> F:
    """Decorate a method that adds a stage so that it describes missing and unknown arguments."""

    def describe(own: tuple[str, ...], unknown: Mapping[str, Any]) -> str:
        from vane_dagster.pipeline.foreign_arguments import stage_call, unknown_arguments

        return unknown_arguments(stage_call(function), unknown)

    def missing(own: tuple[str, ...], lacking: Mapping[str, Any]) -> str:
        text = f"{method} lacks its argument{'s' * (len(lacking) > 1)} {names(lacking)}"
        if "schema" in lacking:
            text += (
                '. Declare the columns of the results, as schema={"label": "VARCHAR"}, or write '
                'schema="infer", which infers them from the first rows'
            )
        return text

    def where(rows: Any, name: Any = "?", *args: Any, **kwargs: Any) -> str:
        return f"{rows.pipeline._location(name)}: "

    method = function.__name__
    return check_arguments(method, describe, missing=missing, where=where)(function)
