"""Statistics of a part's columns, for checks. Computed in the worker for each part."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster.types.kinds import is_floats, is_text
from vane_dagster.types.schema import plain_type
from vane_dagster.types.tensors import as_storage

Measures = dict[str, dict[str, float]]

_Combine = Callable[[float, float], float]
_COMBINED: dict[str, _Combine] = {"dim_min": min, "dim_max": max}


def measure(
    table: pa.Table,
    columns: Sequence[str],
    sums: Mapping[str, Sequence[str]] | None = None,
    wasted: Mapping[str, int] | None = None,
) -> Measures:
    """Compute the statistics of columns that checks need, without a loop over rows."""
    sums = sums or {}
    measures = {name: _measured(table.column(name), sums.get(name, ())) for name in columns}
    if wasted:
        measures = merge_measures([measures, dict.fromkeys(sums, wasted)])
    return measures


def merge_measures(parts: Iterable[Mapping[str, Mapping[str, float]]]) -> Measures:
    """Combine the statistics of many parts."""
    merged: Measures = {}
    for part in parts:
        for column, sums in part.items():
            total = merged.setdefault(column, {})
            for name, value in sums.items():
                combine: _Combine = _COMBINED.get(name, operator.add)
                total[name] = combine(total[name], value) if name in total else value
    return merged


def _measured(column: pa.ChunkedArray, fields: Sequence[str] = ()) -> dict[str, float]:
    column = _decoded(column)
    measured: dict[str, float] = {"nulls": column.null_count}
    if is_text(column.type):
        return measured | {"empty": sum(_empty(chunk) for chunk in column.chunks)}
    if fields:
        sums = {name: pc.sum(pc.struct_field(column, name)).as_py() for name in fields}
        return measured | {name: int(each or 0) for name, each in sums.items()}
    if is_floats(column.type):
        chunks = as_storage(column).chunks
        chunks = [chunk.drop_null() if chunk.null_count else chunk for chunk in chunks]
        counted = merge_measures({"": _vectors(chunk)} for chunk in chunks)
        return measured | {"not_finite": 0, "zero": 0} | counted.get("", {})
    return measured


def _decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Decode a dictionary or views, which kernels and null counts do not handle."""
    kind = column.type
    encoded = pa.types.is_dictionary(kind) or pa.types.is_string_view(kind)
    return column.cast(plain_type(kind)) if encoded else column


def _empty(texts: pa.Array) -> int:
    blank = pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))
    return int(pc.sum(blank).as_py() or 0)


def _vectors(vectors: pa.Array) -> dict[str, float]:
    """Measure an array of lists without nulls."""
    if not len(vectors):
        return {}
    values = vectors.flatten()
    numbers = values.fill_null(pa.scalar(np.nan, values.type)).to_numpy(zero_copy_only=False)
    sizes = pc.list_value_length(vectors).to_numpy().astype("i8")
    low, high = int(sizes.min()), int(sizes.max())
    if not high:
        return {"not_finite": 0, "zero": len(vectors), "dim_min": low, "dim_max": high}
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    finite = np.logical_and.reduceat(np.isfinite(numbers), starts)
    nonzero = np.logical_or.reduceat(numbers != 0, starts)
    bad = int(np.count_nonzero(~finite))
    zero = len(vectors) - int(np.count_nonzero(nonzero))
    return {"not_finite": bad, "zero": zero, "dim_min": low, "dim_max": high}
