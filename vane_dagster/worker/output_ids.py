"""The ids of a call's output, checked against its batch, and the columns that follow them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster._texts import count
from vane_dagster.errors import UdfError, names
from vane_dagster.types.casts import cast_table
from vane_dagster.types.tensors import unsliced
from vane_dagster.worker.id_checks import repeated_or_null
from vane_dagster.worker.protocol import CallUdf, Places, Work


def with_ids(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> pa.Table:
    """Check the ids of a call's output against the batch, or copy them if they are left out."""
    ids = batch.column(op.ids[0])
    if op.origin not in output.column_names:
        if output.num_rows != batch.num_rows or op.parent:
            other = "" if op.parent else ", or one row for each input row, in order"
            raise UdfError(
                f"{work.location}: returned {output.num_rows} rows for {batch.num_rows} without "
                f"{op.origin!r}, the id of the input row. Return the id{other}; columns=, if "
                "given, must include it"
            )
        output = output.append_column(op.origin, ids)
    elif not (returned := output.column(op.origin)).equals(ids):
        _check_returned(returned, ids, work, op)
    if op.parent and work.id not in output.column_names:
        output = output.append_column(work.id, numbered(output.column(op.origin)))
    return cast_table(_carried(output, batch, work, op), work.schema)


def _check_returned(
    returned: pa.ChunkedArray, ids: pa.ChunkedArray, work: Work, op: CallUdf
) -> None:
    location = work.location
    if not op.parent and (wrong := repeated_or_null(returned)):
        raise UdfError(f"{location}: returned {wrong}. Return each id once")
    invented = returned.filter(pc.invert(pc.is_in(returned, value_set=ids)))
    if len(invented):
        raise UdfError(
            f"{location}: returned {count(len(invented), 'id')} not in the batch: "
            f"{names(invented.slice(0, 6).to_pylist())}. Return the ids of the batch unchanged"
        )
    if op.cardinality != "one_to_one" or len(returned) == len(ids):
        return
    lost = ids.filter(pc.invert(pc.is_in(ids, value_set=returned)))
    raise UdfError(
        f"{location}: {len(lost)} of {len(ids)} rows were not returned: ids "
        f"{names(lost.slice(0, 6).to_pylist())}. Return every row, or declare "
        'map_batches(..., cardinality="filter") if rows may be dropped'
    )


def places_within(counts: Places) -> Places:
    """Return the place of each row in its group, for groups of so many rows."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def numbered(parents: pa.ChunkedArray) -> pa.Array:
    """Make an id for each row: its parent's id, and its number among the rows of that parent."""
    codes = parents.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    numbers = np.empty(len(codes), dtype=np.int64)
    numbers[order] = places_within(np.bincount(codes))
    texts = pa.array(numbers).cast(pa.string())
    return pc.binary_join_element_wise(parents.combine_chunks().cast(pa.string()), texts, "-")


def _carried(output: pa.Table, batch: pa.Table, work: Work, op: CallUdf) -> pa.Table:
    """Add the ids that the batch's rows were made from, and the columns that are passed on."""
    ids, given = output.column(op.origin), batch.column(op.ids[0])
    carried = batch.select([*op.ids[1:], *op.carried(work)])
    if carried.num_columns and not ids.equals(given):
        places = pc.index_in(ids, value_set=given.combine_chunks())
        carried = unsliced(carried).take(places)
    for field, column in zip(carried.schema, carried.columns):
        output = output.append_column(field, column)
    return output
