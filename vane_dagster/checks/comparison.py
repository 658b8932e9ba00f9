"""Comparison of rows, with a tolerance for floating-point numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vane_dagster._texts import listed
from vane_dagster.checks.context import RowOutcomes
from vane_dagster.errors import names

OUTCOME = "(outcome)"
"""Placeholder for the column, if rows failed, were dropped, or differ in number."""

_CHARACTERS = 60
_LEAD = 24
_SHOWN = 50
_NAMED = 5


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
    """Return the differences between stored and recomputed rows; a missing column is null."""
    every = dict.fromkeys((*stored.columns, *computed.columns))
    wanted = columns or list(every)
    differences = []
    for id in ids:
        if stored.describe(id) != computed.describe(id):
            if not (id in stored.failed and id in computed.failed):
                differences.append(
                    Difference(id, OUTCOME, stored.describe(id), computed.describe(id))
                )
            continue
        if id in stored.failed:
            continue
        for before, now in zip(stored.rows.get(id, ()), computed.rows.get(id, ())):
            for name in wanted:
                if texts := apart(before.get(name), now.get(name), tolerance):
                    differences.append(Difference(id, name, *texts))
    return differences


def apart(stored: Any, computed: Any, tolerance: float) -> tuple[str, str] | None:
    """Return two values as text, from the first place on where they differ; else None."""
    difference = _differing(stored, computed, tolerance)
    if difference is None:
        return None
    path, a, b = difference
    if isinstance(a, (str, bytes)) and isinstance(b, type(a)):
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b))
        start = max(0, len(list(same)) - _LEAD)
        path, a, b = path + "..." * bool(start), a[start:], b[start:]
    return f"{path}{_short(a)}", f"{path}{_short(b)}"


def _differing(stored: Any, computed: Any, tolerance: float) -> tuple[str, Any, Any] | None:
    """Return the first path at which two values differ, with both values there; else None."""
    if isinstance(stored, dict) and isinstance(computed, dict) and stored.keys() == computed.keys():
        pairs = [(f"{name}: ", stored[name], computed[name]) for name in stored]
    elif (
        isinstance(stored, (list, tuple))
        and isinstance(computed, (list, tuple))
        and len(stored) == len(computed)
    ):
        pairs = [(f"[{i}] ", a, b) for i, (a, b) in enumerate(zip(stored, computed))]
    else:
        return None if _equal(stored, computed, tolerance) else ("", stored, computed)
    for path, a, b in pairs:
        if (difference := _differing(a, b, tolerance)) is not None:
            return f"{path}{difference[0]}", difference[1], difference[2]
    return None


def _equal(stored: Any, computed: Any, tolerance: float) -> bool:
    """Return whether two values are equal. NaN equals NaN; -0.0 equals 0.0 with a tolerance."""
    if isinstance(stored, _FLOATS) and isinstance(computed, _FLOATS):
        before, now = float(stored), float(computed)
        within = tolerance * (1 + abs(before))
        is_close = tolerance > 0 and math.isclose(before, now, rel_tol=0, abs_tol=within)
        return is_close or repr(before) == repr(now)
    return bool(stored == computed) and type(stored) is type(computed)


_FLOATS = (float, np.floating)


def _short(value: Any) -> str:
    """Return a value as a short text."""
    quoted = isinstance(value, (str, bytes))
    text = "null" if value is None else repr(value) if quoted else str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."
