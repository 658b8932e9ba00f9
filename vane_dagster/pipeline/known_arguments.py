"""A check of keyword arguments, for functions that add no stage.

It imports little, because a user's module that only decorates functions does too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from vane_dagster._keywords import F, check_arguments


def known_arguments(
    method: str,
    options: Collection[str] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    more: str = "",
) -> Callable[[F], F]:
    """Decorate a function so that it describes the keyword arguments that it does not take.

    Without it Python raises a TypeError that names one of them.

    Args:
        method: The function's name for users.
        options: The keyword arguments that it takes. Default: those that it declares.
        elsewhere: See `StageCall`.
        more: See `StageCall`.
    """

    def describe(own: tuple[str, ...], unknown: Mapping[str, Any]) -> str:
        from vane_dagster.pipeline.foreign_arguments import StageCall, unknown_arguments

        call = StageCall(method, own, adds_stage=False, elsewhere=elsewhere, more=more)
        return unknown_arguments(call, unknown)

    return check_arguments(method, describe, options)
