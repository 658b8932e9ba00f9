"""Budgets of stages: what their parts have used, and when a run stops."""

from __future__ import annotations

import pytest

import vane_dagster as vd
from vane_dagster.engine.token_budget import TokenBudget
from vane_dagster.providers.usage import UsageAccount
from vane_dagster.storage.manifest import PartInfo

USED = {"requests": 2, "prompt_tokens": 40, "completion_tokens": 10, "cached_tokens": 20}
PRICES = {"prompt": 1.0, "cached": 0.5, "completion": 2.0}


def part(**counts: int) -> PartInfo:
    return PartInfo("k" * 40, "d", 1, 1, measures={"asked_usage": counts})


@pytest.fixture
def pipeline() -> vd.Pipeline:
    made = vd.Pipeline("p", source=vd.parquet("rows.parquet"), id="id")
    made.project("clean", ["text"]).prompt(
        "asked", "{text}", provider="openai", model=vd.Model("m", token_budget=60)
    )
    return made


def test_a_budget_that_is_used_up_is_told_once(pipeline):
    spending = TokenBudget(pipeline)
    assert spending.record("asked", part(prompt_tokens=40)) is None
    error = spending.record("asked", part(prompt_tokens=15, completion_tokens=5))
    assert "stage 'p/asked': this run has used 60 tokens, token_budget=60" in str(error)
    assert spending.record("asked", part(prompt_tokens=40)) is None


def test_stages_without_a_budget_use_nothing(pipeline):
    assert TokenBudget(pipeline).record("clean", part(prompt_tokens=1000)) is None


def test_costs_count_by_the_million_and_cached_tokens_have_their_own_price():
    def over_budget(*budgets: float | None) -> str | None:
        return UsageAccount("u", PRICES, *budgets).over_budget(USED)  # type: ignore[arg-type]  # a tuple

    assert over_budget(None, None) is None
    assert over_budget(51, 50.1e-6) is None
    assert over_budget(None, 50e-6) == "this run has cost 0.00005, cost_budget=0.00005"


def test_metadata_has_shares_and_costs_where_they_are_known():
    free, priced = UsageAccount("u", {}), UsageAccount("u", PRICES)
    assert free.metadata(USED) == {**USED, "cache_hit_rate": 0.5}
    assert priced.metadata(USED) == {**USED, "cache_hit_rate": 0.5, "cost": 50e-6}
    assert free.metadata(dict.fromkeys(USED, 0)) == dict.fromkeys(USED, 0)
