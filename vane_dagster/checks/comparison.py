"""Comparison of values and rows: the same for checks, adoptions and versions of a stage.

Two values are the same if they are equal, or both null; floating-point numbers, also inside of
other values, if they differ by at most a tolerance times one plus the magnitude of the first, or
if both are NaN. Numbers of two types are compared as numbers; a missing column or field is null.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vane_dagster._lazy import pc
from vane_dagster._texts import listed
from vane_dagster.checks.context import RowOutcomes
from vane_dagster.errors import names
from vane_dagster.providers.usage import USAGE
from vane_dagster.storage.row_keys import map_entries
from vane_dagster.storage.sample import python_values
from vane_dagster.types.kinds import is_list, is_number
from vane_dagster.types.schema import plain_type
from vane_dagster.types.tensors import storage_type

OUTCOME = "(outcome)"
"""Placeholder for the column, if rows failed, were dropped, or differ in number."""

_CHARACTERS = 60
_LEAD = 24
_SHOWN = 50
_NAMED = 5
_ROWS = 1 << 14

Mask: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]
_Rows: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Difference:
    """A value that differs from the stored or expected one.

    Attributes:
        id: The id of the row.
        column: The column, or `OUTCOME`.
        before: The stored or expected value, shortened to the difference.
        now: The other value.
    """

    id: Any
    column: str
    before: str
    now: str


def described(differences: Sequence[Difference], rows: int, other: str) -> str:
    """Name the rows that differ from the other ones, and their columns."""
    ids = list(dict.fromkeys(str(each.id) for each in differences))
    columns = names(dict.fromkeys(each.column for each in differences))
    return (
        f"{len(ids):,} of {rows:,} rows differ from the {other}: ids {listed(ids, _NAMED)}, in "
        f"{columns}"
    )


def as_metadata(differences: Sequence[Difference], before: str, now: str) -> dict[str, Any]:
    """Return the number of rows that differ, and a table of the first differences."""
    metadata: dict[str, Any] = {"differing": len({each.id for each in differences})}
    if differences:
        metadata["differences"] = [
            {"id": str(each.id), "column": each.column, before: each.before, now: each.now}
            for each in differences[:_SHOWN]
        ]
    return metadata


def compare(
    stored: RowOutcomes,
    computed: RowOutcomes,
    ids: Sequence[Any],
    columns: Sequence[str] | None,
    tolerance: float,
) -> list[Difference]:
    """Return the differences between stored and recomputed rows."""
    sides, differences, alike = (stored, computed), list[Difference](), []
    for id in ids:
        outcomes = [side.describe(id) for side in sides]
        if outcomes[0] != outcomes[1] and not all(id in side.failed for side in sides):
            differences.append(Difference(id, OUTCOME, *outcomes))
        elif id not in stored.failed:
            alike.append(id)
    owners = [id for id in alike for _ in stored.places.get(id, ())]
    before, now = (
        side.table.take(pa.array([n for id in alike for n in side.places.get(id, ())], pa.int64()))
        for side in sides
    )
    every = dict.fromkeys((*by_default(before.schema), *by_default(now.schema)))
    return [*differences, *differences_of(owners, before, now, columns or [*every], tolerance)]


def by_default(schema: pa.Schema) -> list[str]:
    """Return the columns to compare if none are named: all but a prompt's usage, with seconds."""
    return [column.name for column in schema if not column.type.equals(USAGE)]


def differences_of(
    ids: Sequence[Any], before: pa.Table, now: pa.Table, columns: Sequence[str], tolerance: float
) -> Iterator[Difference]:
    """Yield the differences between rows with the same ids, column by column."""
    for name in columns:
        a, b = (
            plain(side.column(name) if name in side.column_names else pa.nulls(len(ids)))
            for side in (before, now)
        )
        for row in np.flatnonzero(differing(a, b, tolerance)).tolist():
            texts = apart(a.slice(row, 1), b.slice(row, 1))
            yield Difference(ids[row], name, *texts)


def differing(before: pa.Array, now: pa.Array, tolerance: float) -> Mask:
    """Return which pairs of plain values differ."""
    starts = range(0, len(before) or 1, _ROWS)  # limits memory
    slices = [[each.slice(start, _ROWS) for each in (before, now)] for start in starts]
    return np.concatenate([_differing(a, b, tolerance) for a, b in slices])


def apart(before: pa.Array, now: pa.Array) -> tuple[str, str]:
    """Return two plain values as texts, from shortly before the first character that differs."""
    texts = [_text(python_values(pa.chunked_array([each]))[0]) for each in (before, now)]
    start = max(0, len(os.path.commonprefix(texts)) - _LEAD)  # noqa: RUF071  # of texts
    a, b = ("..." * bool(start) + text[start:] for text in texts)
    return _short(a), _short(b)


def plain(values: Union[pa.Array, pa.ChunkedArray]) -> pa.Array:
    """Return values without chunks, dictionaries and extension types; tensors are flat lists."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return array.cast(storage_type(plain_type(array.type)))


def floats(numbers: Union[pa.Array, pa.ChunkedArray]) -> Floats:
    """Return numbers of any type as floating-point numbers; nulls are NaN."""
    return np.asarray(numbers.cast(pa.float64(), safe=False).fill_null(np.nan))


def elements(before: pa.Array, now: pa.Array) -> tuple[Mask, _Rows, pa.Array, pa.Array]:
    """Return which pairs of lists have one length; of these the row of each element, and both.

    A null has no length.
    """
    lengths = [pc.list_value_length(each).cast(pa.int64()).fill_null(-1) for each in (before, now)]
    sizes, others = map(np.asarray, lengths)
    alike: Mask = (sizes == others) & (sizes >= 0)
    rows = np.flatnonzero(alike)
    owners = np.repeat(rows, sizes[rows])
    return alike, owners, before.take(rows).flatten(), now.take(rows).flatten()


def _differing(before: pa.Array, now: pa.Array, tolerance: float) -> Mask:
    valid = np.asarray(before.is_valid()), np.asarray(now.is_valid())
    differs: Mask = valid[0] != valid[1]
    rows = np.flatnonzero(valid[0] & valid[1])
    before, now = before.take(rows), now.take(rows)
    if (within := inside(before, now)) is not None:
        alike, pairs = within
        differs[rows[~alike]] = True
        for _, owners, a, b in pairs:
            differs[rows[owners[_differing(a, b, tolerance)]]] = True
        return differs
    kinds = before.type, now.type
    if all(map(is_number, kinds)) and any(map(pa.types.is_floating, kinds)):
        differs[rows] = _far(before, now, tolerance)
        return differs
    try:
        differs[rows] = pc.not_equal(before, now)
    except pa.ArrowException:  # of these types no values are equal
        differs[rows] = True
    return differs


def inside(
    before: pa.Array, now: pa.Array
) -> tuple[Mask, Sequence[tuple[str, _Rows, pa.Array, pa.Array]]] | None:
    """Return what is inside of values if both are structs, or both lists; else None.

    The mask says which pairs have the same places inside. For each field, which is empty for
    elements, the rows of the values inside and both values follow.
    """
    before, now = (map_entries(v) if pa.types.is_map(v.type) else v for v in (before, now))
    if is_list(before.type) and is_list(now.type):
        alike, *pairs = elements(before, now)
        return alike, [("", *pairs)]
    if not (pa.types.is_struct(before.type) and pa.types.is_struct(now.type)):
        return None
    sides = [dict(zip((f.name for f in v.type), v.flatten())) for v in (before, now)]
    nulls, rows = pa.nulls(len(before)), np.arange(len(before))
    fields = dict.fromkeys(itertools.chain(*sides))
    alike = np.asarray(pc.and_(before.is_valid(), now.is_valid()))
    return alike, [(n, rows, *(side.get(n, nulls) for side in sides)) for n in fields]


def _far(before: pa.Array, now: pa.Array, tolerance: float) -> Mask:
    a, b = floats(before), floats(now)
    with np.errstate(all="ignore"):  # of infinite numbers
        gaps = np.abs(a - b)
        near = np.isfinite(gaps) & (gaps <= tolerance * (1 + np.abs(a)))
    far: Mask = ~(near | (a == b) | (np.isnan(a) & np.isnan(b)))
    return far


def _text(value: Any) -> str:
    quoted = isinstance(value, (str, bytes))
    return "null" if value is None else repr(value) if quoted else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
