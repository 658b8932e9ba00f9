"""Checks of a stage's rows, for ``asset=vd.Asset(checks=[...])``.

A stage has two checks by default. ``rows`` blocks: it has the findings `IdsComplete`, `ErrorRate`
and, for vectors, `Vectors`. ``quality`` warns: it has `PackagesUnchanged` if the stage runs a
function or a model, `NullRate` if it computes columns, and `Text` if it computes texts. A finding
in ``vd.Asset(checks=[...])`` is a check of its own, and no longer part of the default; `Off`
removes a finding or a default check. `Reproducible`, which recomputes rows, is evaluated when it is
executed. All others are evaluated when a partition is committed.

A user-defined check is a frozen dataclass with an `evaluate` method, in a user module::

    from dataclasses import dataclass

    import vane_dagster as vd


    @dataclass(frozen=True)
    class LongTexts(vd.checks.Check):
        column: str
        max_characters: int = 8_000
        max_share: float = 0.01

        def evaluate(self, context: vd.checks.CheckContext) -> vd.checks.CheckOutcome:
            rows = long = 0
            for batch in context.batches([self.column]):
                texts = batch.column(0).to_pylist()
                rows += len(texts)
                long += sum(len(text or "") > self.max_characters for text in texts)
            return vd.checks.CheckOutcome(
                passed=long <= self.max_share * rows,
                description=f"{long:,} of {rows:,} texts are too long",
                metadata={"long": long, "rows": rows},
            )


    checks = [LongTexts("text", blocking=True)]
    docs.map_batches("clean", clean, schema=schema, asset=vd.Asset(checks=checks))

It is evaluated again for a stored partition after an edit of its fields, its code or the code that
it uses. `CheckContext` defines the data that it can read.
"""

from vane_dagster.checks.base import Check, CheckLike, Off
from vane_dagster.checks.builtin import (
    ErrorRate,
    IdsComplete,
    NullRate,
    PackagesUnchanged,
    Text,
    Vectors,
)
from vane_dagster.checks.context import (
    CheckContext,
    CheckOutcome,
    ColumnStatistics,
    PackageVersions,
    PartCounts,
    Recomputation,
    RecomputedRows,
    RowOutcomes,
)
from vane_dagster.checks.drift import Drift
from vane_dagster.checks.golden import Golden
from vane_dagster.checks.reproducible import Reproducible

__all__ = [
    "Check",
    "CheckContext",
    "CheckLike",
    "CheckOutcome",
    "ColumnStatistics",
    "IdsComplete",
    "ErrorRate",
    "NullRate",
    "PackageVersions",
    "PackagesUnchanged",
    "PartCounts",
    "Recomputation",
    "RecomputedRows",
    "RowOutcomes",
    "Vectors",
    "Text",
    "Drift",
    "Golden",
    "Reproducible",
    "Off",
]
