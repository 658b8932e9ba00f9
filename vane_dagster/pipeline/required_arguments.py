"""A check of calls that add a stage: arguments that are missing, and those meant for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from vane_dagster._keywords import too_many
from vane_dagster.errors import DefinitionError
from vane_dagster.pipeline.asset_options import missing_arguments
from vane_dagster.pipeline.foreign_arguments import StageCall, stage_call

F = TypeVar("F", bound=Callable[..., Any])


def required_arguments(*further: str, either: Sequence[str] = ()) -> Callable[[F], F]:
    """Decorate a method that adds a stage so that it describes missing and unnamed arguments.

    Without it Python raises a TypeError, which does not say that a misspelt one was meant for it.

    Args:
        *further: Names of the methods that its further options go to.
        either: Optional arguments of which one is required; the first is reported as missing.
    """

    def decorate(function: F) -> F:
        parameters = list(inspect.signature(function).parameters.values())
        by_place = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        declared = [each.name for each in parameters]
        required = [
            each.name
            for each in parameters
            if each.default is each.empty
            if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = {*by_place[: len(args)], *kwargs}
            if len(args) > len(by_place):
                call = stage_call(function)
                text = too_many(call.method, by_place, call.options, len(args))
                raise DefinitionError(f"{_location(args, kwargs)}: {text}")
            missing = [name for name in required if name not in given]
            missing += either[:1] if given.isdisjoint(either) else []
            if missing:
                rows = args[0]
                call = stage_call(function, *(getattr(rows, each) for each in further))
                known = StageCall(call.method, tuple(dict.fromkeys((*call.options, *declared))))
                text = missing_arguments(missing, kwargs, known)
                raise DefinitionError(f"{_location(args, kwargs)}: {text}")
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate


def _location(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    name = args[1] if len(args) > 1 else kwargs.get("name", "?")
    location: str = args[0].pipeline._location(name)
    return location
