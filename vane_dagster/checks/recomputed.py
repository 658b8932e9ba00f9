"""Rows that were computed again, compared with those that are stored."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vane_dagster.pipeline.options import ERROR_COLUMN
from vane_dagster.storage.filesystem import Location
from vane_dagster.storage.manifest import PartInfo
from vane_dagster.storage.part_file import read_part
from vane_dagster.storage.sample import python_values

OUTCOME = "(outcome)"
"""In place of a column, where rows failed, were left out or became more or fewer."""

_SHOWN = 60
_LEAD = 12


@dataclass(frozen=True)
class Outcome:
    """What a stage made of some input rows.

    Attributes:
        rows: The rows that came out, by the id of the input row, in their order.
        failed: The error of each input row that was quarantined or came out as nulls, by its id.
        columns: The columns of the rows.
    """

    rows: Mapping[Any, Sequence[Mapping[str, Any]]]
    failed: Mapping[Any, str]
    columns: Sequence[str]

    def told(self, id: Any) -> str:
        """What became of an input row."""
        if id in self.failed:
            return f"failed: {self.failed[id]}"
        count = len(self.rows.get(id, ()))
        return f"{count:,} row{'s' * (count != 1)}"


@dataclass(frozen=True)
class Difference:
    """A value that differs from the stored one.

    Attributes:
        id: The id of the input row.
        column: The column, or `OUTCOME`.
        stored: What is stored, shortened to where it differs.
        computed: What came out now.
    """

    id: Any
    column: str
    stored: str
    computed: str


def read_outcome(folder: Location, part: PartInfo, given: str, ids: pa.Array) -> Outcome:
    """What a part has of some input rows.

    Args:
        folder: Where the part is.
        part: The part.
        given: Its column with the id of the input row.
        ids: The ids of the input rows.

    Raises:
        StoreError: If it cannot be read.
    """
    table = read_part(folder, part.name)
    owners = table.column(given)
    table = table.filter(pc.is_in(owners, value_set=ids.cast(owners.type)))
    rows: dict[Any, list[Mapping[str, Any]]] = {}
    values = {name: python_values(table.column(name)) for name in table.column_names}
    for place, id in enumerate(values[given]):
        rows.setdefault(id, []).append({name: column[place] for name, column in values.items()})
    failed = {}
    if part.faults:
        records = read_part(folder, part.faults, ["id", "error"])
        wanted = set(ids.to_pylist())
        pairs = zip(*(records.column(name).to_pylist() for name in ("id", "error")))
        failed = {id: error for id, error in pairs if id in wanted}
    return Outcome(rows, failed, table.column_names)


def compare(
    stored: Outcome,
    computed: Outcome,
    ids: Sequence[Any],
    columns: Sequence[str] | None,
    bounds: tuple[float, float],
) -> list[Difference]:
    """Where what was computed now differs from what is stored.

    Args:
        stored: What is stored.
        computed: What came out now.
        ids: The ids of the input rows.
        columns: The columns that are compared; None for all.
        bounds: The relative and the absolute tolerance of floating-point numbers.
    """
    wanted = columns or [n for n in stored.columns if n != ERROR_COLUMN]
    extra = [] if columns else [n for n in computed.columns if n not in stored.columns]
    found = []
    for id in ids:
        if stored.told(id) != computed.told(id):
            if not (id in stored.failed and id in computed.failed):
                found.append(Difference(id, OUTCOME, stored.told(id), computed.told(id)))
            continue
        if id in stored.failed:
            continue
        for before, now in zip(stored.rows.get(id, ()), computed.rows.get(id, ())):
            for name in (*wanted, *extra):
                if apart := _apart(before, now, name, bounds):
                    found.append(Difference(id, name, *apart))
    return found


def _apart(
    before: Mapping[str, Any], now: Mapping[str, Any], name: str, bounds: tuple[float, float]
) -> tuple[str, str] | None:
    """How a column differs in two rows; None if it does not."""
    missing = "no such column"
    if name not in before or name not in now:
        return (
            _short(before[name]) if name in before else missing,
            _short(now[name]) if name in now else missing,
        )
    found = _differing(before[name], now[name], bounds)
    if found is None:
        return None
    path, a, b = found
    if isinstance(a, (str, bytes)) and isinstance(b, type(a)):
        shown = _windows(a, b)
    else:
        shown = _short(a), _short(b)
    return f"{path}{shown[0]}", f"{path}{shown[1]}"


def _differing(
    stored: Any, computed: Any, bounds: tuple[float, float]
) -> tuple[str, Any, Any] | None:
    """The first place in two values where they differ, and what is there; None if nowhere."""
    if isinstance(stored, dict) and isinstance(computed, dict) and stored.keys() == computed.keys():
        pairs = [(f"{name}: ", stored[name], computed[name]) for name in stored]
    elif (
        isinstance(stored, (list, tuple))
        and isinstance(computed, (list, tuple))
        and len(stored) == len(computed)
    ):
        if (numbers := _float_lists(stored, computed)) is not None:
            near = _near(*numbers, bounds)
            if near.all():
                return None
            first = int(np.argmin(near))
            return f"[{first}] ", stored[first], computed[first]
        pairs = [(f"[{i}] ", a, b) for i, (a, b) in enumerate(zip(stored, computed))]
    else:
        return None if _equal(stored, computed, bounds) else ("", stored, computed)
    for path, a, b in pairs:
        if (found := _differing(a, b, bounds)) is not None:
            return f"{path}{found[0]}", found[1], found[2]
    return None


def _equal(stored: Any, computed: Any, bounds: tuple[float, float]) -> bool:
    if isinstance(stored, _FLOATS) and isinstance(computed, _FLOATS):
        return bool(_near(np.asarray(stored, float), np.asarray(computed, float), bounds))
    return bool(stored == computed) and type(stored) is type(computed)


_FLOATS = (float, np.floating)


def _float_lists(stored: Sequence[Any], computed: Sequence[Any]) -> tuple[Any, Any] | None:
    """Two lists of floating-point numbers as arrays; None if there is anything else in one."""
    if not all(isinstance(each, _FLOATS) for values in (stored, computed) for each in values):
        return None
    return np.asarray(stored, float), np.asarray(computed, float)


def _near(stored: Any, computed: Any, bounds: tuple[float, float]) -> Any:
    """Whether numbers are within the tolerance; NaN is NaN, and infinity itself alone."""
    relative, absolute = bounds
    with np.errstate(invalid="ignore", over="ignore"):
        within = np.abs(computed - stored) <= absolute + relative * np.abs(stored)
        within &= np.isfinite(stored) & np.isfinite(computed)
    return within | (stored == computed) | (np.isnan(stored) & np.isnan(computed))


def _short(value: Any) -> str:
    plain = isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal))
    text = "null" if value is None else str(value) if plain else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _windows(stored: Any, computed: Any) -> tuple[str, str]:
    """Two texts from a little before the first place where they differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(stored, computed)) if a != b),
        min(len(stored), len(computed)),
    )
    start = max(0, same - _LEAD) if max(len(stored), len(computed)) > _SHOWN else 0
    lead = "..." if start else ""
    return lead + _short(stored[start:]), lead + _short(computed[start:])
