"""How far a column's distribution has moved between two partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.checks.comparisons import Drift, can_drift
from vane_dagster.checks.context import Finding, Subject, sample
from vane_dagster.errors import SchemaError
from vane_dagster.types.kinds import is_floats, is_number
from vane_dagster.types.schema import plain_type

if TYPE_CHECKING:
    import pyarrow.dataset as ds

Array = np.ndarray[Any, Any]
_Compare = Callable[[Drift, "ds.Dataset", "ds.Dataset", str], Finding]


def drift(check: Drift, subject: Subject) -> Finding:
    """Compares the column with the previous partition's.

    Raises:
        SchemaError: If a partition lacks the column, or it is of another kind.
    """
    previous = subject.previous()
    if previous is None:
        return Finding(True, "There is no previous partition to compare with", {})
    label, before = previous
    now = subject.dataset()
    kinds = [_kind(each, check.column) for each in (now, before)]
    if kinds[0] is not kinds[1]:
        types = [each.schema.field(check.column).type for each in (now, before)]
        raise SchemaError(
            f"column {check.column!r} is {types[0]} and was {types[1]} in partition {label!r}; "
            "they cannot be compared"
        )
    return kinds[0](check, now, before, label)


def population_stability_index(counts: Array, before: Array) -> float:
    """The population stability index of two samples, by their counts in the same bins.

    ``sum((p - q) * ln(p / q))`` over the bins, p and q the shares of the two samples (N. Siddiqi,
    Credit Risk Scorecards, 2006; the divergence of H. Jeffreys, 1946). Half a row is added to every
    bin of both, so that an empty bin has a logarithm.
    """
    p, q = ((each + 0.5) / (each.sum() + 0.5 * len(each)) for each in (counts, before))
    return float(np.sum((p - q) * np.log(p / q)))


def _kind(
    dataset: ds.Dataset, column: str
) -> Callable[[Drift, ds.Dataset, ds.Dataset, str], Finding]:
    if column not in dataset.schema.names:
        raise SchemaError(f"there is no column {column!r}; expected one of {dataset.schema.names}")
    kind = plain_type(dataset.schema.field(column).type)
    if not can_drift(kind):
        raise SchemaError(
            f"column {column!r} is {kind}; expected numbers, texts, booleans or lists of "
            "floating-point numbers"
        )
    if is_floats(kind):
        return _of_vectors
    return _of_numbers if is_number(kind) else _of_categories


def _of_numbers(check: Drift, now: ds.Dataset, before: ds.Dataset, label: str) -> Finding:
    values = [_numbers(each, check) for each in (now, before)]
    edges = _edges(values[1], check.bins)
    counts = [_binned(each, edges) for each in values]
    return _by_index(check, counts[0], counts[1], label)


def _numbers(dataset: ds.Dataset, check: Drift) -> Array:
    """The sampled numbers; nulls are NaN."""
    found = [
        batch.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
        for batch in sample(dataset, check.column, check.sample_rows)
    ]
    return np.concatenate(found) if found else np.empty(0)


def _edges(values: Array, bins: int) -> Array:
    """Where bins of equal share begin; a value that fills a bin alone has one of its own."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return ordered
    places = np.linspace(0, len(ordered) - 1, bins + 1).round().astype(int)
    found, times = np.unique(ordered[places], return_counts=True)
    repeated = found[times > 1]
    inner = found[(found > ordered[0]) & (found < ordered[-1])]
    return np.unique(np.concatenate([inner, repeated, np.nextafter(repeated, np.inf)]))


def _binned(values: Array, edges: Array) -> Array:
    """Counts by bin, the last of them of nulls and NaN."""
    missing = np.isnan(values)
    places = np.searchsorted(edges, values[~missing], side="right")
    counts = np.bincount(places, minlength=len(edges) + 1)
    return np.append(counts, np.count_nonzero(missing)).astype(float)


def _of_categories(check: Drift, now: ds.Dataset, before: ds.Dataset, label: str) -> Finding:
    counted = [_categories(each, check) for each in (now, before)]
    known = {value: count for value, count in counted[1].items() if value is not None}
    top = sorted(known, key=lambda value: (-known[value], str(value)))[: check.bins]
    counts = []
    for each in counted:
        shown = [each.get(value, 0) for value in (*top, None)]
        counts.append(np.array([*shown, sum(each.values()) - sum(shown)], dtype=float))
    return _by_index(check, counts[0], counts[1], label)


def _categories(dataset: ds.Dataset, check: Drift) -> dict[Any, int]:
    found = [batch for batch in sample(dataset, check.column, check.sample_rows) if len(batch)]
    if not found:
        return {}
    values = pa.chunked_array(found).cast(plain_type(found[0].type))
    return {each["values"]: each["counts"] for each in pc.value_counts(values).to_pylist()}


def _by_index(check: Drift, counts: Array, before: Array, label: str) -> Finding:
    rows = (int(counts.sum()), int(before.sum()))
    if min(rows) < check.min_rows:
        return _too_few(check, rows, label)
    index = population_stability_index(counts, before)
    return Finding(
        index <= check.max_psi,
        f"The population stability index of {check.column} against partition {label!r} is "
        f"{index:.4g}; the limit is {check.max_psi:g}",
        {**_sampled(rows, label), "psi": index, "max_psi": check.max_psi, "bins": len(counts)},
    )


def _of_vectors(check: Drift, now: ds.Dataset, before: ds.Dataset, label: str) -> Finding:
    (centroid, count), (other, others) = (_centroid(each, check) for each in (now, before))
    rows = (count, others)
    if min(rows) < check.min_rows:
        return _too_few(check, rows, label)
    if len(centroid) != len(other):
        return Finding(
            False,
            f"The vectors in {check.column} have dimension {len(centroid)}; in partition "
            f"{label!r} they have dimension {len(other)}",
            {
                **_sampled(rows, label),
                "dimension": len(centroid),
                "dimension_previous": len(other),
            },
        )
    distance = cosine_distance(centroid, other)
    return Finding(
        distance <= check.max_distance,
        f"The cosine distance between the centroids of {check.column} in this partition and in "
        f"partition {label!r} is {distance:.4g}; the limit is {check.max_distance:g}",
        {**_sampled(rows, label), "distance": distance, "max_distance": check.max_distance},
    )


def _centroid(dataset: ds.Dataset, check: Drift) -> tuple[Array, int]:
    """The mean of the sampled vectors that are finite, and their count.

    Raises:
        SchemaError: If their dimensions differ.
    """
    total, count = np.empty(0), 0
    for batch in sample(dataset, check.column, check.sample_rows):
        if not len(vectors := batch.drop_null()):
            continue
        lengths = pc.list_value_length(vectors)
        low, high = pc.min_max(lengths).as_py().values()
        if low != high or (count and low != len(total)):
            raise SchemaError(
                f"column {check.column!r} has vectors of different dimensions, as {low} and "
                f"{high if low != high else len(total)}, which have no centroid"
            )
        values = vectors.flatten().cast(pa.float64()).fill_null(np.nan)
        matrix = values.to_numpy(zero_copy_only=False).reshape(len(vectors), low)
        matrix = matrix[np.isfinite(matrix).all(axis=1)]
        if len(matrix):
            total = matrix.sum(axis=0) + (total if count else 0)
            count += len(matrix)
    return total / max(count, 1), count


def cosine_distance(a: Array, b: Array) -> float:
    """One less the cosine of the angle of two vectors, from 0 to 2.

    Where one is zero, and so has no direction, it is 1; where both are, 0.
    """
    scales = [float(np.max(np.abs(each), initial=0)) for each in (a, b)]
    if not all(scales):
        return 1.0 if any(scales) else 0.0
    a, b = a / scales[0], b / scales[1]  # as squares of very large or small numbers are not numbers
    cosine = np.dot(a, b) / (np.linalg.norm(a) * np.linalg.norm(b))
    return float(min(max(1 - cosine, 0.0), 2.0))


def _too_few(check: Drift, rows: tuple[int, int], label: str) -> Finding:
    return Finding(
        True,
        f"Not compared: {check.column} has {rows[0]:,} rows here and {rows[1]:,} in partition "
        f"{label!r}; at least {check.min_rows:,} are needed in each",
        _sampled(rows, label),
    )


def _sampled(rows: tuple[int, int], label: str) -> dict[str, Any]:
    return {"previous": label, "rows": rows[0], "rows_previous": rows[1]}
