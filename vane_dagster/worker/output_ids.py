"""The ids of a call's output, checked against its batch, and the columns that follow them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.errors import UdfError, names
from vane_dagster.types.kinds import is_list
from vane_dagster.types.tensors import as_storage, unsliced
from vane_dagster.worker.id_checks import are_distinct_and_among, repeated_or_null
from vane_dagster.worker.protocol import CallUdf, Work


def with_ids(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> pa.Table:
    """Check the ids of a call's output against the batch, or copy them if they are left out."""
    ids = batch.column(op.ids[0])
    origin = op.parent or op.ids[0]
    if origin not in output.column_names:
        if output.num_rows != batch.num_rows or op.parent:
            raise UdfError(_indistinguishable(output, batch, work, op))
        output = output.append_column(origin, ids)
    elif not (returned := output.column(origin)).equals(ids):
        _check_returned(returned, ids, work, op)
    if op.parent and work.id not in output.column_names:
        output = output.append_column(work.id, numbered(output.column(origin)))
    return _carried(output, batch, origin, work, op).select(work.schema.names).cast(work.schema)


def _indistinguishable(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> str:
    if op.parent:
        return (
            f"{work.location}: {output.num_rows} rows came back without {op.parent!r}, the id of "
            "the row that each was made from. Return it"
        )
    is_given = op.columns is None or op.ids[0] in op.columns
    hint = "" if is_given else f"; to get the id, name {op.ids[0]!r} in columns="
    return (
        f"{work.location}: {output.num_rows} rows came back for {batch.num_rows} and without the "
        f"id {work.id!r}, so they cannot be distinguished. Return one row for each input row, "
        f"in order, or return the id{hint}"
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
    if op.cardinality != "one_to_one":
        return
    lost = ids.filter(pc.invert(pc.is_in(ids, value_set=returned)))
    if len(lost):
        raise UdfError(
            f"{location}: {len(lost)} of {len(ids)} rows did not come back: ids "
            f"{names(lost.slice(0, 6).to_pylist())}. Return every row, or declare "
            'map_batches(..., cardinality="filter") if rows may be dropped'
        )


def numbered(parents: pa.ChunkedArray) -> pa.Array:
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
    """Return the error of a column that is passed on and was returned with other values."""
    return UdfError(
        f"{location}: column {column!r} is passed on from the input by include_columns, and other "
        "values were returned for it. Declare it in the schema, or return it unchanged"
    )


def changed_id(column: str, location: str) -> UdfError:
    """Return the error of a row that was returned with the id of another."""
    return UdfError(
        f"{location}: column {column!r} is the id of the row that the call was for, and another "
        "value was returned for it. Return it unchanged, or leave it out"
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
