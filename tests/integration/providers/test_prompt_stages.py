"""Prompt stages in runs: budgets, costs, retries, functions that fail, and sizes of vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import vane_dagster as vd
from support.damage import stored_parts
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


def test_a_run_that_has_used_its_budget_stops_and_keeps_what_is_paid_for(
    tmp_path, local, server, endpoint, materialize
):
    pipeline = docs(tmp_path, [f"text number {i}" for i in range(200)])
    pipeline.fragment_rows = 4
    asked(pipeline, endpoint[1], batch_size=4, token_budget=60)

    result = materialize(pipeline, local, raises=False)

    assert "tokens, token_budget=60" in failure(result)
    first = sum(server.requests.values())
    assert 8 <= first < 200
    parts = tmp_path / "store" / "docs" / "asked" / "parts" / "~unpartitioned"
    assert 4 * len(stored_parts(parts)) == first

    materialize(pipeline, local, raises=False)
    assert max(server.requests.values()) == 1  # nothing is paid for twice
    assert sum(server.requests.values()) > first


def test_costs_and_budgets_count_what_is_spent_and_what_is_copied(
    tmp_path, local, server, endpoint, materialize
):
    texts = [f"text number {i}" for i in range(40)]
    prices = {"prompt": 2e6, "completion": 10e6, "cached": 1e6}
    options = {"sampling_params": {"temperature": 0}, "prices": prices}

    def run(token_budget: int) -> dict[str, Any]:
        pipeline = docs(tmp_path, texts)
        asked(pipeline, endpoint[1], token_budget=token_budget, **options)
        return metadata(materialize(pipeline, local), "asked")

    first = run(10_000)
    words = 40 * 3
    tokens = [first[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    assert tokens == [words, words + 40, 40]
    assert first["cache_hit_rate"] == pytest.approx(1 / 3, abs=1e-4)
    assert first["tokens_per_second"] > 0
    assert first["cost"] == pytest.approx((words - 40) * 2 + 40 * 1 + (words + 40) * 10)
    assert (first["rows_computed"], first["cost_spent"]) == (40, first["cost"])
    assert "cost_inherited" not in first
    server.bodies.clear()
    texts[7], texts[8] = "another text", "another text"
    again = run(30)
    assert len(server.bodies) == 1
    assert (again["rows_computed"], again["rows_copied"]) == (1, 39)
    assert again["completion_tokens"] == (
        again["completion_tokens_spent"] + again["completion_tokens_inherited"]
    )
    assert again["cost"] == again["cost_spent"] + again["cost_inherited"]
    assert again["requests_spent"] == 1


# Embeddings


class Lengths:
    """A model with vectors of four numbers, and of two for the text "short"."""

    def __init__(self, model: str) -> None:
        assert model == "m"

    async def embed(self, texts: list[str], dimensions: int | None) -> list[list[float]]:
        assert dimensions is None
        size = 2 if "short" in texts else 4
        return [[len(text), 1.0, 0.0, 0.0][:size] for text in texts]


def test_vectors_have_the_size_that_the_first_run_finds(tmp_path, local, materialize):
    def embedded(texts: list[str | None]) -> vd.Pipeline:
        pipeline = docs(tmp_path, texts)
        vectors = pipeline.embed(
            "asked",
            "text",
            provider=Lengths,
            model="m",
            batch_size=1,
            normalize=False,
            on_error=vd.Failures("quarantine", max_error_rate=0.9),
        )
        vectors.write("table", tmp_path / "table", format="lance", options={"index": index})
        return pipeline

    index = {"column": "asked", "metric": "l2"}
    texts = ["a", "bcd", None, "ef"]
    materialize(embedded(texts), local)

    fixed = pa.list_(pa.float32(), 4)
    assert read(tmp_path).schema.field("asked").type == fixed
    nearest = {"column": "asked", "q": [3.0, 1.0, 0.0, 0.0], "k": 1}
    assert lance.dataset(tmp_path / "table").to_table(nearest=nearest)["id"].to_pylist() == [1]

    materialize(embedded([*texts, "short"]), local)
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store")).to_pylist()
    messages = {row["id"]: row["message"] for row in aside}
    assert "fixed_size_list<item: float>[4]" in messages[4]
    assert read(tmp_path)["id"].to_pylist() == [0, 1, 3]


def test_rows_that_a_function_fails_for_lose_no_others_and_are_paid_for(
    tmp_path, local, server, endpoint, materialize
):
    def before(row: dict[str, Any]) -> str:
        assert sorted(row) == ["__place", "id", "text"], "no column that arranges rows"
        return {1: "q", 2: "q"}.get(row["id"]) or row["text"][100]

    server.answers = {"q": ['{"name": "Ada", "age": 36}']}
    pipeline = docs(tmp_path, __place=[7, 8, 9, 10])
    asked(pipeline, endpoint[1], before, on_error="quarantine", max_error_rate=0.5,
          return_format=Person)  # fmt: skip
    server.answers["a fox"] = ['{"name": "Tim", "age": 1}']
    options = {"base_url": endpoint[1], "api_key_env": "LLM_KEY"}
    pipeline.prompt(
        "fox", "{text}", provider="openai",
        model=vd.Model("m", options=options, prices={"completion": 1e6}), return_format=Person,
        concurrency=vd.Workers(env_vars=["LLM_KEY"]),
        on_error=vd.Failures("null", 1.0, retry_on=["InvalidAnswer"], max_retries=1),
    )  # fmt: skip

    facts = metadata(materialize(pipeline, local), "fox")

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [1, 2], "the others are in quarantine"
    assert [answer["age"] for answer in rows["asked"].to_pylist()] == [36, 36]
    errors = read(tmp_path, "fox")["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, False, False]
    assert facts["requests"] == 1 + 3 * 2, "answers that do not fit were asked for again"
    words = [4, *(2 * len(f"echo: {text}".split()) for text in TEXTS[1:])]
    assert facts["completion_tokens"] == facts["cost"] == sum(words)
