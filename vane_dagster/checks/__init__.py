"""Checks of a stage's rows, for ``asset=vd.Asset(checks=[...])``.

A stage has two checks by default. ``rows`` blocks: it has the findings `IdsComplete`, `ErrorRate`
and, for vectors, `Vectors`. ``quality`` warns: it has `PackagesUnchanged` if the stage runs a
function or a model, `NullRate` if it computes columns, and `Text` if it computes texts. A finding
in ``vd.Asset(checks=[...])`` is a separate check, and no longer part of the default check; `Off`
removes a finding or a default check. `Reproducible`, which recomputes rows, is evaluated only when
it is executed. All others are evaluated when a partition is committed.

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

from __future__ import annotations

from typing import TYPE_CHECKING

from vane_dagster._lazy import public_names

if TYPE_CHECKING:
    from vane_dagster.checks.base import Check as Check
    from vane_dagster.checks.base import CheckLike as CheckLike
    from vane_dagster.checks.base import Off as Off
    from vane_dagster.checks.builtin import ErrorRate as ErrorRate
    from vane_dagster.checks.builtin import IdsComplete as IdsComplete
    from vane_dagster.checks.builtin import NullRate as NullRate
    from vane_dagster.checks.builtin import PackagesUnchanged as PackagesUnchanged
    from vane_dagster.checks.builtin import Text as Text
    from vane_dagster.checks.builtin import Vectors as Vectors
    from vane_dagster.checks.compared import Compared as Compared
    from vane_dagster.checks.context import CheckOutcome as CheckOutcome
    from vane_dagster.checks.context import ColumnStatistics as ColumnStatistics
    from vane_dagster.checks.context import PackageVersions as PackageVersions
    from vane_dagster.checks.context import PartCounts as PartCounts
    from vane_dagster.checks.drift import Drift as Drift
    from vane_dagster.checks.golden import Golden as Golden
    from vane_dagster.checks.partition import CheckContext as CheckContext
    from vane_dagster.checks.reproducible import Reproducible as Reproducible

__getattr__, __dir__ = public_names(__name__, __file__)
