"""The check that computes a sample of rows again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster.checks.base import Check, bound, checked_columns, listed
from vane_dagster.errors import DefinitionError


@dataclass(frozen=True)
class Reproducible(Check):
    """Stored rows come out the same if they are computed again.

    It finds what a fragment key cannot know: files that a function reads when it is called, the
    environment, upgraded packages, results that differ from call to call. A random sample of input
    rows is read as the stage has read them and computed with today's code on the warm workers; what
    comes out is compared with what is stored, and nothing is committed.

    It is executed alone, from Dagster's UI, a job or a schedule. A run that materializes the stage
    too leaves it out.

    Attributes:
        rows: How many input rows are computed again, in each partition. They come from four
            fragments at most.
        tolerance: The largest difference of floating-point numbers, as it is or as a share of the
            stored number; or a pair (relative, absolute), whose sum it may be, as in
            `numpy.isclose`. All else has to be equal.
        columns: The columns that are compared; by default all.
    """

    kind: ClassVar[str] = "reproducible"
    thresholds: ClassVar[Mapping[str, str]] = {
        "rows": "rows",
        "tolerance": "tolerance",
        "columns": "columns",
    }
    at_commit: ClassVar[bool] = False

    rows: int = 20
    tolerance: float | tuple[float, float] = 1e-5
    columns: Sequence[str] | None = field(default=None, kw_only=True)
    name: str = field(default="reproducible", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.blocking:
            raise DefinitionError(
                f"{self._culprit}: blocking=True, but it is evaluated after the commit and "
                "withholds nothing; leave it out"
            )
        positive(self._culprit, "rows", self.rows)
        given = self.tolerance
        pair = given if isinstance(given, (tuple, list)) else (given, given)
        if len(pair) != 2:
            raise DefinitionError(
                f"{self._culprit}: tolerance is {given!r}; expected a number, or a pair "
                "(relative, absolute)"
            )
        relative, absolute = (bound(self._culprit, "tolerance", each) for each in pair)
        self._set(
            rows=self.rows,
            tolerance=(relative, absolute),
            columns=checked_columns(self._culprit, self.columns),
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

    def fit(self, schema: pa.Schema, culprit: str) -> None:
        self._require(schema, culprit, self.columns)
