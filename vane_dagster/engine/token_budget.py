"""Consumption of a run's stages against their budgets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from vane_dagster.errors import BudgetError
from vane_dagster.pipeline.pipeline import Pipeline
from vane_dagster.providers.usage import UsageAccount
from vane_dagster.storage.batch_records import Recorded
from vane_dagster.storage.manifest import PartInfo


class TokenBudget:
    """Sums the consumption of the calls of a run, by stage.

    A run that waits for batches has several plans, which share the sums in `used`.
    """

    def __init__(self, pipeline: Pipeline, used: dict[str, Counter[str]] | None = None) -> None:
        self._pipeline = pipeline
        self._used = {} if used is None else used
        self._told: set[str] = set()
        self._rows = Counter[str]()
        self._spent = defaultdict[str, Counter[str]](Counter)

    def record(self, stage: str, spent: Counter[str]) -> BudgetError | None:
        """Add a call; return the error to stop with when a budget is exhausted, once per stage.

        Answers of batches were counted when they were submitted.
        """
        if (usage := self._pipeline[stage].spec.usage) is None:
            return None
        live = spent["requests"] - spent["batch_requests"]
        if spent["batch_requests"]:
            spent = Counter({n: round(v * live / spent["requests"]) for n, v in spent.items()})
            spent["batch_requests"] = 0
        return self._add(stage, usage, spent)

    def ended(self, stage: str, part: PartInfo, rows: int) -> None:
        """Add the source rows of a fragment whose part is written, if it has used anything."""
        usage = self._pipeline[stage].spec.usage
        self._rows[stage] += rows if usage and any(usage.used(part.spent).values()) else 0

    def may_begin(self, stage: str, rows: int, in_flight: Callable[[], int]) -> bool:
        """Return whether a fragment may begin beside those in flight; both are in source rows.

        It may if all of them would stay within the budget, by the usage so far and the fragments
        that have ended and used some of it. A fragment alone always may.
        """
        usage = self._pipeline[stage].spec.usage
        if usage is None or not usage.has_budget or not (others := in_flight()):
            return True
        if not (ended := self._rows[stage]):
            return False
        share = (rows + others) / ended
        expected = Counter({n: round(share * v) for n, v in self._spent[stage].items()})
        return not usage.over_budget(self._used.get(stage, Counter[str]()) + expected)

    def submitted(self, stage: str, recorded: Recorded, rows: int) -> BudgetError | None:
        """Add requests for a batch, by an estimate of their tokens; see `record`."""
        usage, requests = self._pipeline[stage].spec.usage, recorded.requests
        assert usage is not None
        used = Counter(
            requests=requests,
            batch_requests=requests,
            prompt_tokens=recorded.prompt_tokens,
            completion_tokens=recorded.completion_tokens,
        )
        self._rows[stage] += rows if requests else 0
        return self._add(stage, usage, used) if requests else None

    def _add(self, stage: str, usage: UsageAccount, spent: Counter[str]) -> BudgetError | None:
        used = self._used.setdefault(stage, Counter())
        used.update(spent)
        self._spent[stage].update(spent)
        message = usage.over_budget(used)
        if message is None or stage in self._told:
            return None
        self._told.add(stage)
        return BudgetError(
            f"stage '{self._pipeline.name}/{stage}': {message}. Work in flight is finished and "
            "kept. Run again to continue with a fresh budget, or raise the budget"
        )
