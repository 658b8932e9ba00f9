"""A check that recomputes a sample of rows and compares them with the stored rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from vane_dagster._arguments import positive
from vane_dagster._texts import count
from vane_dagster.checks.base import ANY, Check, listed
from vane_dagster.checks.comparison import as_metadata, compare, described
from vane_dagster.checks.context import CheckOutcome
from vane_dagster.errors import VaneError, first_line

if TYPE_CHECKING:
    from vane_dagster.checks.partition import CheckContext


@dataclass(frozen=True)
class Reproducible(Check):
    """Stored rows are equal to the results of computing them again.

    The check detects changes that a fragment key cannot cover: files that a function reads when it
    is called, the environment, upgraded packages, and results that differ from call to call. It
    reads a random sample of input rows as the stage read them, and computes them with the current
    code on the warm workers. It compares the output with the stored rows and commits nothing.

    It runs only when it is executed alone: from Dagster's UI, a job or a schedule. A run that also
    materializes the stage skips it.

    Attributes:
        rows: The number of input rows to recompute in each partition, from at most four fragments.
        tolerance: The largest difference of floating-point numbers, also inside of other values,
            relative to one plus their magnitude. All other values must be equal.
        columns: The columns to compare. Default: all but the usage of prompts.
    """

    rows: int = 20
    tolerance: float = 1e-5
    columns: Sequence[str] | None = field(default=None, kw_only=True)

    _is_alone: ClassVar[bool] = True
    _bounds: ClassVar[Mapping[str, float]] = {"tolerance": ANY}

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self._location, "rows", self.rows)

    @property
    def description(self) -> str:
        return (
            f"{self.rows} random rows, computed again, match the stored rows "
            f"in {listed(self.columns)}"
        )

    def fit(self, schema: pa.Schema, location: str) -> None:
        self._require(schema, location, self.columns)

    def evaluate(self, context: CheckContext) -> CheckOutcome:
        """Compare the recomputed rows with the stored rows."""
        again = context._recomputation
        assert again is not None, "it is evaluated alone"
        metadata: dict[str, Any] = {"code_changed": again.code_changed}
        if again.source_changed:
            text = "Nothing was compared: source files changed after the run. Materialize it again"
            return CheckOutcome(False, text, metadata, severity="WARN")
        try:
            read = again.read()
            rows = sum(len(each.ids) for each in read)
            differences = [
                difference
                for each in read
                for difference in compare(
                    each.stored, each.computed, each.ids, self.columns, self.tolerance
                )
            ]
        except VaneError as error:
            text = f"The rows could not be computed again and compared: {first_line(error)}"
            return CheckOutcome(False, text, {**metadata, "error": str(error)})
        metadata |= {"rows": rows, **as_metadata(differences, "stored", "computed")}
        if differences:
            text = described(differences, rows, "stored rows")
            since = "; the stage's code has changed since" if again.code_changed else ""
            return CheckOutcome(False, f"{text}{since}", metadata)
        return CheckOutcome(True, f"{count(rows, 'row')} computed again; all match", metadata)
