"""Prompt stages: messages, providers, structured answers, and what becomes of errors."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pydantic
import pytest
from conftest import failure, metadata, read_stage, write_source
from llm_server import KEY, Server, serving
from tiny_llm import make

import vane_dagster as vd
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.format import parse_format
from vane_dagster.providers.pace import Pace
from vane_dagster.providers.template import parse_template

TEXTS = ["a fox", "a dog", "the fox and the dog", "nothing at all"]


class Reversed:
    """A provider of a user's own."""

    OPERATIONAL = frozenset({"address"})

    def __init__(self, model: str, *, address: str = "", suffix: str = "") -> None:
        self.model, self.suffix = model, suffix

    async def submit(self, request: Request) -> Answer:
        text = request.messages[-1]["content"]
        if "poison" in text:
            raise ValueError("no answer to this")
        return Answer(text[::-1] + self.suffix, len(text), len(text))


class Person(pydantic.BaseModel):
    name: str
    age: int
    mood: Literal["good", "bad"] = "good"
    tags: list[str] = []

    @pydantic.field_validator("age")
    @classmethod
    def not_negative(cls, age: int) -> int:
        if age < 0:
            raise ValueError("nobody is that young")
        return age


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[Server, str]]:
    with serving() as (server, url):
        yield server, url


@pytest.fixture
def server(endpoint: tuple[Server, str], monkeypatch: pytest.MonkeyPatch) -> Server:
    """The endpoint with its counts at zero; a key is in the environment."""
    monkeypatch.setenv("LLM_KEY", KEY)
    found = endpoint[0]
    found.__init__()  # type: ignore[misc]
    return found


def docs(tmp_path: Path, texts: list[str | None] = TEXTS, **columns: Any) -> vd.Pipeline:
    table = {"id": pa.array(range(len(texts)), pa.int64()), "text": pa.array(texts, pa.string())}
    write_source(tmp_path / "src", {**table, **columns})
    return vd.Pipeline("docs", source=vd.parquet(str(tmp_path / "src")), id="id")


def asked(above: Any, url: str, messages: str = "{text}", **kwargs: Any) -> vd.Stage:
    """A stage that asks the endpoint."""
    options = {
        "base_url": url,
        "api_key_env": "LLM_KEY",
        **kwargs.pop("provider_options", {}),
    }
    given = {"provider": "openai", "model": "m", "env_vars": ["LLM_KEY"], **kwargs}
    return above.prompt("asked", messages, provider_options=options, **given)


def read(tmp_path: Path, stage: str = "asked") -> pa.Table:
    return read_stage(tmp_path / "store", "docs", stage)


# Messages


def test_a_template_is_filled_from_each_row(tmp_path, local, materialize):
    pipeline = docs(tmp_path, n=pa.array([1, 2, 3, 4]))
    pipeline.prompt(
        "asked",
        "{n}. {{{text}}}",
        provider=Reversed,
        model="m",
        include_columns=["n", "text"],
        output_column="back",
    )

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows.column_names == ["id", "n", "text", "back", "back_usage"]
    assert rows["back"].to_pylist() == [
        f"{n}. {{{text}}}"[::-1] for n, text in zip([1, 2, 3, 4], TEXTS)
    ]
    usage = rows["back_usage"].to_pylist()
    assert [u["prompt_tokens"] for u in usage] == [
        len(f"{i}. {{{t}}}") for i, t in enumerate(TEXTS)
    ]
    assert all(u["finish_reason"] == "stop" and u["seconds"] >= 0 for u in usage)


def test_a_column_of_conversations(tmp_path, local, server, endpoint, materialize):
    talks = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"},
         {"role": "user", "content": text}]
        for text in TEXTS
    ]  # fmt: skip
    asked(docs(tmp_path, talk=talks), endpoint[1], "talk", system="Be brief.")
    pipeline = docs(tmp_path, talk=talks)
    asked(pipeline, endpoint[1], "talk", system="Be brief.")

    materialize(pipeline, local)

    assert read(tmp_path)["response"].to_pylist() == [f"echo: {text}" for text in TEXTS]
    roles = [[m["role"] for m in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user", "assistant", "user"]] * len(TEXTS)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ("{text} {}", "has the field {}"),
        ("{text.upper}", "has the field {text.upper}"),
        ("{text", "is no template"),
        ("say something", "names no column"),
        ("", "expected a column's name"),
        (7, "expected a column's name"),
    ],
)
def test_messages_that_are_no_template(messages, told):
    with pytest.raises(vd.DefinitionError, match=re.escape(told)):
        parse_template("stage", messages, None)


def test_a_field_that_the_stage_above_does_not_have(tmp_path):
    short = docs(tmp_path).project("short", {"words": "length(text)"})
    with pytest.raises(vd.DefinitionError, match="needs 'text', which 'short' does not have"):
        short.prompt("asked", "{text}", provider=Reversed, model="m")


def test_a_field_that_the_source_does_not_have(tmp_path, local, materialize):
    pipeline = docs(tmp_path)
    pipeline.prompt("asked", "{title}", provider=Reversed, model="m")

    assert "columns names 'title'" in failure(materialize(pipeline, local, raises=False))


def test_null_and_empty_prompts_are_errors_of_their_rows(tmp_path, local, materialize):
    pipeline = docs(tmp_path, ["a", None, " ", "d"])
    pipeline.prompt(
        "asked", "text", provider=Reversed, model="m", on_error="quarantine", max_error_rate=0.5
    )

    materialize(pipeline, local)

    assert read(tmp_path)["id"].to_pylist() == [0, 3]
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store")).sort_by("id")
    assert aside["message"].to_pylist() == [
        "column 'text' is null; a prompt needs it",
        "the prompt is empty",
    ]


# Providers


def test_a_provider_of_a_users_own_is_keyed_by_its_code_and_what_changes_answers(
    tmp_path, local, materialize
):
    def computed(**kwargs: Any) -> int:
        pipeline = docs(tmp_path)
        pipeline.prompt("asked", "{text}", **{"provider": Reversed, "model": "m", **kwargs})
        return metadata(materialize(pipeline, local), "asked")["fragments_computed"]

    assert computed() == 1
    assert computed(provider_options={"address": "elsewhere"}, concurrency=2, batch_size=2) == 0
    assert computed(provider_options={"suffix": "!"}) == 1
    assert computed(model="n") == 1
    assert computed(sampling_params={"temperature": 0}) == 1
    assert computed(system="Be brief.") == 1
    assert computed(return_format=["xof a", "god a"], on_error="null", max_error_rate=1) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"provider": "nobody"},
            "unknown provider 'nobody'; there are 'openai', 'transformers', 'vllm'",
        ),
        ({"provider": dict}, "expected a name"),
        ({"model": ""}, "model is ''; expected a model's name"),
        ({"return_format": "yes or no"}, "return_format is 'yes or no'; expected a pydantic"),
        ({"return_format": ["yes", "Yes"]}, "has a choice twice"),
        ({"return_format": {"type": "object"}}, "has a part without a column type"),
        ({"sampling_params": [1]}, "sampling_params is a list"),
        ({"gpus_per_actor": -1}, "gpus is -1"),
        ({"explain_errors": -1}, "explain_errors is -1"),
    ],
)
def test_arguments_that_do_not_fit(arguments, told, tmp_path):
    with pytest.raises(vd.DefinitionError, match=re.escape(told)):
        docs(tmp_path).prompt(
            "asked", "{text}", **{"provider": Reversed, "model": "m", **arguments}
        )


# An endpoint


def test_an_endpoint_answers(tmp_path, local, server, endpoint, materialize):
    pipeline = docs(tmp_path)
    asked(pipeline, endpoint[1], system="Be brief.", sampling_params={"temperature": 0, "top_k": 5})

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows["response"].to_pylist() == [f"echo: {text}" for text in TEXTS]
    assert [u["cached_tokens"] for u in rows["response_usage"].to_pylist()] == [1] * 4
    (body, *_) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["top_k"], body["model"]) == (0, 5, "m")


def test_rows_that_an_endpoint_is_too_busy_for_are_asked_again_alone(
    tmp_path, local, server, endpoint, materialize
):
    texts = ["fine", "busy", "broken", "cut", "also fine"]
    pipeline = docs(tmp_path, texts)
    asked(pipeline, endpoint[1])

    materialize(pipeline, local)

    assert read(tmp_path)["response"].to_pylist() == [f"echo: {text}" for text in texts]
    assert server.seen == {"fine": 1, "busy": 2, "broken": 2, "cut": 2, "also fine": 1}


def test_rows_that_an_endpoint_refuses_are_set_aside(
    tmp_path, local, server, endpoint, materialize
):
    texts = ["fine", "refused", "too long", "also fine"]
    pipeline = docs(tmp_path, texts)
    asked(pipeline, endpoint[1], on_error="quarantine", max_error_rate=0.5)

    materialize(pipeline, local)

    assert read(tmp_path)["id"].to_pylist() == [0, 3]
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store")).sort_by("id")
    assert aside["error"].to_pylist() == ["BadRequestError", "PromptTooLong"]
    assert max(server.seen.values()) == 1


@pytest.mark.parametrize("key", ["sk-another-key-altogether", None])
def test_a_wrong_or_missing_key_fails_at_once(
    key, tmp_path, local, server, endpoint, materialize, monkeypatch
):
    monkeypatch.setenv("LLM_KEY", key) if key else monkeypatch.delenv("LLM_KEY")
    pipeline = docs(tmp_path, ["a"] * 50)
    asked(pipeline, endpoint[1], on_error="quarantine")

    told = failure(materialize(pipeline, local, raises=False))

    assert ("Incorrect API key" in told) if key else ("'LLM_KEY' is not set in the worker" in told)
    assert "sk-another" not in told
    assert not server.seen


def test_requests_in_flight_are_bounded(tmp_path, local, server, endpoint, materialize):
    server.seconds = 0.02
    pipeline = docs(tmp_path, [f"text {i}" for i in range(40)])
    asked(pipeline, endpoint[1], provider_options={"max_connections": 3}, batch_size=40)

    materialize(pipeline, local)

    assert server.most == 3


def test_limits_by_the_minute_are_shared_by_workers(monkeypatch):
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("vane_dagster.providers.pace.asyncio.sleep", sleep)

    async def take(pace: Pace, times: int) -> None:
        for _ in range(times):
            await pace.take(1)

    pace = Pace(60)
    asyncio.run(take(pace, 4))
    assert waited == pytest.approx([1, 2, 3], abs=0.1)
    waited.clear()
    pace = Pace(60)
    pace.workers = 3
    asyncio.run(take(pace, 3))
    assert waited == pytest.approx([3, 6], abs=0.1)
    waited.clear()
    asyncio.run(take(Pace(None), 100))
    assert waited == []


def test_a_limit_by_the_minute_of_an_endpoint(tmp_path, local, server, endpoint, materialize):
    pipeline = docs(tmp_path, [f"text {i}" for i in range(4)])
    limits = {"requests_per_minute": 1200, "tokens_per_minute": 600_000}
    asked(pipeline, endpoint[1], provider_options=limits, concurrency=2)

    materialize(pipeline, local)

    assert read(tmp_path).num_rows == 4


# Structured answers


def test_answers_are_validated_and_become_columns(tmp_path, local, server, endpoint, materialize):
    good = '```json\n{"name": "Ada", "age": 36, "tags": ["x"]}\n```'
    server.answers = {
        "good": [good],
        "young": ['{"name": "Tim", "age": -1}'],
        "cut": ['{"name": "T'],
        "better": ['{"name": "Eve"}', '{"name": "Eve", "age": 5}'],
    }
    pipeline = docs(tmp_path, [*server.answers])
    asked(
        pipeline,
        endpoint[1],
        return_format=Person,
        explain_errors=1,
        on_error="null",
        max_error_rate=0.5,
    )

    materialize(pipeline, local)

    rows = read(tmp_path)
    kind = pa.struct(
        [("name", pa.string()), ("age", pa.int64()), ("mood", pa.string()),
         ("tags", pa.list_(pa.string()))]
    )  # fmt: skip
    assert rows.schema.field("response").type == kind
    assert rows["response"].to_pylist() == [
        {"name": "Ada", "age": 36, "mood": "good", "tags": ["x"]},
        None,
        None,
        {"name": "Eve", "age": 5, "mood": "good", "tags": []},
    ]
    errors = rows["error"].to_pylist()
    assert "age: Value error, nobody is that young" in errors[1]
    assert '"age": -1' in errors[1]  # the answer is kept
    assert "The answer is no JSON" in errors[2]
    said = [m["content"] for body in server.bodies for m in body["messages"] if "again" in str(m)]
    assert any("age: Field required" in text for text in said)
    assert server.bodies[0]["response_format"]["json_schema"]["schema"]["title"] == "Person"


def test_one_of_some_choices(tmp_path, local, server, endpoint, materialize):
    server.answers = {"a": ['{"answer": "yes"}'], "b": ["No."], "c": ["perhaps"]}
    pipeline = docs(tmp_path, ["a", "b", "c"])
    choices = ["yes", "no"]
    asked(pipeline, endpoint[1], return_format=choices, on_error="quarantine", max_error_rate=0.5)

    materialize(pipeline, local)

    assert read(tmp_path)["response"].to_pylist() == ["yes", "no"]
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store"))
    assert "The answer is none of 'yes', 'no'. The answer: perhaps" in aside["message"][0].as_py()


def test_a_json_schema_with_references_has_columns():
    schema = {
        "$defs": {"place": {"type": "object", "properties": {"city": {"type": "string"}}}},
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/place"},
            "scores": {"type": "array", "items": {"type": "number"}},
            "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "required": ["at"],
    }
    form = parse_format("stage", schema)
    city = pa.struct([("city", pa.string())])
    scores = pa.list_(pa.float64())
    assert form.type == pa.struct([("at", city), ("scores", scores), ("sure", pa.bool_())])
    assert form.value(Answer('{"at": {"city": "Rome"}}')) == {"at": {"city": "Rome"}}
    with pytest.raises(ValueError, match="'at' is a required property"):
        form.value(Answer("{}"))


# A model in the worker


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tiny"), longest=96)


def test_a_model_of_transformers(tiny, tmp_path, local, materialize):
    texts = [*TEXTS, "word " * 200]
    pipeline = docs(tmp_path, texts)
    pipeline.prompt(
        "asked",
        "{text}",
        provider="transformers",
        model=str(tiny),
        sampling_params={"max_tokens": 8, "temperature": 0},
        provider_options={"batch_size": 3},
        on_error="quarantine",
        max_error_rate=0.5,
    )

    materialize(pipeline, local)

    rows = read(tmp_path)
    assert rows["id"].to_pylist() == [0, 1, 2, 3]
    assert rows["response"].to_pylist() == [_greedy(tiny, text, 8) for text in TEXTS]
    usage = rows["response_usage"].to_pylist()
    assert all(0 <= u["completion_tokens"] <= 8 for u in usage)
    aside = vd.quarantine("docs/asked", store=str(tmp_path / "store"))
    assert aside["error"].to_pylist() == ["PromptTooLong"]
    assert "the model takes 96" in aside["message"][0].as_py()


def _greedy(folder: Path, text: str, tokens: int) -> str:
    """What the model answers to one text alone, without padding."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    given = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**given, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
