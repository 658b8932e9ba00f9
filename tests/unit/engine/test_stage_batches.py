"""Records of batches: their states, groups within limits, and that nothing is submitted twice."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vane_dagster.engine.stage_batches import DOUBT_SECONDS, StageBatches, grouped
from vane_dagster.errors import ComputeError
from vane_dagster.providers.batch_api import (
    BatchAnswer,
    BatchApi,
    OpenAIBatches,
    RefusedBatch,
    RemoteBatch,
)
from vane_dagster.storage.batch_records import ProviderBatch, record_requests
from vane_dagster.storage.filesystem import StoragePath
from vane_dagster.storage.store import Store

DAY = 24 * 3600.0


@dataclass
class World(BatchApi):
    """A provider, its clock, and a stage that uses it.

    Attributes:
        knows_names: Whether the provider shows names of batches, as OpenAI does.
        submitted: The custom ids of each batch.
        fails: Raised by the next submission: before the batch is made, or after.
        hidden: Batches that the list lacks.
    """

    folder: Path
    knows_names: bool = True
    now: float = 1000.0
    submitted: dict[str, list[str]] = field(default_factory=dict)
    remote: dict[str, RemoteBatch] = field(default_factory=dict)
    fails: tuple[Exception, bool] | None = None
    hidden: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    canceled: list[str] = field(default_factory=list)

    MAX_REQUESTS, MAX_BYTES = 3, 10_000

    def batches(self) -> StageBatches:
        spec = SimpleNamespace(
            name="asked",
            model=SimpleNamespace(name="m"),
            batch_api=lambda: self,
            failures=SimpleNamespace(max_retries=2),
        )
        store = Store(StoragePath(str(self.folder)))
        return StageBatches(store, "docs", spec, lambda: self.now, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def asked(self, *digests: str) -> str:
        requests = {digest * 32: f'{{"prompt": "{digest}"}}' for digest in digests}
        return record_requests(self.batches().folder.path, requests).name

    def submit_all(self, *digests: str, key: str | None = None) -> list[ProviderBatch]:
        record = ProviderBatch("m", 0.0, "run", 0, (), ("asked", "below"))
        self.now += 1
        batches = self.batches()
        batches.refresh()
        before = {each.name for each in batches.batches}
        for error in batches.submit({key: [self.asked(*digests)]}, record, lambda _: None).values():
            raise error
        return [each for each in batches.batches if each.name not in before]

    def sent(self) -> Counter[str]:
        return Counter(each[0] for ids in self.submitted.values() for each in ids)

    def end(self) -> None:
        self.remote = {id: replace(each, has_ended=True) for id, each in self.remote.items()}

    # BatchApi

    _batches = None

    def _remote(self, found: Any) -> RemoteBatch:
        raise NotImplementedError

    def line(self, custom_id: str, body: str) -> bytes:
        return f"{custom_id} {body}".encode()

    def submit(self, name: str, lines: Sequence[bytes]) -> RemoteBatch:
        error, is_made = self.fails or (None, True)
        self.fails = None
        if is_made:
            id = f"remote-{len(self.remote)}"
            self.submitted[id] = [line.decode().partition(" ")[0] for line in lines]
            named = name if self.knows_names else None
            made = RemoteBatch(id, self.now, self.now + DAY, False, len(lines), named)
            self.remote[id] = made
        if error is not None:
            raise error
        return made

    def since(self, at: float) -> Iterator[RemoteBatch]:
        found = [each for id, each in self.remote.items() if id not in self.hidden]
        yield from (each for each in reversed(found) if each.created_at >= at)

    def get(self, id: str) -> RemoteBatch:
        return self.remote[id]

    def answers(self, batch: RemoteBatch) -> Iterator[BatchAnswer]:
        for custom_id in reversed(self.submitted[batch.id]):
            if custom_id[0] not in self.lost:
                yield BatchAnswer(custom_id, "succeeded", f'"{custom_id[0]}"')

    def close(self) -> None:
        pass

    def cancel(self, id: str) -> None:
        self.canceled.append(id)
        self.remote[id] = replace(self.remote[id], is_canceled=True, has_ended=True)


@pytest.fixture(params=[True, False], ids=["named", "nameless"])
def world(tmp_path: Path, request: pytest.FixtureRequest) -> World:
    return World(tmp_path, request.param)


def refreshed(batches: StageBatches) -> list[ProviderBatch]:
    """Look at the batches, and return those that have ended since."""
    before = {each.name for each in batches.read() if each.ended_at}
    batches.refresh()
    return [each for each in batches.batches if each.ended_at and each.name not in before]


def answered(batches: StageBatches) -> dict[str, str]:
    index = batches.answers(0, "", False).index()
    found = {digest: [*index.find(digest * 32)] for digest in "abcdef01"}
    return {digest: held[-1].status for digest, held in found.items() if held and held[-1]}


def test_a_batch_that_another_process_collects_meanwhile_stays_in_flight(world):
    world.submit_all("a", "b")
    batches = world.batches()
    batches.refresh()
    given = batches.answers(0, "", False)
    world.end()
    world.batches().refresh()
    assert [*given.index().find("a" * 32)] == [None]
    assert [*given.index().find("c" * 32)] == []


def test_a_batch_that_the_account_has_no_room_for_waits_until_another_has_ended(world):
    full = {"has_ended": True, "problem": "the limit is reached", "lacks_room": True}
    (first,), _, (third,) = (world.submit_all(each, key=each) for each in "abc")
    world.remote[third.id], world.lost = replace(world.remote[third.id], **full), {"c", "d"}
    batches = world.batches()
    assert [each.counts for each in refreshed(batches)] == [{"postponed": 1}]
    assert batches.waiting() == {"a", "b", "c"}
    world.now += 1
    world.remote[first.id] = replace(world.remote[first.id], has_ended=True)
    assert len(refreshed(batches)) == 1
    assert batches.waiting() == {"b"}
    world.end()
    batches.refresh()
    (alone,) = world.submit_all("d", key="d")
    world.remote[alone.id] = replace(world.remote[alone.id], **full)
    assert [each.counts for each in refreshed(batches)] == [{"errored": 1}]


@pytest.mark.parametrize(("code", "lacks_room"), [("token_limit_exceeded", True), (None, False)])
def test_openai_says_by_a_code_that_the_account_has_no_room(code, lacks_room):
    reason = SimpleNamespace(message="Enqueued token limit reached", code=code)
    found = SimpleNamespace(
        id="b", created_at=1, expires_at=None, status="failed", request_counts=None, metadata=None,
        output_file_id=None, error_file_id=None, errors=SimpleNamespace(data=[reason]),
    )  # fmt: skip
    remote = OpenAIBatches._remote(object.__new__(OpenAIBatches), found)
    assert (remote.problem, remote.lacks_room) == ("Enqueued token limit reached", lacks_room)


@pytest.fixture(autouse=True)
def _no_uname(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients send the name of the processor, for which Python starts `uname`."""
    monkeypatch.setattr("platform._Processor.get", str)


def openai_api(answers: dict[str, list[int]]) -> tuple[OpenAIBatches, list[str]]:
    """OpenAI's client of a server that answers a path with statuses in turn; 0 breaks off."""
    httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
    asked: list[str] = []

    def answer(request: Any) -> Any:
        asked.append(path := request.url.path.rpartition("/")[2])
        if not (status := answers[path].pop(0) if answers.get(path) else 200):
            raise httpx.ConnectError("dropped")
        made = {"id": "b", "created_at": 1, "status": "validating", "object": "batch"}
        return httpx.Response(status, json=made, headers={"retry-after-ms": "1"})

    transport = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(api_key="k", base_url="http://api/v1", http_client=transport)
    return OpenAIBatches(client, "/chat/completions"), asked


@pytest.mark.parametrize("status", [429, 500, 0])
def test_a_transient_error_repeats_an_upload_and_never_the_creation_of_a_batch(status):
    api, asked = openai_api({"files": [status]})
    assert api.submit("name", [b"{}"]).id == "b"
    assert asked == ["files", "files", "batches"]
    api, asked = openai_api({"batches": [status]})
    with pytest.raises(ComputeError, match="a batch was not created"):
        api.submit("name", [b"{}"])
    assert asked == ["files", "batches"]


def test_a_batch_that_cannot_be_read_is_named_with_its_stage(world, monkeypatch):
    (made,) = world.submit_all("a")
    monkeypatch.setattr(world, "get", openai_api({made.id: [500] * 9})[0].get)
    with pytest.raises(ComputeError) as raised:
        world.batches().refresh()
    start = f"stage 'docs/asked': batch {made.id} was not read by http://api/v1/batches/{made.id}: "
    assert str(raised.value).startswith(f"{start}InternalServerError")


def test_what_two_processes_record_of_a_batch_is_kept(world):
    (made,) = world.submit_all("a", key="monday")
    folder = world.batches().folder
    ended = replace(made, ended_at=5.0, counts={"succeeded": 1})
    folder.write(ended)
    folder.write(replace(made, partitions=("monday", "tuesday"), stages=("below", "other"), id=""))
    folder.write(ended)
    expected = replace(ended, partitions=("monday", "tuesday"), stages=(*made.stages, "other"))
    assert folder.batches() == [expected]


def test_a_batch_is_submitted_looked_at_and_collected(world):
    (made,) = world.submit_all("a", "b", key="monday")
    assert (made.state, made.requests, made.partitions) == ("submitted", 2, ("monday",))
    assert made.expected == world.now + DAY
    batches = world.batches()
    assert refreshed(batches) == []
    assert batches.expected("monday") == made.expected
    world.end()
    (ended,) = refreshed(batches)
    assert (ended.state, ended.counts) == ("ended", {"succeeded": 2})
    assert answered(batches) == {"a": "succeeded", "b": "succeeded"}
    files = batches.folder.path.names()
    assert sorted(files) == [f"{made.name}.answers.parquet", f"{made.name}.json"]
    assert refreshed(batches) == []


def test_requests_in_flight_are_not_submitted_again_and_their_partitions_wait(world):
    world.submit_all("a", "b", key="monday")
    assert world.submit_all("a", "b", key="tuesday") == []
    (other,) = world.submit_all("b", "c", key="wednesday")
    assert other.requests == 1
    assert set(world.sent().values()) == {1}
    first, second = world.batches().read()
    assert first.partitions == ("monday", "tuesday")
    assert second.partitions == ("wednesday",)


def test_a_run_that_is_killed_before_or_after_the_call_submits_nothing_twice(world):
    """Killed: the call raises what nothing handles."""
    for is_made in (True, False):
        world.fails = (KeyboardInterrupt(), is_made)
        with pytest.raises(KeyboardInterrupt):
            world.submit_all("a", "b")
        (doubted,) = world.batches().read()
        assert doubted.state == "in doubt"
        if not is_made:
            # Until the provider has long not listed it, it may have been made.
            assert world.submit_all("a", "b") == []
            world.now += DOUBT_SECONDS
        made = world.submit_all("a", "b")
        if not world.knows_names and is_made:
            assert made == []
            assert world.batches().read()[0].state == "in doubt", "its answers will have the name"
            world.now += DOUBT_SECONDS
            assert world.submit_all("a", "b") == []
        world.end()
        assert len(refreshed(world.batches())) == 1
        assert set(world.sent().values()) == {1}
        world.submitted.clear()
        for batch in (folder := world.batches().folder).batches():
            folder.drop(batch)
            folder.path.delete([f"{batch.name}.answers.parquet"])


def test_what_another_run_has_submitted_and_collected_meanwhile_is_not_submitted(world):
    """The workers of this run have recorded it before."""
    slow = world.batches()
    slow.refresh()
    name = world.asked("a")
    world.submit_all("a")
    world.end()
    assert len(refreshed(world.batches())) == 1
    record = ProviderBatch("m", 0.0, "slow", 0, (), ("asked",))
    assert slow.submit({"p": [name]}, record, lambda _: None) == {}
    assert world.sent() == {"a": 1}
    (batch,) = world.batches().read()
    assert "p" in batch.partitions, "it is continued too"


def test_a_batch_that_the_provider_lists_late_is_found(world):
    world.fails = (ComputeError("502"), True)
    (doubted,) = world.submit_all("a")
    assert doubted.state == "in doubt"
    world.hidden = {"remote-0"}
    world.now += DOUBT_SECONDS / 2
    assert world.submit_all("a") == []
    world.hidden = set()
    world.end()
    batches = world.batches()
    (ended,) = refreshed(batches)
    assert (ended.id, world.sent()) == ("remote-0", {"a": 1})


def test_batches_of_others_are_not_taken_for_ours(world):
    others = replace(world, folder=world.folder / "other", submitted=world.submitted)
    others.remote = world.remote
    world.fails = (ComputeError("502"), False)
    world.submit_all("a")
    others.submit_all("b")
    world.now += DOUBT_SECONDS
    if not world.knows_names:
        assert world.submit_all("a") == [], "the other may be ours until it has ended"
        world.end()
    (made,) = world.submit_all("a")
    assert made.id == "remote-1"


def test_a_refused_batch_is_an_error_and_leaves_nothing(world):
    world.fails = (RefusedBatch("400: no such model"), False)
    with pytest.raises(RefusedBatch, match=r"stage 'docs/asked': 400: no such model"):
        world.submit_all("a")
    assert world.batches().folder.path.names() == {}


def test_two_runs_at_once_withdraw_and_submit_once(world, monkeypatch):
    """The other run records the same requests between the first one's look and its record."""
    others, done = world.batches(), []
    folder_add = type(others.folder).add

    def add(folder: Any, batch: ProviderBatch, requests: Any) -> None:
        folder_add(folder, batch, requests)
        if not done:
            done.append(batch)
            monkeypatch.setattr(type(others.folder), "add", folder_add)
            record = ProviderBatch("m", 0.0, "other", 0, (), ("asked",))
            taken = others._taken
            monkeypatch.setattr(others, "_taken", lambda without="": frozenset())
            others.submit({None: [world.asked("a")]}, record, lambda _: None)
            monkeypatch.setattr(others, "_taken", taken)

    monkeypatch.setattr(type(others.folder), "add", add)
    assert world.submit_all("a", "b")[0].requests == 1
    assert world.sent() == {"a": 1, "b": 1}


def test_what_does_not_come_back_has_a_status(world):
    world.lost = {"b", "c"}
    world.submit_all("a", "b")
    world.end()
    world.now += DAY
    batches = world.batches()
    batches.refresh()
    assert answered(batches) == {"a": "succeeded", "b": "expired"}
    world.submit_all("c", "d")
    world.batches().cancel([each.name for each in world.batches().read()])
    batches = world.batches()
    batches.refresh()
    batches.cancel([each.name for each in batches.in_flight])
    batches.refresh()
    assert answered(batches) == {
        "a": "succeeded",
        "b": "expired",
        "c": "canceled",
        "d": "succeeded",
    }


def test_an_image_of_a_request_counts_a_thousand_tokens(world):
    folder = world.batches().folder.path
    body = json.dumps({"text": "a" * 392, "url": "data:image/png;base64," + "iVBO" * 10_000 + "="})
    assert record_requests(folder, {"0" * 32: body, "1" * 32: "{}"}).prompt_tokens == 1_103


def test_requests_are_grouped_within_the_limits():
    given = [("x", "1", "a" * 10), ("x", "2", "b" * 10), ("y", "2", "b" * 10), ("y", "3", "c")]
    by_count = [(list(group), keys) for group, keys in grouped(given, 0, 2, 1000)]
    assert by_count == [(["1", "2"], ["x", "y"]), (["3"], ["y"])]
    by_bytes = [(list(group), keys) for group, keys in grouped(given, 5, 1000, 30)]
    assert by_bytes == [(["1", "2"], ["x", "y"]), (["3"], ["y"])]
    assert [list(group) for group, _ in grouped(given, 5, 1000, 20)] == [["1"], ["2"], ["3"]]
    assert list(grouped([], 0, 1, 1)) == []


class Killed(BaseException):
    """Ends a process at once."""


class Kills:
    """Kills the process before or after some of its operations on the store and the provider."""

    def __init__(self) -> None:
        self.done = 0
        self.at: frozenset[int] = frozenset()

    def tick(self) -> None:
        self.done += 1
        if self.done in self.at:
            raise Killed

    def around(self, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            found = method(*args, **kwargs)
            self.tick()
            return found

        return call


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Kills:
    found = Kills()
    method = found.around(StoragePath.with_storage_errors)
    monkeypatch.setattr(StoragePath, "with_storage_errors", method)
    for name in ("submit", "since", "get", "answers"):
        monkeypatch.setattr(World, name, found.around(getattr(World, name)))
    return found


def process(world: World, wanted: str) -> None:
    """A run: it looks at batches, and records what has no answer and is not in flight."""
    batches = world.batches()
    batches.refresh()
    index = batches.answers(0, "", False).index()
    left = [d for d in wanted if not [*index.find(d * 32)]]
    if left:
        record = ProviderBatch("m", 0.0, "run", 0, (), ("asked",))
        batches.submit({None: [world.asked(*left)]}, record, lambda _: None)


def lives(folder: Path, knows_names: bool, kills: Kills, at: Sequence[int]) -> int:
    """Runs are killed at some operations, until all is answered; return the operations of all."""
    world = World(folder, knows_names)
    kills.done, kills.at = 0, frozenset(at)
    for _ in range(12):
        world.now += DOUBT_SECONDS / 2
        with contextlib.suppress(Killed):
            process(world, "abcd")
        world.end()
    done, kills.at = kills.done, frozenset()
    batches = world.batches()
    assert refreshed(batches) == []
    assert answered(batches) == dict.fromkeys("abcd", "succeeded"), at
    assert set(world.sent().values()) == {1}, at
    return done


@pytest.mark.parametrize("knows_names", [True, False], ids=["named", "nameless"])
def test_runs_that_are_killed_at_any_operation(tmp_path, kills, knows_names):
    """At random, once and twice: nothing is sent twice, and nothing is lost."""
    whole = lives(tmp_path / "whole", knows_names, kills, ())
    chance = random.Random(int(os.environ.get("VANE_SEED", "0")))
    for number in range(int(os.environ.get("VANE_ROUNDS", "8"))):
        at = chance.sample(range(1, whole), 1 + number % 2)
        lives(tmp_path / str(number), knows_names, kills, at)
