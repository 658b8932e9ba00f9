"""Which waiting leases want nodes, how many, and for how long, with fake placement groups."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from support.pool_claims import ask, claim
from vane_dagster.compute import growth
from vane_dagster.compute.growth import Growth, adds_nodes, short_of_nodes
from vane_dagster.compute.placement import Bundle
from vane_dagster.compute.pool_state import POLL_SECONDS, PoolState

BARE = {"head": {"CPU": 1.0}}
ONE = {"head": {"CPU": 1.0}, "n1": {"GPU": 1.0}}
TWO = {**ONE, "n2": {"GPU": 1.0}}
GPU, TPU = {"GPU": 1}, {"TPU": 1}


@pytest.fixture
def pool_state() -> PoolState:
    return PoolState()


@pytest.fixture
def grown(pool_state: PoolState) -> Growth:
    return Growth(pool_state)


# What is short of nodes, and by how much


def test_nothing_is_wanted_where_the_nodes_suffice(pool_state):
    assert ask(pool_state, "1", claim("a", GPU=1), claim("io"), nodes=ONE) is not None
    assert short_of_nodes(pool_state, ONE, 0.0) == {}
    pool_state.release("1", 0.0)
    ask(pool_state, "2", claim("b", CPU=2), nodes=ONE)
    assert short_of_nodes(pool_state, ONE, 0.0) == {"2": [{"CPU": 2}]}
    larger = {"n": {"CPU": 2.0}}
    assert short_of_nodes(pool_state, larger, 0.0) == {}, "there is a larger node now"


def test_what_is_free_is_part_of_what_is_wanted_and_what_is_leased_is_not(pool_state):
    ask(pool_state, "1", claim("a", GPU=1), nodes=ONE)
    assert ask(pool_state, "2", claim("b", (2, 4), GPU=1), claim("io"), nodes=ONE) is None
    assert short_of_nodes(pool_state, ONE, 0.0) == {"2": [GPU] * 2}, "the least, all at once"
    assert short_of_nodes(pool_state, TWO, 0.0) == {"2": [GPU] * 2}, "what is free is part of it"
    assert short_of_nodes(pool_state, {**TWO, "n3": {"GPU": 1.0}}, 0.0) == {}


def test_idle_pools_make_room_before_nodes_are_added(pool_state):
    ask(pool_state, "1", claim("a", GPU=1), nodes=ONE)
    pool_state.release("1", 0.0)
    assert ask(pool_state, "2", claim("b", (3, 3), GPU=1), nodes=TWO) is None
    assert short_of_nodes(pool_state, TWO, 0.0) == {"2": [GPU] * 2}, (
        "one in place of the idle pool, one on the free node, one on a new node"
    )
    assert short_of_nodes(pool_state, ONE, 0.0) == {"2": [GPU] * 2}
    assert list(pool_state.pools) == ["a"], "it stays warm until the lease is granted"


def test_who_does_not_poll_any_more_wants_nothing(pool_state):
    assert ask(pool_state, "1", claim("a", GPU=1), nodes=BARE) is None
    assert short_of_nodes(pool_state, BARE, POLL_SECONDS - 1) == {"1": [GPU]}
    assert short_of_nodes(pool_state, BARE, POLL_SECONDS) == {}


# Groups


@dataclass
class Group:
    name: str
    bundles: list[Bundle]
    state: str = "PENDING"


class Groups:
    """Ray's placement groups; `log` has what was posted (+) and removed (-)."""

    def __init__(self) -> None:
        self.alive: list[Group] = []
        self.log: list[str] = []

    def post(self, bundles: list[Bundle], name: str) -> Group:
        self.alive.append(group := Group(name, bundles))
        self.log.append(f"+{name}")
        return group

    def remove(self, group: Group) -> None:
        self.alive.remove(group)
        self.log.append(f"-{group.name}")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    made = Groups()
    monkeypatch.setattr("ray.util.placement_group", made.post)
    monkeypatch.setattr("ray.util.remove_placement_group", made.remove)
    monkeypatch.setattr("ray.util.placement_group_table", lambda group: {"state": group.state})
    monkeypatch.setattr(growth, "adds_nodes", lambda: True)
    return made


def test_each_request_has_a_group_until_nodes_are_there_or_it_is_gone(groups, pool_state, grown):
    ask(pool_state, "1", claim("a", GPU=1), nodes=BARE)
    ask(pool_state, "2", claim("b", TPU=1), nodes=BARE)
    assert grown.asked_for("1") == ""
    for _ in range(2):
        grown.step(BARE, 0.0)
    assert [(group.name, group.bundles) for group in groups.alive] == [("1", [GPU]), ("2", [TPU])]
    assert grown.asked_for("1") == "1 x 1 GPU"
    grown.step(ONE, 1.0)
    assert groups.log == ["+1", "+2", "-1"], "1 is granted when its run asks again"
    pool_state.release("2", 2.0)
    grown.step(ONE, 2.0)
    assert groups.alive == []
    assert grown.asked_for("2") == ""


def test_a_group_that_ray_reserves_is_removed_at_once_and_renewed_if_it_is_still_needed(
    groups, pool_state, grown
):
    ask(pool_state, "1", claim("a", GPU=1), nodes=BARE)
    grown.step(BARE, 0.0)
    grown.step(BARE, 1.0)
    assert groups.log == ["+1"]
    for state in ("CREATED", "REMOVED"):
        groups.alive[0].state = state
        grown.step(BARE, 1.0)
    assert groups.log == ["+1", "-1", "+1", "-1", "+1"]


def test_a_group_follows_what_its_request_is_short_of(groups, pool_state, grown):
    ask(pool_state, "1", claim("a", GPU=1), nodes=ONE)
    ask(pool_state, "2", claim("a", (3, 3), GPU=1), nodes=ONE)
    ask(pool_state, "3", claim("a", (4, 4), GPU=1), nodes=ONE)
    grown.step(ONE, 0.0)
    assert [len(group.bundles) for group in groups.alive] == [2, 1]
    pool_state.release("2", 1.0)
    grown.step(ONE, 1.0)
    assert [(group.name, len(group.bundles)) for group in groups.alive] == [("3", 3)]


# Whether the cluster can grow


class Gcs:
    def __init__(self, version: int) -> None:
        self.stored: dict[Any, bytes] = {}
        self.put(b"__autoscaler_v2_enabled", b"1" if version == 2 else b"0", b"__autoscaler")

    def put(self, key: bytes, value: bytes, namespace: bytes | None = None) -> None:
        self.stored[key, namespace] = value

    def internal_kv_get(self, key: bytes, namespace: bytes | None, timeout: float) -> bytes | None:
        return self.stored.get((key, namespace))

    def report(self, types: Sequence[str], at: float | None = None) -> None:
        found = {
            "time": time.time() if at is None else at,
            "autoscaler_report": {
                "active_nodes": dict.fromkeys(types, 1), "pending_launches": {}
            },
        }  # fmt: skip
        self.put(b"__autoscaling_status", json.dumps(found).encode())


@pytest.mark.parametrize("version", [1, 2])
def test_a_cluster_adds_nodes_while_its_autoscaler_runs(version, monkeypatch):
    """The first version reports its nodes; the second has an address for its metrics."""
    gcs = Gcs(version)
    monkeypatch.setattr("ray.experimental.internal_kv.internal_kv_get_gcs_client", lambda: gcs)
    assert not adds_nodes(), "there is none"
    if version == 2:
        gcs.put(b"AutoscalerMetricsAddress", b"10.0.0.1:44217")
        assert adds_nodes()
        return
    gcs.report(["accelerated"])
    assert adds_nodes()
    gcs.report(["node_" + "a" * 56])
    assert not adds_nodes(), "it mirrors nodes that were started by hand"
    gcs.report(["accelerated"], at=time.time() - 1000)
    assert not adds_nodes(), "it is silent"
