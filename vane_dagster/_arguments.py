"""Checks of single arguments: each returns the value in its one form, or raises."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vane_dagster._secrets import holds_password
from vane_dagster.errors import DefinitionError

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
"""A placeholder in a URL pattern; the group is its name."""


def parse_concurrency(where: str, value: Any) -> tuple[int, int] | None:
    """A number of workers, or (min, max), as a pair; None is left to the cluster.

    Raises:
        DefinitionError: If it is neither, or below one.
    """
    if value is None:
        return None
    pair = (value, value) if isinstance(value, int) else value
    whole = isinstance(pair, (tuple, list)) and all(type(n) is int and n >= 1 for n in pair)
    if isinstance(value, bool) or not whole or len(pair) != 2 or pair[0] > pair[1]:
        raise DefinitionError(
            f"{where}: concurrency is {value!r}; expected a number of workers from 1 up, or "
            "(min, max) with min <= max"
        )
    return (pair[0], pair[1])


def positive(where: str, name: str, value: Any, default: Any = None) -> Any:
    """`value` if it is a whole number from 1 up, `default` if it is None.

    Raises:
        DefinitionError: If it is anything else.
    """
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise DefinitionError(f"{where}: {name} is {value!r}; expected a whole number from 1 up")
    return value


def seconds(where: str, name: str, value: Any) -> float | None:
    """`value` if it is a number of seconds above 0, or None.

    Raises:
        DefinitionError: If it is anything else.
    """
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise DefinitionError(f"{where}: {name} is {value!r}; expected seconds above 0, or None")
    return float(value)


def one_of(where: str, name: str, value: Any, allowed: Sequence[str]) -> Any:
    """`value` if it is one of `allowed`; raises DefinitionError otherwise."""
    if value not in allowed:
        listed = ", ".join(repr(a) for a in allowed)
        raise DefinitionError(f"{where}: {name} is {value!r}; expected one of {listed}")
    return value


def mapping(where: str, name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """A mapping with text keys as a dict, an empty one for None.

    Raises:
        DefinitionError: If it is anything else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        kind = type(value).__name__  # a value may be secret
        raise DefinitionError(f"{where}: {name} is a {kind}; expected a mapping of name to value")
    return dict(value)


def positional(where: str, name: str, value: Sequence[Any]) -> tuple[Any, ...]:
    """A list or tuple as a tuple; raises DefinitionError for anything else."""
    if not isinstance(value, (list, tuple)):
        raise DefinitionError(
            f"{where}: {name} is a {type(value).__name__}; expected a list of arguments, as [...]"
        )
    return tuple(value)


def list_of_names(where: str, name: str, value: Sequence[str] | None) -> tuple[str, ...] | None:
    """A list of texts as a tuple, None for None; raises DefinitionError for anything else."""
    if value is None:
        return None
    if isinstance(value, str) or not all(isinstance(item, str) for item in value):
        raise DefinitionError(f"{where}: {name} is {value!r}; expected a list of names")
    return tuple(value)


def environment_variables(
    where: str, forwarded: Sequence[str], keyed: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The environment variables of a stage's workers, and those of them that are keyed.

    Raises:
        DefinitionError: If they are no names.
    """
    plain = list_of_names(where, "env_vars", forwarded) or ()
    counted = list_of_names(where, "keyed_env_vars", keyed) or ()
    return tuple(dict.fromkeys((*plain, *counted))), counted


def selection(
    where: str, value: Sequence[str] | Mapping[str, str] | None
) -> tuple[tuple[str, str], ...]:
    """Columns, or output column to column, as pairs.

    Raises:
        DefinitionError: If it is neither, or a name stands twice.
    """
    pairs: Any = value
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = [(column, column) for column in value]
    if not isinstance(pairs, list) or not all(
        isinstance(name, str) and isinstance(column, str) for name, column in pairs
    ):
        raise DefinitionError(
            f"{where} is {value!r}; expected a list of columns, or a mapping of output column to "
            "column"
        )
    if repeated := sorted({n for n, _ in pairs if [m for m, _ in pairs].count(n) > 1}):
        raise DefinitionError(f"{where}: {repeated[0]!r} stands twice; give each its own name")
    return tuple(pairs)


def check_url(where: str, url: str) -> None:
    """Raises DefinitionError for a URL that is empty or has an unknown placeholder."""
    if not isinstance(url, str) or not url.strip():
        raise DefinitionError(f"{where}: url is {url!r}; expected a path or a URL")
    if "::" in url:
        raise DefinitionError(
            f"{where}: {url!r} chains file systems by '::', which is not supported; expected "
            "a path or one URL, with storage_options for the rest"
        )
    if holds_password(url):
        raise DefinitionError(
            f"{where}: {url!r} holds a password, which would stand in manifests; give it in "
            "storage_options"
        )
    for name in PLACEHOLDER.findall(url):
        if name.partition(".")[0] != "partition_key":
            raise DefinitionError(
                f"{where}: {url!r} has the unknown placeholder {{{name}}}; expected "
                "{partition_key}, or {partition_key.<dimension>} for a multi-partition"
            )
