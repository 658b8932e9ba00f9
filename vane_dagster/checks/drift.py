"""The drift of a column's distribution between two partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from vane_dagster._arguments import positive, text
from vane_dagster._lazy import pc
from vane_dagster.checks.base import ANY, Check
from vane_dagster.checks.comparison import floats
from vane_dagster.checks.context import CheckOutcome, Severity
from vane_dagster.errors import SchemaError
from vane_dagster.types.kinds import is_floats, is_number, is_text
from vane_dagster.types.schema import plain_type
from vane_dagster.types.tensors import as_storage

if TYPE_CHECKING:
    from vane_dagster.checks.partition import CheckContext

Array = np.ndarray[Any, Any]
_BINS = 10
_SAMPLE_ROWS = 100_000


def can_drift(kind: pa.DataType) -> bool:
    """Return whether `Drift` supports columns of the type."""
    kind = plain_type(kind)
    return is_number(kind) or is_text(kind) or is_floats(kind) or pa.types.is_boolean(kind)


@dataclass(frozen=True)
class Drift(Check):
    """How far a column's distribution has moved since the previous partition.

    Numbers, texts and booleans are compared by the population stability index. By convention, 0.1
    is a slight shift, and 0.2 a shift to investigate. Vectors are compared by the cosine distance
    of their centroids. At most 100,000 random rows are read from each partition. Numbers have ten
    bins with equal shares of the previous partition, texts one for each of its ten most frequent
    values; other values are one more bin, and nulls another one.

    Attributes:
        column: The column.
        max_psi: The largest population stability index allowed.
        max_distance: The largest cosine distance allowed, from 0 to 2.
        min_rows: With fewer rows in either partition the check passes, because chance moves the
            index by about ``20 / rows``.
    """

    column: str
    max_psi: float = field(default=0.2, kw_only=True)
    max_distance: float = field(default=0.1, kw_only=True)
    min_rows: int = field(default=500, kw_only=True)
    severity: Severity = field(default="WARN", kw_only=True)

    compares: ClassVar[bool] = True
    _bounds: ClassVar[Mapping[str, float]] = {"max_psi": ANY, "max_distance": ANY}

    def __post_init__(self) -> None:
        text(self._location, "column", self.column, "its name")
        if not self.name:
            plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in self.column)
            self._set(name=f"drift_{plain}")
        super().__post_init__()
        positive(self._location, "min_rows", self.min_rows)

    @property
    def description(self) -> str:
        return (
            f"The distribution of {self.column} is close to the previous partition's: a population "
            f"stability index of at most {self.max_psi:g} or, for vectors, a cosine distance "
            f"between the centroids of at most {self.max_distance:g}"
        )

    def fit(self, schema: pa.Schema, location: str) -> None:
        kinds = "numbers, texts, booleans or lists of floating-point numbers"
        self._require(schema, location, [self.column], can_drift, kinds)

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the column with the previous partition's.

        Raises:
            DefinitionError: If a partition lacks the column, or its type is not comparable.
            SchemaError: If the types in the partitions cannot be compared.
        """
        before = context.previous()
        if before is None:
            return CheckOutcome(True, "There is no previous partition to compare with")
        for each in (context, before):
            self.fit(each.schema, f"partition {each.partition!r}")
        types = [plain_type(each.schema.field(self.column).type) for each in (context, before)]
        kinds = [_kind(each) for each in types]
        if kinds[0] is not kinds[1]:
            raise SchemaError(
                f"column {self.column!r} is {types[0]} but was {types[1]} in partition "
                f"{before.partition!r}; they cannot be compared"
            )
        rows = context.counts.rows, before.counts.rows
        metadata = {"previous": before.partition, "rows": rows[0], "rows_previous": rows[1]}
        compared = kinds[0](self, context, before) if min(rows) >= self.min_rows else None
        if compared is None:
            return CheckOutcome(
                True,
                f"Not compared: there are {rows[0]:,} rows here and {rows[1]:,} in partition "
                f"{before.partition!r}; at least {self.min_rows:,} with a value are needed in each",
                metadata,
            )
        measure, distance, limit = compared
        return CheckOutcome(
            distance <= limit,
            f"The {_MEASURES[measure]} of {self.column} against partition {before.partition!r} is "
            f"{distance:.4g}; the limit is {limit:g}",
            metadata | {measure: distance, f"max_{measure}": limit},
        )


_MEASURES = {
    "psi": "population stability index",
    "distance": "cosine distance between the centroids",
}
_Compared = tuple[str, float, float]
"""A measure, its value, and the largest value allowed."""
_Compare = Callable[[Drift, "CheckContext", "CheckContext"], _Compared | None]


def population_stability_index(counts: Array, before: Array) -> float:
    """Return the population stability index of two samples.

    ``sum((p - q) * ln(p / q))`` over the bins, with p and q the shares of the two samples
    (N. Siddiqi, Credit Risk Scorecards, 2006; the divergence of H. Jeffreys, 1946). Half a row is
    added to every bin of both samples, which keeps the logarithm of an empty bin finite.
    """
    p, q = ((each + 0.5) / (each.sum() + 0.5 * len(each)) for each in (counts, before))
    return float(np.sum((p - q) * np.log(p / q)))


def _kind(kind: pa.DataType) -> _Compare:
    if is_floats(kind):
        return _of_vectors
    return _of_numbers if is_number(kind) else _of_categories


def _values(context: CheckContext, check: Drift) -> pa.ChunkedArray:
    """Return the sampled values."""
    field = context.schema.field(check.column)
    batches = context.sample([check.column], _SAMPLE_ROWS)
    return pa.Table.from_batches(batches, pa.schema([field])).column(0).cast(plain_type(field.type))


def _of_numbers(check: Drift, now: CheckContext, before: CheckContext) -> _Compared:
    values = [floats(_values(each, check)) for each in (now, before)]
    edges = _edges(values[1])
    counts = [_binned(each, edges) for each in values]
    return "psi", population_stability_index(*counts), check.max_psi


def _edges(values: Array) -> Array:
    """Return the start of bins of equal share; a value that fills a whole bin has its own."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return ordered
    places = np.linspace(0, len(ordered) - 1, _BINS + 1).round().astype(int)
    distinct, times = np.unique(ordered[places], return_counts=True)
    repeated = distinct[times > 1]
    inner = distinct[(distinct > ordered[0]) & (distinct < ordered[-1])]
    return np.unique(np.concatenate([inner, repeated, np.nextafter(repeated, np.inf)]))


def _binned(values: Array, edges: Array) -> Array:
    """Return counts by bin; the last bin counts nulls and NaN."""
    missing = np.isnan(values)
    places = np.searchsorted(edges, values[~missing], side="right")
    counts = np.bincount(places, minlength=len(edges) + 1)
    return np.append(counts, np.count_nonzero(missing)).astype(float)


def _of_categories(check: Drift, now: CheckContext, before: CheckContext) -> _Compared:
    pairs = [pc.value_counts(_values(each, check)).to_pylist() for each in (now, before)]
    counted = [{pair["values"]: pair["counts"] for pair in each} for each in pairs]
    known = {value: count for value, count in counted[1].items() if value is not None}
    top = sorted(known, key=lambda value: (-known[value], str(value)))[:_BINS]
    counts = []
    for each in counted:
        shown = [each.get(value, 0) for value in (*top, None)]
        counts.append(np.array([*shown, sum(each.values()) - sum(shown)], dtype=float))
    return "psi", population_stability_index(*counts), check.max_psi


def _of_vectors(check: Drift, now: CheckContext, before: CheckContext) -> _Compared | None:
    (centroid, count), (other, others) = (_centroid(each, check) for each in (now, before))
    if min(count, others) < check.min_rows:
        return None
    if len(centroid) != len(other):
        raise SchemaError(
            f"the vectors in {check.column!r} have dimension {len(centroid)}; in partition "
            f"{before.partition!r} they have dimension {len(other)}"
        )
    return "distance", cosine_distance(centroid, other), check.max_distance


def _centroid(context: CheckContext, check: Drift) -> tuple[Array, int]:
    """Return the mean of the finite sampled vectors, and their number."""
    total, count = np.empty(0), 0
    for batch in context.sample([check.column], _SAMPLE_ROWS):
        column = as_storage(pa.chunked_array([batch.column(0)]))
        if not len(vectors := column.combine_chunks().drop_null()):
            continue
        lengths = pc.list_value_length(vectors)
        low, high = pc.min_max(lengths).as_py().values()
        if low != high or (count and low != len(total)):
            raise SchemaError(
                f"column {check.column!r} has vectors of different dimensions, such as {low} and "
                f"{high if low != high else len(total)}, which have no centroid"
            )
        matrix = floats(vectors.flatten()).reshape(len(vectors), low)
        matrix = matrix[np.isfinite(matrix).all(axis=1)]
        if len(matrix):
            total = matrix.sum(axis=0) + (total if count else 0)
            count += len(matrix)
    return total / max(count, 1), count


def cosine_distance(a: Array, b: Array) -> float:
    """Return one minus the cosine of the angle between two vectors, from 0 to 2.

    A zero vector has no direction: the distance is 1 if one vector is zero, and 0 if both are.
    """
    norms = [float(np.linalg.norm(each)) for each in (a, b)]
    if not all(norms):
        return 1.0 if any(norms) else 0.0
    cosine = np.dot(a, b) / (norms[0] * norms[1])
    return float(min(max(1 - cosine, 0.0), 2.0))
