"""What a run's prompt stages use of their budgets."""

from __future__ import annotations

from collections import Counter

from vane_dagster.errors import BudgetError
from vane_dagster.pipeline.model_stages import PromptSpec
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.providers.usage import COUNTS, cost
from vane_dagster.storage.manifest import PartInfo


class Spending:
    """Adds up the tokens of the parts that a run has computed, by stage.

    Args:
        pipeline: The pipeline.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._used: dict[str, Counter[str]] = {}

    def take(self, stage: str, part: PartInfo) -> BudgetError | None:
        """Takes in a part; the error to stop with where a budget is used up, told once."""
        spec = self._pipeline[stage].spec
        if not isinstance(spec, PromptSpec):
            return None
        before = self._over(spec)
        sums = part.measures.get(spec.recipe.usage, {})
        used = self._used.setdefault(stage, Counter(dict.fromkeys(COUNTS, 0)))
        used.update({name: int(sums.get(name, 0)) for name in COUNTS})
        told = self._over(spec)
        if told is None or before is not None:
            return None
        return BudgetError(
            f"stage '{self._pipeline.name}/{stage}': {told}. What was under way is finished and "
            "kept; run again to go on, with the whole budget anew, or raise it"
        )

    def _over(self, spec: PromptSpec) -> str | None:
        used = self._used.get(spec.name)
        if used is None:
            return None
        tokens = used["prompt_tokens"] + used["completion_tokens"]
        if spec.max_tokens is not None and tokens >= spec.max_tokens:
            return f"this run has used {tokens} tokens, max_tokens={spec.max_tokens}"
        paid = cost(used, spec.prices)
        if spec.max_cost is not None and paid >= spec.max_cost:
            return f"this run has cost {paid:g}, max_cost={spec.max_cost:g}"
        return None
