"""Which replica a worker calls, and when its model has to be constructed again."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

import pytest

import vane_dagster as vd
from vane_dagster.servers import directory as module
from vane_dagster.servers.directory import Directory
from vane_dagster.servers.handle import HostUrls, ServerHandle
from vane_dagster.servers.launch import Endpoint

NEAR = Endpoint("http://near:1", "grpc://near:2", "m", "key-of-near", node_id="here")
FAR = Endpoint("http://far:1", "grpc://far:2", "m", "key-of-far", node="far", node_id="other")
KEYS = ("llm",)


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "own_node_id", lambda: "here")


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Endpoint, bool]]:
    found: dict[Endpoint, bool] = {}
    monkeypatch.setattr(module, "answers", lambda endpoint: found.get(endpoint, True))
    return found


def known(*endpoints: Endpoint) -> Directory:
    found = Directory()
    found.update({"llm": endpoints})
    return found


def test_the_own_node_comes_first_then_the_first_replica():
    directory = known(FAR, NEAR)
    assert directory.current("llm") == NEAR
    with directory.request("llm") as first, directory.request("llm") as second:
        assert [first, second] == [NEAR, NEAR]
    assert known(FAR, replace(FAR, url="http://third:1")).current("llm") == FAR


def test_requests_go_to_the_least_loaded_replica():
    other = replace(NEAR, url="http://near:9")
    directory = known(NEAR, other)
    with directory.request("llm") as first:
        with directory.request("llm") as second:
            assert {first, second} == {NEAR, other}
        with directory.request("llm") as third:
            assert third == second, "its request has ended"


def test_a_replica_that_does_not_answer_is_avoided(up):
    directory = known(NEAR, FAR)
    up[NEAR] = False
    assert not directory.probe(KEYS, monotonic())
    assert directory.is_usable(KEYS), "the other one answers"
    assert directory.current("llm") == FAR
    with directory.request("llm") as chosen:
        assert chosen == FAR
    up[NEAR] = True
    assert directory.probe(KEYS, monotonic())
    with directory.request("llm") as chosen:
        assert chosen == NEAR


def test_a_call_that_began_after_a_replica_was_lost_fails_for_another_reason(up):
    directory = known(NEAR, FAR)
    before = monotonic()
    up[NEAR] = False
    assert not directory.probe(KEYS, before), "the call may have used it"
    assert not directory.probe(KEYS, before), "as may another one that began then"
    began = monotonic()
    assert directory.current("llm") == FAR
    assert directory.probe(KEYS, began)
    up[FAR] = False
    assert not directory.probe(KEYS, began)


def test_a_call_during_which_a_replica_was_down_may_have_failed_because_of_it(up):
    """Also if it answers again when the error is raised, as after the client's own retries."""
    directory, began = known(NEAR), monotonic()
    directory.update({"llm": [replace(NEAR, life=(0, True))]})
    assert not directory.probe(KEYS, began)
    assert not directory.probe(KEYS, monotonic()), "nobody has said that it is back"
    assert not directory.is_usable(KEYS), "its supervisor has not seen that it answers"
    during = monotonic()
    directory.update({"llm": [replace(NEAR, life=(1, False))]})
    assert not directory.probe(KEYS, during)
    assert directory.is_usable(KEYS)
    assert directory.probe(KEYS, monotonic())


def test_without_a_ready_replica_a_request_fails_as_a_connection_does():
    directory = known()
    with pytest.raises(ConnectionError, match="no replica of the server is ready"):
        directory.current("llm")
    assert not directory.probe(KEYS, monotonic())
    assert not directory.is_usable(KEYS)


def test_a_model_that_was_given_a_url_needs_that_replica(up):
    directory = known(NEAR, FAR)
    with directory.constructing():
        directory.current("llm")
    up[NEAR] = False
    directory.probe(KEYS, monotonic())
    assert not directory.is_usable(KEYS), "its model keeps the URL of the one that is down"
    assert not directory.is_outdated, "it comes back there"
    began = monotonic()
    directory.update({"llm": [FAR]})
    assert directory.is_outdated
    assert not directory.probe(KEYS, began), "it went away during the call"
    assert directory.probe(KEYS, monotonic())


def test_a_model_that_asks_for_the_url_in_each_call_is_never_outdated():
    directory = known(NEAR)
    directory.current("llm")
    directory.update({"llm": [FAR]})
    assert not directory.is_outdated
    assert directory.current("llm") == FAR


def test_an_address_is_unknown_outside_of_workers():
    with pytest.raises(vd.errors.StageError, match="`vane-dagster pools endpoint` prints it"):
        ServerHandle("nobody").url  # noqa: B018  # looking it up raises


def test_a_handle_travels_without_its_declaration():
    server = vd.Server(["serve", "{port}"], model="m")
    handle = pickle.loads(pickle.dumps(server))
    assert (type(handle), handle.key, handle.keyed) == (ServerHandle, server.key, None)


def test_a_handle_has_the_attributes_of_a_replica(monkeypatch):
    monkeypatch.setattr("vane_dagster.servers.handle.directory", known(NEAR))
    handle = ServerHandle("llm")
    assert (handle.url, handle.grpc_url) == ("http://near:1", "grpc://near:2")
    assert (handle.model, handle.headers) == ("m", {"Authorization": "Bearer key-of-near"})


def test_a_worker_finds_its_own_host_wherever_replicas_run(monkeypatch):
    monkeypatch.setattr("vane_dagster.servers.handle.directory", known(FAR))
    urls = HostUrls(ServerHandle("llm"), "grpc")
    assert urls[socket.gethostname()] == "grpc://far:2"
    assert dict(urls) == {socket.gethostname(): "grpc://far:2", "far": "grpc://far:2"}
    with pytest.raises(KeyError):
        urls["nowhere"]
