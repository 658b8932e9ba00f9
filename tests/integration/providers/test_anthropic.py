"""The provider "anthropic" over a server that speaks the Messages API, with its faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.llm_server import Server, serving
from vane_dagster.errors import StageError
from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.format import InvalidAnswer
from vane_dagster.providers.http import MalformedResponse


@pytest.fixture(scope="module")
def endpoint() -> Iterator[tuple[Server, str]]:
    with serving() as (server, url):
        yield server, url.removesuffix("/v1")


def submit(url: str, *messages: Any, options: Any = None, **request: Any) -> Answer:
    """Answer one request, in this process."""
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    given = {"base_url": url, "api_key_env": "LLM_KEY", **(options or {})}

    async def answered() -> Answer:
        provider = AnthropicProvider("m", **given)
        try:
            return await provider.submit(Request(said, **request))
        finally:
            for client in provider._clients.values():
                await client.close()  # a worker keeps its connections until it ends

    return asyncio.run(answered())


# Requests and answers


def test_a_request_has_the_api_form(server, endpoint):
    sampling = {
        "temperature": 0,
        "top_k": 5,
        "stop": "END",
        "max_completion_tokens": 7,
        "extra_body": {"metadata": {"user_id": "u"}},
    }
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "how are you"},
    ]
    answer = submit(
        endpoint[1], *talk, sampling=sampling, options={"extra_body": {"service_tier": "auto"}}
    )
    assert answer.text == "echo: how are you"
    assert server.bodies == [
        {
            "model": "m",
            "system": "Be brief.\n\nBe kind.",
            "messages": [talk[1], talk[2], talk[4]],
            "max_tokens": 7,
            "temperature": 0,
            "top_k": 5,
            "stop_sequences": ["END"],
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
        }
    ]


def test_prompt_tokens_include_those_of_the_cache(server, endpoint):
    answer = submit(endpoint[1], "a fox")
    counts = answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens
    assert counts == (2 + 2 + 1, 3, 1)
    assert answer.finish_reason == "stop"
    assert submit(endpoint[1], "a", sampling={"max_tokens": 1}).finish_reason == "length"


@pytest.mark.parametrize(
    ("schema", "given", "text"),
    [
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, '{"n": 1}', '{"n": 1}'),
        ({"type": "array", "items": {"type": "integer"}}, '{"answer": [1, 2]}', "[1, 2]"),
        ({"type": "string"}, "no JSON", "no JSON"),
    ],
)
def test_a_schema_is_that_of_a_tool_which_the_model_must_call(
    schema, given, text, server, endpoint
):
    server.answers = {"q": [given]}
    assert submit(endpoint[1], "q", schema=schema).text == text
    (body,) = server.bodies
    (tool,) = body["tools"]
    sent = tool["input_schema"]
    assert (sent if schema["type"] == "object" else sent["properties"]["answer"]) == schema
    assert body["tool_choice"] == {"type": "tool", "name": tool["name"]}


def test_a_model_that_thinks_may_answer_in_text(server, endpoint):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    submit(endpoint[1], "q", choices=("yes", "no"), sampling={"thinking": thinking})
    assert server.bodies[0]["tool_choice"] == {"type": "auto"}


def test_a_choice_is_the_answer_of_the_tool(server, endpoint):
    server.answers = {"q": ['{"answer": "no"}']}
    assert submit(endpoint[1], "q", choices=("yes", "no")).text == "no"


# Errors


def test_a_message_of_another_role_is_an_error_of_its_row(server, endpoint):
    with pytest.raises(ValueError, match="has the role 'tool'"):
        submit(endpoint[1], {"role": "tool", "content": "x"})


def response(*content: Any, reason: Any = "end_turn", **fields: Any) -> bytes:
    """Return the body of a response with content blocks."""
    usage = {"input_tokens": 5, "output_tokens": 2}
    body = {"id": "1", "type": "message", "role": "assistant", "model": "m",
            "content": list(content), "stop_reason": reason, "usage": usage, **fields}  # fmt: skip
    return json.dumps(body).encode()


YES = {"type": "text", "text": "yes"}


@pytest.mark.parametrize(
    "body",
    [
        response(content=None),
        response(content="hello"),
        response("yes"),
        response({"type": "text", "text": None}),
        response({"text": "yes"}),
        b"\xff\xfe{",
    ],
)
def test_responses_with_other_content_are_malformed(body, server, endpoint):
    server.responses = {"q": body}
    with pytest.raises(MalformedResponse, match="is not of anthropic's API"):
        submit(endpoint[1], "q")


def test_an_answer_without_usage_or_reason_is_an_answer(server, endpoint):
    server.responses = {"q": response({"type": "other"}, YES, reason=3, usage=None)}
    assert submit(endpoint[1], "q") == Answer("yes", 0, 0, 0, "")


@pytest.mark.parametrize(
    ("reason", "fields", "expected"),
    [
        ("refusal", {"stop_details": {"type": "refusal", "explanation": "It is unsafe."}},
         "(finish_reason 'refusal'): It is unsafe."),
        ("max_tokens", {}, "(finish_reason 'length'). It was cut: raise max_tokens."),
        ("pause_turn", {}, "(finish_reason 'pause_turn')."),
    ],
)  # fmt: skip
def test_no_answer_is_an_error_that_has_the_reason_and_is_paid_for(
    reason, fields, expected, server, endpoint
):
    server.responses = {"q": response(reason=reason, **fields)}
    with pytest.raises(InvalidAnswer) as raised:
        submit(endpoint[1], "q", choices=("yes", "no"))
    assert expected in str(raised.value)
    assert raised.value.used["completion_tokens"] == 2


def test_an_empty_answer_that_the_model_ended_is_an_answer(server, endpoint):
    server.responses = {"q": response()}
    assert submit(endpoint[1], "q").text == ""


def test_a_missing_key_is_no_rows_error(server, endpoint, monkeypatch):
    monkeypatch.delenv("LLM_KEY")
    with pytest.raises(StageError, match="'LLM_KEY' is not set"):
        submit(endpoint[1], "a")
