"""What a function should return in place of values that Arrow cannot hold, or of another type.

The texts name types and never contain values. Libraries are recognized by the names of their
classes, so none is imported.
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from vane_dagster.types.kinds import is_bytes, is_text
from vane_dagster.types.schema import sql_name
from vane_dagster.types.tensors import astype, is_element

_INSPECTED_ROWS = 1000
_WITH_VALUE = re.compile(r"^Could not convert .* with type (\w+): (.*)$", re.DOTALL)
_NARROW_FLOATS = ("bfloat16", "float8")
_PLAIN = (
    *(bool, int, float, str, bytes, dict, list, tuple, set, frozenset),
    *(dt.date, dt.time, dt.timedelta, decimal.Decimal),
)
_Test = Callable[[pa.DataType], bool]
_EXPRESSIONS: Sequence[tuple[_Test, _Test, str]] = (
    (is_bytes, is_text, "value.decode()"),
    (pa.types.is_nested, is_text, "json.dumps(value)"),
    (lambda found: True, is_text, "str(value)"),
    (is_text, is_bytes, "value.encode()"),
    (pa.types.is_floating, pa.types.is_integer, "round(value), and None in place of NaN,"),
    (pa.types.is_floating, pa.types.is_decimal, "round(value, digits)"),
    (pa.types.is_timestamp, pa.types.is_date, "value.date()"),
    (is_text, pa.types.is_timestamp, "datetime.datetime.fromisoformat(value)"),
    (
        lambda found: pa.types.is_timestamp(found) and found.tz is None,
        lambda wanted: pa.types.is_timestamp(wanted) and wanted.tz is not None,
        "value.replace(tzinfo=datetime.timezone.utc), if its values are in UTC,",
    ),
    (
        lambda found: pa.types.is_timestamp(found) and found.tz is not None,
        lambda wanted: pa.types.is_timestamp(wanted) and wanted.tz is None,
        "value.astimezone(datetime.timezone.utc).replace(tzinfo=None)",
    ),
)
"""The Python expressions that convert a value of one type to another. The first one counts."""


def explained(error: BaseException, values: Any) -> str:
    """Explain why a column cannot be converted, with what to return instead."""
    if type(error) is ValueError:  # ours; Arrow's are of subclasses
        return str(error)
    if advice := _about_array(values) or _about_rows(values):
        return advice
    found = _WITH_VALUE.match(str(error))
    return f"a {found[1]} {found[2]}" if found else str(error)


def instead(found: pa.DataType, wanted: pa.DataType, column: str, castable: bool) -> str:
    """Say what to return in place of values of another type, or that do not fit into a type."""
    convert = "Return values that fit" if castable else "Convert it in the function"
    matching = (text for one, other, text in _EXPRESSIONS if one(found) and other(wanted))
    if expression := next(matching, ""):
        convert = f"Return {expression} for each row"
    elif not castable and is_element(wanted) and (is_element(found) or is_text(found)):
        convert = f"Return {astype(wanted)}"
    if not column:
        return convert
    declared = sql_name(found)
    schema = f"declare { ({column: declared})!r}" if declared else "declare that type"
    return f"{convert}, or {schema} in the schema"


def _about_array(values: Any) -> str | None:
    kind = str(getattr(values, "dtype", "")).rpartition(".")[2]
    if kind.startswith(_NARROW_FLOATS):
        return f"Arrow has no {kind}. Return it as float32, which holds its values"
    if kind.startswith("complex"):
        return f"Arrow has no {kind}. Return value.real and value.imag, as two columns"
    if "sparse" in str(getattr(values, "layout", "")).lower():
        return "a sparse tensor. Return value.to_dense()"
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
