"""Prompt stages in runs: what they cost, and the budget of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage
from support.prompts import asked, docs
from support.results import failure, metadata
from support.warm_workers import workers_that_imported


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    """The client of an endpoint takes a second to import, and each test has workers that do."""
    with workers_that_imported("openai.resources.chat", "openai.resources.embeddings"):
        yield


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


def test_costs_and_budgets_count_what_is_spent_and_what_is_copied(
    tmp_path, local, server, endpoint, materialize
):
    prices = {"prompt": 2e6, "completion": 10e6, "cached": 1e6}
    options = {"sampling_params": {"temperature": 0}, "prices": prices, "batch_size": 4}

    def declared(texts: list[str], token_budget: int) -> vd.Pipeline:
        pipeline = docs(tmp_path, texts)
        pipeline.fragment_rows = 4
        asked(pipeline, endpoint[1], token_budget=token_budget, **options)
        return pipeline

    # What a run spends.
    texts = [f"text number {i}" for i in range(40)]
    first = metadata(materialize(declared(texts, 10_000), local), "asked")
    words = 40 * 3
    tokens = [first[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    assert tokens == [words, words + 40, 40]
    assert first["cache_hit_rate"] == pytest.approx(1 / 3, abs=1e-4)
    assert first["tokens_per_second"] > 0
    assert first["cost"] == pytest.approx((words - 40) * 2 + 40 * 1 + (words + 40) * 10)
    assert (first["rows_computed"], first["cost_of_answers"]) == (40, first["cost"])
    assert "cost_inherited" not in first

    # Rows that are copied cost nothing, and need no budget.
    server.clear()
    texts[5], texts[6] = "another text", "another text"
    again = metadata(materialize(declared(texts, 30), local), "asked")
    assert len(server.bodies) == again["requests_spent"] == again["rows_computed"] == 1
    spent = again["completion_tokens_spent"] + again["completion_tokens_inherited"]
    assert again["completion_tokens"] == spent
    assert again["cost_of_answers"] == again["cost"] + again["cost_inherited"]

    # A run that has used its budget stops, and keeps what is paid for.
    server.clear()
    texts += [f"another number {i}" for i in range(200)]
    pipeline = declared(texts, 60)
    assert "tokens, token_budget=60" in failure(materialize(pipeline, local, raises=False))
    first_requests = sum(server.requests.values())
    assert 8 <= first_requests < 200
    materialize(pipeline, local, raises=False)
    assert max(server.requests.values()) == 1, "nothing is paid for twice"
    assert sum(server.requests.values()) > first_requests
