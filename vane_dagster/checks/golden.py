"""Rows compared with those that are expected."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.checks.comparisons import Golden
from vane_dagster.checks.context import Finding, Subject, batches
from vane_dagster.checks.drift import cosine_distance
from vane_dagster.errors import SchemaError, names
from vane_dagster.types.kinds import is_list, is_number, is_numbers

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_NAMED = 5


def golden(check: Golden, subject: Subject) -> Finding:
    """Compares the rows of the expected ids.

    Raises:
        SchemaError: If columns or types do not fit, or expected ids are null or repeated.
    """
    dataset = subject.dataset()
    columns = _columns(check, subject.id, dataset.schema)
    ids = _ids(check.rows, subject.id, dataset.schema)
    actual = _rows(dataset, subject.id, columns, ids)
    expected = check.rows.take(pc.index_in(actual.column(subject.id), value_set=ids))
    differs = np.zeros(actual.num_rows, dtype=bool)
    metadata: dict[str, Any] = {"expected": len(ids), "found": actual.num_rows}
    for name in columns:
        apart, largest = _compared(check, name, actual.column(name), expected.column(name))
        differs |= apart
        metadata[f"differing/{name}"] = int(np.count_nonzero(apart))
        if largest is not None and math.isfinite(largest):
            metadata[f"largest_difference/{name}"] = largest
    count = int(np.count_nonzero(differs))
    metadata["differing"] = count
    if count:
        first = np.flatnonzero(differs)[:_NAMED]
        found = actual.column(subject.id).take(pa.array(first)).to_pylist()
        metadata["differing_ids"] = ", ".join(map(str, found))
    described = _described(check, actual.num_rows, len(ids), count, metadata)
    return Finding(not count and actual.num_rows >= check.min_found, described, metadata)


def _described(
    check: Golden, found: int, expected: int, count: int, metadata: dict[str, Any]
) -> str:
    if count:
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        differing = f"ids {metadata['differing_ids']}{more}"
        return f"{count:,} of {found:,} rows differ from the expected values: {differing}"
    present = f"{found:,} of {expected:,} expected ids are in the output"
    if found < check.min_found:
        return f"{present}; at least {check.min_found:,} are required"
    if not found:
        return f"{present}, so nothing was compared"
    return f"{present}, and their rows match the expected values"


def _columns(check: Golden, id: str, schema: pa.Schema) -> list[str]:
    """The columns that are compared."""
    expected = check.rows.column_names
    if id not in expected:
        raise SchemaError(f"the expected rows have no id {id!r}; they have {names(expected)}")
    columns = [name for name in check.columns or expected if name != id]
    if missing := [name for name in columns if name not in expected]:
        raise SchemaError(f"the expected rows have no column {missing[0]!r}")
    if missing := [name for name in columns if name not in schema.names]:
        raise SchemaError(
            f"the stage has no column {missing[0]!r}, which is expected; it has "
            f"{names(schema.names)}"
        )
    if not columns:
        raise SchemaError(f"the expected rows have no column besides the id {id!r}")
    return columns


def _ids(expected: pa.Table, id: str, schema: pa.Schema) -> pa.Array:
    ids = _cast(expected.column(id), schema.field(id).type, id).combine_chunks()
    if ids.null_count or pc.count_distinct(ids).as_py() != len(ids):
        raise SchemaError(f"the expected ids in {id!r} are null or repeated; give each id once")
    return ids


def _rows(dataset: ds.Dataset, id: str, columns: Sequence[str], ids: pa.Array) -> pa.Table:
    """The rows of the ids. Other columns are read of those fragments alone that have some."""
    where = pc.field(id).isin(ids)
    found: list[pa.RecordBatch] = []
    for fragment in dataset.get_fragments():
        if sum(map(len, found)) == len(ids):
            break
        if any(len(batch) for batch in batches(fragment, dataset.schema, [id], where)):
            found += batches(fragment, dataset.schema, [id, *columns], where)
    fields = [dataset.schema.field(name) for name in (id, *columns)]
    return pa.Table.from_batches(found, pa.schema(fields))


def _compared(
    check: Golden, name: str, actual: pa.ChunkedArray, expected: pa.ChunkedArray
) -> tuple[np.ndarray[Any, Any], float | None]:
    """Which values differ and, of numbers, by how much at most."""
    kinds = (actual.type, expected.type)
    if not any(pa.types.is_floating(k.value_type if is_list(k) else k) for k in kinds):
        pairs = zip(actual, _cast(expected, actual.type, name))
        return np.array([not a.equals(b) for a, b in pairs], dtype=bool), None
    if not all(map(is_number, kinds)) and not all(map(is_numbers, kinds)):
        raise SchemaError(f"column {name!r} is {kinds[0]}; the expected values are {kinds[1]}")
    apart, largest = [], 0.0
    for a, b in zip(actual.to_pylist(), expected.to_pylist()):
        difference, is_close = _difference(check, a, b)
        apart.append(not is_close)
        largest = max(largest, difference)
    return np.array(apart, dtype=bool), largest


def _difference(check: Golden, actual: Any, expected: Any) -> tuple[float, bool]:
    """How far a number or vector is from the expected one, and whether that is near enough."""
    if actual is None or expected is None:
        return 0.0, actual is expected
    a, b = (np.asarray(each, dtype=float) for each in (actual, expected))
    if a.shape != b.shape:
        return math.inf, False
    if check.max_distance is not None and a.ndim:
        distance = cosine_distance(a, b)
        return distance, distance <= check.max_distance
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        near = apart <= check.tolerance * np.maximum(1.0, np.abs(b))
        near &= np.isfinite(apart)
    return float(np.max(apart, initial=0.0)), bool(near.all())


def _cast(column: pa.ChunkedArray, kind: pa.DataType, name: str) -> pa.ChunkedArray:
    try:
        return column.cast(kind)
    except pa.ArrowException as error:
        raise SchemaError(
            f"column {name!r} is {kind}; the expected values are {column.type}: {error}"
        ) from None
