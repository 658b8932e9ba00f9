"""Consumption of a run's stages against their budgets."""

from __future__ import annotations

from collections import Counter

from vane_dagster.errors import BudgetError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.manifest import PartInfo


class TokenBudget:
    """Sums the consumption of the parts that a run has computed, by stage."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._used: dict[str, Counter[str]] = {}

    def record(self, stage: str, part: PartInfo) -> BudgetError | None:
        """Add a part; return the error to stop with when a budget is exhausted, once per stage."""
        if (usage := self._pipeline[stage].spec.usage) is None:
            return None
        used = self._used.setdefault(stage, Counter())
        was_over = bool(used) and usage.over_budget(used) is not None
        used.update(usage.used(part.spent))
        message = usage.over_budget(used)
        if message is None or was_over:
            return None
        return BudgetError(
            f"stage '{self._pipeline.name}/{stage}': {message}. Work in flight is finished and "
            "kept. Run again to continue with a fresh budget, or raise the budget"
        )
