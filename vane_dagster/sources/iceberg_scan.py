"""Rows of a data file of an Iceberg table: Arrow decodes row groups, and pyiceberg converts them.

pyiceberg 0.12 itself reads the whole file, and null lists of structs as empty ones. So a fragment
costs the time and memory of its own row groups, and nulls are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io.pyarrow import (
    ArrowAccessor,
    ArrowProjectionVisitor,
    expression_to_pyarrow,
    pyarrow_to_schema,
)
from pyiceberg.schema import Schema, prune_columns, visit_with_partner

from vane_dagster.sources.lake_source import Mask
from vane_dagster.sources.parquet_scan import batches

_POSITION = "__position"


def rows(
    table: Any, url: str, constants: Mapping[str, str], wanted: Schema, start: int, stop: int
) -> Iterator[pa.Table]:
    """Read rows by their positions in the file, also those that are deleted, batch by batch.

    The constants are values of fields that the file may lack, by their ids.
    """
    metadata, kind_of = table.metadata, cast(Any, wanted.find_type)
    is_old = metadata.format_version <= 2  # without timestamps of nanoseconds
    values = {
        int(id): from_bytes(kind_of(int(id)), bytes.fromhex(text))
        for id, text in constants.items()
        if int(id) in wanted.field_ids
    }
    with table.io.new_input(url).open() as stream, pq.ParquetFile(stream, pre_buffer=True) as file:
        mapping = metadata.name_mapping()
        own = pyarrow_to_schema(file.schema_arrow, mapping, is_old, metadata.format_version)
        ids = {each.field_id for each in wanted.fields}
        names = [each.name for each in own.fields if each.field_id in ids]
        projection = _Projection(
            own, is_old, projected_missing_fields=values, allow_timestamp_tz_mismatch=True
        )
        for batch in batches(file, start, stop, names):
            projected = visit_with_partner(wanted, batch, projection, ArrowAccessor(own))
            yield pa.Table.from_batches([pa.RecordBatch.from_struct_array(projected)])


def tested_ids(schema: Schema, where: str) -> list[int]:
    """Return the ids of a filter's columns: a name may have been another column's."""
    return sorted(extract_field_ids(bind(schema, parse(where), case_sensitive=True)))


def passing(
    table: Any, url: str, constants: Mapping[str, str], schema: Schema, where: str, count: int
) -> Mask:
    """Return which rows of a file pass a filter, by reading its columns."""
    condition = bind(schema, parse(where), case_sensitive=True)
    expression = expression_to_pyarrow(condition, schema)
    wanted = prune_columns(schema, set(tested_ids(schema, where)))
    mask, at = np.zeros(count, bool), 0
    for batch in rows(table, url, constants, wanted, 0, count):
        positions = pa.array(np.arange(at, at + batch.num_rows))
        passed = batch.append_column(_POSITION, positions).filter(expression)
        mask[passed.column(_POSITION).to_numpy()] = True
        at += batch.num_rows
    return mask


class _Projection(ArrowProjectionVisitor):
    """pyiceberg's conversion to the table's schema, which keeps nulls.

    That of pyiceberg 0.12 makes empty lists and maps of null ones of structs.
    """

    def list(self, kind: Any, values: Any, inner: Any) -> Any:
        return _with_nulls(super().list(kind, values, inner), values)

    def map(self, kind: Any, values: Any, keys: Any, items: Any) -> Any:
        return _with_nulls(super().map(kind, values, keys, items), values)


def _with_nulls(converted: pa.Array | None, values: pa.Array) -> pa.Array | None:
    """Return converted values that are null where the original ones are."""
    if converted is None or not values.null_count:
        return converted
    return pc.if_else(values.is_valid(), converted, pa.scalar(None, converted.type))
