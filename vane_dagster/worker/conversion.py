"""Columns that a user's function returns, as columns of the declared schema."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from vane_dagster.errors import UdfError, names
from vane_dagster.types.casts import Mismatch
from vane_dagster.types.schema import sql_name, type_name
from vane_dagster.types.tensors import is_tensor
from vane_dagster.types.to_arrow import UnknownField, to_arrow
from vane_dagster.worker.batch_formats import copied

_WITH_VALUE = re.compile(r"Could not convert .* with type ([^:]+): ", re.DOTALL)

_NULLS = (
    ". In numpy and torch batches, a null among integers is NaN; include_columns= passes "
    "a column of the input on unchanged"
)


def fitted(values: Any, field: pa.Field, location: str, pinned: bool = False) -> pa.ChunkedArray:
    """Convert one column of results to the type of its field, by the rules of `to_arrow`."""
    kind = field.type
    wanted = type_name(kind) if is_tensor(kind) else str(kind)
    expected = f"{location}: column {field.name!r}: expected {wanted}, found"
    try:
        array = to_arrow(values, kind, closed=pinned)
    except UnknownField as error:
        path = ".".join((field.name, *error.path))
        raise _beyond_pinned(f"field {path!r}", location) from error
    except Mismatch as error:
        raise UdfError(f"{expected} {_described(error, field)}") from error
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UdfError(f"{expected} {_kind_of(values)}: {_explained(error)}") from error
    column = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    return column if type(values) is list else copied(column)  # it may share the memory


def _explained(error: BaseException) -> str:
    """Return Arrow's message without the value."""
    if not (match := _WITH_VALUE.search(str(error))):
        return str(error)
    reason = str(error)[match.end() :]
    if "did not recognize Python value type" in reason:
        reason = (
            "has no type in Arrow. Return numbers, text, bytes, arrays, lists or dicts of them; "
            "pickle.dumps(value) in a BLOB column keeps an object as it is"
        )
    return f"a {match[1]} {reason}"


def check_pinned(given: Iterable[Any], schema: pa.Schema, location: str) -> None:
    """Validate that results have no columns beyond an inferred schema.

    The first rows may lack a column that later ones have, and nobody has declared that it may be
    dropped.
    """
    known = frozenset(schema.names)
    if beyond := [name for name in given if name not in known]:
        raise _beyond_pinned(f"column {names(beyond)}", location)


def _beyond_pinned(what: str, location: str) -> UdfError:
    return UdfError(
        f"{location}: returned {what}, which is not in the schema inferred from the first "
        "rows. Return the same columns and fields for every row, with None where there is no "
        "value, or declare the schema"
    )


def _described(error: Mismatch, field: pa.Field) -> str:
    """Describe the values of a wrong type, and what to do about them."""
    where = f" in field {'.'.join(error.path)!r}" if error.path else ""
    if not error.path and error.wanted != field.type:
        where = " as elements"
    declared = None if where else sql_name(error.actual)
    schema = f", or declare { ({field.name: declared})!r} in the schema" if declared else ""
    if error.reason:
        is_nan = "value nan " in error.reason  # of an integer type
        return (
            f"{error.actual}{where} with values that do not fit: {error.reason}. Return "
            f"values that fit, and None for missing ones{schema}{_NULLS * is_nan}"
        )
    return f"{error.actual}{where}. Convert them in the function{schema}"


def _kind_of(values: Any) -> str:
    kind = type(values).__name__
    if hasattr(values, "shape"):
        return f"{kind} of {getattr(values, 'dtype', '?')}, shape {tuple(values.shape)}"
    return f"{kind} of {type(values[0]).__name__}" if kind == "list" and values else kind
