"""A check that recomputes a sample of rows and compares them with the stored rows."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster.checks.base import Check, bound, checked_columns, listed
from vane_dagster.checks.context import CheckContext, CheckOutcome, Recomputation, RowOutcomes
from vane_dagster.errors import DefinitionError, VaneError, names
from vane_dagster.types.schema import ERROR_COLUMN

OUTCOME = "(outcome)"
"""Placeholder for the column, if rows failed, were dropped, or differ in number."""

_CHARACTERS = 60
_LEAD = 12
_SHOWN = 50
_NAMED = 5


@dataclass(frozen=True)
class Reproducible(Check):
    """Stored rows come out the same if they are computed again.

    The check detects changes that a fragment key cannot cover: files that a function reads when it
    is called, the environment, upgraded packages, and results that differ from call to call. It
    reads a random sample of input rows as the stage read them, and computes them with the current
    code on the warm workers. It compares the output with the stored rows and commits nothing.

    It is executed alone, from Dagster's UI, a job or a schedule. A run that also materializes the
    stage skips it.

    Attributes:
        rows: The number of input rows to recompute in each partition, from at most four fragments.
        tolerance: The largest difference of floating-point numbers, absolute or as a share of the
            stored number; or a pair (relative, absolute) that is summed, as in `numpy.isclose`. All
            other values must be equal.
        columns: The columns to compare. Default: all.
    """

    rows: int = 20
    tolerance: float | tuple[float, float] = 1e-5
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    name: str = field(default="reproducible", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self._location, "rows", self.rows)
        given = self.tolerance
        pair = given if isinstance(given, (tuple, list)) else (given, given)
        if len(pair) != 2:
            raise DefinitionError(
                f"{self._location}: tolerance is {given!r}; expected a number, or a pair "
                "(relative, absolute)"
            )
        relative, absolute = (bound(self._location, "tolerance", each) for each in pair)
        self._set(
            tolerance=(relative, absolute),
            columns=checked_columns(self._location, self.columns),
        )

    @property
    def bounds(self) -> tuple[float, float]:
        """The relative and the absolute tolerance."""
        assert isinstance(self.tolerance, tuple)
        return self.tolerance

    @property
    def description(self) -> str:
        return (
            f"{self.rows} random rows, computed again, match the stored rows "
            f"in {listed(self.columns)}"
        )

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.columns)

    @property
    def rows_to_recompute(self) -> int:
        """The number of input rows to recompute in each partition."""
        return self.rows

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the recomputed rows with the stored rows."""
        again = context.recomputed()
        metadata: dict[str, Any] = {"loads": again.loads, "warm": again.warm}
        metadata["seed"] = str(again.seed)  # as text: Dagster would plot a number
        metadata["code_changed"] = again.code_changed
        if again.error is not None:
            return _failed("The rows could not be computed again", again.error, metadata)
        try:
            read = again.read()
            rows = sum(len(each.ids) for each in read)
            differences = [
                difference
                for each in read
                for difference in compare(
                    each.stored, each.computed, each.ids, self.columns, self.bounds
                )
            ]
        except VaneError as error:
            what = "The rows could not be compared with what is stored"
            return _failed(what, error, metadata)
        differing = list(dict.fromkeys(each.id for each in differences))
        metadata |= {
            "rows": rows,
            "differing": len(differing),
            "fragments": again.sampled_fragments,
            "fragments_with_changed_source": again.changed_fragments,
        }
        skipped = _skipped(again)
        if differences:
            shown = [{n: str(v) for n, v in asdict(d).items()} for d in differences[:_SHOWN]]
            metadata["differences"] = shown
            columns = names(dict.fromkeys(each.column for each in differences))
            described = _described(differing, rows, columns, again.code_changed)
            return CheckOutcome(False, f"{described}{skipped}", metadata)
        if not rows and again.changed_fragments:
            described = f"Nothing could be compared{skipped}"
            return CheckOutcome(False, described, metadata, severity="WARN")
        return CheckOutcome(True, f"{_same(rows)}{skipped}", metadata)


@dataclass(frozen=True)
class Difference:
    """A value that differs from the stored one.

    Attributes:
        id: The id of the input row.
        column: The column, or `OUTCOME`.
        stored: The stored value, shortened to the difference.
        computed: The recomputed value.
    """

    id: Any
    column: str
    stored: str
    computed: str


def _skipped(again: Recomputation) -> str:
    if not again.changed_fragments:
        return ""
    return (
        f". The source files of {again.changed_fragments:,} of {again.fragments:,} fragments "
        "have changed since, so their rows were not compared; materialize it again"
    )


def _failed(what: str, error: VaneError, metadata: Mapping[str, Any]) -> CheckOutcome:
    text = str(error)
    described = f"{what}: {text.partition(chr(10))[0]}"
    return CheckOutcome(False, described, {**metadata, "error": text})


def _same(rows: int) -> str:
    if rows < 2:
        one = "1 row was computed again and matches the stored row"
        return one if rows else "The partition has no row to compute again"
    return f"{rows:,} rows were computed again; all match the stored rows"


def _described(differing: Sequence[object], rows: int, columns: str, code_changed: bool) -> str:
    more = f" and {len(differing) - _NAMED:,} more" if len(differing) > _NAMED else ""
    ids = ", ".join(str(id) for id in differing[:_NAMED])
    since = "; the stage's code has changed since" if code_changed else ""
    return (
        f"{len(differing):,} of {rows:,} rows differ from the stored rows: "
        f"ids {ids}{more}, in {columns}{since}"
    )


def compare(
    stored: RowOutcomes,
    computed: RowOutcomes,
    ids: Sequence[Any],
    columns: Sequence[str] | None,
    bounds: tuple[float, float],
) -> list[Difference]:
    """Return the differences between stored and recomputed rows."""
    wanted = columns or [n for n in stored.columns if n != ERROR_COLUMN]
    extra = [] if columns else [n for n in computed.columns if n not in stored.columns]
    found = []
    for id in ids:
        if stored.describe(id) != computed.describe(id):
            if not (id in stored.failed and id in computed.failed):
                found.append(Difference(id, OUTCOME, stored.describe(id), computed.describe(id)))
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
    """Return the stored and the computed value of a column as text if they differ; else None."""
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
    """Return the first path at which two values differ, with both values there; else None."""
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
    """Return two lists of floating-point numbers as arrays; None if one holds anything else."""
    if not all(isinstance(each, _FLOATS) for values in (stored, computed) for each in values):
        return None
    return np.asarray(stored, float), np.asarray(computed, float)


def _near(stored: Any, computed: Any, bounds: tuple[float, float]) -> Any:
    """Return which numbers are within the tolerance; NaN equals NaN, and infinity equals itself."""
    relative, absolute = bounds
    with np.errstate(invalid="ignore", over="ignore"):
        within = np.abs(computed - stored) <= absolute + relative * np.abs(stored)
        within &= np.isfinite(stored) & np.isfinite(computed)
    return within | (stored == computed) | (np.isnan(stored) & np.isnan(computed))


def _short(value: Any) -> str:
    plain = isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal))
    text = "null" if value is None else str(value) if plain else repr(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}..."


def _windows(stored: Any, computed: Any) -> tuple[str, str]:
    """Return two texts, cut to start shortly before their first difference."""
    same = next(
        (i for i, (a, b) in enumerate(zip(stored, computed)) if a != b),
        min(len(stored), len(computed)),
    )
    start = max(0, same - _LEAD) if max(len(stored), len(computed)) > _CHARACTERS else 0
    lead = "..." if start else ""
    return lead + _short(stored[start:]), lead + _short(computed[start:])
