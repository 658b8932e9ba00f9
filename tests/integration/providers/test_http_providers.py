"""The providers of endpoints in this process, over a server with odd responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.base import Answer, Request, SamplingRefused
from vane_dagster.providers.format import InvalidAnswer
from vane_dagster.providers.http import HttpProvider, MalformedResponse
from vane_dagster.providers.openai import OpenAIProvider


@asynccontextmanager
async def opened(url: str, api: str = "chat", **options: Any) -> AsyncIterator[HttpProvider]:
    """A provider by its API: "messages" is that of anthropic."""
    made = AnthropicProvider if api == "messages" else OpenAIProvider
    url = url.removesuffix("/v1") if api == "messages" else url
    provider = made("m", api=api, base_url=url, api_key_env="LLM_KEY", **options)
    try:
        yield provider
    finally:
        for client in provider._clients.values():
            await client.close()  # a worker keeps its connections until it ends


def call(url: str, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of a provider."""

    async def called() -> Any:
        async with opened(url, **options) as provider:
            return await getattr(provider, method)(*arguments)

    return asyncio.run(called())


def submit(url: str, *messages: Any, api: str = "chat", options: Any = None, **sent: Any) -> Answer:
    """Answer one request."""
    said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    answer: Answer = call(url, "submit", Request(said, **sent), api=api, **(options or {}))
    return answer


def response(message: Any = None, reason: Any = "stop", **fields: Any) -> bytes:
    """Return the body of a response with a message."""
    choice = {"index": 0, "finish_reason": reason, "message": message, "text": "yes"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    body = {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice],
            "usage": usage, **fields}  # fmt: skip
    return json.dumps(body).encode()


def blocks(*content: Any, reason: Any = "end_turn", **fields: Any) -> bytes:
    """Return the body of a response of anthropic's API with content blocks."""
    usage = {"input_tokens": 5, "output_tokens": 2}
    body = {"id": "1", "type": "message", "role": "assistant", "model": "m",
            "content": list(content), "stop_reason": reason, "usage": usage, **fields}  # fmt: skip
    return json.dumps(body).encode()


YES = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", response(choices=[None])),
        ("chat", response(choices=[])),
        ("chat", response(None)),
        ("chat", response({"role": "assistant", "content": ["yes"]})),
        ("chat", b"\xff\xfe{"),
        ("chat", b"[1]"),
        ("completions", response(choices=[{"index": 0, "text": 5}])),
        ("messages", blocks(content=None)),
        ("messages", blocks(content="hello")),
        ("messages", blocks({"type": "text", "text": None})),
        ("messages", blocks({"text": "yes"})),
    ],
)
def test_responses_in_another_form_are_malformed(api, body, server, endpoint):
    server.responses = {"q": body}
    with pytest.raises(MalformedResponse, match=r"is not of (openai|anthropic)'s API"):
        submit(endpoint[1], "q", api=api)


def said(content: Any, reason: str = "stop", **fields: Any) -> bytes:
    return response({"role": "assistant", "content": content, **fields}, reason)


EMPTY = Answer("", 5, 2, 0, "stop")
BARE = Answer("yes", finish_reason="")
TEXT_BLOCK = {"type": "text", "text": "yes"}


@pytest.mark.parametrize(
    ("api", "body", "answer"),
    [
        ("chat", response(YES, 3, usage={"prompt_tokens": 1.5}), BARE),
        (
            "messages",
            blocks({"type": "x"}, TEXT_BLOCK, reason=3, usage=None),
            Answer("yes", finish_reason=""),
        ),
        ("chat", said(""), EMPTY),
        ("messages", blocks(), EMPTY),
    ],
)
def test_an_answer_may_be_empty_or_lack_usage_and_reason(api, body, answer, server, endpoint):
    server.responses = {"q": body}
    assert submit(endpoint[1], "q", api=api) == answer


@pytest.mark.parametrize(
    ("api", "body", "expected"),
    [
        ("chat", said(None, refusal="I cannot say."),
         "The model gave no answer (finish_reason 'stop'): I cannot say."),
        ("chat", said("", "content_filter"), "(finish_reason 'content_filter')."),
        ("chat", said(None), "(finish_reason 'stop')."),
        ("chat", said("", "length"), "(finish_reason 'length'). It was cut: raise max_tokens."),
        ("messages", blocks(reason="refusal", stop_details={"explanation": "It is unsafe."}),
         "(finish_reason 'refusal'): It is unsafe."),
        ("messages", blocks(reason="max_tokens"), "(finish_reason 'length'). It was cut: raise"),
    ],
)  # fmt: skip
def test_no_answer_is_an_error_that_has_the_reason_and_is_paid_for(
    api, body, expected, server, endpoint
):
    server.responses = {"q": body}
    with pytest.raises(InvalidAnswer) as raised:
        submit(endpoint[1], "q", api=api, choices=("yes", "no"))
    assert expected in str(raised.value)
    assert "The answer:" not in str(raised.value)
    assert raised.value.used["completion_tokens"] == 2


def test_a_response_that_is_not_http_is_a_lost_connection(server):
    async def asked() -> None:
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            async with opened(f"http://127.0.0.1:{port}") as provider:
                await provider.submit(Request([{"role": "user", "content": "q"}]))

    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:.*/chat/completions"):
        asyncio.run(asked())


def test_an_endpoint_that_is_not_there_is_named(server):
    refused = r"http://127\.0\.0\.1:9/v1/chat/completions: Cannot connect to host"
    with pytest.raises(ConnectionError, match=refused):
        submit("http://127.0.0.1:9/v1", "q")


def test_a_rows_own_parameters_that_are_no_part_of_a_body_are_refused(server, endpoint):
    with pytest.raises(SamplingRefused, match="sampling_params has 'extra_headers'") as raised:
        submit(endpoint[1], "q", sampling={"extra_headers": {"X-Key": "planted"}})
    assert "planted" not in str(raised.value)
    assert not server.bodies


def test_completions_take_one_text_and_fields_of_the_servers_own(server, endpoint):
    sampling = {"temperature": 0, "extra_body": {"guided_regex": "a"}}
    options = {"extra_body": {"ignore_eos": True, "guided_regex": "b"}}
    system = {"role": "system", "content": "Be brief."}
    given = {"api": "completions", "sampling": sampling, "options": options}
    answer = submit(endpoint[1], system, "q", **given)
    assert (answer.text, answer.prompt_tokens) == ("echo: Be brief.\n\nq", 3)
    assert answer.finish_reason == "length"
    (body,) = server.bodies
    assert "messages" not in body
    assert (body["temperature"], body["guided_regex"], body["ignore_eos"]) == (0, "a", True)


# Embeddings

VECTORS = [{"index": index, "embedding": [1.0]} for index in range(3)]


@pytest.mark.parametrize(
    "data",
    [
        [None],
        [{"index": 0}],
        VECTORS[:1],  # one is missing
        [VECTORS[0], VECTORS[0]],  # a repeated one in the place of another
        VECTORS,
    ],
)
def test_vectors_in_another_form_are_malformed(data, server, endpoint):
    server.vectors = json.dumps({"object": "list", "model": "m", "data": data}).encode()
    with pytest.raises(MalformedResponse, match="is not of openai's API"):
        call(endpoint[1], "embed", ["a", "b"], None)


# Only of anthropic's API


def ask(url: str, *messages: Any, **sent: Any) -> Answer:
    return submit(url, *messages, api="messages", **sent)


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
    options = {"extra_body": {"service_tier": "auto"}}
    answer = ask(endpoint[1], *talk, sampling=sampling, options=options)
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
    answer = ask(endpoint[1], "a fox")
    counts = answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens
    assert counts == (2 + 2 + 1, 3, 1)
    assert answer.finish_reason == "stop"
    assert ask(endpoint[1], "a", sampling={"max_tokens": 1}).finish_reason == "length"


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
    assert ask(endpoint[1], "q", schema=schema).text == text
    (body,) = server.bodies
    (tool,) = body["tools"]
    sent = tool["input_schema"]
    assert (sent if schema["type"] == "object" else sent["properties"]["answer"]) == schema
    assert body["tool_choice"] == {"type": "tool", "name": tool["name"]}


def test_a_choice_in_json_is_that_choice(server, endpoint):
    server.answers = {"q": ['{"answer": "bad {x}"}']}
    assert submit(endpoint[1], "q", choices=("good", "bad {x}")).text == "bad {x}"


def test_a_model_that_thinks_may_answer_in_text(server, endpoint):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    server.answers = {"q": ['{"answer": "no"}']}
    answer = ask(endpoint[1], "q", choices=("yes", "no"), sampling={"thinking": thinking})
    assert answer.text == "no"
    assert server.bodies[0]["tool_choice"] == {"type": "auto"}
