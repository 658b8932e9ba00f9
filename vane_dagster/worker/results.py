"""Results of calls with batches, as tables of the declared schema."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from vane_dagster.errors import UdfError, names
from vane_dagster.types.schema import empty_table
from vane_dagster.worker.conversion import check_pinned, fitted


def from_result(
    result: Any,
    schema: pa.Schema,
    ids: Collection[str],
    id: str,
    location: str,
    passed_on: Collection[str] = (),
    pinned: bool = False,
) -> pa.Table:
    """Convert a user's result to a table of `schema`, without the ids that it leaves out.

    The table is a copy, because a function may keep its arrays and refill them for the next batch.
    """
    columns, rows = result_columns(result, schema, id, location)
    if pinned:
        check_pinned(columns, schema, location)
    optional = {*ids, *passed_on}
    missing = [name for name in schema.names if name not in columns and name not in optional]
    if missing:
        raise UdfError(
            f"{location}: {names(missing)} is declared in the schema but was not returned; "
            f"returned: {names(columns, 20)}. Return it, or remove it from the schema"
        )
    fields, arrays = [], []
    for field in schema:
        if field.name in columns and field.name not in passed_on:
            fields.append(field)
            arrays.append(fitted(columns[field.name], field, location, pinned))
    lengths = {field.name: len(array) for field, array in zip(fields, arrays)}
    if len(set(lengths.values())) > 1:
        raise UdfError(f"{location}: the columns returned differ in length: {lengths}")
    if not arrays:
        return pa.table({"rows": pa.nulls(rows)}).select([])
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def result_columns(
    result: Any, schema: pa.Schema, id: str, location: str
) -> tuple[Mapping[str, Any], int]:
    """Return the columns of a result, and its number of rows if it is a table."""
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        return _by_name(result, schema, location), result.num_rows
    pandas, reader = sys.modules.get("pandas"), None
    if isinstance(result, Mapping):
        for name in schema.names:
            if pandas is not None and isinstance(result.get(name), pandas.Series):
                _check_index(result[name].index, location)
        return dict(result), 0
    if pandas is not None and isinstance(result, pandas.DataFrame):
        columns, index = {str(name): result[name] for name in result.columns}, result.index
        if id in columns:
            return columns, len(result)
        if id in index.names:
            return {**columns, id: index.get_level_values(id)}, len(result)
        _check_index(index, location)
        return columns, len(result)
    if hasattr(result, "get_columns"):  # of polars, as Series, whose types tell more than Arrow's
        return {column.name: column for column in result.get_columns()}, len(result)
    if hasattr(result, "__arrow_c_stream__"):
        with contextlib.suppress(pa.ArrowInvalid):  # a stream of single values, such as a Series
            reader = pa.RecordBatchReader.from_stream(result)
        if reader is not None:
            table = reader.read_all()  # errors of the user's reader propagate
            return _by_name(table, schema, location), table.num_rows
    raise UdfError(
        f"{location}: returned {type(result).__name__}; expected a table (pyarrow, pandas, "
        "polars, a DuckDB relation or any object with __arrow_c_stream__) or a dict of column to "
        "array"
    )


def _by_name(rows: Any, schema: pa.Schema, location: str) -> Mapping[str, Any]:
    returned = rows.schema.names
    if twice := [name for name in schema.names if returned.count(name) > 1]:
        raise UdfError(
            f"{location}: returned several columns named {names(twice)}. Return one of each"
        )
    return dict(zip(returned, rows.columns))


def _check_index(index: Any, location: str) -> None:
    """Refuse a pandas index that does not count from 0: its rows may be in another order.

    A named index holds values of a column, for example after `set_index` and `groupby`.
    """
    if index.name is not None or not index.equals(sys.modules["pandas"].RangeIndex(len(index))):
        raise UdfError(
            f"{location}: returned a pandas index that is named or does not count from 0, so "
            "its rows cannot be matched. Return a data frame with the id; if the rows are in the "
            "batch's order, use reset_index(drop=True) or Series.to_numpy()"
        )


def put_together(results: Sequence[pa.Table], schema: pa.Schema, location: str) -> pa.Table:
    """Concatenate the results of a call."""
    if not results:
        return empty_table(schema)
    columns = dict.fromkeys(tuple(result.column_names) for result in results)
    if len(columns) > 1:
        some, others, *_ = map(names, columns)
        raise UdfError(
            f"{location}: one result has the columns {some}, another has {others}. Return the same "
            "columns in all results of a call"
        )
    return pa.concat_tables(results)
