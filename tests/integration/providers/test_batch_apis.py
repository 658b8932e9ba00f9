"""The batch APIs with the real clients, against a server that follows their specification."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.batch_server import Batches
from vane_dagster.engine.stage_batches import answers_by_digest
from vane_dagster.errors import ComputeError
from vane_dagster.providers.anthropic import AnthropicProvider
from vane_dagster.providers.base import Request
from vane_dagster.providers.batch_api import BatchApi, RefusedBatch
from vane_dagster.providers.http import HttpProvider
from vane_dagster.providers.openai import OpenAIProvider

NAME = "0123456789abcdef"
Made = tuple[BatchApi, HttpProvider]


@pytest.fixture(params=[OpenAIProvider, AnthropicProvider], ids=["openai", "anthropic"])
def made(request: pytest.FixtureRequest, server: Any, endpoint: Any) -> Iterator[Made]:
    url = endpoint[1]
    if request.param is AnthropicProvider:
        url = url.removesuffix("/v1")
    options = {"base_url": url, "api_key_env": "LLM_KEY"}
    api = request.param.batch_api(options)
    yield api, request.param("m", **options)
    api.close()


def lines(made: Made, *prompts: str) -> list[bytes]:
    api, provider = made
    return [
        api.line(f"{i:032x}-{NAME}", json.dumps(provider.body(asked(prompt))))
        for i, prompt in enumerate(prompts)
    ]


def asked(prompt: str) -> Request:
    return Request([{"role": "user", "content": prompt}], {"max_tokens": 9})


def test_answers_come_by_row_in_any_order_partly_failed(made, batches):
    api, provider = made
    prompts = ["a", "refused", "b\u2028c", "expires", "busy", "twice"]
    found = api.submit(NAME, lines(made, *prompts))
    assert (found.has_ended, found.requests) == (False, 6)
    assert found.expires_at - found.created_at == pytest.approx(24 * 3600)
    assert found.name == (NAME if isinstance(provider, OpenAIProvider) else None)
    ended = api.get(found.id)
    assert ended.has_ended
    every = list(api.answers(ended))
    assert {each.custom_id[33:] for each in every} == {NAME}
    answers = answers_by_digest([f"{i:032x}" for i in range(6)], every)
    named = {prompts[int(digest, 16)]: answer for digest, answer in answers.items()}
    assert {prompt: (each.status, each.code) for prompt, each in named.items()} == {
        "a": ("succeeded", 0),
        "refused": ("errored", 400),
        "b\u2028c": ("succeeded", 0),
        "expires": ("expired", 0),
        "busy": ("errored", 429 if isinstance(provider, OpenAIProvider) else 0),
        "twice": ("succeeded", 0),
    }
    assert "content policy" in named["refused"].text
    answer = provider.read(asked(""), json.loads(named["b\u2028c"].text))
    assert answer.text == "echo: b\u2028c"
    assert answer.completion_tokens > 0


def test_answers_that_the_provider_keeps_no_more_or_has_cut_are_lost(made, batches):
    api, provider = made
    ended = api.get(api.submit(NAME, lines(made, "a", "b")).id)
    if isinstance(provider, OpenAIProvider):
        (file,) = ended.files
        batches.files[file] = b'{"custom_id": 1\n[]\n' + batches.files[file]
    assert len([*api.answers(ended)]) == 2
    batches.keeps_answers = False
    assert [*api.answers(api.get(ended.id))] == []


def test_batches_since_a_time_are_listed_over_pages(made, batches):
    api = made[0]
    for number in range(5):
        api.submit(f"{number}", lines(made, "a"))
        batches.made[-1].at = 1000.0 + number
    assert [each.id for each in api.since(1002.0)] == ["batch_4", "batch_3", "batch_2"]


def test_a_cancelled_batch_keeps_what_it_has(made, batches):
    api = made[0]
    batches.ends_at_once = False
    found = api.submit(NAME, lines(made, "a", "slow"))
    api.cancel(found.id)
    assert api.get(found.id).is_canceled
    batches.end()
    ended = api.get(found.id)
    statuses = {each.custom_id[:32]: each.status for each in api.answers(ended)}
    assert statuses == {f"{0:032x}": "succeeded", f"{1:032x}": "canceled"}
    assert (ended.has_ended, ended.is_canceled) == (True, True)


def refused(batches: Batches) -> None:
    batches.refuse = (400, "no such model")


def overloaded(batches: Batches) -> None:
    batches.refuse = (503, "overloaded")


def dropped(batches: Batches) -> None:
    batches.drop_connection = 1


@pytest.mark.parametrize(
    ("fault", "kind", "message", "count"),
    [
        (refused, RefusedBatch, "no such model", 0),
        (overloaded, ComputeError, "overloaded", 0),
        (dropped, ComputeError, "bad gateway", 1),
    ],
)
def test_a_batch_that_may_have_been_made_is_not_called_refused(
    made, batches, fault: Callable[[Batches], None], kind, message, count
):
    fault(batches)
    with pytest.raises(ComputeError, match=message) as raised:
        made[0].submit(NAME, lines(made, "a"))
    assert type(raised.value) is kind
    assert len(batches.made) == count, "the client has sent it again"


def test_a_batch_that_fails_as_a_whole_says_why(server, endpoint, batches, monkeypatch):
    """Only OpenAI's do: it reads the file later."""
    options = {"base_url": endpoint[1], "api_key_env": "LLM_KEY"}
    api = OpenAIProvider.batch_api(options)
    batches.max_requests = 1
    given = lines((api, OpenAIProvider("m", **options)), "a", "b")
    found = api.get(api.submit(NAME, given).id)
    assert (found.has_ended, found.problem) == (True, "too many lines")
    assert list(api.answers(found)) == []
    api.close()


def test_a_wrong_key_is_an_error(made, monkeypatch):
    provider = type(made[1])
    monkeypatch.setenv("LLM_KEY", "wrong")
    url = made[1]._base_url
    api = provider.batch_api({"base_url": url, "api_key_env": "LLM_KEY"})
    with pytest.raises(RefusedBatch, match="Incorrect API key"):
        api.submit(NAME, lines(made, "a"))
    api.close()
    monkeypatch.delenv("LLM_KEY")
    with pytest.raises(ComputeError, match="'LLM_KEY' is not set here"):
        provider.batch_api({"base_url": url, "api_key_env": "LLM_KEY"})
