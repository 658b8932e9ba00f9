"""Results of calls with batches, as tables of the declared schema."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster.errors import UdfError, names
from vane_dagster.types.schema import empty_table
from vane_dagster.worker.conversion import check_pinned, fitted
from vane_dagster.worker.conversion_advice import class_name


@dataclass(frozen=True)
class Result:
    """The result of one call, or one of the results that a call yielded.

    Attributes:
        rows: The rows as a table of the declared schema, without the ids that the user left out.
        index: For a pandas data frame without the id, the row positions in the batch that its index
            holds, -1 for an entry that is no position; None if the rows have no index.
    """

    rows: pa.Table
    index: npt.NDArray[np.int64] | None = None


def from_result(
    result: Any,
    schema: pa.Schema,
    ids: Collection[str],
    id: str,
    location: str,
    passed_on: Collection[str] = (),
    pinned: bool = False,
) -> Result:
    """Convert a user's result to a table of `schema`, without the ids that it leaves out.

    The table is a copy, because a function may keep its arrays and refill them for the next batch.
    """
    columns, rows, index = result_columns(result, schema, id, location)
    if pinned:
        check_pinned(columns, schema, location)
    optional = {*ids, *passed_on}
    missing = [name for name in schema.names if name not in columns and name not in optional]
    if missing:
        raise UdfError(
            f"{location}: {names(missing)} is declared in the schema and was not returned; "
            f"returned: {names(columns, 20)}. Return it, or take it out of the schema"
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
        return Result(pa.table({"rows": pa.nulls(rows)}).select([]), index)
    return Result(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), index)


def result_columns(
    result: Any, schema: pa.Schema, id: str, location: str
) -> tuple[Mapping[str, Any], int, npt.NDArray[np.int64] | None]:
    """Return the columns of a result, its number of rows if it is a table, and its index."""
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        return _by_name(result, schema, location), result.num_rows, None
    pandas = sys.modules.get("pandas")
    if isinstance(result, Mapping):
        declared = [result[name] for name in schema.names if name in result]
        indexes = [v.index for v in declared if pandas and isinstance(v, pandas.Series)]
        if not all(_counts_up(_places(index)) for index in indexes):
            raise _unmatched(len(indexes[0]), location)
        return dict(result), 0, _places(indexes[0]) if indexes and id not in result else None
    if pandas is not None and isinstance(result, pandas.DataFrame):
        columns, index = {str(name): result[name] for name in result.columns}, result.index
        if id in columns:
            return columns, len(result), None
        if id in index.names:
            return {**columns, id: index.get_level_values(id)}, len(result), None
        return columns, len(result), _places(index)
    if hasattr(result, "__arrow_c_stream__"):
        table = _streamed(result, location)
        return _by_name(table, schema, location), table.num_rows, None
    raise UdfError(
        f"{location}: returned {class_name(result)}; expected a table (pyarrow, pandas, polars, a "
        "DuckDB relation or any other object with __arrow_c_stream__) or a dict of column to array"
    )


def _by_name(rows: Any, schema: pa.Schema, location: str) -> Mapping[str, Any]:
    found = rows.schema.names
    if twice := [name for name in schema.names if found.count(name) > 1]:
        raise UdfError(f"{location}: returned several columns {names(twice)}. Return one of them")
    return dict(zip(found, rows.columns))


def _streamed(result: Any, location: str) -> pa.Table:
    """Read the table that a result exports. Errors of the user's reader propagate."""
    try:
        reader = pa.RecordBatchReader.from_stream(result)
    except pa.ArrowInvalid as error:  # a stream of single values, as of a polars Series
        raise UdfError(
            f"{location}: returned {class_name(result)}, which is not a table: {error}. Return a "
            "dict of column to array"
        ) from error
    return reader.read_all()


def _places(index: Any) -> npt.NDArray[np.int64]:
    """Return the row positions that a pandas index holds, -1 for an entry that is no position.

    A named index holds values of a column, as after `set_index` and `groupby`.
    """
    if index.inferred_type != "integer" or index.hasnans or index.name is not None:
        return np.full(len(index), -1, np.int64)
    places: npt.NDArray[np.int64] = index.to_numpy(np.int64)
    return places


def _counts_up(places: npt.NDArray[np.int64]) -> bool:
    """Return whether positions are 0, 1, 2 and so on, as in a default index."""
    return bool(np.array_equal(places, np.arange(len(places))))


def _unmatched(rows: int, location: str) -> UdfError:
    return UdfError(
        f"{location}: a pandas index came back that is not that of the {rows} rows expected, in "
        "their order and without a name, so the rows cannot be matched. Return a data frame with "
        "the id; if the rows are in the batch's order, use reset_index(drop=True), or "
        "Series.to_numpy()"
    )


def put_together(
    results: Sequence[Result], places: Sequence[int], schema: pa.Schema, location: str
) -> pa.Table:
    """Concatenate the results of a call.

    Data frames without the id are in the order of the input if their index says so. A default index
    does only if all positions are expected.
    """
    if not results:
        return empty_table(schema)
    columns = dict.fromkeys(tuple(result.rows.column_names) for result in results)
    if len(columns) > 1:
        some, others, *_ = ([*map(repr, each)] for each in columns)
        raise UdfError(
            f"{location}: one result has the columns {', '.join(some)} and another "
            f"{', '.join(others) or 'none'}. Return the same columns in all results of a call"
        )
    rows = pa.concat_tables([result.rows for result in results])
    if all(result.index is None for result in results) or rows.num_rows != len(places):
        return rows
    pieces = [np.arange(r.rows.num_rows) if r.index is None else r.index for r in results]
    if np.array_equal(np.concatenate(pieces), places):
        return rows
    if _counts_up(np.asarray(places, np.int64)) and all(map(_counts_up, pieces)):
        return rows
    raise _unmatched(len(places), location)
