"""`TableSource`: rows in memory, of an Arrow table, a data frame, or Python's own values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster._keywords import known_keywords
from vane_dagster.errors import DefinitionError, SourceError, VaneError
from vane_dagster.sources.rows_source import Positions, Rows, RowsSource
from vane_dagster.sources.schemas import plain_schema
from vane_dagster.storage.dataframes import (
    NEEDS_RAY,
    batches,
    form_of_value,
    known_forms,
)
from vane_dagster.storage.row_keys import encoded_rows
from vane_dagster.types.casts import cast_table
from vane_dagster.types.schema import check_column_names, check_storable, empty_table
from vane_dagster.types.to_arrow import as_column

_LABEL = "vd.table"


@dataclass(frozen=True, kw_only=True)
class TableSource(RowsSource):
    """Rows in memory."""

    kind: ClassVar[str] = "table"


@known_keywords("vd.table")
def table(
    data: Any, *, partition_column: str | None = None, allow_empty: bool = False
) -> TableSource:
    """Declare rows in memory as a pipeline's source.

    Rows are identified by their content, in blocks of at most 1,024 rows. The same rows in another
    kind of object are the same source. A changed row recomputes only the fragments with its block.
    Inserted rows also change the fragments after them, whose rows are reused by their keys. Types
    count, encodings do not. With ``id=vd.row_id()`` any change recomputes all rows.

    In a pandas data frame NaN is null, and a named index is a column. numpy arrays with several
    dimensions are tensors.

    A run copies the rows into the store, where workers read them; after any change, it copies the
    whole table. Each process that loads the definitions builds the rows. If `data` is a function,
    only processes that list the source do.

    Args:
        data: A `pyarrow` Table, RecordBatch or RecordBatchReader, a pandas or polars frame, a
            DuckDB relation, a dict of columns, or a list of dicts; or a function without parameters
            that returns one, which is called once, when the rows are needed.
        partition_column: For a partitioned pipeline: the rows of a partition are those whose value
            in this column, as text, equals the key. If all times are at midnight, they count as
            days. Rows that belong to no partition cause a warning.
        allow_empty: Whether a partition without rows is accepted; an error by default.

    Raises:
        DefinitionError: If the object is of another kind.
    """
    label = _described(data)
    if isinstance(data, pa.RecordBatchReader):
        data = data.read_all()  # it can be read once
    return TableSource(
        load=functools.cache(lambda: _rows(data, partition_column)),
        partition_column=partition_column,
        is_partitioned=partition_column is not None,
        label=label,
        allow_empty=allow_empty,
    )


def _rows(data: Any, partition_column: str | None) -> Rows:
    """Return the rows of an object in memory, as an Arrow table."""
    if callable(data):
        data = data()
        _described(data)
    try:
        table = _as_arrow(data)
        schema = plain_schema(table.schema)
        if not schema.names:
            raise SourceError(f"{_LABEL}: a table needs one or more columns")
        check_column_names(schema.names, _LABEL)
        check_storable(schema, _LABEL)
        encoded_rows(empty_table(schema).columns)  # refuses types without an identity
        rows = cast_table(table, schema)
    except VaneError as error:
        raise SourceError(str(error)) from error
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceError(
            f"{_LABEL}: the rows cannot be converted to Arrow: {error}. Give each column a "
            "different name and values of one type, and all columns the same length"
        ) from error
    if partition_column is not None:  # rows are taken from all over it
        rows = rows.combine_chunks()

    def take(positions: Positions) -> pa.Table:
        if isinstance(positions, range):
            return rows.slice(positions.start, len(positions))
        return rows.take(pa.array(positions))

    return Rows(schema, len(rows), take, rows.column, partition_column)


def _described(data: Any) -> str:
    """Return what an object is, for messages."""
    form = form_of_value(data)
    is_list = isinstance(data, Sequence) and not isinstance(data, (str, bytes))
    is_rows = is_list and all(isinstance(row, Mapping) for row in data)
    if is_rows or isinstance(data, (Mapping, pa.RecordBatch)) or form not in (None, NEEDS_RAY):
        return f"a {form or type(data).__name__} in memory"
    if inspect.isfunction(data) and not inspect.signature(data).parameters:
        return f"the table of {data.__qualname__}()"
    forms = known_forms().removesuffix(f", {NEEDS_RAY}")
    raise DefinitionError(
        f"{_LABEL}: data is a {type(data).__module__}.{type(data).__qualname__}; expected "
        f"{forms}, pyarrow.RecordBatch, a dict of columns, a list of dicts, or a function without "
        "parameters that returns one. Files are read by vd.parquet, vd.csv or vd.json, Ray "
        "Datasets by vd.ray_dataset"
    )


def _as_arrow(data: Any) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if form_of_value(data) is not None:
        return batches(data, _LABEL).read_all()
    if isinstance(data, Mapping):
        columns = dict(data)
    else:
        names = dict.fromkeys(name for row in data for name in row)
        columns = {name: [row.get(name) for row in data] for name in names}
    return pa.table({name: _as_array(values, name) for name, values in columns.items()})


def _as_array(values: Any, name: str) -> Any:
    try:
        column = as_column(values)
        if isinstance(column, np.ndarray) and column.ndim > 1:
            return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(column))
        return column if isinstance(column, pa.ChunkedArray) else pa.array(column)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceError(
            f"{_LABEL}: column {name!r} cannot be converted to Arrow: {error}. Give it values of "
            "one Arrow type"
        ) from error
