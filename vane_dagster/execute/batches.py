"""Batches as users see them, and what they return made to fit the declared schema."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.declare.kinds import is_list, is_number, is_text
from vane_dagster.declare.stage import BatchFormat
from vane_dagster.errors import UdfError, names
from vane_dagster.execute.ids import are_distinct_and_among, repeated_or_null
from vane_dagster.execute.operations import CallUdf
from vane_dagster.execute.work import Work


def to_format(batch: pa.Table, form: BatchFormat) -> Any:
    """A batch as the user asked for it.

    Returns:
        A `pyarrow.Table`, a dict of column to array, or a `pandas.DataFrame`. A column of
        fixed-size lists of numbers is an array of shape (rows, size) in the dict.
    """
    if form == "pyarrow":
        return batch
    if form == "pandas":
        return batch.to_pandas()
    return {name: _to_numpy(batch.column(name)) for name in batch.column_names}


def _to_numpy(column: pa.ChunkedArray) -> Any:
    kind = column.type
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        array = column.combine_chunks()
        values = array.flatten()
        if pa.types.is_primitive(kind.value_type) and not values.null_count:
            return values.to_numpy(zero_copy_only=False).reshape(len(array), kind.list_size)
    return column.to_numpy()


def from_result(result: Any, schema: pa.Schema, carried: Collection[str], culprit: str) -> pa.Table:
    """What a user's call returned, as a table of `schema`, without the ids that it left out.

    Args:
        result: A `pyarrow.Table` or RecordBatch, a dict of column to array, or a data frame.
        schema: The declared columns with the ids.
        carried: The ids, which may be left out.
        culprit: Stage and fragment, for messages.

    Raises:
        UdfError: If it is none of these, a column is missing, or a type does not fit.
    """
    columns, rows = _columns(result, culprit)
    missing = [name for name in schema.names if name not in columns and name not in carried]
    if missing:
        raise UdfError(
            f"{culprit}: {names(missing)} is declared in the schema and was not returned; "
            f"returned: {names(columns, 20)}. Return it, or take it out of the schema"
        )
    fields = [field for field in schema if field.name in columns]
    arrays = [_fitted(columns[field.name], field, culprit) for field in fields]
    lengths = {field.name: len(array) for field, array in zip(fields, arrays)}
    if len(set(lengths.values())) > 1:
        raise UdfError(f"{culprit}: the columns returned differ in length: {lengths}")
    if not arrays:
        return pa.table({"rows": pa.nulls(rows)}).select([])
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _columns(result: Any, culprit: str) -> tuple[Mapping[str, Any], int]:
    if isinstance(result, (pa.Table, pa.RecordBatch)):
        return dict(zip(result.schema.names, result.columns)), result.num_rows
    if isinstance(result, Mapping):
        return result, 0
    if hasattr(result, "columns") and hasattr(result, "to_dict"):  # a pandas data frame
        table = pa.Table.from_pandas(result, preserve_index=False)
        return dict(zip(table.column_names, table.columns)), table.num_rows
    raise UdfError(
        f"{culprit}: returned {type(result).__name__}; expected a pyarrow.Table, a dict of column "
        "to array, or a pandas.DataFrame"
    )


def _fitted(values: Any, field: pa.Field, culprit: str) -> pa.ChunkedArray:
    kind = field.type
    try:
        array = _to_arrow(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise UdfError(
            f"{culprit}: column {field.name!r}: expected {kind}, found {_kind_of(values)}: {error}"
        ) from error
    if array.type != kind:
        if not _same_family(array.type, kind):
            raise UdfError(
                f"{culprit}: column {field.name!r}: expected {kind}, found {array.type}. Convert "
                "it in the function, or declare that type in the schema"
            )
        try:
            array = array.cast(kind)
        except pa.ArrowException as error:
            raise UdfError(
                f"{culprit}: column {field.name!r}: expected {kind}, found {array.type} with "
                f"values that do not fit: {error}"
            ) from error
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def _to_arrow(values: Any, kind: pa.DataType) -> Any:
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values
    if isinstance(values, (str, bytes, Mapping)):
        raise TypeError("a single value, not one for each row")
    if hasattr(values, "detach"):  # a torch tensor
        values = values.detach().cpu().numpy()
    if getattr(values, "ndim", 1) == 2:
        return _matrix(values, kind)
    if getattr(values, "ndim", 1) > 2:
        values = list(values.tolist())
    if hasattr(values, "dtype") and values.dtype != object:
        return pa.array(values)
    values = [v.detach().cpu().numpy() if hasattr(v, "detach") else v for v in values]
    if values and getattr(values[0], "ndim", 0) and not pa.types.is_nested(kind):
        raise TypeError("values are arrays")
    if is_number(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind):
        return pa.array(values)  # inferred, so that a wrong type is found and not converted
    return pa.array(values, kind)


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
    """Whether a cast keeps the meaning: number to number, text to text, list to list, and so on."""
    if pa.types.is_null(found):
        return True
    if pa.types.is_dictionary(found):
        return _same_family(found.value_type, wanted)
    if is_list(found) and is_list(wanted):
        return _same_family(found.value_type, wanted.value_type)
    if pa.types.is_struct(found) and pa.types.is_struct(wanted):
        return {f.name for f in found} == {f.name for f in wanted}
    families = (is_number, is_text, pa.types.is_boolean, pa.types.is_temporal, _is_binary)
    return any(family(found) and family(wanted) for family in families)


def _is_binary(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def with_ids(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> pa.Table:
    """A call's output with its ids checked against the batch's, or carried over if left out.

    Args:
        output: What `from_result` made of it.
        batch: What was given, with the ids of the rows that its rows were made from.
        work: Its schema, id and culprit.
        op: Its cardinality, and the names of the batch's ids.

    Raises:
        UdfError: If a row is missing, invented or there twice.
    """
    ids = batch.column(op.ids[0])
    origin = op.parent or op.ids[0]
    if origin not in output.column_names:
        if output.num_rows != batch.num_rows or op.parent:
            raise UdfError(_cannot_be_told_apart(output, batch, work, op))
        output = output.append_column(origin, ids)
    elif not (returned := output.column(origin)).equals(ids):
        _check_returned(returned, ids, work, op)
    if op.parent and work.id not in output.column_names:
        output = output.append_column(work.id, _numbered(output.column(origin)))
    return _carried(output, batch, origin, op).select(work.schema.names).cast(work.schema)


def _cannot_be_told_apart(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> str:
    if op.parent:
        return (
            f"{work.culprit}: {output.num_rows} rows came back without {op.parent!r}, the id of "
            "the row that each was made from. Return it, or name its column as parent_id"
        )
    return (
        f"{work.culprit}: {output.num_rows} rows came back for {batch.num_rows} and without the "
        f"id {work.id!r}, so they can't be told apart. Return one row for each input row, in "
        "order, or return the id"
    )


def _check_returned(
    returned: pa.ChunkedArray, ids: pa.ChunkedArray, work: Work, op: CallUdf
) -> None:
    culprit = work.culprit
    complete = len(returned) == len(ids) or op.cardinality == "filter"
    if not op.parent and complete and are_distinct_and_among(returned, ids):
        return
    if op.parent and returned.null_count:
        raise UdfError(
            f"{culprit}: returned {returned.null_count} rows whose {op.parent!r} is null; expected "
            "the id of the row that each was made from"
        )
    if not op.parent and (wrong := repeated_or_null(returned)):
        raise UdfError(f"{culprit}: returned {wrong}. Return each id once")
    invented = returned.filter(pc.invert(pc.is_in(returned, value_set=ids)))
    if len(invented):
        raise UdfError(
            f"{culprit}: returned {len(invented)} ids that it was not given: "
            f"{names(invented.slice(0, 6).to_pylist())}. Return the ids of the batch unchanged"
        )
    if op.cardinality in ("filter", "zero_to_many"):
        return
    lost = ids.filter(pc.invert(pc.is_in(ids, value_set=returned)))
    if len(lost):
        instead = "zero_to_many" if op.parent else "filter"
        raise UdfError(
            f"{culprit}: {len(lost)} of {len(ids)} rows did not come back: ids "
            f"{names(lost.slice(0, 6).to_pylist())}. Return every row, or declare "
            f'map_batches(..., cardinality="{instead}") if rows may be dropped'
        )


def _numbered(parents: pa.ChunkedArray) -> pa.Array:
    """An id for each row: its parent's, and its number among the rows of the same parent."""
    codes = parents.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    starts = np.cumsum(counts) - counts
    numbers = np.empty(len(codes), dtype=np.int64)
    numbers[order] = np.arange(len(codes)) - np.repeat(starts, counts)
    texts = pa.array(numbers).cast(pa.string())
    return pc.binary_join_element_wise(parents.combine_chunks().cast(pa.string()), texts, "-")


def _carried(output: pa.Table, batch: pa.Table, origin: str, op: CallUdf) -> pa.Table:
    """The output with the ids that the batch's rows were made from."""
    if len(op.ids) == 1:
        return output
    ids, given = output.column(origin), batch.column(op.ids[0])
    positions = None if ids.equals(given) else pc.index_in(ids, value_set=given.combine_chunks())
    for name in op.ids[1:]:
        column = batch.column(name)
        carried = column if positions is None else column.take(positions)
        if name in output.column_names:
            output = output.drop_columns([name])
        output = output.append_column(name, carried)
    return output
