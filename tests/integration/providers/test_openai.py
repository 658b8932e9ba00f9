"""The provider "openai" in this process, over a server with odd responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from vane_dagster.providers.base import Answer, Request, SamplingRefused
from vane_dagster.providers.format import InvalidAnswer
from vane_dagster.providers.http import MalformedResponse
from vane_dagster.providers.openai import OpenAIProvider


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[OpenAIProvider]:
    provider = OpenAIProvider("m", base_url=url, api_key_env="LLM_KEY", **options)
    try:
        yield provider
    finally:
        for client in provider._clients.values():
            await client.close()  # a worker keeps its connections until it ends


def call(url: str, method: str, *arguments: Any, **options: Any) -> Any:
    """Call a method of the provider."""

    async def called() -> Any:
        async with opened(url, **options) as provider:
            return await getattr(provider, method)(*arguments)

    return asyncio.run(called())


def submit(url: str, prompt: str, api: str = "chat", **request: Any) -> Answer:
    """Answer one request."""
    said = [{"role": "user", "content": prompt}]
    answer: Answer = call(url, "submit", Request(said, **request), api=api)
    return answer


def response(message: Any = None, reason: Any = "stop", **fields: Any) -> bytes:
    """Return the body of a response with a message."""
    choice = {"index": 0, "finish_reason": reason, "message": message, "text": "yes"}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    body = {"id": "1", "object": "chat.completion", "model": "m", "choices": [choice],
            "usage": usage, **fields}  # fmt: skip
    return json.dumps(body).encode()


YES = {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_an_answer_without_usage_or_reason_is_an_answer(api, server, endpoint):
    server.responses = {"q": response(YES, 3, usage={"prompt_tokens": 1.5})}
    assert submit(endpoint[1], "q", api) == Answer("yes", 0, 0, 0, "")


@pytest.mark.parametrize(
    ("body", "api"),
    [
        (response(choices=[None]), "chat"),
        (response(choices=[]), "chat"),
        (response(choices={"0": "yes"}), "chat"),
        (response(choices=["yes"]), "chat"),
        (response(None), "chat"),
        (response({"role": "assistant", "content": ["yes"]}), "chat"),
        (b"\xff\xfe{", "chat"),
        (b"[1]", "chat"),
        (response(choices=[{"index": 0, "text": 5}]), "completions"),
    ],
)
def test_responses_in_another_form_are_malformed(body, api, server, endpoint):
    server.responses = {"q": body}
    with pytest.raises(MalformedResponse, match="is not of openai's API"):
        submit(endpoint[1], "q", api)


@pytest.mark.parametrize(
    ("message", "reason", "expected"),
    [
        ({"content": None, "refusal": "I cannot say."}, "stop",
         "The model gave no answer (finish_reason 'stop'): I cannot say."),
        ({"content": "", "refusal": "I cannot say."}, "stop", "I cannot say."),
        ({"content": ""}, "content_filter", "(finish_reason 'content_filter')."),
        ({"content": None, "tool_calls": []}, "tool_calls", "(finish_reason 'tool_calls')."),
        ({"content": None}, "stop", "(finish_reason 'stop')."),
        ({"content": ""}, "length", "(finish_reason 'length'). It was cut: raise max_tokens."),
    ],
)  # fmt: skip
def test_no_answer_is_an_error_that_has_the_reason_and_is_paid_for(
    message, reason, expected, server, endpoint
):
    server.responses = {"q": response({"role": "assistant", **message}, reason)}
    with pytest.raises(InvalidAnswer) as raised:
        submit(endpoint[1], "q", choices=("yes", "no"))
    assert expected in str(raised.value)
    assert "The answer:" not in str(raised.value)
    assert raised.value.used["completion_tokens"] == 2


def test_an_empty_answer_that_the_model_ended_is_an_answer(server, endpoint):
    server.responses = {"q": response({"role": "assistant", "content": ""})}
    assert submit(endpoint[1], "q").text == ""


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"extra_headers": {"X-Key": "planted"}}, "sampling_params has 'extra_headers'"),
        ({"extra_body": "x"}, "extra_body of type str"),
    ],
)
def test_a_rows_own_parameters_that_are_no_part_of_a_body_are_refused(
    sampling, message, server, endpoint
):
    with pytest.raises(SamplingRefused, match=message) as raised:
        submit(endpoint[1], "q", sampling=sampling)
    assert "planted" not in str(raised.value)
    assert not server.bodies


VECTORS = [{"index": index, "embedding": [1.0]} for index in range(3)]


@pytest.mark.parametrize(
    "data",
    [
        [None],
        [{"index": 0}],
        [{"embedding": [1.0]}],
        VECTORS[:1],  # one is missing
        [VECTORS[0], VECTORS[0]],  # a repeated one in the place of another
        VECTORS[1:],
        VECTORS,
    ],
)
def test_vectors_in_another_form_are_malformed(data, server, endpoint):
    server.vectors = json.dumps({"object": "list", "model": "m", "data": data}).encode()
    with pytest.raises(MalformedResponse, match="is not of openai's API"):
        call(endpoint[1], "embed", ["a", "b"], None)


def test_vectors_with_odd_usage(server, endpoint):
    data = [{"index": 0, "embedding": [1.0, 2.0]}]
    server.vectors = json.dumps({"object": "list", "data": data, "usage": {}}).encode()
    assert call(endpoint[1], "embed", ["a"], None) == [[1.0, 2.0]]


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


def test_a_request_that_is_cancelled_frees_its_connection(server, endpoint):
    server.seconds = 1

    async def asked() -> str:
        question = Request([{"role": "user", "content": "q"}])
        async with opened(endpoint[1], max_connections=1) as provider:
            given_up = asyncio.ensure_future(provider.submit(question))
            while not server.bodies:
                await asyncio.sleep(0.01)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            server.seconds = 0
            return (await asyncio.wait_for(provider.submit(question), 10)).text

    assert asyncio.run(asked()) == "echo: q"
