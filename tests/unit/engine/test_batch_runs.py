"""Prompt stages in batch mode: which requests are sent, and when their answers are committed."""

from __future__ import annotations

import json
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import vane_dagster as vd
from support.arguments import grouped
from support.data import read_stage
from support.in_process import InProcessCompute
from support.prompts import Person, docs
from vane_dagster.errors import DefinitionError, VaneError
from vane_dagster.orchestration.batch_runs import BatchRuns
from vane_dagster.orchestration.plain_run import run as run_plain
from vane_dagster.orchestration.read import open_store
from vane_dagster.providers.base import Answer, Request
from vane_dagster.providers.batch_api import BatchAnswer, BatchApi, RemoteBatch
from vane_dagster.providers.openai import OpenAIProvider
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.manifest import generation_number
from vane_dagster.storage.store import Store

DAY = 24 * 3600.0
REFUSED = {"refused": "against the content policy", "too long": "maximum context length is 8"}


class Batches(BatchApi):
    """A provider's batches, which echo; `answers_of` has other answers to a text, in turn."""

    MAX_REQUESTS, MAX_BYTES = 1000, 1 << 20
    _batches = None

    def __init__(self) -> None:
        self.made: list[dict[str, str]] = []
        self.remote: dict[str, RemoteBatch] = {}
        self.answers_of: dict[str, list[str]] = {}
        self.ends_at_once = True

    def __reduce__(self) -> Any:
        return getattr, (types, "batches_of_test")  # no copy, by whatever module

    @property
    def prompts(self) -> Counter[str]:
        return Counter(text for batch in self.made for text in batch.values())

    def end(self) -> None:
        self.remote = {id: replace(each, has_ended=True) for id, each in self.remote.items()}

    # BatchApi

    def _remote(self, found: Any) -> RemoteBatch:
        raise NotImplementedError

    def line(self, custom_id: str, body: str) -> bytes:
        return f"{custom_id} {body}".encode()

    def submit(self, name: str, lines: Sequence[bytes]) -> RemoteBatch:
        id, now = str(len(self.made)), time.time()
        pairs = [line.decode().split(" ", 1) for line in lines]
        self.made.append({custom_id: json.loads(body)["text"] for custom_id, body in pairs})
        self.remote[id] = RemoteBatch(id, now, now + DAY, self.ends_at_once, len(lines), name)
        return self.remote[id]

    def since(self, at: float) -> Iterator[RemoteBatch]:
        yield from reversed(self.remote.values())

    def get(self, id: str) -> RemoteBatch:
        return self.remote[id]

    def answers(self, batch: RemoteBatch) -> Iterator[BatchAnswer]:
        for custom_id, text in self.made[int(batch.id)].items():
            others = self.answers_of.get(text)
            if text in REFUSED:
                yield BatchAnswer(custom_id, "errored", REFUSED[text], 400)
            elif text == "expires" and self.prompts[text] == 1:
                yield BatchAnswer(custom_id, "expired")
            elif not (text == "slow" and batch.is_canceled):
                answer = others.pop(0) if others else f"echo: {text}"
                yield BatchAnswer(custom_id, "succeeded", json.dumps(answer))

    def close(self) -> None:
        pass

    def cancel(self, id: str) -> None:
        self.remote[id] = replace(self.remote[id], is_canceled=True)


class Batched:
    """A provider whose requests have a text, and whose answers are one."""

    def __init__(self, model: str) -> None:
        pass

    def body(self, request: Request) -> dict[str, Any]:
        messages = [message["content"] for message in request.messages]
        return {**request.sampling, "text": messages[0], "follow_up": messages[1:]}

    def read(self, request: Request, found: str) -> Answer:
        return Answer(found, 10, 10)

    async def submit(self, request: Request) -> Answer:
        return Answer(f"live: {request.messages[-1]['content']}", 10, 10)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Batches:
    made = Batches()
    monkeypatch.setattr(types, "batches_of_test", made, raising=False)
    monkeypatch.setattr(Batched, "batch_api", lambda options: made, raising=False)
    return made


def declared(tmp_path: Path, texts: list[str | None], **given: Any) -> vd.Pipeline:
    """docs -> asked -> below, in fragments of two rows."""
    pipeline = docs(tmp_path, texts)
    pipeline.fragment_rows = 2
    own = {"provider": Batched, "model": "m", "mode": "batch", **given}
    pipeline.prompt("asked", "{text}", **grouped(own)).project("below", ["id", "asked"])
    return pipeline


Ran = Callable[..., bool]


@pytest.fixture
def run(tmp_path: Path) -> Ran:
    given: dict[str, Any] = {"store": str(tmp_path / "store"), "compute": InProcessCompute()}

    def ran(pipeline: vd.Pipeline, **options: Any) -> bool:
        """Return whether all stages are up to date after a run; else none is."""
        pipeline.run(**given, **options)
        (done,) = {each.up_to_date for each in pipeline.plan(store=given["store"]).stages}
        return bool(done)

    return ran


def rows(tmp_path: Path) -> list[Any]:
    return read_stage(tmp_path / "store", "docs", "below").sort_by("id")["asked"].to_pylist()


def test_failed_rows_are_quarantined_and_retried_in_another_batch(tmp_path, run, batches):
    texts = ["one", "refused", "too long", None]
    aside = {"on_error": "quarantine", "include_columns": ["text"]}
    pipeline = declared(tmp_path, texts, **aside)
    assert [run(pipeline), run(pipeline)] == [False, True]
    failed = vd.quarantine("docs/asked", store=str(tmp_path / "store")).sort_by("id").to_pylist()
    assert [(each["id"], each["error"]) for each in failed] == [
        (1, "BatchRequestError"), (2, "BatchRequestError"), (3, "ValueError"),
    ]  # fmt: skip
    assert failed[0]["message"] == "errored 400: against the content policy"
    assert rows(tmp_path) == ["echo: one"]

    for _ in range(2):  # the second takes the answers up
        run(pipeline, retry_quarantined=True)
        assert batches.prompts == {"one": 1, "refused": 2, "too long": 2}


def test_an_answer_that_does_not_fit_is_asked_again_in_the_next_batch(tmp_path, run, batches):
    batches.answers_of["ann"] = ["no json", '{"name": "ann", "age": 7}']
    batches.answers_of["bob"] = ['{"name": "bob", "age": 9}']
    given = {"return_format": Person, "explain_errors": 1}
    pipeline = declared(tmp_path, ["ann", "bob"], **given)
    assert [run(pipeline) for _ in range(3)] == [False, False, True]
    assert [each["age"] for each in rows(tmp_path)] == [7, 9]
    assert [len(each) for each in batches.made] == [2, 1]


def test_rows_that_change_in_flight_are_not_committed_with_the_former_answer(
    tmp_path, run, batches
):
    batches.ends_at_once = False
    given = {"sampling_params": {"temperature": 0}}
    run(declared(tmp_path, ["one", "two", "two"], **given))
    assert batches.prompts == {"one": 1, "two": 1}, "equal prompts share an answer"
    pipeline = declared(tmp_path, ["one", "other", "two"], **given)
    run(pipeline)
    assert batches.prompts == {"one": 1, "two": 1, "other": 1}
    batches.end()
    assert run(pipeline)
    assert rows(tmp_path) == ["echo: one", "echo: other", "echo: two"]


def test_a_forced_run_asks_again_and_the_next_forced_one_commits(tmp_path, run, batches):
    pipeline = declared(tmp_path, ["same", "same"])
    assert [run(pipeline), run(pipeline)] == [False, True]
    assert batches.prompts == {"same": 2}, "each row has an answer of its own"
    store = Store(StoragePath(str(tmp_path / "store")))
    for generation in (0, 1):
        run(pipeline, force=True)
        assert (
            generation_number(store.latest("docs", "asked", [None])[None].generation) == generation
        )
    assert batches.prompts == {"same": 4}


def test_a_run_that_waits_commits(tmp_path, run, batches, monkeypatch):
    monkeypatch.setattr("vane_dagster.orchestration.run.BATCH_POLL_SECONDS", 0.01)
    assert run(declared(tmp_path, ["one", "expires"]), wait=True)
    assert [len(each) for each in batches.made] == [2, 1]


def continuation(pipeline: vd.Pipeline, store: Store) -> Any:
    """Look at the batches, and return the only run that goes on."""
    known = BatchRuns(pipeline, store)
    for each in known.every:
        each.refresh()
    (found,) = known.continuations()[0]
    return found


@pytest.mark.parametrize("option", ["force", "retry_quarantined"])
def test_a_run_that_goes_on_computes_nothing_again_that_is_committed(
    option, tmp_path, run, batches
):
    """After the stage below failed, say."""
    pipeline = declared(tmp_path, ["one", "refused"], on_error="quarantine")
    assert [run(pipeline), run(pipeline)] == [False, True]
    run(pipeline, **{option: True})  # the former version stays in force
    made = len(batches.made)
    store = open_store(str(tmp_path / "store"), "test")
    for stages in (["asked"], ["asked", "below"]):
        going_on = continuation(pipeline, store)
        assert going_on.options.get(option, False) is (stages == ["asked"])
        run_plain(pipeline, None, stages, store.root.url, InProcessCompute(), **going_on.options)
    assert len(batches.made) == made
    assert pipeline.plan(store=store.root.url).is_up_to_date


def test_a_run_goes_on_with_a_stage_below_that_has_no_results_yet(tmp_path, run, batches):
    pipeline = declared(tmp_path, ["one"])
    assert not run(pipeline)
    store = open_store(str(tmp_path / "store"), "test")
    for stages in (["asked"], ["asked", "below"]):
        going_on = continuation(pipeline, store)
        assert going_on.stages == ["asked", "below"]
        run_plain(pipeline, None, stages, store.root.url, InProcessCompute())
    assert BatchRuns(pipeline, store).continuations()[0] == []


def test_a_change_of_the_mode_computes_what_waits_for_a_batch_and_nothing_else(
    tmp_path, run, batches
):
    in_batches, live = (
        declared(tmp_path, ["one", "two", "slow"], mode=mode) for mode in ("batch", "live")
    )
    batches.ends_at_once = False
    assert not run(in_batches)
    batches.cancel("0")
    batches.end()
    assert not run(in_batches)  # asks for "slow" again
    assert run(live)
    assert rows(tmp_path) == ["echo: one", "live: two", "live: slow"]  # by fragments
    assert [len(each) for each in batches.made] == [3, 1]


def test_budgets_count_requests_when_they_are_submitted(tmp_path, run, batches):
    given = {"sampling_params": {"max_tokens": 100}, "token_budget": 300}
    pipeline = declared(tmp_path, [f"text {i}" for i in range(80)], **given)
    sent = [0]
    for _ in range(2):  # another run has another budget
        with pytest.raises(VaneError, match="token_budget=300"):
            run(pipeline)
        sent.append(sum(batches.prompts.values()))
    assert sent[0] < sent[1] < sent[2] < 80
    assert set(batches.prompts.values()) == {1}


def test_what_has_no_batches_is_refused(tmp_path, batches):
    with pytest.raises(DefinitionError, match='only the providers "openai"'):
        declared(tmp_path, ["a"], provider="transformers")
    with pytest.raises(DefinitionError, match='only the providers "openai"'):
        declared(tmp_path, ["a"], provider=type("Endpoint", (OpenAIProvider,), {"BATCHES": None}))
    with pytest.raises(DefinitionError, match="explain_errors=1"):
        declared(tmp_path, ["a"], retry_on=["InvalidAnswer"])
    with pytest.raises(DefinitionError, match="no stage uses batches"):
        docs(tmp_path).build_batch_sensor()
