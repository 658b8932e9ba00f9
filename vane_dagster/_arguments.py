"""Checks of single arguments: each returns the value in its one form, or raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vane_dagster._secrets import holds_password
from vane_dagster.errors import DefinitionError, names

if TYPE_CHECKING:
    import dagster as dg

PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
"""A placeholder in a URL pattern; the group is its name."""


def fill_placeholders(url: str, key: str | None, escape: Callable[[str], str] = str) -> str:
    """A URL with a partition's key in place of its placeholders.

    Args:
        url: The URL, with ``{partition_key}`` or ``{partition_key.<dimension>}``.
        key: The partition's key, which has one for each dimension where it is a multi-partition's.
        escape: Makes the text that stands in the URL.
    """

    def value(match: re.Match[str]) -> str:
        dimension = match.group(1).partition(".")[2]
        keys = getattr(key, "keys_by_dimension", {})
        return escape(keys[dimension] if dimension else str(key))

    return PLACEHOLDER.sub(value, url)


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


def check_placeholders(
    where: str, url: str, partitions_def: dg.PartitionsDefinition[Any] | None
) -> None:
    """Checks that a URL has a placeholder exactly where a pipeline has partitions.

    Args:
        where: The pipeline or stage, for the message.
        url: The URL.
        partitions_def: The pipeline's partitions; None for an unpartitioned one.

    Raises:
        DefinitionError: If it does not, or names an unknown dimension.
    """
    fields = PLACEHOLDER.findall(url)
    if partitions_def is None and fields:
        raise DefinitionError(
            f"{where}: {url!r} has {{{fields[0]}}}, but the pipeline has no "
            "partitions_def; give it one, or take the placeholder out"
        )
    if partitions_def is not None and not fields:
        raise DefinitionError(
            f"{where}: {url!r} has no {{partition_key}}, so that every partition "
            "would have the same files; put it in, or leave partitions_def out"
        )
    dimensions = [f.partition(".")[2] for f in fields if "." in f]
    known = [d.name for d in getattr(partitions_def, "partitions_defs", ())]
    if unknown := [d for d in dimensions if d not in known]:
        raise DefinitionError(
            f"{where}: {url!r} names the dimension {unknown[0]!r}; the partitions "
            f"have {names(known)}"
        )
