"""Validation of single arguments: each function returns the normalized value, or raises."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from vane_dagster._secrets import holds_secret
from vane_dagster.errors import DefinitionError, names

if TYPE_CHECKING:
    import dagster as dg

_ANY = re.compile(r".+", re.DOTALL)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The name of a pipeline or a stage."""
PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
"""A placeholder in a URL pattern; the group is its name."""
_BOUNDS = ("partition_start", "partition_end")
"""Placeholders for the bounds of a time window, which may have a format."""


def unexpected(where: str, name: str, value: object, expected: str) -> DefinitionError:
    """Return the error for an argument with another value than those that are expected."""
    return DefinitionError(f"{where}: {name} is {value!r}; expected {expected}")


def fill_placeholders(url: str, key: str | None, escape: Callable[[str], str] = str) -> str:
    """Replace the placeholders of a URL with those of a `PartitionKey`, or with a text."""

    def value(match: re.Match[str]) -> str:
        name, _, form = match.group(1).partition(":")
        known: Any = key
        if name in _BOUNDS:
            return str(known.bound(name.rpartition("_")[2], form))
        dimension = name.partition(".")[2]
        return escape(known.keys_by_dimension[dimension] if dimension else str(key))

    return PLACEHOLDER.sub(value, url)


def time_windows(partitions_def: Any) -> dict[str, Any]:
    """Return the definition of time windows of partitions, by its dimension; "" for no dimension.

    There is none if partitions are no time windows.
    """
    every = {
        each.name: each.partitions_def for each in getattr(partitions_def, "partitions_defs", ())
    }
    every = every or {"": partitions_def}
    return {k: each for k, each in every.items() if hasattr(each, "time_window_for_partition_key")}


def any_partition(url: str) -> str:
    """Return a glob for the URLs of all partitions."""
    some = PLACEHOLDER.sub(lambda match: "/".join("\0" * (match[1].count("/") + 1)), url)
    return re.sub(r"\*?\0[\0*]*", "*", some)  # "**" would be folders


def filled_filter(condition: str | None, key: str | None) -> str | None:
    """Return a row filter of one partition, with the key escaped for a quoted text."""
    if condition is None:
        return None
    return fill_placeholders(condition, key, lambda text: text.replace("'", "''"))


def parse_concurrency(
    where: str, name: str, value: Any, what: str = "workers"
) -> tuple[int, int] | None:
    """Parse a number of workers, or a (min, max) pair, into a pair."""
    if value is None:
        return None
    pair: Any = (value, value) if isinstance(value, int) else value
    whole = isinstance(pair, (tuple, list)) and all(type(n) is int and n >= 1 for n in pair)
    if isinstance(value, bool) or not whole or len(pair) != 2 or pair[0] > pair[1]:
        expected = f"a number of {what} from 1 up, or (min, max) with min <= max"
        expected += ', or "auto"' if what == "workers" else ""
        raise unexpected(where, name, value, expected)
    return (pair[0], pair[1])


def parse_workers(where: str, name: str, value: Any) -> tuple[int, int] | Literal["auto"] | None:
    """Parse a number of workers, a (min, max) pair, or "auto"."""
    return "auto" if value == "auto" else parse_concurrency(where, name, value)


def positive(where: str, name: str, value: Any, default: Any = None, least: int = 1) -> Any:
    """Validate a whole number from 1 up."""
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise unexpected(where, name, value, f"a whole number from {least} up")
    return value


def flag(where: str, name: str, value: Any) -> bool:
    """Validate a bool."""
    if not isinstance(value, bool):
        raise unexpected(where, name, value, "True or False")
    return value


def whole(where: str, name: str, value: Any) -> Any:
    """Validate a whole number from 0 up."""
    return positive(where, name, value, least=0)


def seconds(where: str, name: str, value: Any) -> Any:
    """Validate a number of seconds above 0; None is allowed."""
    expected = "seconds above 0, or None"
    return number(where, name, value, expected, lambda given: 0 < given < float("inf"))


def number(where: str, name: str, value: Any, expected: str, fits: Callable[[float], bool]) -> Any:
    """Validate a number that fits, or None."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and fits(value)):
        raise unexpected(where, name, value, expected)
    return value


def check_installed(where: str, module: str, extra: str) -> None:
    """Check that the package of an extra is installed."""
    if find_spec(module) is None:
        raise DefinitionError(f"{where} needs the module {module!r}. Install vane-dagster[{extra}]")


def check_name(where: str, value: Any) -> None:
    """Check the name of a pipeline or a stage."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise DefinitionError(
            f"{where}: a name has letters, digits and '_', and does not begin with a digit"
        )


def text(
    where: str, name: str, value: Any, expected: str = "a text", form: re.Pattern[str] = _ANY
) -> str:
    """Validate a text that has a form; by default one that is not empty."""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise unexpected(where, name, value, expected)
    return value


def one_of(where: str, name: str, value: Any, allowed: Sequence[str]) -> Any:
    """Validate that a value is one of the allowed values."""
    if value not in allowed:
        raise unexpected(where, name, value, f"one of {', '.join(map(repr, allowed))}")
    return value


def mapping(where: str, name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy a mapping with string keys into a dict; None becomes an empty dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        kind = type(value).__name__  # the value may be a secret
        raise DefinitionError(f"{where}: {name} is a {kind}; expected a mapping of name to value")
    return dict(value)


def positional(where: str, name: str, value: Sequence[Any], expected: str) -> tuple[Any, ...]:
    """Convert a list or tuple to a tuple."""
    if not isinstance(value, (list, tuple)):
        raise DefinitionError(f"{where}: {name} is a {type(value).__name__}; expected {expected}")
    return tuple(value)


def list_of_names(where: str, name: str, value: Sequence[str] | None) -> tuple[str, ...] | None:
    """Convert a list of strings to a tuple; None stays None."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise unexpected(where, name, value, "a list of names")
    return tuple(value)


def selection(where: str, name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Convert a list of columns, or a mapping of output column to column, to pairs."""
    if isinstance(value, Mapping):
        return tuple(zip(value, list_of_names(where, name, [*value.values()]) or ()))
    listed = list_of_names(where, name, value) or ()
    return tuple(zip(listed, listed))


def check_url(where: str, url: str) -> None:
    """Validate that a URL is not empty and has only known placeholders."""
    if not isinstance(url, str) or not url.strip():
        raise unexpected(where, "url", url, "a path or a URL")
    if "::" in url:
        raise DefinitionError(
            f"{where}: {url!r} chains file systems by '::', which is not supported; expected "
            "a path or one URL, with storage_options for the rest"
        )
    if holds_secret(url):
        raise DefinitionError(
            f"{where}: {url!r} holds a password or a signature, which would be in manifests and "
            "ids; give the URL without it, and credentials in storage_options"
        )
    _check_names(where, url)


def _check_names(where: str, url: str) -> None:
    for name in PLACEHOLDER.findall(url):
        if name.partition(".")[0] != "partition_key" and name.partition(":")[0] not in _BOUNDS:
            raise DefinitionError(
                f"{where}: {url!r} has the unknown placeholder {{{name}}}; expected "
                "{partition_key}, {partition_key.<dimension>} for a multi-partition, or "
                "{partition_start:%Y/%m/%d} or {partition_end} for time windows"
            )


def path_text(value: Any) -> Any:
    """Return the text of a `pathlib.Path` or another `os.PathLike`; other values unchanged."""
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def checked_url(where: str, url: str | os.PathLike[str]) -> str:
    """Return a URL or path as text, after `check_url`."""
    text: str = path_text(url)
    check_url(where, text)
    return text


def check_placeholders(
    where: str,
    url: str,
    partitions_def: dg.PartitionsDefinition[Any] | None,
    is_target: bool = False,
) -> None:
    """Verify that a URL has a placeholder if and only if the pipeline has partitions.

    That of a target names the whole key, so that each partition has its own folder.
    """
    _check_names(where, url)
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
    bounds = [f for f in fields if f.partition(":")[0] in _BOUNDS]
    windows = time_windows(partitions_def)
    if bounds and (is_target or len(windows) != 1):
        why = f"the dimensions {names(windows)} have one each"
        why = why if windows else "partitions_def has none"
        why = "a target can name the key only" if is_target else why
        raise DefinitionError(
            f"{where}: {url!r} has {{{bounds[0]}}}, a bound of a time window, but {why}; write "
            "{partition_key}"
        )
    dimensions = [f.partition(".")[2] for f in fields if "." in f and f not in bounds]
    known = [d.name for d in getattr(partitions_def, "partitions_defs", ())]
    if unknown := [d for d in dimensions if d not in known]:
        raise DefinitionError(
            f"{where}: {url!r} names the dimension {unknown[0]!r}; the partitions "
            f"have {names(known)}"
        )
    lacking = [d for d in known if d not in dimensions]
    if is_target and lacking and "partition_key" not in fields:
        fix = "/".join(f"{{partition_key.{d}}}" for d in known)
        raise DefinitionError(
            f"{where}: {url!r} does not name the dimension {lacking[0]!r}, so that several "
            f"partitions would share a folder; put in {fix}, or {{partition_key}}"
        )
