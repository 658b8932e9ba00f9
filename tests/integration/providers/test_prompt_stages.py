"""Prompt stages: messages, structured answers, errors, and functions of a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import vane_dagster as vd
from support.damage import stored_parts
from support.data import read_stage
from support.prompts import TEXTS, Person, Reversed, asked, docs
from support.results import failure, metadata
from support.warm_workers import workers_that_imported


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    """The client of an endpoint takes a second to import, and each test has workers that do."""
    with workers_that_imported("openai.resources.chat", "openai.resources.embeddings"):
        yield


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


# Messages


def test_a_template_is_filled_from_each_row(tmp_path, local, materialize):
    pipeline = docs(tmp_path, n=pa.array([1, 2, 3, 4]))
    given = {"include_columns": ["n"], "output_column": "back"}
    pipeline.prompt("asked", "{n}. {{{text}}}", provider=Reversed, model="m", **given)

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows.column_names == ["id", "n", "back", "back_usage"]
    expected = [f"{n}. {{{text}}}"[::-1] for n, text in enumerate(TEXTS, 1)]
    assert rows["back"].to_pylist() == expected


def test_a_column_of_conversations(tmp_path, local, server, endpoint, materialize):
    talks = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"},
         {"role": "user", "content": text}]
        for text in TEXTS
    ]  # fmt: skip
    pipeline = docs(tmp_path, talk=talks)
    asked(pipeline, endpoint[1], "talk", system="Be brief.")

    materialize(pipeline, local)

    assert read(tmp_path)["asked"].to_pylist() == [f"echo: {text}" for text in TEXTS]
    roles = [[m["role"] for m in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user", "assistant", "user"]] * len(TEXTS)


# An endpoint


def test_completions_take_one_text_and_fields_of_the_servers_own(
    tmp_path, local, server, endpoint, materialize
):
    pipeline = docs(tmp_path)
    sampling = {"temperature": 0, "extra_body": {"guided_regex": "a"}}
    given = {"extra_body": {"ignore_eos": True, "guided_regex": "b"}, "api": "completions"}
    asked(pipeline, endpoint[1], system="Be brief.", sampling_params=sampling, options=given)

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows["asked"].to_pylist() == [f"echo: Be brief.\n\n{text}" for text in TEXTS]
    used = rows["asked_usage"].to_pylist()[0]
    assert (used["prompt_tokens"], used["finish_reason"]) == (4, "length")
    body = server.bodies[0]
    assert "messages" not in body
    assert (body["temperature"], body["guided_regex"], body["ignore_eos"]) == (0, "a", True)


def test_tokens_and_cost_stand_in_the_metadata(tmp_path, local, server, endpoint, materialize):
    pipeline = docs(tmp_path)
    prices = {"prompt": 2.0, "completion": 10.0, "cached": 1.0}
    asked(pipeline, endpoint[1], prices=prices)

    facts = metadata(materialize(pipeline, local), "asked")

    words = sum(len(text.split()) for text in TEXTS)
    assert facts["requests"] == 4
    tokens = [facts[name] for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    assert tokens == [words, words + 4, 4]
    assert facts["cache_hit_rate"] == pytest.approx(4 / words, abs=1e-4)
    assert facts["tokens_per_second"] > 0
    assert facts["cost"] == pytest.approx(((words - 4) * 2 + 4 * 1 + (words + 4) * 10) / 1e6)


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


def test_budgets_and_costs_count_what_is_spent_not_what_is_copied(
    tmp_path, local, server, endpoint, materialize
):
    texts = [f"text number {i}" for i in range(40)]
    options = {"sampling_params": {"temperature": 0}, "prices": {"completion": 1e6}}

    def run(token_budget: int) -> dict[str, Any]:
        pipeline = docs(tmp_path, texts)
        asked(pipeline, endpoint[1], token_budget=token_budget, **options)
        return metadata(materialize(pipeline, local), "asked")

    first = run(10_000)
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
    assert "tokens_per_second" not in again


def test_answers_that_do_not_fit_may_be_asked_for_again(
    tmp_path, local, server, endpoint, materialize
):
    server.answers = {"b": ["perhaps"]}
    pipeline = docs(tmp_path, ["b"])
    asked(pipeline, endpoint[1], return_format=["yes"], retry_on=["InvalidAnswer"], max_retries=1,
          on_error="quarantine", max_error_rate=1.0)  # fmt: skip

    facts = metadata(materialize(pipeline, local), "asked")

    assert len(server.bodies) == facts["requests"] == facts["completion_tokens"] == 2


# Structured answers


def test_texts_are_given_labels(tmp_path, local, server, endpoint, materialize):
    pipeline = docs(tmp_path, ["a", "b"])
    labels = {"good": "praise", "bad {x}": ""}
    options = {"base_url": endpoint[1], "api_key_env": "LLM_KEY"}
    head = (
        "Which of these labels fits the text best? Answer with the label alone.\n\n"
        "- good: praise\n- bad {x}\n\nText: "
    )
    server.answers = {f"{head}a": ["Good"], f"{head}b": ['{"answer": "bad {x}"}']}
    pipeline.classify(
        "asked",
        "text",
        labels,
        provider="openai",
        model=vd.Model("m", options=options),
        concurrency=vd.Workers(env_vars=["LLM_KEY"]),
    )

    materialize(pipeline, local)

    assert read(tmp_path)["asked"].to_pylist() == ["good", "bad {x}"]
    with pytest.raises(vd.DefinitionError, match="labels is 'good'; expected a list of names"):
        pipeline.classify("other", "text", "good", provider="openai", model="m")


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
        vectors.write("files", tmp_path / "files")
        return pipeline

    index = {"column": "asked", "metric": "l2"}
    texts = ["a", "bcd", None, "ef"]
    materialize(embedded(texts), local)

    fixed = pa.list_(pa.float32(), 4)
    assert read(tmp_path).schema.field("asked").type == fixed
    assert ds.dataset(tmp_path / "files", exclude_invalid_files=True).schema.types == [
        pa.int64(), fixed,
    ]  # fmt: skip
    nearest = {"column": "asked", "q": [3.0, 1.0, 0.0, 0.0], "k": 1}
    assert lance.dataset(tmp_path / "table").to_table(nearest=nearest)["id"].to_pylist() == [1]

    materialize(embedded([*texts, "short"]), local)
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store")).to_pylist()
    messages = {row["id"]: row["message"] for row in aside}
    assert "fixed_size_list<item: float>[4]" in messages[4]
    assert read(tmp_path)["id"].to_pylist() == [0, 1, 3]


# As users of ray.data.llm write them


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    return dict(  # noqa: C408  # as in Ray's guide
        messages=[
            {"role": "system", "content": "You are a bot that responds with haikus."},
            {"role": "user", "content": row["text"]},
        ],
        sampling_params=dict(temperature=0.3, max_tokens=row["id"] + 1),  # noqa: C408  # as in Ray's guide
    )


def postprocess(row: dict[str, Any]) -> dict[str, Any]:
    return dict(answer=row["generated_text"], **row)


def test_functions_of_another_system(tmp_path, local, server, endpoint, materialize):
    pipeline = docs(tmp_path)
    stage = asked(
        pipeline, endpoint[1], preprocess, output_column="generated_text",
        include_columns=["text"], sampling_params={"temperature": 1, "n": 1},
    )  # fmt: skip
    stage.map(
        "answered",
        postprocess,
        schema={"answer": "VARCHAR", "generated_text": "VARCHAR", "text": "VARCHAR"},
        columns=["generated_text", "text"],
    )

    materialize(pipeline, local)

    rows = read(tmp_path, "answered")
    assert rows.column_names == ["id", "answer", "generated_text", "text"]
    assert rows["answer"].to_pylist() == [f"echo: {text}" for text in TEXTS]
    assert rows["text"].to_pylist() == TEXTS
    bodies = sorted(server.bodies, key=lambda body: body["max_tokens"])
    assert [(body["temperature"], body["n"], body["max_tokens"]) for body in bodies] == [
        (0.3, 1, place + 1) for place in range(4)
    ]
    assert [m["role"] for m in bodies[0]["messages"]] == ["system", "user"]


def keys(row: dict[str, Any]) -> str:
    return f"{sorted(row)} {row.get('__place')}"


def test_rows_that_are_arranged_have_no_other_columns(tmp_path, local, materialize):
    pipeline = docs(tmp_path, TEXTS[::-1], __place=[7, 8, 9, 10])
    pipeline.prompt("asked", keys, provider=Reversed, model="m", include_columns=True)

    materialize(pipeline, local)

    rows = read_stage(tmp_path / "store", "docs", "asked")
    expected = [f"['__place', 'id', 'text'] {place}"[::-1] for place in (7, 8, 9, 10)]
    assert rows["id"].to_pylist() == [0, 1, 2, 3]
    assert rows["asked"].to_pylist() == expected


def test_rows_that_a_function_fails_for_lose_no_others_and_are_paid_for(
    tmp_path, local, server, endpoint, materialize
):
    def before(row: dict[str, Any]) -> str:
        return {1: "q", 2: "q"}.get(row["id"]) or row["text"][100]

    server.answers = {"q": ['{"name": "Ada", "age": 36}']}
    pipeline = docs(tmp_path)
    asked(pipeline, endpoint[1], before, on_error="quarantine", max_error_rate=0.5,
          return_format=Person)  # fmt: skip
    server.answers["a fox"] = ['{"name": "Tim", "age": 1}']
    options = {"base_url": endpoint[1], "api_key_env": "LLM_KEY"}
    pipeline.prompt(
        "fox", "{text}", provider="openai",
        model=vd.Model("m", options=options, prices={"completion": 1e6}), return_format=Person,
        concurrency=vd.Workers(env_vars=["LLM_KEY"]),
        on_error=vd.Failures("null", max_error_rate=1.0),
    )  # fmt: skip

    facts = metadata(materialize(pipeline, local), "fox")

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [1, 2], "the others are in quarantine"
    assert [answer["age"] for answer in rows["asked"].to_pylist()] == [36, 36]
    errors = read(tmp_path, "fox")["error"].to_pylist()
    assert [error is None for error in errors] == [True, False, False, False]
    assert facts["requests"] == 4
    words = [4, *(len(f"echo: {text}".split()) for text in TEXTS[1:])]
    assert facts["completion_tokens"] == facts["cost"] == sum(words)


def test_functions_get_their_columns_beside_those_that_pass_through(tmp_path, local, materialize):
    def seen(row: dict[str, Any]) -> str:
        return " ".join(sorted(row))

    pipeline = docs(tmp_path, title=["t"] * 4, year=[1, 2, 3, 4])
    given = {"provider": Reversed, "model": "m", "messages": seen}
    pipeline.prompt("asked", columns=["title"], include_columns=True, **given)
    pipeline.prompt("named", columns=["title", "id"], **given)
    pipeline.prompt("parts", columns=["title"], reuse="fragments", **given)
    pipeline.prompt("every", include_columns=["year"], **given)

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert set(rows.column_names) == {"id", "text", "title", "year", "asked", "asked_usage"}
    assert rows["asked"].to_pylist() == ["title"[::-1]] * 4
    for name in ("named", "parts"):
        assert read(tmp_path, name)[name].to_pylist() == ["id title"[::-1]] * 4
    every = read(tmp_path, "every")
    assert set(every.column_names) == {"id", "year", "every", "every_usage"}
    assert every["every"].to_pylist() == ["id text title year"[::-1]] * 4


def test_columns_that_the_source_does_not_have(tmp_path, local, materialize):
    for given in ({"messages": "title"}, {"messages": preprocess, "include_columns": ["title"]}):
        pipeline = docs(tmp_path)
        pipeline.prompt("asked", provider=Reversed, model="m", **given)
        assert "has no column 'title'" in failure(materialize(pipeline, local, raises=False))
