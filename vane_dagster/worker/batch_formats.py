"""Conversion of batches to the user's format, and of results to the declared schema."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import SchemaError, StageError, UdfError, names
from vane_dagster.pipeline.options import BatchFormat
from vane_dagster.types.frames import to_pandas, to_polars
from vane_dagster.types.kinds import as_lists, is_list, is_list_view, is_number, is_text
from vane_dagster.types.row_values import as_found, row_values
from vane_dagster.types.schema import empty_table, type_name
from vane_dagster.types.tensors import (
    as_storage,
    from_lists,
    from_ndarray,
    holds_tensors,
    is_element,
    is_multidimensional,
    is_tensor,
    nested,
    numbers,
    object_array,
    row_shape,
    stacked,
    storage_type,
    to_ndarray,
    unsliced,
    whole,
    with_null_rows,
)
from vane_dagster.worker.conversion_advice import explained, mismatch
from vane_dagster.worker.frameworks import without_tensor
from vane_dagster.worker.id_checks import are_distinct_and_among, repeated_or_null
from vane_dagster.worker.protocol import CallUdf, Work


def copied(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Copy a column into memory that nothing else shares.

    This is a plain memory copy, at about 15 GB/s. It trims slices to their own size. Numbers and
    arrays of numbers become one chunk, so that no format has to copy them again.
    """
    whole = column.num_chunks > 1 and (
        pa.types.is_primitive(column.type) or row_shape(column.type) is not None
    )
    pieces = [column.chunks] if whole else [[chunk] for chunk in column.chunks]
    return pa.chunked_array([pa.concat_arrays(piece) for piece in pieces], column.type)


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
        A `pyarrow.Table`, a dict of column to array or tensor, a `pandas.DataFrame` or a
        `polars.DataFrame`. A column of tensors or of fixed-size lists of numbers is an array of
        shape ``(rows, *shape)``, or a data frame's column of arrays. Lists of variable size are an
        object array of arrays, or a list of tensors.

    Raises:
        StageError: If the worker lacks the format's package, or polars has no type for a column.
    """
    if form == "pyarrow":
        return batch
    if form == "pandas":
        return to_pandas(batch)
    if form == "polars":
        _package("polars", form)
        try:
            return to_polars(batch)
        except SchemaError as error:
            raise StageError(str(error)) from error
    if form == "torch":
        torch = _package("torch", form)
        return {name: _to_torch(batch.column(name), torch) for name in batch.column_names}
    return {name: _read_only(_to_numpy(batch.column(name))) for name in batch.column_names}


def _package(name: str, form: str) -> Any:
    """Import the package of a format.

    Raises:
        StageError: If the worker cannot import it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise StageError(
            f"batch_format={form!r} needs the package {name!r}, which this worker cannot import: "
            f"{error}. Install it in the environment of the workers, or declare another format"
        ) from error


def _to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as an array, or as an object array if a row is no number, text or array."""
    kind = column.type
    if row_shape(kind) is not None:
        array = to_ndarray(whole(column))
        if array is not None:
            return array
        if is_multidimensional(kind):
            return object_array(row_values(column))
    if holds_tensors(kind):
        return object_array(row_values(column))
    found: npt.NDArray[Any] = column.to_numpy()
    return found


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if array.dtype != object:
        array.flags.writeable = False
    return array


def _to_torch(column: pa.ChunkedArray, torch: Any) -> Any:
    """Return a column of numbers as a tensor, other columns as a list."""
    kind = column.type
    shape = row_shape(kind)
    element = kind.value_type if shape is None and is_list(kind) else kind
    if not is_element(element if shape is None else shape.value_type):
        return row_values(column)
    if shape is not None and not column.null_count:
        array = to_ndarray(whole(column))
    elif shape is None and element is kind:
        array = numbers(whole(column))
    else:
        array = None
    if array is not None and array.dtype != object:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    rows = row_values(column) if is_multidimensional(kind) else _to_numpy(column)
    if array is not None:  # bools with nulls
        return list(rows)
    # Bools with nulls are objects, and rows with a null list inside are nested lists.
    if any(isinstance(row, list) or (row is not None and row.dtype == object) for row in rows):
        return row_values(column)
    return [None if row is None else torch.tensor(row) for row in rows]


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
    columns, rows, index = result_columns(result, schema, id, location)
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


def result_columns(
    result: Any, schema: pa.Schema, id: str, location: str
) -> tuple[Mapping[str, Any], int, npt.NDArray[np.int64] | None]:
    """Return the columns of a result, its number of rows if it is a table, and its index.

    Args:
        result: See `from_result`.
        schema: The columns whose index counts.
        id: The id that matches output rows to input rows.
        location: Stage and fragment, for messages.

    Raises:
        UdfError: If the result has another form.
    """
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        return dict(zip(result.schema.names, result.columns)), result.num_rows, None
    pandas = sys.modules.get("pandas")
    if isinstance(result, Mapping):
        index = None if pandas is None else _series_index(result, schema, id, pandas, location)
        columns, rows = dict(result), 0
    elif pandas is not None and isinstance(result, pandas.DataFrame):
        index = result.index
        others = [name for name in result.columns if not _is_plain(result[name], str(name), schema)]
        table = pa.Table.from_pandas(result.drop(columns=others), preserve_index=False)
        columns, rows = dict(zip(table.column_names, table.columns)), len(result)
        columns |= {str(name): result[name] for name in others}
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


def _is_plain(series: Any, name: str, schema: pa.Schema) -> bool:
    """Return whether Arrow itself converts a column of a data frame, without its declared type."""
    if name not in schema.names or pa.types.is_nested(schema.field(name).type):
        return False
    return not _holds_ndarrays(series)


def _holds_ndarrays(series: Any) -> bool:
    """Return whether a column of a data frame has arrays of several dimensions as values."""
    if getattr(series, "ndim", 0) != 1 or series.dtype != object:
        return False
    first = next((value for value in series if value is not None), None)
    return getattr(host_array(first), "ndim", 0) > 1


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
        return empty_table(schema)
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
    """Convert one column of results to the type of its field.

    Numbers are cast to the declared number type if they fit, text to text, lists to lists; nothing
    else is converted. None and masked values become null. NaN stays a number, except in pandas,
    where it stands for a missing value. An array of shape (n, 1) is a column of scalars.

    Args:
        values: The values of the rows: a sequence, an array, a tensor, a Series or an Arrow array.
        field: The declared column.
        location: Stage and fragment, for messages.

    Returns:
        The column, in memory that nothing else shares.

    Raises:
        UdfError: If they do not fit; it names the column, the expected and the found type, and the
            conversion that would help.
    """
    kind = field.type
    try:
        array = _to_arrow(values, kind)
        if is_tensor(kind):
            array = _each_chunk(array, lambda chunk: _as_tensors(chunk, kind))
        elif is_tensor(array.type):
            array = _each_chunk(
                array, nested if is_multidimensional(kind) else lambda chunk: chunk.storage
            )
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        _refuse(field, location, _kind_of(values), f": {explained(error, values, kind)}", error)
    if array.type != kind:
        if not _same_family(array.type, kind):
            _refuse(field, location, str(array.type), f". {mismatch(array.type, kind, field.name)}")
        try:
            if is_list_view(array.type):
                array = as_lists(array)
            elif _has_view_values(array.type):  # polars' categories; Arrow can't decode them
                array = array.cast(pa.dictionary(array.type.index_type, pa.string()))
            array = array.cast(kind)
        except pa.ArrowException as error:
            text = f" with values that do not fit: {error}"
            if is_number(array.type):
                text += f". {mismatch(array.type, kind, field.name)}"
            _refuse(field, location, str(array.type), text, error)
    column = array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    shared = isinstance(values, (pa.Array, pa.ChunkedArray)) or any(
        hasattr(values, name) for name in ("dtype", "__arrow_c_stream__")
    )
    return copied(column) if shared else column


def _refuse(
    field: pa.Field, location: str, found: str, text: str, error: Exception | None = None
) -> NoReturn:
    wanted = type_name(field.type) if is_tensor(field.type) else str(field.type)
    raise UdfError(
        f"{location}: column {field.name!r}: expected {wanted}, found {found}{text}"
    ) from error


def _each_chunk(array: Any, convert: Any) -> Any:
    if isinstance(array, pa.ChunkedArray):
        if not array.num_chunks:
            return pa.chunked_array([convert(array.combine_chunks())])
        return pa.chunked_array([convert(chunk) for chunk in array.chunks])
    return convert(array)


def _as_tensors(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    if pa.types.is_null(array.type):
        return array.cast(kind)
    if is_list_view(array.type):
        array = as_lists(array).combine_chunks()
    if not is_list(array.type) and not is_tensor(array.type):
        raise TypeError(f"values are {array.type}, one for each row")
    return from_lists(array, kind)


def _to_arrow(values: Any, kind: pa.DataType) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, (str, bytes, Mapping)):
        raise TypeError("a single value, not one for each row")
    if hasattr(values, "columns") and (hasattr(values, "ndim") or exports_stream(values)):
        raise TypeError("a data frame. Return one of its columns, or its values by to_numpy()")
    if exports_stream(values):
        return pa.chunked_array(values)
    if not _is_pandas(values):
        values = host_array(values)
    if isinstance(values, memoryview):
        values = np.asarray(values)
    if getattr(values, "ndim", 1) > 1 and values.dtype != object:
        return _from_array(values, kind)
    if getattr(getattr(values, "dtype", None), "names", None):  # a structured array
        values = [dict(zip(values.dtype.names, row)) for row in values.tolist()]
    if hasattr(values, "dtype") and values.dtype != object:
        return pa.array(values)
    return _from_rows(plain_rows(values), kind)


def _from_array(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Convert an array of several dimensions; a scalar's dimension of 1 is squeezed."""
    if is_list(kind) or is_tensor(kind):
        return from_ndarray(values, kind)
    if set(values.shape[1:]) == {1}:
        return pa.array(values.reshape(-1))
    one = "a vector" if values.ndim == 2 else "an array"
    name = f'vd.tensor("{values.dtype.name}", {tuple(int(n) for n in values.shape[1:])})'
    raise TypeError(f"an array of shape {values.shape} has {one} a row. Declare {name}")


_PLAIN = frozenset({str, int, float, bool, bytes, list, dict, type(None)})
"""Types of values that are no arrays."""


def plain_rows(values: Any) -> list[Any]:
    """Return the values of rows, with None for masked and missing ones, arrays as numpy's."""
    missing = values.isna() if _is_pandas(values) else ()
    rows = [value if type(value) in _PLAIN else host_array(value) for value in values]
    for place in np.flatnonzero(missing):
        rows[place] = None
    return rows


def _from_rows(rows: list[Any], kind: pa.DataType) -> pa.Array:
    first = next((row for row in rows if row is not None), None)
    ndim = first.ndim if isinstance(first, np.ndarray) else None
    if ndim is not None and all(isinstance(row, (np.ndarray, type(None))) for row in rows):
        if row_shape(kind) is not None or ndim > 1 or not pa.types.is_nested(kind):
            return _from_arrays(rows, kind)
        rows = [row.tolist() if isinstance(row, np.ma.MaskedArray) else row for row in rows]
    if is_tensor(kind):
        return _tensors_from_lists(rows, kind)
    if holds_tensors(kind):
        return _nested_rows(rows, kind)
    if is_number(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind):
        return pa.array(rows)  # inferred, to detect a wrong type instead of converting it
    return _nested_values(rows, kind)


def _nested_values(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert lists and structs; floats in place of integers stay floats, for a checked cast."""
    try:
        found = pa.infer_type(rows)
    except pa.ArrowException:  # maps, and arrays of several types
        return pa.array(rows, kind)
    return pa.array(rows, as_found(kind, found))


def _from_arrays(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert an array a row: one array of all if they have one shape."""
    array = stacked(rows)
    if array is not None:
        valid = pa.array(array) if array.ndim == 1 else _from_array(array, kind)
        return with_null_rows(valid, [row is None for row in rows])
    if not pa.types.is_nested(kind) and not is_tensor(kind):
        raise TypeError("values are arrays")
    if row_shape(kind) is not None:
        shapes = list(dict.fromkeys(row.shape for row in rows if row is not None))
        raise ValueError(f"rows have the shapes {names(shapes)}; expected one shape")
    return _nested_values([None if row is None else row.tolist() for row in rows], kind)


def _tensors_from_lists(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert nested lists to tensors, or flat lists, which are Arrow's values of a tensor."""
    row, depth = next((row for row in rows if row is not None), ()), 0
    while isinstance(row, (list, tuple, np.ndarray)):
        depth += 1
        row = row[0] if len(row) else None
    lists = kind.value_type
    for size in reversed(kind.shape):
        lists = pa.list_(lists, size)
    return _nested_values(rows, storage_type(kind) if depth == 1 else lists)


def _nested_rows(rows: list[Any], kind: pa.DataType) -> pa.Array:
    """Convert structs and lists with tensors inside, which Arrow does not convert itself."""
    is_null = [row is None for row in rows]
    given = [row for row in rows if row is not None]
    if pa.types.is_struct(kind):
        columns = [_inner([row.get(field.name) for row in given], field) for field in kind]
        return with_null_rows(pa.StructArray.from_arrays(columns, fields=list(kind)), is_null)
    if pa.types.is_list(kind):
        values = _inner([value for row in given for value in row], kind.value_field)
        offsets = np.cumsum([0, *(len(row) for row in given)], dtype=np.int32)
        lists = pa.ListArray.from_arrays(pa.array(offsets), values)
        return with_null_rows(lists, is_null)
    raise TypeError(f"{kind} has tensors inside, which only lists and structs can")


def _inner(values: list[Any], field: pa.Field) -> pa.Array:
    array = _from_rows(plain_rows(values), field.type)
    if is_tensor(field.type):
        array = _as_tensors(array, field.type)
    return array.cast(field.type)


def host_array(value: Any) -> Any:
    """Convert a tensor or image to an array in host memory; return other values unchanged.

    An array without dimensions, such as a loss, becomes a scalar, and a masked one None.

    Raises:
        TypeError: If numpy has no such numbers.
    """
    value = without_tensor(value)
    if isinstance(value, np.ndarray):
        return value if value.ndim else None if value is np.ma.masked else value[()]
    if isinstance(value, np.generic) or not hasattr(value, "__array__") or _is_pandas(value):
        return value
    return host_array(np.asarray(value))


def _is_pandas(values: Any) -> bool:
    pandas = sys.modules.get("pandas")
    if pandas is None:
        return False
    arrays = (pandas.Series, pandas.Index, pandas.api.extensions.ExtensionArray)
    return isinstance(values, (*arrays, pandas.DataFrame))


def exports_stream(values: Any) -> bool:
    """Return whether a column is read as an Arrow stream. A pandas Series is not.

    pandas exports NaN as a number, and cannot export columns of objects.
    """
    return hasattr(values, "__arrow_c_stream__") and not _is_pandas(values)


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
    if (is_list(found) or is_list_view(found)) and is_list(wanted):
        return _same_family(found.value_type, wanted.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        fields = {field.name: field.type for field in found}
        return fields.keys() == set(wanted.names) and all(
            _same_family(fields[field.name], field.type) for field in wanted
        )
    families = (is_number, is_text, pa.types.is_boolean, pa.types.is_temporal, _is_binary)
    return any(family(found) and family(wanted) for family in families)


def _has_view_values(kind: pa.DataType) -> bool:
    return bool(pa.types.is_dictionary(kind) and pa.types.is_string_view(kind.value_type))


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


def is_equal(some: pa.ChunkedArray, other: pa.ChunkedArray) -> bool:
    """Return whether columns are equal, but for what formats such as pandas confuse.

    NaN equals null, and integers among nulls equal others that have the same double.
    """
    some, other = as_storage(some), as_storage(other)
    if len(some) != len(other) or some.equals(other):
        return len(some) == len(other)
    if pa.types.is_floating(some.type):
        return bool(_without_nan(some).equals(_without_nan(other)))
    if pa.types.is_integer(some.type) and other.null_count:
        some, other = (column.cast(pa.float64(), safe=False) for column in (some, other))
        return bool(some.equals(other))
    if is_list(some.type):
        same = pc.list_value_length(some).equals(pc.list_value_length(other))
        return same and is_equal(pc.list_flatten(some), pc.list_flatten(other))
    if pa.types.is_struct(some.type):
        same = some.is_null().equals(other.is_null())
        return same and all(
            is_equal(pc.struct_field(some, index), pc.struct_field(other, index))
            for index in range(some.type.num_fields)
        )
    return False


def _without_nan(numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.if_else(pc.is_nan(numbers), None, numbers)


def changed_input(column: str, location: str) -> UdfError:
    """Return the error of a column that is passed on and was returned with other values.

    Args:
        column: The column.
        location: Stage and fragment.
    """
    return UdfError(
        f"{location}: column {column!r} is passed on from the input by include_columns, and other "
        "values were returned for it. Declare it in the schema, or return it unchanged"
    )


def _carried(output: pa.Table, batch: pa.Table, origin: str, work: Work, op: CallUdf) -> pa.Table:
    """Add the ids that the batch's rows were made from, and the columns that are passed on."""
    ids, given, included = output.column(origin), batch.column(op.ids[0]), op.carried(work)
    if not included and len(op.ids) == 1:
        return output
    positions = None if ids.equals(given) else pc.index_in(ids, value_set=given.combine_chunks())
    rows = batch if positions is None else unsliced(batch)
    for name in (*op.ids[1:], *included):
        column = rows.column(name)
        carried = column if positions is None else column.take(positions)
        if name in output.column_names:
            if name in included and not is_equal(output.column(name), carried):
                raise changed_input(name, work.location)
            output = output.drop_columns([name])
        output = output.append_column(name, carried)
    return output
