"""Checks of the names of arguments and columns. Messages list similar names that exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

from vane_dagster.errors import DefinitionError, SchemaError, VaneError, names

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
Describe = Callable[[tuple[str, ...], Mapping[str, Any]], str]
"""Returns the message for arguments, from the options of the function and the values given."""

_NEAREST = 3
_SIMILARITY = 0.6
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def known_keywords(method: str) -> Callable[[F], F]:
    """Decorate a function so that it describes the arguments that it does not take.

    Without it Python raises a TypeError that names one of them.

    Args:
        method: The function's name for users.
    """

    def describe(options: tuple[str, ...], unknown: Mapping[str, Any]) -> str:
        return "\n".join(
            f"unknown argument {name!r} of {method}{_correction(name, options)}"
            for name in sorted(unknown)
        )

    return check_arguments(method, describe)


def check_arguments(
    method: str,
    describe: Describe,
    options: Collection[str] = (),
    missing: Describe | None = None,
    where: Callable[..., str] = lambda *args, **kwargs: "",
) -> Callable[[F], F]:
    """Decorate a function so that it refuses the arguments that it does not take.

    Args:
        method: The function's name for users.
        describe: Describes the unknown keyword arguments.
        options: The keyword arguments that it takes. Default: those that it declares.
        missing: Describes arguments that are missing. Default: Python does.
        where: Returns what messages begin with, from the arguments of the call.
    """

    def decorate(function: F) -> F:
        declared = list(inspect.signature(function).parameters.values())
        named = {each.name: each for each in declared if each.kind in (*_POSITIONAL, _BY_NAME)}
        own = tuple(options or (name for name in named if name != "self"))
        known = {*own, *named}
        by_name = tuple(options or (each.name for each in declared if each.kind is _BY_NAME))
        is_open = any(each.kind is each.VAR_POSITIONAL for each in declared)
        by_place = [name for name, each in named.items() if each.kind in _POSITIONAL]
        needed = [name for name, each in named.items() if each.default is each.empty]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            texts = []
            if unknown := {name: kwargs[name] for name in kwargs if name not in known}:
                texts.append(describe(own, unknown))
            if len(args) > len(by_place) and not is_open:
                texts.append(too_many(method, by_place, by_name, len(args)))
            given = {*by_place[: len(args)], *kwargs}
            lacking = [name for name in needed if name not in given]
            if lacking and missing is not None:
                texts.append(missing(own, dict.fromkeys(lacking)))
            if texts:
                raise DefinitionError(where(*args, **kwargs) + "\n".join(texts))
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate


def checked_record(name: str) -> Callable[[C], C]:
    """Decorate a dataclass so that it describes the arguments that it does not take.

    Args:
        name: Its name for users.
    """

    def decorate(record: Any) -> Any:
        record.__init__ = known_keywords(name)(record.__init__)
        return record

    return decorate


def too_many(method: str, by_place: Collection[str], options: Collection[str], given: int) -> str:
    """Describe arguments that have to be given by name.

    Args:
        method: The function's name for users.
        by_place: The parameters that may be given by position, with ``self``.
        options: The arguments that are given by name.
        given: The number of arguments that were given by position.
    """
    own = [name for name in by_place if name != "self"]
    more = given - len(by_place)
    those = "1 more value was" if more == 1 else f"{more} more values were"
    taken = f"takes {names(own)} by position" if own else "takes no argument by position"
    text = f"{method} {taken}, and {those} given without a name"
    if not options:
        return f"{text}. Leave them out"
    return f"{text}. Name each, as {next(iter(options))}=...; its options are {names(options, 50)}"


def similar(name: str, known: Collection[str]) -> str:
    """Return a question that names the options with a similar spelling; empty if there is none.

    Args:
        name: The name that was given.
        known: The options.
    """
    spelled = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), spelled, _NEAREST, _SIMILARITY)
    found = [spelled[each] for each in near]
    return f"Did you mean {' or '.join(map(repr, found))}?" if found else ""


def columns_listed(columns: Collection[str], missing: str) -> str:
    """List the columns that exist, and ask for similar ones to one that does not."""
    return f"{names(columns, 20)}. {similar(missing, columns)}".rstrip(". ")


def require_columns(
    owner: str,
    wanted: Iterable[str],
    columns: Collection[str],
    error: type[VaneError] = SchemaError,
    fix: str = "",
) -> None:
    """Raise an error that lists the columns that exist, unless all that are wanted do.

    Args:
        owner: The location, the argument that names the columns, and the table, for the message.
        wanted: The columns that are wanted.
        columns: The columns that exist.
        error: The class of the error.
        fix: A sentence to end the message with.

    Raises:
        VaneError: If a column does not exist.
    """
    if missing := [name for name in wanted if name not in columns]:
        listed = columns_listed(columns, missing[0])
        text = f"{owner} has no column {names(missing)}; it has {listed}"
        raise error(text if not fix else f"{text}{'' if text.endswith('?') else '.'} {fix}")


def _correction(name: str, options: Collection[str]) -> str:
    if found := similar(name, options):
        return f". {found}"
    return f": its options are {names(options, 50)}" if options else ": it has no options"
