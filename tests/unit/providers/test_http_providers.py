"""Providers of endpoints: what they send, what they make of responses, and how they connect."""

from __future__ import annotations

import asyncio
import json
import pickle
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jsonschema
import pytest

import vane_dagster as vd
from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.base import Answer, EndpointRefused, Request
from vane_dagster.providers.format import InvalidAnswer
from vane_dagster.providers.http import HttpProvider, MalformedResponse, in_object
from vane_dagster.providers.openai import OpenAIProvider
from vane_dagster.providers.usage import checked_usage
from vane_dagster.servers import handle
from vane_dagster.servers.directory import Directory
from vane_dagster.servers.launch import Endpoint, own_node_id

LIBRARY = SimpleNamespace(APIConnectionError=ConnectionError, APIStatusError=RuntimeError)
"""Stands for a client library, whose import takes longer than all tests of this file."""


class Client:
    """Stands for a library's client: keeps the bodies, and returns the parsed response."""

    def __init__(self, response: Any) -> None:
        self.response = response
        self.bodies: list[Any] = []

    async def post(self, path: str, cast_to: Any, body: Any) -> Any:
        self.bodies.append(body)
        return json.loads(self.response) if isinstance(self.response, bytes) else self.response


def provider(api: str, response: Any, **options: Any) -> tuple[HttpProvider, Client]:
    with mock.patch("vane_dagster.providers.http.needs", return_value=LIBRARY):
        made = (AnthropicProvider if api == "messages" else OpenAIProvider)("m", **options)
    client = Client(response)
    made._client = lambda endpoint: client  # type: ignore[method-assign]  # in place of the network
    return made, client


def submit(
    api: str, response: Any, *messages: Any, options: Any = None, **sent: Any
) -> tuple[Answer, Any]:
    made, client = provider(api, response, **(options or {}))
    talk = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
    answer: Answer = asyncio.run(made.submit(Request(talk, **sent)))
    return answer, client.bodies[0]


def said(content: Any, reason: Any = "stop", **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **fields}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    return {"choices": [{"finish_reason": reason, "message": message}], "usage": usage}


def blocks(*content: Any, reason: Any = "end_turn", **fields: Any) -> dict[str, Any]:
    usage = {"input_tokens": 5, "output_tokens": 2}
    return {"content": list(content), "stop_reason": reason, "usage": usage, **fields}


def text(value: Any) -> dict[str, Any]:
    return {"type": "text", "text": value}


@pytest.mark.parametrize(
    ("api", "response"),
    [
        ("chat", {"choices": [None]}),
        ("chat", {"choices": []}),
        ("chat", {"choices": [{"message": None}]}),
        ("chat", said(["yes"])),
        ("chat", b"\xff\xfe{"),
        ("chat", [1]),
        ("messages", {"content": None}),
        ("messages", {"content": "hello"}),
        ("messages", blocks(text(None))),
        ("messages", blocks({"text": "yes"})),
    ],
)
def test_responses_in_another_form_are_malformed(api, response):
    with pytest.raises(MalformedResponse, match=r"does not follow (openai|anthropic)'s API"):
        submit(api, response, "q")


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "invalid_api_key", EndpointRefused),
        (429, "insufficient_quota", EndpointRefused),
        (429, "rate_limit_exceeded", RuntimeError),
        (400, None, RuntimeError),
    ],
)
def test_an_account_without_credit_fails_the_stage_and_a_rate_limit_the_request(
    status, code, expected
):
    error = RuntimeError(f"Error code: {status}")
    error.status_code, error.code = status, code
    error.request = SimpleNamespace(url="https://api.example.com/v1/chat/completions")
    made, client = provider("chat", None, api_key_env="KEY")
    client.post = mock.AsyncMock(side_effect=error)
    with pytest.raises(expected, match=f"Error code: {status}"):
        asyncio.run(made.submit(Request([{"role": "user", "content": "q"}])))


VECTORS = [{"index": index, "embedding": [1.0]} for index in range(3)]


@pytest.mark.parametrize(
    "found",
    [
        [None],
        [{"index": 0}],
        VECTORS[:1],  # one is missing
        [VECTORS[0], VECTORS[0]],  # a repeated one in the place of another
        VECTORS,
    ],
)
def test_vectors_in_another_form_are_malformed(found):
    made, _ = provider("chat", {"data": found})
    with pytest.raises(MalformedResponse, match="does not follow openai's API"):
        asyncio.run(made.embed(["a", "b"], None))  # type: ignore[attr-defined]  # the provider embeds


CACHED = {
    "input_tokens": 2,
    "cache_creation_input_tokens": 2,
    "cache_read_input_tokens": 1,
    "output_tokens": 3,
}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}}
LIST = {"type": "array"}
CHOICES = {"choices": ("good", "bad {x}")}


def called(**given: Any) -> dict[str, Any]:
    return blocks({"type": "tool_use", "name": "answer", "input": given}, reason="tool_use")


@pytest.mark.parametrize(
    ("api", "response", "sent", "answer"),
    [
        ("chat", {**said("yes", 3), "usage": {"prompt_tokens": 1.5}}, {}, ("yes", 0, 0, 0, "")),
        ("chat", said(""), {}, ("", 5, 2, 0, "stop")),
        ("chat", said('{"answer": "bad {x}"}'), CHOICES, ("bad {x}", 5, 2, 0, "stop")),
        ("messages", blocks({"type": "x"}, text("a"), reason=3, usage=None), {},
         ("a", 0, 0, 0, "")),
        ("messages", blocks(), {}, ("", 5, 2, 0, "stop")),
        ("messages", blocks(text("a"), usage=CACHED), {}, ("a", 5, 3, 1, "stop")),
        ("messages", blocks(text("a"), reason="max_tokens"), {}, ("a", 5, 2, 0, "length")),
        ("messages", called(n=1), {"schema": NUMBER}, ('{"n": 1}', 5, 2, 0, "stop")),
        ("messages", called(answer=[1]), {"schema": LIST}, ("[1]", 5, 2, 0, "stop")),
        ("messages", blocks(text("no JSON")), {"schema": LIST}, ("no JSON", 5, 2, 0, "stop")),
    ],
)  # fmt: skip
def test_an_answer_may_be_empty_or_lack_usage_and_reason(api, response, sent, answer):
    assert checked_usage(submit(api, response, "q", **sent)[0]) == Answer(*answer)


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
OMITTED = {"type": "thinking", "thinking": "", "signature": "s"}
HIDDEN = {"type": "redacted_thinking", "data": "x"}
CHAT = {"usage": {"completion_tokens_details": {"reasoning_tokens": 3}}}
MESSAGES = {"usage": {"output_tokens_details": {"thinking_tokens": 3}}}
NAMED = {"type": "tool_use", "name": "answer", "input": {"answer": "yes"}}


@pytest.mark.parametrize(
    ("api", "response", "reasoning"),
    [
        ("chat", {**said("yes", reasoning="Hm."), **CHAT}, "Hm."),
        ("chat", {**said("yes", reasoning_content="Hm.", reasoning=None), **CHAT}, "Hm."),
        ("chat", {**said("yes"), **CHAT}, None),
        ("messages", {**blocks(THOUGHT, text("yes")), **MESSAGES}, "Hm."),
        ("messages", {**blocks(THOUGHT, HIDDEN, THOUGHT, NAMED), **MESSAGES}, "Hm.\n\nHm."),
        ("messages", {**blocks(OMITTED, text("yes")), **MESSAGES}, None),
    ],
)
def test_reasoning_is_no_part_of_an_answer(api, response, reasoning):
    found = checked_usage(submit(api, response, "q", choices=("yes", "no"))[0])
    assert (found.text, found.reasoning, found.reasoning_tokens) == ("yes", reasoning, 3)


@pytest.mark.parametrize(
    ("api", "response", "expected"),
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
def test_no_answer_is_an_error_that_has_the_reason_and_is_paid_for(api, response, expected):
    with pytest.raises(InvalidAnswer, match=re.escape(expected)) as raised:
        submit(api, response, "q", **CHOICES)
    assert "The answer:" not in str(raised.value)
    assert raised.value.used["completion_tokens"] == 2


def test_a_rows_own_parameters_that_are_no_part_of_a_body_are_refused():
    with pytest.raises(ValueError, match="sampling_params has 'extra_headers'") as raised:
        submit("chat", said("yes"), "q", sampling={"extra_headers": {"X-Key": "planted"}})
    assert "planted" not in str(raised.value)


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "hi"},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "how are you"},
]
SAMPLED = {
    "temperature": 0,
    "top_k": 5,
    "stop": "END",
    "max_completion_tokens": 7,
    "extra_body": {"metadata": {"user_id": "u"}},
}


def test_requests_have_the_form_of_the_api():
    options = {"extra_body": {"ignore_eos": True, "metadata": {}}}
    _, body = submit("chat", said("yes"), *TALK, options=options, sampling=SAMPLED, schema=NUMBER)
    assert (body["messages"], body["temperature"]) == (TALK, 0)
    assert (body["ignore_eos"], body["metadata"]) == (True, {"user_id": "u"})
    assert body["response_format"]["json_schema"]["schema"] == NUMBER

    options = {"extra_body": {"service_tier": "auto"}}
    _, body = submit("messages", blocks(), *TALK, options=options, sampling=SAMPLED)
    assert body == {
        "model": "m",
        "system": "Be brief.\n\nBe kind.",
        "messages": [TALK[1], TALK[2], TALK[4]],
        "max_tokens": 7,
        "temperature": 0,
        "top_k": 5,
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
    }


def test_anthropics_model_must_call_a_tool_that_has_the_schema_unless_it_thinks():
    for schema in (NUMBER, LIST):
        _, body = submit("messages", blocks(), "q", schema=schema)
        (tool,) = body["tools"]
        sent = tool["input_schema"]
        assert (sent if schema is NUMBER else sent["properties"]["answer"]) == schema
        assert body["tool_choice"] == {"type": "tool", "name": tool["name"]}
    sampling = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer, body = submit("messages", blocks(text("good")), "q", sampling=sampling, **CHOICES)
    assert (answer.text, body["tool_choice"]) == ("good", {"type": "auto"})


# Connections


@pytest.fixture(autouse=True)
def _no_uname(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients send the name of the processor, for which Python starts `uname`."""
    monkeypatch.setattr("platform._Processor.get", str)


def test_an_endpoint_that_is_not_there_or_does_not_speak_http_is_named():
    pytest.importorskip("openai", reason="the client is not installed")

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0\r\n\r\n")
        writer.close()

    async def ask(port: int) -> None:
        made = OpenAIProvider("m", base_url=f"http://127.0.0.1:{port}/v1", api_key_env=None)
        try:
            await made.submit(Request([{"role": "user", "content": "q"}]))
        finally:
            for client in made._clients.values():
                await client.close()

    async def asked() -> None:
        with pytest.raises(ConnectionError, match="/v1/chat/completions: Cannot connect to host"):
            await ask(9)
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as listening:
            with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:.*/chat/completions"):
                await ask(listening.sockets[0].getsockname()[1])

    asyncio.run(asked())


def test_limits_are_waited_for_in_a_turn_and_again_by_a_row_that_asks_again():
    made, client = provider("chat", said("yes"), max_connections=1)
    taken: list[str] = []

    async def limited() -> float:
        taken.append("limits")
        return 1.0

    made._limited = limited  # type: ignore[method-assign]  # in place of the network

    async def row(name: str, requests: int) -> None:
        async with made.turn():
            taken.append(name)
            for _ in range(requests):
                await made._post("/", {})
            await asyncio.sleep(0)
        assert len(client.bodies)

    async def ask() -> None:
        await asyncio.gather(row("first", 2), row("second", 1))
        await made._post("/", {})

    asyncio.run(ask())
    assert taken == ["limits", "first", "limits", "limits", "second", "limits"]


def test_a_vllm_server_is_asked_for_a_choice_as_plain_text():
    vllm, other = vd.VLLMServer("m"), vd.Server(["serve", "{port}"], model="m")
    for server in (vllm, other):
        sent = pickle.loads(pickle.dumps(server))  # as a worker gets it
        made, _ = provider("chat", None, server=sent)
        body: Any = made.body(Request([{"role": "user", "content": "q"}], **CHOICES))
        if server is vllm:
            assert body.pop("structured_outputs") == {"choice": list(CHOICES["choices"])}
        else:
            assert body.pop("response_format")["type"] == "json_schema"
        assert body.keys() == {"model", "messages"}


def test_references_of_a_schema_lead_somewhere_in_an_object():
    schema = {"type": "array", "items": {"$ref": "#/$defs/N"}, "$defs": {"N": {"type": "integer"}}}
    jsonschema.validate({"answer": [1]}, dict(in_object(schema)))


def test_connections_are_limited_for_each_replica(monkeypatch):
    pytest.importorskip("openai", reason="the client is not installed")
    llm = vd.VLLMServer("m", replicas=vd.Workers(3, max_concurrency=2))
    near = [Endpoint(f"http://near:{n}", node_id=own_node_id()) for n in (1, 2)]
    monkeypatch.setattr(handle, "directory", known := Directory())
    known.update({llm.key: [*near, Endpoint("http://far:1", node_id="other")]})
    docs = vd.Pipeline("docs", source=vd.parquet("/none"), id="id")
    docs.prompt("answer", "{text}", model=llm)
    options = docs["answer"].spec.udf.constructor_kwargs["options"]
    in_flight, most = Counter[str](), Counter[str]()

    class Counting(Client):
        async def post(self, path: str, **_: Any) -> None:
            url = self.response
            in_flight[url] += 1
            most[url] = max(most[url], in_flight[url])
            await asyncio.sleep(0.001)
            in_flight[url] -= 1

    def client(made: OpenAIProvider, endpoint: Endpoint | None) -> Counting:
        return Counting(endpoint.url if endpoint else made._base_url)

    monkeypatch.setattr(OpenAIProvider, "_client", client)

    async def ask_often(made: OpenAIProvider) -> None:
        await asyncio.gather(*(made._post("/", {}) for _ in range(20)))

    asyncio.run(ask_often(OpenAIProvider("m", **options)))
    assert most == {"http://near:1": 2, "http://near:2": 2}
    asyncio.run(ask_often(OpenAIProvider("m", base_url="http://own", max_connections=3)))
    assert most["http://own"] == 3
