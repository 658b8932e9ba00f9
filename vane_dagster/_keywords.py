"""Checks of the names of arguments and columns. Messages list similar names that exist."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, TypeVar, cast

from vane_dagster.errors import DefinitionError, SchemaError, VaneError, names

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_NEAREST = 3
_SIMILARITY = 0.6
_NONE: Mapping[str, str] = MappingProxyType({})
_RECORD_OF: dict[str, str] = {}
"""The record that has an option."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def known_keywords(
    method: str,
    advice: Mapping[str, str] = _NONE,
    fields: Mapping[str, str] = _NONE,
    more: str = "",
    where: Callable[..., str] = lambda *args, **kwargs: "",
) -> Callable[[F], F]:
    """Decorate a function so that it describes missing arguments, and those that it does not take.

    Without it Python raises a TypeError that names one of them.
    """

    def decorate(function: F) -> F:
        declared = list(inspect.signature(function).parameters.values())
        named = {each.name: each for each in declared if each.kind in (*_POSITIONAL, _BY_NAME)}
        own = [name for name in named if name != "self"]
        by_name = [each.name for each in declared if each.kind is _BY_NAME]
        is_open = any(each.kind is each.VAR_POSITIONAL for each in declared)
        by_place = [name for name, each in named.items() if each.kind in _POSITIONAL]
        needed = [name for name, each in named.items() if each.default is each.empty]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            unknown = [name for name in kwargs if name not in named]
            texts = unknown_arguments(method, unknown, own, advice, fields, more)
            if len(args) > len(by_place) and not is_open:
                texts.append(too_many(method, by_place, by_name, len(args)))
            given = {*by_place[: len(args)], *kwargs}
            if lacking := [name for name in needed if name not in given]:
                how = "".join(f". {advice[name]}" for name in lacking if name in advice)
                plural = "s" * (len(lacking) > 1)
                texts.append(f"{method} lacks its argument{plural} {names(lacking)}{how}")
            if texts:
                raise DefinitionError(where(*args, **kwargs) + "\n".join(texts))
            return function(*args, **kwargs)

        return cast(F, checked)

    return decorate


def unknown_arguments(
    method: str,
    unknown: Iterable[str],
    options: Collection[str],
    advice: Mapping[str, str] = _NONE,
    fields: Mapping[str, str] = _NONE,
    more: str = "",
) -> list[str]:
    """Describe each of the unknown arguments of a call."""
    listed = f"its options are {names(options, 50)}" if options else "it has no options"

    def correction(name: str) -> str:
        if written := fields.get(name) or advice.get(name):
            return f": {written}"
        found = similar(name, [*options, *fields])
        return f". {found}" if found else f": {listed}{more}"

    return [f"unknown argument {n!r} of {method}{correction(n)}" for n in sorted(unknown)]


def checked_record(name: str) -> Callable[[C], C]:
    """Decorate a dataclass so that it describes the arguments that it does not take."""

    def decorate(record: Any) -> Any:
        defaults = {each.name: (each.default, each.default_factory) for each in fields(record)}
        options = [option for option, kinds in defaults.items() if kinds != (MISSING, MISSING)]
        _RECORD_OF.update(dict.fromkeys(options, f"write it in {name}"))
        record.__init__ = known_keywords(name, _RECORD_OF)(record.__init__)
        return record

    return decorate


def too_many(method: str, by_place: Collection[str], options: Collection[str], given: int) -> str:
    """Describe arguments that have to be given by name."""
    own = [name for name in by_place if name != "self"]
    more = given - len(by_place)
    those = "1 more value was" if more == 1 else f"{more} more values were"
    taken = f"takes {names(own)} by position" if own else "takes no argument by position"
    text = f"{method} {taken}, and {those} given without a name"
    if not options:
        return f"{text}. Leave them out"
    return f"{text}. Name each, as {next(iter(options))}=...; its options are {names(options, 50)}"


def similar(name: str, known: Collection[str]) -> str:
    """Return a question that names the options with a similar spelling; empty if there is none."""
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
    """Raise an error that lists the columns that exist, unless all that are wanted do."""
    if missing := [name for name in wanted if name not in columns]:
        listed = columns_listed(columns, missing[0])
        text = f"{owner} has no column {names(missing)}; it has {listed}"
        raise error(text if not fix else f"{text}{'' if text.endswith('?') else '.'} {fix}")
