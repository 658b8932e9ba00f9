"""Conversion of batches to the user's format, and of results to the declared schema."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import UdfError, names
from vane_dagster.pipeline.options import BatchFormat
from vane_dagster.types.kinds import is_list, is_number, is_text
from vane_dagster.worker.conversion_advice import explained, mismatch
from vane_dagster.worker.frameworks import without_tensor
from vane_dagster.worker.id_checks import are_distinct_and_among, repeated_or_null
from vane_dagster.worker.protocol import CallUdf, Work


def copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Copy a column into memory that nothing else shares.

    This is a plain memory copy, at about 15 GB/s. It trims slices to their own size.
    """
    return pa.chunked_array([pa.concat_arrays([c]) for c in column.chunks], column.type)


def given_batch(batch: pa.Table, form: BatchFormat) -> Any:
    """Convert a copy of a batch to the format of the user's code, for one call.

    The code may write into the batch, for example through `torch.from_numpy`, which ignores
    read-only memory. Retries, halves of the batch and other stages must not see such writes.

    Args:
        batch: The rows.
        form: The format that the user asked for.
    """
    own = [copied(column) for column in batch.columns]
    return to_format(pa.Table.from_arrays(own, schema=batch.schema), form)


def to_format(batch: pa.Table, form: BatchFormat) -> Any:
    """Convert a batch to the format that the user asked for.

    Args:
        batch: The rows.
        form: The format.

    Returns:
        A `pyarrow.Table`, a dict of column to array, or a `pandas.DataFrame`. In the dict, a column
        of fixed-size lists of numbers is an array of shape (rows, size).
    """
    if form == "pyarrow":
        return batch
    if form == "pandas":
        return batch.to_pandas()
    return {name: _to_numpy(batch.column(name)) for name in batch.column_names}


def row_values(column: pa.ChunkedArray) -> Sequence[Any]:
    """Return the Python value of each row of a column, for functions that get one row at a time."""
    return list(column.to_pylist())


def _to_numpy(column: pa.ChunkedArray) -> Any:
    kind = column.type
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        array = column.combine_chunks()
        values = array.flatten()
        if pa.types.is_primitive(kind.value_type) and not values.null_count:
            return values.to_numpy(zero_copy_only=False).reshape(len(array), kind.list_size)
    return column.to_numpy()


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
) -> Result:
    """Convert a user's result to a table of `schema`, without the ids that it leaves out.

    The table is a copy, because a function may keep its arrays and refill them for the next batch.

    Args:
        result: A table in any form that exports Arrow streams (`__arrow_c_stream__`): pyarrow,
            polars, DuckDB, nanoarrow; a pandas data frame; or a dict of column to array.
        schema: The declared columns with the ids.
        ids: The ids, which may be left out.
        id: The id among them that matches output rows to input rows.
        location: Stage and fragment, for messages.
        passed_on: Columns that are taken from the input. They may be left out, or be in a form that
            does not hold all values of their type.

    Raises:
        UdfError: If the result has another form, a column is missing, or a type does not fit.
    """
    columns, rows, index = _columns(result, schema, id, location)
    optional = {*ids, *passed_on}
    missing = [name for name in schema.names if name not in columns and name not in optional]
    if missing:
        raise UdfError(
            f"{location}: {names(missing)} is declared in the schema and was not returned; "
            f"returned: {names(columns, 20)}. Return it, or take it out of the schema"
        )
    fields, arrays = [], []
    for field in schema:
        if field.name in columns:
            try:
                array = fitted(columns[field.name], field, location)
            except UdfError:
                if field.name in passed_on:
                    continue
                raise
            fields.append(field)
            arrays.append(array)
    lengths = {field.name: len(array) for field, array in zip(fields, arrays)}
    if len(set(lengths.values())) > 1:
        raise UdfError(f"{location}: the columns returned differ in length: {lengths}")
    if not arrays:
        return Result(pa.table({"rows": pa.nulls(rows)}).select([]), index)
    return Result(pa.Table.from_arrays(arrays, schema=pa.schema(fields)), index)


def _columns(
    result: Any, schema: pa.Schema, id: str, location: str
) -> tuple[Mapping[str, Any], int, npt.NDArray[np.int64] | None]:
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        return dict(zip(result.schema.names, result.columns)), result.num_rows, None
    pandas = sys.modules.get("pandas")
    if isinstance(result, Mapping):
        index = None if pandas is None else _series_index(result, schema, id, pandas, location)
        columns, rows = dict(result), 0
    elif pandas is not None and isinstance(result, pandas.DataFrame):
        index = result.index
        table = pa.Table.from_pandas(result, preserve_index=False)
        columns, rows = dict(zip(table.column_names, table.columns)), table.num_rows
    elif hasattr(result, "__arrow_c_stream__"):
        table = _streamed(result, location)
        return dict(zip(table.column_names, table.columns)), table.num_rows, None
    else:
        raise UdfError(
            f"{location}: returned {_qualified(result)}; expected a table (pyarrow, pandas, "
            "polars, a DuckDB relation or any other object with __arrow_c_stream__) or a dict of "
            "column to array"
        )
    if index is None or id in columns:
        return columns, rows, None
    if id in index.names:
        return {**columns, id: index.get_level_values(id)}, rows, None
    return columns, rows, _places(index)


def _streamed(result: Any, location: str) -> pa.Table:
    """Read the table that a result exports. Errors of the user's reader propagate."""
    try:
        reader = pa.RecordBatchReader.from_stream(result)
    except pa.ArrowInvalid as error:  # a stream of single values, as of a polars Series
        raise UdfError(
            f"{location}: returned {_qualified(result)}, which is not a table: {error}. Return a "
            "dict of column to array"
        ) from error
    return reader.read_all()


def _qualified(value: Any) -> str:
    """Return a class name with its package, because several packages have a DataFrame."""
    kind = type(value)
    package = kind.__module__.split(".")[0]
    return kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"


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


def _series_index(
    result: Mapping[str, Any], schema: pa.Schema, id: str, pandas: Any, location: str
) -> Any:
    """Return the index that the pandas series of a dict share; None if it holds no series.

    Arrays have no index. They are in the order of the series only if the id is one of the series.
    """
    declared = {name: result[name] for name in schema.names if name in result}
    series = {name: v for name, v in declared.items() if isinstance(v, pandas.Series)}
    moved = [
        name
        for name, v in series.items()
        if not _counts_up(_places(v.index)) or id in v.index.names
    ]
    if not moved:
        return next((v.index for v in series.values()), None)
    index = series[moved[0]].index
    for name, column in declared.items():
        own = column.index if name in series else None
        same = id in moved if own is None else own.equals(index) and own.names == index.names
        if not same:
            raise UdfError(
                f"{location}: column {moved[0]!r} is a pandas Series whose index has a name or is "
                f"not 0 to {len(index) - 1} in order, and column {name!r} has another or none, so "
                "their rows cannot be matched. Return a data frame, or arrays in one order, by "
                "Series.to_numpy()"
            )
    return index


def put_together(
    results: Sequence[Result], places: Sequence[int], schema: pa.Schema, location: str
) -> pa.Table:
    """Concatenate the results of a call.

    Data frames without the id are sorted by their index if they have as many rows as the input. A
    default index means input order only if all positions are expected.

    Args:
        results: The results that the call returned or yielded.
        places: The positions in the batch of the rows that are expected.
        schema: The schema of the empty table, if there are no results.
        location: Stage and fragment, for messages.

    Raises:
        UdfError: If an index does not hold each of these positions once.
    """
    if not results:
        return schema.empty_table()
    rows = pa.concat_tables([result.rows for result in results])
    if all(result.index is None for result in results) or rows.num_rows != len(places):
        return rows
    complete = _counts_up(np.asarray(places, np.int64))
    if complete and all(r.index is None or _counts_up(r.index) for r in results):
        return rows
    index = np.concatenate(
        [np.arange(r.rows.num_rows) if r.index is None else r.index for r in results]
    )
    order = np.argsort(index, kind="stable")
    if not np.array_equal(index[order], places):
        expected = f"0 to {len(places) - 1}" if complete else names(places)
        ways = "reset_index(drop=True), or Series.to_numpy()" if complete else "Series.to_numpy()"
        raise UdfError(
            f"{location}: a data frame came back without the id, and its index is not that of the "
            f"rows expected, {expected} in any order and without a name, so its rows cannot be "
            "matched to those given. Return the id, or keep the batch's index; if the rows are in "
            f"the batch's order, use {ways}"
        )
    return rows if np.array_equal(index, places) else rows.take(order)


def fitted(values: Any, field: pa.Field, location: str) -> pa.ChunkedArray:
    """Convert one column of a result to the type of its field.

    Args:
        values: An array, a tensor, an Arrow column, or a list with a value for each row.
        field: The column's name and type.
        location: Stage and fragment, for messages.

    Raises:
        UdfError: If the values do not fit the type.
    """
    kind = field.type
    try:
        array = _to_arrow(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UdfError(
            f"{location}: column {field.name!r}: expected {kind}, found {_kind_of(values)}: "
            f"{explained(error, values, kind)}"
        ) from error
    if array.type != kind:
        if not _same_family(array.type, kind):
            raise UdfError(
                f"{location}: column {field.name!r}: expected {kind}, found {array.type}. "
                f"{mismatch(array.type, kind, field.name)}"
            )
        try:
            if _is_list_view(array.type):
                array = _as_lists(array)
            elif _has_view_values(array.type):  # polars' categories; Arrow can't decode them
                array = array.cast(pa.dictionary(array.type.index_type, pa.string()))
            array = array.cast(kind)
        except pa.ArrowException as error:
            raise UdfError(
                f"{location}: column {field.name!r}: expected {kind}, found {array.type} with "
                f"values that do not fit: {error}"
            ) from error
    column = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    shared = isinstance(values, (pa.Array, pa.ChunkedArray)) or any(
        hasattr(values, name) for name in ("dtype", "__arrow_c_stream__")
    )
    return copied(column) if shared else column


def _to_arrow(values: Any, kind: pa.DataType) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, (str, bytes, Mapping)):
        raise TypeError("a single value, not one for each row")
    if hasattr(values, "columns") and (hasattr(values, "ndim") or _exports_stream(values)):
        raise TypeError("a data frame. Return one of its columns, or its values by to_numpy()")
    if _exports_stream(values):
        return pa.chunked_array(values)
    values = without_tensor(values)
    if isinstance(values, memoryview):
        values = np.asarray(values)
    if getattr(values, "ndim", 1) == 2:
        return _matrix(values, kind)
    if getattr(values, "ndim", 1) > 2:
        values = list(values.tolist())
    if getattr(getattr(values, "dtype", None), "names", None):  # a structured array
        values = [dict(zip(values.dtype.names, row)) for row in values.tolist()]
    if hasattr(values, "dtype") and values.dtype != object:
        return pa.array(values)
    values = [without_tensor(value) for value in values]
    first = values[0] if values else None
    is_array = getattr(first, "ndim", 0) and not isinstance(first, memoryview)
    if is_array and not pa.types.is_nested(kind):
        raise TypeError("values are arrays")
    if is_number(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind):
        return pa.array(values)  # inferred, to detect a wrong type instead of converting it
    return pa.array(values, kind)


def _exports_stream(values: Any) -> bool:
    """Return whether a column is read as an Arrow stream. A pandas Series is not.

    pandas exports NaN as a number, and cannot export columns of objects.
    """
    pandas = sys.modules.get("pandas")
    is_pandas = pandas is not None and isinstance(values, (pandas.Series, pandas.Index))
    return hasattr(values, "__arrow_c_stream__") and not is_pandas


def _matrix(values: Any, kind: pa.DataType) -> pa.Array:
    flat = pa.array(values.reshape(-1))
    width = values.shape[1]
    if pa.types.is_fixed_size_list(kind) and kind.list_size != width:
        raise ValueError(f"vectors have {width} elements, not {kind.list_size}")
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind)):
        raise TypeError(f"an array of shape {values.shape} has a vector a row")
    return pa.FixedSizeListArray.from_arrays(flat, width)


def _kind_of(values: Any) -> str:
    shape = getattr(values, "shape", None)
    if shape is not None:
        return f"{type(values).__name__} of {getattr(values, 'dtype', '?')}, shape {tuple(shape)}"
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        return f"{type(values).__name__} of {type(values[0]).__name__}"
    return type(values).__name__


def _same_family(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether a cast keeps the meaning: number to number, text to text, list to list."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(found):
        return _same_family(found.value_type, wanted)
    if (is_list(found) or _is_list_view(found)) and is_list(wanted):
        return _same_family(found.value_type, wanted.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        return {f.name for f in found} == {f.name for f in wanted}
    families = (is_number, is_text, pa.types.is_boolean, pa.types.is_temporal, _is_binary)
    return any(family(found) and family(wanted) for family in families)


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _has_view_values(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind) and pa.types.is_string_view(kind.value_type))


def _as_lists(views: Any) -> pa.ChunkedArray:
    """Convert list views to lists in row order; Arrow's own cast keeps the offsets as they are."""
    chunks = []
    for chunk in views.chunks if isinstance(views, pa.ChunkedArray) else [views]:
        lengths = pc.fill_null(pc.list_value_length(chunk), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        chunks.append(pa.LargeListArray.from_arrays(offsets, chunk.flatten(), mask=chunk.is_null()))
    return pa.chunked_array(chunks, pa.large_list(views.type.value_type))


def _is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    )


def with_ids(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> pa.Table:
    """Check the ids of a call's output against the batch, or copy them if they are left out.

    Args:
        output: The result of `from_result`.
        batch: The input rows, with the ids of the rows that they were made from.
        work: The task: its schema, id and location.
        op: The call: its cardinality, and the names of the batch's ids.

    Returns:
        The output with all ids, as a table of the task's schema.

    Raises:
        UdfError: If a row is missing, duplicated, or has an id that is not in the batch.
    """
    ids = batch.column(op.ids[0])
    origin = op.parent or op.ids[0]
    if origin not in output.column_names:
        if output.num_rows != batch.num_rows or op.parent:
            raise UdfError(_indistinguishable(output, batch, work, op))
        output = output.append_column(origin, ids)
    elif not (returned := output.column(origin)).equals(ids):
        _check_returned(returned, ids, work, op)
    if op.parent and work.id not in output.column_names:
        output = output.append_column(work.id, _numbered(output.column(origin)))
    return _carried(output, batch, origin, work, op).select(work.schema.names).cast(work.schema)


def _indistinguishable(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> str:
    if op.parent:
        return (
            f"{work.location}: {output.num_rows} rows came back without {op.parent!r}, the id of "
            "the row that each was made from. Return it, or name its column as parent_id"
        )
    return (
        f"{work.location}: {output.num_rows} rows came back for {batch.num_rows} and without the "
        f"id {work.id!r}, so they cannot be distinguished. Return one row for each input row, "
        "in order, or return the id"
    )


def _check_returned(
    returned: pa.ChunkedArray, ids: pa.ChunkedArray, work: Work, op: CallUdf
) -> None:
    location = work.location
    complete = len(returned) == len(ids) or op.cardinality == "filter"
    if not op.parent and complete and are_distinct_and_among(returned, ids):
        return
    if op.parent and returned.null_count:
        raise UdfError(
            f"{location}: returned {returned.null_count} rows whose {op.parent!r} is null; "
            "expected the id of the row that each was made from"
        )
    if not op.parent and (wrong := repeated_or_null(returned)):
        raise UdfError(f"{location}: returned {wrong}. Return each id once")
    invented = returned.filter(pc.invert(pc.is_in(returned, value_set=ids)))
    if len(invented):
        raise UdfError(
            f"{location}: returned {len(invented)} ids that it was not given: "
            f"{names(invented.slice(0, 6).to_pylist())}. Return the ids of the batch unchanged"
        )
    if op.cardinality in ("filter", "zero_to_many"):
        return
    lost = ids.filter(pc.invert(pc.is_in(ids, value_set=returned)))
    if len(lost):
        instead = "zero_to_many" if op.parent else "filter"
        raise UdfError(
            f"{location}: {len(lost)} of {len(ids)} rows did not come back: ids "
            f"{names(lost.slice(0, 6).to_pylist())}. Return every row, or declare "
            f'map_batches(..., cardinality="{instead}") if rows may be dropped'
        )


def _numbered(parents: pa.ChunkedArray) -> pa.Array:
    """Make an id for each row: its parent's id, and its number among the rows of that parent."""
    codes = parents.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    starts = np.cumsum(counts) - counts
    numbers = np.empty(len(codes), dtype=np.int64)
    numbers[order] = np.arange(len(codes)) - np.repeat(starts, counts)
    texts = pa.array(numbers).cast(pa.string())
    return pc.binary_join_element_wise(parents.combine_chunks().cast(pa.string()), texts, "-")


def _equal(some: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Return whether columns are equal. NaN equals null: formats such as pandas confuse them."""
    if len(some) != len(other) or some.equals(other):
        return len(some) == len(other)
    if pa.types.is_floating(some.type):
        return bool(_without_nan(some).equals(_without_nan(other)))
    if is_list(some.type):
        same = pc.list_value_length(some).equals(pc.list_value_length(other))
        return same and _equal(pc.list_flatten(some), pc.list_flatten(other))
    if pa.types.is_struct(some.type):
        same = some.is_null().equals(other.is_null())
        return same and all(
            _equal(pc.struct_field(some, index), pc.struct_field(other, index))
            for index in range(some.type.num_fields)
        )
    return False


def _without_nan(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.is_nan(numbers), None, numbers)


def _carried(output: pa.Table, batch: pa.Table, origin: str, work: Work, op: CallUdf) -> pa.Table:
    """Add the ids that the batch's rows were made from, and the columns that are passed on."""
    ids, given, included = output.column(origin), batch.column(op.ids[0]), op.carried(work)
    if not included and len(op.ids) == 1:
        return output
    positions = None if ids.equals(given) else pc.index_in(ids, value_set=given.combine_chunks())
    for name in (*op.ids[1:], *included):
        column = batch.column(name)
        carried = column if positions is None else column.take(positions)
        if name in output.column_names:
            if name in included and not _equal(output.column(name), carried):
                raise UdfError(
                    f"{work.location}: column {name!r} is passed on from the input by "
                    "include_columns, and other values were returned for it. Declare it in the "
                    "schema, or return it unchanged"
                )
            output = output.drop_columns([name])
        output = output.append_column(name, carried)
    return output
