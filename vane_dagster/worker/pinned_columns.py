"""Refusal of columns and fields that results have beyond an inferred schema.

The first rows may lack a column that later ones have. Nobody has declared that it may be dropped.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np
import pyarrow as pa

from vane_dagster.errors import UdfError, names
from vane_dagster.pipeline.contracts import RowCall
from vane_dagster.types.kinds import is_list
from vane_dagster.types.records import fields_of, has_fields
from vane_dagster.worker.protocol import CallUdf, Work
from vane_dagster.worker.row_results import RowResults

_Finder = Callable[[Any, str], Union[str, None]]
"""Returns the path of a field of a value that its type lacks, from the path of the value."""


def with_pinned_columns(result: Any, schema: pa.Schema, location: str) -> Any:
    """Return the result of a call with a batch, unless it has more columns than the schema.

    Arrow's types are compared when they are cast, so only Python values are searched for fields.

    Args:
        result: A table, data frame, or dict of column to array.
        schema: The inferred schema, with all columns that are passed on.
        location: Stage and fragment, for messages.

    Raises:
        UdfError: If it has a column, or a field of a struct, that the schema lacks.
    """
    pandas = sys.modules.get("pandas")
    is_frame = pandas is not None and isinstance(result, pandas.DataFrame)
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        _check_names(result.schema.names, schema, location)
    elif is_frame or isinstance(result, Mapping):
        _check_names(map(str, result.columns) if is_frame else result, schema, location)
        for name, find in _finders(schema).items():
            if name in result:
                _check_rows(result[name], find, name, schema, location)
    elif hasattr(result, "__arrow_c_stream__"):
        try:
            result = pa.RecordBatchReader.from_stream(result)
        except pa.ArrowInvalid:  # no table, which its conversion explains
            return result
        _check_names(result.schema.names, schema, location)
    return result


class PinnedRows(RowResults):
    """The results of the calls for the rows of a batch, without columns beyond the schema."""

    def __init__(self, contract: RowCall, batch: pa.Table, op: CallUdf, work: Work) -> None:
        super().__init__(contract, batch, op, work)
        self._known = frozenset(work.schema.names)
        self._finders = _finders(work.schema)

    def _columns(self, values: Sequence[Any], places: Sequence[int]) -> dict[str, Any]:
        for value in values:
            self._check(value)
        return super()._columns(values, places)

    def _check(self, value: Any) -> None:
        schema, location, column = self._work.schema, self._work.location, self._contract.output
        if column is None and not has_fields(value):
            column = self._op.made[0]
        given = fields_of(value) if column is None else {column: value}
        if not given.keys() <= self._known:
            _check_names(given, schema, location)
        for name, find in self._finders.items():
            if name in given:
                _check_rows([given[name]], find, name, schema, location)


def _check_names(given: Iterable[Any], schema: pa.Schema, location: str) -> None:
    known = frozenset(schema.names)
    if extra := [name for name in given if name not in known]:
        raise _refused(f"column {names(extra)}", schema.names, location)


def _check_rows(rows: Any, find: _Finder, name: str, schema: pa.Schema, location: str) -> None:
    is_column = hasattr(rows, "__len__") and getattr(rows, "ndim", None) != 0
    if not is_column or isinstance(rows, (pa.Array, pa.ChunkedArray)):
        return
    for row in rows:
        if (path := find(row, name)) is not None:
            raise _refused(f"field {path!r}", schema.names, location)


def _refused(what: str, known: Collection[str], location: str) -> UdfError:
    return UdfError(
        f"{location}: returned {what}, which the pinned schema lacks: it was inferred from the "
        f"first rows, and has {names(known, 20)}. Return the same columns and fields for every "
        "row, with None where there is no value, or declare the schema"
    )


def _finders(schema: pa.Schema) -> dict[str, _Finder]:
    """Return the finders of the columns that hold structs."""
    found = ((field.name, _finder(field.type)) for field in schema)
    return {name: find for name, find in found if find is not None}


def _finder(kind: pa.DataType) -> _Finder | None:
    """Return the finder of a type; None if it holds no structs."""
    if pa.types.is_struct(kind):
        known = {field.name: _finder(field.type) for field in kind}
        return functools.partial(_in_struct, known=known)
    if is_list(kind) and (item := _finder(kind.value_type)) is not None:
        return functools.partial(_in_items, find=item)
    if pa.types.is_map(kind) and (item := _finder(kind.item_type)) is not None:
        return functools.partial(_in_map, find=item)
    return None


def _in_struct(value: Any, path: str, known: Mapping[str, _Finder | None]) -> str | None:
    if isinstance(value, np.void) and value.dtype.names:  # a row of a structured array
        value = {name: value[name] for name in value.dtype.names}
    if not has_fields(value):
        return None
    for name, item in fields_of(value).items():
        if name not in known:
            return f"{path}.{name}"
        find = known[name]
        if find is not None and (found := find(item, f"{path}.{name}")) is not None:
            return found
    return None


def _in_items(value: Any, path: str, find: _Finder) -> str | None:
    items = value if isinstance(value, (list, tuple, np.ndarray)) else ()
    return next((found for item in items if (found := find(item, path)) is not None), None)


def _in_map(value: Any, path: str, find: _Finder) -> str | None:
    """Search a mapping, or a list of pairs."""
    if isinstance(value, Mapping):
        return _in_items(list(value.values()), path, find)
    pairs = value if isinstance(value, (list, tuple, np.ndarray)) else ()
    items = [pair[1] for pair in pairs if isinstance(pair, tuple) and len(pair) == 2]
    return _in_items(items, path, find)
