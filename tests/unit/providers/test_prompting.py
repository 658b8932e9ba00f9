"""Prompt stages as they are declared: templates, formats, limits, and what is refused."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
import pydantic
import pytest

import vane_dagster as vd
from support.prompts import Person, Reversed, docs, in_turns
from support.udf_calls import row_stage, run_stage
from vane_dagster.errors import RowErrors
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.format import InvalidAnswer, parse_format
from vane_dagster.providers.prompt_function import PromptFunction
from vane_dagster.providers.prompting import PromptTask
from vane_dagster.providers.rate_limiter import RateLimiter
from vane_dagster.providers.template import Template, parse_template
from vane_dagster.providers.usage import checked_usage, token_count


class Needy(Reversed):
    def __init__(self, model: str, region: str) -> None:
        super().__init__(model)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("{text} {}", "has the field {}"),
        ("{text.upper}", "has the field {text.upper}"),
        ("{text", "is not a template"),
        ("say something", "names no column"),
        ("", "expected a column's name"),
        (7, "expected a column's name"),
    ],
)
def test_messages_that_are_no_template(messages, message):
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        parse_template("stage", messages, None)


def test_messages_are_shown_with_their_roles():
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ["See {n}", "{text}"]},
    ]
    shown = [str(parse_template("here", given, None)) for given in (chat, "Say: {text}", "text")]
    assert shown == ["system: Be brief.\nuser: See {n} {text}", "Say: {text}", "column `text`"]


def test_the_assets_say_what_is_asked(tmp_path):
    pipeline = docs(tmp_path)
    pipeline.prompt("asked", "Say: {text}", provider=Reversed, model="m")
    pipeline.prompt("said", "text", provider=Reversed, model="m")
    pipeline.embed("vectors", "text", provider=Reversed, model="m")
    specs = {spec.key.path[-1]: spec for spec in pipeline.build_assets().specs}
    assert [specs[name].description for name in ("asked", "said", "vectors")] == [
        "Reversed('m') is asked: Say: {text}",
        "Reversed('m') is asked: column `text`",
        "Column `text` is embedded by Reversed('m')",
    ]
    assert [specs[name].kinds for name in ("asked", "vectors")] == [{"prompt"}, {"embed"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"provider": "nobody"},
            "unknown provider 'nobody'; there are 'anthropic', 'openai', "
            "'sentence_transformers', 'transformers', 'vllm'",
        ),
        ({"provider": dict}, "or a class, with `async def submit`, which this stage calls"),
        ({"return_format": "yes or no"}, "return_format is 'yes or no'; expected a pydantic"),
        ({"return_format": ["yes", "Yes"]}, "has a choice twice"),
        ({"return_format": {"type": "object"}}, "has a part without a column type"),
        ({"sampling_params": [1]}, "sampling_params is a list"),
        ({"output_column": "id"}, "two columns would be called 'id'"),
        ({"output_column": "text", "include_columns": ["text"]}, "would be called 'text'"),
        (
            {"output_column": "error", "on_error": "null"},
            "adds a column 'error'; rename the column",
        ),
        ({"provider": Needy}, "(model, **options): missing a required argument: 'region'"),
        ({"messages": '{"text": "{text}"}'}, 'has the field {"text"}; expected the name of a'),
        ({"column": "text", "dimensions": 0}, "dimensions is 0"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message, tmp_path):
    """Those with a column are of `embed`."""
    given = {"provider": Reversed, "model": "m", **arguments}
    pipeline: Any = docs(tmp_path)
    is_prompt = "column" not in arguments
    given |= {} if not is_prompt or "messages" in arguments else {"messages": "{text}"}
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        (pipeline.prompt if is_prompt else pipeline.embed)("asked", **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prices": {"answer": 1}}, "prices is {'answer': 1}; expected the price of a million"),
        ({"cost_budget": 1}, "cost_budget=1 needs prices"),
        ({"cost_budget": -1, "prices": {"prompt": 1}}, "cost_budget is -1; expected an amount"),
        ({"token_budget": 0}, "token_budget is 0; expected a whole number"),
    ],
)
def test_values_of_a_model_that_do_not_fit(arguments, message):
    with pytest.raises(vd.errors.DefinitionError, match=f"^vd.Model: {re.escape(message)}"):
        vd.Model("m", **arguments)
    with pytest.raises(vd.errors.DefinitionError, match=r"^vd\.Failures: explain_errors is -1"):
        vd.Failures(explain_errors=-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sampling_params": {"extra_body": "x"}}, "sampling_params: an extra_body of type str"),
        (
            {"sampling_params": {"extra_body": {"a": {1, 2}}}},
            "sampling_params has 'extra_body', which cannot be sent: Object of type set is not",
        ),
        (
            {"sampling_params": {"extra_headers": {"X-Key": "planted"}}},
            "has 'extra_headers', but sampling parameters are fields of the request's body",
        ),
        ({"sampling_params": {"api_key": "planted"}}, "as its option 'api_key_env'"),
    ],
)
def test_what_an_endpoint_cannot_be_sent_is_refused_at_declaration(arguments, message, tmp_path):
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)) as raised:
        docs(tmp_path).prompt("asked", "{text}", provider="openai", model="m", **arguments)
    assert "planted" not in str(raised.value)


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("requests_per_minute", "600", "a number above 0"),
        ("tokens_per_minute", 0, "a number above 0"),
        ("timeout", "60", "a number above 0"),
        ("max_connections", 2.5, "a whole number from 1 up"),
    ],
)
def test_numbers_of_an_endpoint_are_checked_at_declaration(
    provider, name, value, expected, tmp_path
):
    model = vd.Model("m", options={name: value})
    message = f"asked': the options of the model: {name} is {value!r}; expected {expected}"
    with pytest.raises(vd.errors.DefinitionError, match=re.escape(message)):
        docs(tmp_path).prompt("asked", "{text}", provider=provider, model=model)


# What is asked

HEARD: list[Request] = []
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
ROWS = pa.table({"id": [0], "text": ["a fox"], "n": [1], "title": ["t"], "talk": [TALK]})


class Heard(Reversed):
    async def submit(self, request: Request) -> Answer:
        HEARD.append(request)
        return await super().submit(request)


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    """As in the guide of Ray Data."""
    messages = [{"role": "system", "content": "haikus"}, {"role": "user", "content": row["text"]}]
    return {"messages": messages, "sampling_params": {"temperature": 0.3}}


def seen(row: dict[str, Any]) -> str:
    return " ".join(sorted(row))


@pytest.mark.parametrize(
    ("messages", "given", "asked"),
    [
        ("{n}. {{{text}}}", {"include_columns": ["n"]}, ["1. {a fox}"]),
        ("{text:.{n}}", {}, ["a"]),
        ("talk", {"system": "Be brief."}, ["Be brief.", "hello", "hi"]),
        (preprocess, {"columns": ["text"]}, ["haikus", "a fox"]),
        (seen, {}, ["id n talk text title"]),
        (seen, {"columns": ["title"], "include_columns": True}, ["title"]),
        (seen, {"columns": ["title"], "reuse": "fragments"}, ["id title"]),
    ],
)
def test_what_is_asked_for_a_row(messages, given, asked):
    HEARD.clear()
    sampling = {"temperature": 1, "n": 1}
    stage = row_stage(
        "prompt", messages, provider=Heard, model="m", output_column="back",
        sampling_params=sampling, **given,
    )  # fmt: skip
    rows = run_stage(stage, ROWS)
    (request,) = HEARD
    assert [message["content"] for message in request.messages] == asked
    own = {"temperature": 0.3} if messages is preprocess else {}
    assert dict(request.sampling) == {**sampling, **own}
    passed = given.get("include_columns", [])
    others = {"text", "n", "title", "talk"} if passed is True else set(passed)
    assert set(rows.column_names) == {"id", "back", "back_usage", *others}
    assert rows["back"].to_pylist() == [asked[-1][::-1]]


def test_structs_lists_and_maps_are_json_in_a_template():
    row = {
        "fields": {"a": None, "b": True, "day": date(2026, 1, 2), "name": "Zoë"},
        "tags": [["x"], []],
        "counts": [("x", {"n": 1})],  # a map, as Arrow returns it
        "day": date(2026, 1, 2),
        "price": 1.0,
        "text": "it's",
    }
    template = parse_template("here", " ".join(f"{{{name}}}" for name in row), None)
    (message,) = template.messages(row)
    assert message["content"] == (
        '{"a": null, "b": true, "day": "2026-01-02", "name": "Zoë"} [["x"], []] {"x": {"n": 1}} '
        "2026-01-02 1.0 it's"
    )


class Turns(Reversed):
    """Answers no row whose text ends in "slow" before the last row was asked."""

    now = most = 0
    last = asyncio.Event()

    async def submit(self, request: Request) -> Answer:
        kind = type(self)
        kind.now, kind.most = kind.now + 1, max(kind.most, kind.now + 1)
        text = request.messages[-1]["content"]
        if text == "last":
            kind.last.set()
        if text == "slow":
            await asyncio.wait_for(kind.last.wait(), timeout=60)
        await asyncio.sleep(0)
        kind.now -= 1
        return Answer(text)


def test_a_row_is_asked_as_soon_as_another_one_is_answered():
    Turns.last, Turns.most = asyncio.Event(), 0
    stage = row_stage(
        "prompt", "{text}", provider=Turns, model="m", batch_size=2, max_concurrency=2,
    )  # fmt: skip
    texts = ["slow", "a", "slow", "b", "slow", "c", "d", "e", "last"]
    rows = run_stage(stage, pa.table({"id": range(len(texts)), "text": texts}))
    assert rows["out"].to_pylist() == texts
    assert Turns.most == 4, "batch_size times max_concurrency"


def test_no_row_is_asked_after_the_lease_has_ended():
    HEARD.clear()
    stage = row_stage(
        "prompt", "{text}", provider=Heard, model="m", batch_size=2, max_concurrency=2,
    )  # fmt: skip
    table = pa.table({"id": range(20), "text": ["a"] * 20})
    assert run_stage(stage, table, revoked=lambda: len(HEARD) > 5) is None
    assert len(HEARD) <= 9


def test_a_request_that_takes_too_long_costs_its_row_alone():
    Turns.last = asyncio.Event()
    stage = row_stage(
        "prompt", "{text}", provider=Turns, model="m", on_error="quarantine", timeout_s=1,
    )  # fmt: skip
    rows = run_stage(stage, pa.table({"id": [1, 2], "text": ["slow", "a"]}), retries=0)
    assert rows["id"].to_pylist() == [2]


class Praise(Reversed):
    async def submit(self, request: Request) -> Answer:
        HEARD.append(request)
        return Answer("bad {x}" if "fox" in str(request.messages) else "Good")


def test_texts_are_given_labels_by_a_prompt():
    HEARD.clear()
    labels = {"good": "praise", "bad {x}": ""}
    stage = row_stage("classify", "text", labels=labels, provider=Praise, model="m")
    table = pa.table({"id": [0, 1], "text": ["a fox", "a"]})
    assert run_stage(stage, table)["out"].to_pylist() == ["bad {x}", "good"]
    assert [request.messages[-1]["content"] for request in HEARD] == [
        "Which of these labels fits the text best? Answer with the label alone.\n\n"
        f"- good: praise\n- bad {{x}}\n\nText: {text}" for text in ("a fox", "a")
    ]  # fmt: skip
    for wrong, message in (
        ("good", "expected a list of names"),
        (["a", "a"], "expected different"),
    ):
        with pytest.raises(vd.errors.DefinitionError, match=message):
            row_stage("classify", "text", labels=wrong, provider=Praise, model="m")


class Aliased(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(alias_generator=str.upper)
    first_name: str


def test_fields_with_aliases_are_asked_for_by_these_and_stored_by_name():
    form = parse_format("stage", Aliased)
    assert form.schema is not None
    assert list(form.schema["properties"]) == ["FIRST_NAME"]
    assert pa.array([form.value(Answer('{"FIRST_NAME": "Bo"}'))], form.type).to_pylist() == [
        {"first_name": "Bo"}
    ]


@pytest.mark.parametrize(
    ("choices", "answer", "expected"),
    [
        (["U.S.", "U.K."], "U.S.", "U.S."),
        (["U.S.", "U.K."], " u.k", "U.K."),
        (["yes", "yes."], "yes.", "yes."),
        (["yes", "no"], "'Yes'.", "yes"),
        ([" a ", "b"], "a", " a "),
    ],
)
def test_a_choice_is_recognized(choices, answer, expected):
    assert parse_format("stage", choices).value(Answer(answer)) == expected


@pytest.mark.parametrize(
    "text", ['```json {"a": 1}```', '```\n{"a": 1}\n```', '```json\n{"a": 1}```']
)
def test_json_in_a_code_fence(text):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert parse_format("stage", schema).value(Answer(text)) == {"a": 1}


class Node(pydantic.BaseModel):
    below: list[Node]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (Node, "has no column type: it refers to itself"),
        ({"enum": ["a", 1]}, "has no column type"),
        ({"$ref": "#/$defs/missing"}, "has no column type: KeyError"),
        ({"type": "array", "items": {"$ref": "#/items/0"}, "$defs": {}}, "has no column type"),
        ({"type": "object", "properties": {"a": True}}, "has no column type"),
        ({"anyOf": [True]}, "has no column type"),
        ({"type": ["string", "integer"]}, "allows several types"),
        ({"type": "objct"}, r"is not a JSON schema: \$\.type"),
        ({"type": "integer", "minimum": "0"}, r"is not a JSON schema: \$\.minimum"),
    ],
)
def test_formats_without_a_column_type(form, words):
    with pytest.raises(vd.errors.DefinitionError, match=words):
        parse_format("stage", form)


# Batches of answers


class Said:
    """Returns what the prompt is mapped to: answers, each once, or an error; keeps requests."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = answers
        self.requests: list[Request] = []

    async def submit(self, request: Request) -> Answer:
        self.requests.append(request)
        found = self.answers[request.messages[0]["content"].split("\n")[0]].pop(0)
        if isinstance(found, BaseException):
            raise found
        return found


def run_task(said: Said, **options: Any) -> RowErrors:
    task = PromptTask(parse_template("here", "text", None), "response", **options)
    texts = list(said.answers)
    with pytest.raises(RowErrors) as raised:
        asyncio.run(task.run(said, in_turns(pa.table({"id": range(len(texts)), "text": texts}))))
    return raised.value


def test_odd_usage_counts_for_nothing():
    odd = {None: 0, "7": 0, 1.5: 0, -1: 0, 2**70: 0, 5.0: 5, 3: 3}
    assert {value: token_count({"n": value}, "n") for value in odd} == odd
    assert token_count(None, "n") == 0
    found = checked_usage(Answer("yes", np.int32(2), "3", None, 3))
    assert found == Answer("yes", 2, 0, 0, "")


def test_answers_before_a_follow_up_that_fails_are_paid_for():
    said = Said(good=[Answer("yes")], odd=[Answer("perhaps", 5, 2), ValueError("no")])
    error = run_task(said, format=parse_format("stage", ["yes"]), explain=1)
    assert list(error.errors) == [1]
    assert (error.used["requests"], error.used["completion_tokens"]) == (1, 2)


def test_an_answer_before_a_follow_up_that_takes_too_long_is_paid_for():
    said = Said(odd=[Answer("perhaps", 5, 2), asyncio.CancelledError()])
    options: Any = {"format": parse_format("stage", ["yes"]), "explain": 1}
    task = PromptTask(parse_template("here", "text", None), "response", **options)
    used = Counter[str]()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(task._one(said, {"text": "odd"}, used))
    assert (used["requests"], used["completion_tokens"]) == (1, 2)


def test_answers_are_validated_and_become_columns():
    said = Said(
        good=[Answer('```json\n{"name": "Ada", "age": 36, "tags": ["x"]}\n```')],
        young=[Answer('{"name": "Tim", "age": -1}')] * 2,
        unfinished=[Answer('{"name": "T')] * 2,
        better=[Answer('{"name": "Eve"}'), Answer('{"name": "Eve", "age": 5}')],
    )
    raised = run_task(said, format=parse_format("stage", Person), explain=1)
    kind = pa.struct(
        [("name", pa.string()), ("age", pa.int64()), ("mood", pa.string()),
         ("tags", pa.list_(pa.string()))]
    )  # fmt: skip
    assert parse_format("stage", Person).type == kind
    assert raised.rows["response"].to_pylist() == [
        {"name": "Ada", "age": 36, "mood": "good", "tags": ["x"]},
        {"name": "Eve", "age": 5, "mood": "good", "tags": []},
    ]
    assert [used["requests"] for used in raised.rows["response_usage"].to_pylist()] == [1, 2]
    young, unfinished = (str(raised.errors[place]) for place in (1, 2))
    assert "age: Value error, nobody is that young" in young
    assert '"age": -1' in young, "the answer is kept"
    assert "The answer is not JSON" in unfinished
    (*_, asked) = (r for r in said.requests if r.messages[0]["content"].startswith("better"))
    assert "age: Field required" in asked.messages[-1]["content"]
    assert asked.schema["title"] == "Person"


def test_adapters_of_a_rows_own():
    said = Said(a=[Answer("yes")], b=[Answer("yes")], c=[Answer("yes")])
    task = PromptTask(
        parse_template("here", "text", None), "response",
        adapter={"one": "/adapters/one", "2": "/adapters/2"}, adapter_column="own",
    )  # fmt: skip
    batch = pa.table({"text": ["a", "b", "c"], "own": ["one", None, "two"]})
    with pytest.raises(RowErrors) as raised:
        asyncio.run(task.run(said, in_turns(batch)))
    assert [request.adapter for request in said.requests] == ["/adapters/one", ""]
    message = "column 'own' has the adapter 'two'; expected null or one of 'one', '2'"
    assert str(raised.value.errors[2]) == message
    assert task.reads == ("text", "own")


def test_sampling_of_a_rows_own():
    def asked(row: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": row["text"], "sampling_params": row["own"]}

    said = Said(a=[Answer("yes")], b=[Answer("yes")])
    function = PromptFunction(asked)
    task = PromptTask(Template(), "response", {"max_tokens": 3}, function=function, columns=None)
    batch = pa.table({"text": ["a", "b"], "own": [{"temperature": 0.5}, None]})
    asyncio.run(task.run(said, in_turns(batch)))
    given = [{"max_tokens": 3, "temperature": 0.5}, {"max_tokens": 3}]
    assert [dict(request.sampling) for request in said.requests] == given


@pytest.mark.parametrize(
    ("text", "schema"),
    [
        ('{"n": 99999999999999999999999}', {"n": {"type": "integer"}}),
        ("[" * 100_000, {"n": {"type": "string"}}),
    ],
)
def test_an_answer_without_a_place_in_its_column_is_paid_for(text, schema):
    schema = schema and {"type": "object", "properties": schema}
    said = Said(good=[Answer("{}")], odd=[Answer(text, 5, 2)])
    error = run_task(said, format=parse_format("stage", schema))
    assert isinstance(error.errors[1], InvalidAnswer)
    assert error.errors[1].used["completion_tokens"] == 2
    assert len(error.rows["response"]) == 1


def test_no_message_of_a_follow_up_is_empty():
    said = Said(q=[Answer(" \n"), Answer("no")], odd=[ValueError("no")])
    run_task(said, format=parse_format("stage", ["yes", "no"]), explain=1)
    (*_, last) = [r.messages for r in said.requests if r.messages[0]["content"] == "q"]
    assert [m["role"] for m in last] == ["user", "assistant", "user"]
    assert last[1]["content"] == "(no answer)"
    assert last[2]["content"].startswith("The answer is none of 'yes', 'no'. Answer again")


class Clock:
    """Seconds that pass while something sleeps, which it does a bit longer than asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("vane_dagster.providers.rate_limiter.asyncio.sleep", self.sleep)
        monkeypatch.setattr("vane_dagster.providers.rate_limiter.time.monotonic", lambda: self.now)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.001

    def begins(self, limiter: RateLimiter, times: int, tokens: int = 0) -> list[int]:
        """When requests that all wait begin, in seconds, if answers of some tokens come at once."""
        begins, start = [], self.now

        async def ask() -> None:
            taken = await limiter.take()
            begins.append(int(self.now - start))
            limiter.learn(taken, tokens)

        async def ask_all() -> None:
            await asyncio.gather(*(ask() for _ in range(times)))

        asyncio.run(ask_all())
        return begins


def test_limits_by_the_minute_are_shared_by_workers(monkeypatch):
    clock = Clock(monkeypatch)
    limiter = RateLimiter(60)
    assert clock.begins(limiter, 4) == [0, 1, 2, 3]
    clock.now += 100
    assert clock.begins(limiter, 2) == [0, 1], "what was not used before is not added"
    limiter = RateLimiter(60)
    limiter.workers = 3
    assert clock.begins(limiter, 3) == [0, 3, 6]
    assert clock.begins(RateLimiter(None), 100) == [0] * 100


def test_a_limit_of_tokens_learns_from_the_first_answer(monkeypatch):
    clock = Clock(monkeypatch)
    assert clock.begins(RateLimiter(600, typical=500), 30, tokens=20) == [*range(0, 60, 2)]
    assert clock.begins(RateLimiter(600, typical=1), 3, tokens=100) == [0, 10, 20]


def test_each_of_several_requests_in_flight_is_charged_with_its_tokens(monkeypatch):
    clock = Clock(monkeypatch)
    limiter, start = RateLimiter(600, typical=1), clock.now

    async def ask() -> None:
        for taken in [await limiter.take() for _ in range(4)]:
            limiter.learn(taken, 100)
        await limiter.take()

    asyncio.run(ask())
    assert clock.now - start == pytest.approx(40, abs=0.01), "400 tokens at 10 per second"


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
