"""A check of keyword arguments, for functions that add no stage.

It imports little, because a user's module that only decorates functions does too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

from vane_dagster.errors import DefinitionError

F = TypeVar("F", bound=Callable[..., Any])


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

    def decorate(function: F) -> F:
        declared = list(inspect.signature(function).parameters.values())
        own = tuple(options or (each.name for each in declared if each.kind is each.KEYWORD_ONLY))
        known = {*own, *(each.name for each in declared if each.kind is not each.VAR_KEYWORD)}

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if unknown := {name: kwargs[name] for name in kwargs if name not in known}:
                from vane_dagster.pipeline.foreign_arguments import StageCall, unknown_arguments

                call = StageCall(method, own, adds_stage=False, elsewhere=elsewhere, more=more)
                raise DefinitionError(unknown_arguments(call, unknown))
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate
