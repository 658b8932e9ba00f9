"""What a run's stages use of their budgets."""

from __future__ import annotations

from collections import Counter

from vane_dagster.errors import BudgetError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.storage.manifest import PartInfo


class TokenBudget:
    """Adds up what the parts that a run has computed have used, by stage.

    Args:
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._used: dict[str, Counter[str]] = {}

    def take(self, stage: str, part: PartInfo) -> BudgetError | None:
        """Takes in a part; the error to stop with where a budget is used up, told once."""
        spec = self._pipeline[stage].spec
        if not spec.sums:
            return None
        used = self._used.setdefault(stage, Counter())
        was_over = bool(used) and spec.over_budget(used) is not None
        used.update(spec.used(part.measures))
        message = spec.over_budget(used)
        if message is None or was_over:
            return None
        return BudgetError(
            f"stage '{self._pipeline.name}/{stage}': {message}. What was under way is finished and "
            "kept; run again to go on, with the whole budget anew, or raise it"
        )
