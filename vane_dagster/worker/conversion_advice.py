"""What a function should return in place of values that Arrow cannot hold.

The texts name types and never contain values. Libraries are recognized by the names of their
classes, so none is imported.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

_INSPECTED_ROWS = 1000
_WITH_VALUE = re.compile(r"^Could not convert .* with type (\w+): (.*)$", re.DOTALL)
_UNHELD = ("bfloat16", "float8", "complex")
_PLAIN = (
    *(bool, int, float, str, bytes, dict, list, tuple, set, frozenset),
    *(dt.date, dt.time, dt.timedelta, decimal.Decimal),
)


def explained(error: BaseException, values: Any) -> str:
    """Explain why a column cannot be converted, with what to return instead."""
    if type(error) is ValueError:  # ours; Arrow's are of subclasses
        return str(error)
    if advice := _about_array(values) or _about_rows(values):
        return advice
    found = _WITH_VALUE.match(str(error))
    return f"a {found[1]} {found[2]}" if found else str(error)


def _about_array(values: Any) -> str | None:
    kind = str(getattr(values, "dtype", "")).rpartition(".")[2]
    if kind.startswith(_UNHELD):
        return f"Arrow has no {kind}. Return real numbers of a type that it has, such as float32"
    return None


def _about_rows(values: Any) -> str | None:
    for value in _rows(values):
        if advice := _about_array(value):
            return f"rows are arrays. {advice}"
        if not isinstance(value, _PLAIN) and not hasattr(value, "dtype"):
            return (
                f"Arrow has no type for a {class_name(value)}. Return numbers, text as by "
                "str(value), bytes, arrays as by np.asarray(value), lists or dicts of them; "
                "pickle.dumps(value) in a BLOB column keeps an object as it is"
            )
    return None


def _rows(values: Any) -> Iterator[Any]:
    """Yield the first objects that are not null; an iterator is consumed already."""
    listed = isinstance(values, Sequence) and not isinstance(values, memoryview)
    if listed or getattr(getattr(values, "dtype", None), "kind", "") == "O":
        yield from (value for value in islice(iter(values), _INSPECTED_ROWS) if value is not None)


def class_name(value: Any) -> str:
    """Return the name of a class with its package, because several packages have a DataFrame."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "builtins" else f"{package}.{kind.__name__}"
