"""Checks of the names of arguments and columns. Messages list similar names that exist."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, TypeVar, cast

from vane_dagster.errors import DefinitionError, SchemaError, VaneError, names

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])

_NEAREST = 3
_SIMILARITY = 0.6
_NONE: Mapping[str, str] = MappingProxyType({})
RECORD_OF: dict[str, str] = {}
"""How to write an option of a record: ``write reuse=vd.Reuse(version=...)``."""
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, _BY_NAME)


def known_keywords(
    method: str,
    advice: Mapping[str, str] = _NONE,
    more: str = "",
    where: Callable[..., str] = lambda *args, **kwargs: "",
) -> Callable[[F], F]:
    """Decorate a function so that it describes missing arguments, and those that it does not take.

    Without it Python raises a TypeError that names one of them. The keys of a TypedDict that
    ``**options`` unpacks are arguments like others.
    """

    def decorate(function: F) -> F:
        signature = full_signature(function)
        declared = [each for each in signature.parameters.values() if each.name != "self"]
        own = [each.name for each in declared if each.kind in _NAMED]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            unknown = [name for name in kwargs if name not in own]
            texts = unknown_arguments(method, unknown, own, advice, more)
            try:
                signature.bind(*args, **{name: kwargs[name] for name in kwargs if name in own})
            except TypeError as error:
                how = [text for name, text in advice.items() if str(error).endswith(repr(name))]
                texts.append(
                    f"{method}: {error}. {how[0] if how else f'It takes {names(own, 50)}'}"
                )
            if texts:
                raise DefinitionError(where(*args, **kwargs) + "\n".join(texts))
            return function(*args, **kwargs)

        setattr(checked, "__signature__", signature)  # noqa: B010  # mypy knows no such attribute
        return cast(F, checked)

    return decorate


def full_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return a signature with the keys of the TypedDict that ``**options`` unpacks in its place."""
    signature, listed = inspect.signature(function), []
    for each in signature.parameters.values():
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(each.annotation))
        keys = function.__globals__[unpacked[1]].__annotations__ if unpacked else {}
        listed += [] if unpacked else [each]
        for key, kind in keys.items():
            text = kind.__forward_arg__
            listed.append(inspect.Parameter(key, _BY_NAME, default=None, annotation=text))
    return signature.replace(parameters=listed)


def unknown_arguments(
    method: str,
    unknown: Iterable[str],
    options: Collection[str],
    advice: Mapping[str, str] = _NONE,
    more: str = "",
) -> list[str]:
    """Describe each of the unknown arguments of a call."""
    listed = f"its options are {names(options, 50)}" if options else "it has no options"

    def correction(name: str) -> str:
        if name in advice:
            return f": {advice[name]}"
        hint = similar(name, {*options, *advice})
        return f". {hint}" if hint else f": {listed}{more}"

    return [f"unknown argument {n!r} of {method}{correction(n)}" for n in sorted(unknown)]


def checked_record(argument: str, name: str) -> Callable[[C], C]:
    """Decorate the dataclass of an argument so that it describes what it does not take."""

    def decorate(record: Any) -> Any:
        for each in fields(record):
            RECORD_OF[each.name] = f"write {argument}={name}({each.name}=...)"
        record.__init__ = known_keywords(name, RECORD_OF)(record.__init__)
        return record

    return decorate


def similar(name: str, known: Collection[str]) -> str:
    """Return a question that names the options with a similar spelling; empty if there is none."""
    spelled = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), spelled, _NEAREST, _SIMILARITY)
    suggestions = [spelled[each] for each in near]
    return f"Did you mean {' or '.join(map(repr, suggestions))}?" if suggestions else ""


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
