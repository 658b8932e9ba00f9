"""`TableSource`: rows in memory, of an Arrow table, a data frame, or Python's own values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster._keywords import known_keywords, require_columns
from vane_dagster.errors import DefinitionError, SourceError, StoreError, VaneError, names
from vane_dagster.sources.rows_source import Positions, Rows, RowsSource
from vane_dagster.sources.table_reader import in_plain_types, table_schema
from vane_dagster.storage.dataframes import (
    NEEDS_RAY,
    batches,
    check_dtype,
    form_of_value,
    known_forms,
)
from vane_dagster.types.schema import check_distinct, check_storable
from vane_dagster.types.to_arrow import as_column

_LABEL = "vd.table"


@dataclass(frozen=True, kw_only=True)
class TableSource(RowsSource):
    """Rows in memory."""

    kind: ClassVar[str] = "table"

    def describe(self) -> str:
        return self.label[:1].upper() + self.label[1:]


@known_keywords("vd.table")
def table(
    data: Any, *, partition_column: str | None = None, allow_empty: bool = False
) -> TableSource:
    """Declare rows in memory as a pipeline's source.

    Rows are identified by their content: the same rows of another kind of object are the same
    source, and a changed row recomputes only the fragments around it. A run copies the rows into
    the store, where workers read them.

    Args:
        data: A `pyarrow` Table, RecordBatch or RecordBatchReader, a pandas or polars frame, a
            DuckDB relation, a dict of columns, or a list of dicts; or a function without parameters
            that returns one, which is called once, when the rows are needed.
        partition_column: For a partitioned pipeline: the rows of a partition are those whose value
            in this column, as text, equals the key.
        allow_empty: Whether a partition without rows is accepted; an error by default.

    Raises:
        DefinitionError: If the object is of another kind, has no columns, or two of one name.
    """
    label = _described(data)
    if isinstance(data, pa.RecordBatchReader):
        data = data.read_all()  # it can be read once
    if not callable(data):
        _check_columns(_column_names(data), partition_column)
    return TableSource(
        load=functools.cache(lambda: _InMemory(data, partition_column)),
        partition_column=partition_column,
        is_partitioned=partition_column is not None,
        label=label,
        allow_empty=allow_empty,
    )


class _InMemory(Rows):
    """The rows of an object in memory, as an Arrow table."""

    def __init__(self, data: Any, partition_column: str | None) -> None:
        if callable(data):
            data = data()
            _described(data)
            _check_columns(_column_names(data), partition_column)
        found = _as_arrow(data)
        _check_columns(found.schema.names, partition_column)
        schema = table_schema(found.schema)
        try:
            check_storable(schema, _LABEL)
        except VaneError as error:
            raise SourceError(str(error)) from error
        super().__init__(schema, len(found), partition_column)
        self._table = in_plain_types(found, schema)
        if partition_column is not None:  # rows are taken from all over it
            self._table = self._table.combine_chunks()

    def take(self, positions: Positions) -> pa.Table:
        if isinstance(positions, range):
            return self._table.slice(positions.start, len(positions))
        return self._table.take(pa.array(positions))

    def column(self, name: str) -> pa.ChunkedArray:
        return self._table.column(name)


def _described(data: Any) -> str:
    """Return what an object is, for messages."""
    if isinstance(data, Mapping):
        return "a dict of columns in memory"
    form = form_of_value(data)
    if form is not None and form != NEEDS_RAY:
        return f"a {form} in memory"
    if isinstance(data, pa.RecordBatch):
        return "a pyarrow.RecordBatch in memory"
    is_list = isinstance(data, Sequence) and not isinstance(data, (str, bytes))
    if is_list and all(isinstance(row, Mapping) for row in data):
        return "a list of dicts in memory"
    if inspect.isfunction(data) and not inspect.signature(data).parameters:
        return f"the table of {data.__qualname__}()"
    if form == NEEDS_RAY:
        hint = "; for a Ray Dataset, write vd.ray_dataset(fn) with a function that returns it"
    elif isinstance(data, str):
        hint = "; to read files, write vd.parquet, vd.csv or vd.json"
    else:
        hint = ""
    forms = known_forms().removesuffix(f", {NEEDS_RAY}")
    raise DefinitionError(
        f"{_LABEL}: data is a {type(data).__module__}.{type(data).__qualname__}; expected "
        f"{forms}, pyarrow.RecordBatch, a dict of columns, a list of dicts, or a function without "
        f"parameters that returns one{hint}"
    )


def _column_names(data: Any) -> list[Any]:
    if isinstance(data, Mapping):
        return list(data)
    if isinstance(data, Sequence):
        return list(dict.fromkeys(name for row in data for name in row))
    if hasattr(data, "collect_schema"):  # a lazy frame warns about anything else
        return list(data.collect_schema().names())
    schema = getattr(data, "schema", None)
    if isinstance(schema, pa.Schema):
        return list(schema.names)
    index = [name for name in getattr(getattr(data, "index", None), "names", ()) if name]
    return [*index, *data.columns]


def _check_columns(found: Sequence[Any], partition_column: str | None) -> None:
    if not found:
        raise DefinitionError(f"{_LABEL}: the table has no columns; expected one or more")
    if wrong := [name for name in found if not isinstance(name, str) or not name]:
        raise DefinitionError(
            f"{_LABEL}: column names {wrong[:3]!r} are not non-empty strings; rename them"
        )
    check_distinct(list(found), _LABEL)
    if partition_column is not None:
        owner = f"{_LABEL}: partition_column: the table"
        require_columns(owner, [partition_column], found, DefinitionError)


def _as_arrow(data: Any) -> pa.Table:
    if isinstance(data, Mapping):
        return _of_columns(data)
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data
    if form_of_value(data) is None:
        columns: dict[str, list[Any]] = {name: [] for name in _column_names(data)}
        for row in data:
            for name, values in columns.items():
                values.append(row.get(name))
        return _of_columns(columns)
    try:
        return batches(data, _LABEL).read_all()
    except StoreError as error:
        raise SourceError(str(error)) from error
    except (pa.ArrowException, TypeError) as error:
        raise SourceError(
            f"{_LABEL}: the frame cannot be converted to Arrow: {error}. Give each column values "
            "of one type"
        ) from error


def _of_columns(columns: Mapping[str, Any]) -> pa.Table:
    made = {}
    for name, values in columns.items():
        try:
            made[name] = _as_array(values, name)
        except StoreError as error:
            raise SourceError(str(error)) from error
        except (pa.ArrowException, TypeError, ValueError, VaneError) as error:
            raise SourceError(
                f"{_LABEL}: column {name!r} cannot be converted to Arrow: {error}. Give it values "
                "of one type"
            ) from error
    counts = {name: len(values) for name, values in made.items()}
    if len(set(counts.values())) > 1:
        raise SourceError(
            f"{_LABEL}: the columns have different numbers of rows: "
            f"{names([f'{name} has {count}' for name, count in counts.items()])}"
        )
    return pa.table(made)


def _as_array(values: Any, name: str) -> Any:
    check_dtype(getattr(values, "dtype", None), name, _LABEL)
    if isinstance(values, np.ndarray) and values.ndim > 1:
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        kind = pa.fixed_shape_tensor(flat.type, values.shape[1:])
        stored = pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))
        return pa.ExtensionArray.from_storage(kind, stored)
    column = as_column(values)
    if isinstance(column, list):
        check_dtype(next((type(v).__name__ for v in column if v is not None), None), name, _LABEL)
    return column if isinstance(column, (pa.Array, pa.ChunkedArray)) else pa.array(column)
