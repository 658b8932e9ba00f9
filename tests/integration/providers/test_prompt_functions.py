"""Prompt stages with functions of a row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import vane_dagster as vd
from support.data import read_stage
from support.prompts import TEXTS, Person, Reversed, asked, docs
from support.results import failure, metadata
from support.warm_workers import workers_that_imported


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    with workers_that_imported("openai.resources.chat", "openai.resources.embeddings"):
        yield


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage).sort_by("id")


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
    assert rows["id"].to_pylist() == [1, 2]
    assert [answer["age"] for answer in rows["asked"].to_pylist()] == [36, 36]
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store")).sort_by("id")
    assert aside["error"].to_pylist() == ["IndexError", "IndexError"]
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
    pipeline = docs(tmp_path)
    pipeline.prompt("asked", "prompt", provider=Reversed, model="m")
    assert "has no column 'prompt'" in failure(materialize(pipeline, local, raises=False))
    pipeline = docs(tmp_path)
    pipeline.prompt(
        "asked", provider=Reversed, model="m", include_columns=["title"], messages=preprocess
    )
    assert "has no column 'title'" in failure(materialize(pipeline, local, raises=False))
