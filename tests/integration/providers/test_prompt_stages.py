"""Prompt stages in runs: budgets, costs, retries, rows that fail, and sizes of vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage
from support.prompts import TEXTS, Person, asked, docs
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


class Lengths:
    """A model with vectors of four numbers, and of two for the text "short"."""

    def __init__(self, model: str) -> None:
        assert model == "m"

    async def embed(self, texts: list[str], dimensions: int | None) -> list[list[float]]:
        assert dimensions is None
        size = 2 if "short" in texts else 4
        return [[len(text), 1.0, 0.0, 0.0][:size] for text in texts]


def test_rows_that_fail_lose_no_others_and_are_paid_for(
    tmp_path, local, server, endpoint, materialize
):
    """Rows of functions that make prompts, of answers in another form, and of vectors."""

    def before(row: dict[str, Any]) -> str:
        assert sorted(row) == ["__place", "id", "text"], "no column that arranges rows"
        return {1: "q", 2: "q"}.get(row["id"]) or row["text"][100]

    def declared(texts: list[str]) -> vd.Pipeline:
        pipeline = docs(tmp_path, texts, __place=range(7, 7 + len(texts)))
        asked(pipeline, endpoint[1], before, on_error="quarantine", max_error_rate=0.9,
              return_format=Person)  # fmt: skip
        options = {"base_url": endpoint[1], "api_key_env": "LLM_KEY"}
        pipeline.prompt(
            "fox", "{text}", provider="openai",
            model=vd.Model("m", options=options, prices={"completion": 1e6}), return_format=Person,
            concurrency=vd.Workers(env_vars=["LLM_KEY"]),
            on_error=vd.Failures("null", 1.0, retry_on=["InvalidAnswer"], max_retries=1),
        )  # fmt: skip
        vectors = pipeline.embed(
            "vectors", "text", provider=Lengths, model="m", batch_size=1, normalize=False,
            on_error=vd.Failures("quarantine", max_error_rate=0.9),
        )  # fmt: skip
        index = {"column": "vectors", "metric": "l2"}
        vectors.write("table", tmp_path / "table", format="lance", options={"index": index})
        return pipeline

    server.answers = {
        "q": ['{"name": "Ada", "age": 36}'],
        "a fox": ['{"name": "Tim", "age": 1}'],
    }
    facts = metadata(materialize(declared(TEXTS), local), "fox")

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [1, 2], "the others are in quarantine"
    assert [answer["age"] for answer in rows["asked"].to_pylist()] == [36, 36]
    errors = read(tmp_path, "fox")["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, False, False]
    assert facts["requests"] == 1 + 3 * 2, "answers that do not fit were asked for again"
    words = [4, *(2 * len(f"echo: {text}".split()) for text in TEXTS[1:])]
    assert facts["completion_tokens"] == facts["cost"] == sum(words)

    # Vectors have the size that the first run has found; others are errors of their rows.
    fixed = pa.list_(pa.float32(), 4)
    assert read(tmp_path, "vectors").schema.field("vectors").type == fixed
    nearest = {"column": "vectors", "q": [19.0, 1.0, 0.0, 0.0], "k": 1}
    assert lance.dataset(tmp_path / "table").to_table(nearest=nearest)["id"].to_pylist() == [2]
    materialize(declared([*TEXTS, "short"]), local)
    (aside,) = vd.quarantine("docs/vectors", store=str(tmp_path / "store")).to_pylist()
    assert aside["id"] == 4
    assert "fixed_size_list<item: float>[4]" in aside["message"]
    assert read(tmp_path, "vectors")["id"].to_pylist() == [0, 1, 2, 3]
