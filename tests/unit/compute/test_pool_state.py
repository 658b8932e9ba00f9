"""The pool state alone: grants, their order, and evictions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pool_claims import ONE, ask, claim, spec
from vane_dagster.compute.admission import largest, plan_waves, unsatisfiable
from vane_dagster.compute.api import Capacity
from vane_dagster.compute.placement import FreeResources, fits, gpus_for
from vane_dagster.compute.pool_state import LEASE_SECONDS, LeaseGrant, LeaseRecord, PoolState
from vane_dagster.errors import ComputeError
from vane_dagster.worker.pools import PoolSpec

TWO = {"n1": {"CPU": 4.0, "GPU": 1.0}, "n2": {"CPU": 4.0, "GPU": 1.0}}


@pytest.fixture
def pool_state() -> PoolState:
    return PoolState()


def sizes(pool_state: PoolState) -> dict[str, int]:
    return {identity: len(pool.workers) for identity, pool in pool_state.pools.items()}


def granted(*given: Any, **more: Any) -> LeaseGrant:
    grant = ask(*given, **more)
    assert grant is not None
    return grant


# First come, first served


def test_nobody_overtakes_where_resources_compete(pool_state):
    granted(pool_state, "1", claim("a", GPU=1))
    assert ask(pool_state, "2", claim("b", GPU=1)) is None
    assert ask(pool_state, "3", claim("a", GPU=1)) is None, "a is warm, but 2 was first"
    assert pool_state.blocking_runs("3") == ["run-1", "run-2"]
    granted(pool_state, "4", claim("c", CPU=1))
    granted(pool_state, "5", claim("d"))
    pool_state.release("1", 1.0)
    assert ask(pool_state, "3", claim("a", GPU=1), now=1.0) is None
    assert len(granted(pool_state, "2", claim("b", GPU=1), now=1.0).kill) == 1
    assert sizes(pool_state) == {"b": 1, "c": 1, "d": 1}
    pool_state.release("2", 2.0)
    granted(pool_state, "3", claim("a", GPU=1), now=2.0)


def test_a_request_that_is_not_repeated_loses_its_place(pool_state):
    granted(pool_state, "1", claim("a", GPU=1))
    assert ask(pool_state, "2", claim("b", GPU=1)) is None
    pool_state.release("1", 1.0)
    assert ask(pool_state, "3", claim("c", GPU=1), now=5.0) is None
    granted(pool_state, "3", claim("c", GPU=1), now=20.0)


def test_a_pool_knows_the_stages_that_leased_it_last(pool_state):
    for stage in ("docs/embedding", "mail/embedding"):
        asked = replace(spec("m"), stages=(stage,)).request()
        assert ask(pool_state, stage, asked) is not None
        pool_state.release(stage, 1.0)
    assert pool_state.pools["m"].claim.stages == ("mail/embedding",)


def test_a_request_asked_twice_has_one_lease(pool_state):
    first, again = (granted(pool_state, "1", claim("a", (2, 2), CPU=1)) for _ in range(2))
    assert again.workers == first.workers
    assert [lease.id for lease in pool_state.holders("a")] == ["1"]
    assert pool_state.holders("b") == []
    assert not again.start
    assert sizes(pool_state) == {"a": 2}


# Priority


def test_the_highest_priority_goes_first_then_who_came_first(pool_state):
    ask(pool_state, "1", claim("a", GPU=1))
    waiting = {"2": 0, "3": 5, "4": 5}
    for now, (id, priority) in enumerate(waiting.items()):
        assert ask(pool_state, id, claim("b", GPU=1), now=float(now), priority=priority) is None
    assert pool_state.blocking_runs("2") == ["run-1", "run-3", "run-4"]
    assert pool_state.blocking_runs("3") == ["run-1"]
    pool_state.release("1", 5.0)
    order = []
    while waiting:
        for id, priority in list(waiting.items()):
            if ask(pool_state, id, claim("b", GPU=1), now=6.0, priority=priority) is not None:
                order.append(id)
                del waiting[id]
                pool_state.release(id, 6.0)
    assert order == ["3", "4", "2"]


def test_a_low_priority_does_not_wait_for_ever(pool_state):
    ask(pool_state, "held", claim("a", GPU=1))
    assert ask(pool_state, "low", claim("b", GPU=1), now=0.0) is None
    for now in range(10, 1800, 10):  # runs of a higher priority keep coming, each for ten seconds
        ask(pool_state, "low", claim("b", GPU=1), now=float(now))
        ask(pool_state, f"high-{now}", claim("c", GPU=1), now=float(now), priority=2)
    pool_state.release("held", 1800.0)
    assert ask(pool_state, "high-1790", claim("c", GPU=1), now=1800.0, priority=2) is None
    granted(pool_state, "low", claim("b", GPU=1), now=1800.0)


# Sharing and growing


def test_runs_share_a_pool_and_it_grows_to_the_largest_lease(pool_state):
    first = granted(pool_state, "1", claim("a", (1, 1), CPU=1))
    second = granted(pool_state, "2", claim("a", (2, 2), CPU=1))
    assert len(second.start) == 1
    assert first.workers["a"][0] in second.workers["a"]
    assert len(second.workers["a"]) == 2
    for id in "12":
        pool_state.release(id, 0.0)
    third, fourth = (granted(pool_state, id, claim("a", CPU=1)) for id in "34")
    assert not {*third.workers["a"]} & {*fourth.workers["a"]}, "no more than the most, least used"
    assert sizes(pool_state) == {"a": 2}


def test_pools_grow_by_turns_to_what_there_is_without_ending_anything(pool_state):
    granted(pool_state, "1", claim("a", CPU=1))
    pool_state.release("1", 0.0)
    assert not granted(pool_state, "2", claim("b", (1, 8), CPU=1)).kill
    assert sizes(pool_state) == {"a": 1, "b": 3}
    turns = PoolState()
    granted(turns, "1", claim("a", (1, 8), CPU=1), claim("b", (1, 8), CPU=1))
    assert sizes(turns) == {"a": 2, "b": 2}


def test_workers_beyond_the_least_make_room_for_the_same_lease(pool_state):
    first = granted(pool_state, "1", claim("a", (2, 2), GPU=1), nodes=TWO)
    pool_state.release("1", 0.0)
    grant = granted(pool_state, "2", claim("a", GPU=1), claim("b", GPU=1), nodes=TWO)
    assert grant.kill == first.workers["a"][1:], "the elder stays"
    assert sizes(pool_state) == {"a": 1, "b": 1}


# Eviction


@pytest.mark.parametrize(
    ("nodes", "idle", "kept"),
    [
        ({"GPU": 3.0}, {"b": {"GPU": 1}, "c": {"GPU": 1}, "a": {"GPU": 1}}, {"a", "c"}),
        ({"GPU": 1.0, "CPU": 1.0}, {"cpu": {"CPU": 1}, "free": {}, "gpu": {"GPU": 1}},
         {"cpu", "free"}),
    ],
    ids=["least recently used first", "what holds nothing of use is spared"],
)  # fmt: skip
def test_which_idle_pool_makes_room(pool_state, nodes, idle, kept):
    for at, (name, bundle) in enumerate(idle.items()):
        granted(pool_state, name, claim(name, **bundle), nodes={"n": nodes})
        pool_state.release(name, float(at))
    granted(pool_state, "4", claim("new", GPU=1), nodes={"n": nodes}, now=9.0)
    assert set(pool_state.pools) == {*kept, "new"}


def test_idle_time_counts_from_the_last_release(pool_state):
    ask(pool_state, "1", claim("a", idle=10))
    ask(pool_state, "2", claim("a", idle=10))
    pool_state.release("1", 100.0)
    assert pool_state.expired_pools(500.0) == [], "still leased"
    pool_state.release("2", 500.0)
    assert pool_state.expired_pools(509.0) == []
    assert pool_state.expired_pools(511.0) == ["a"]


def test_a_pool_on_the_wrong_node_is_moved_for_its_own_lease(pool_state):
    pool_state.adopt("a-1", (claim("a", GPU=1), ("big",), set()), 0.0)
    nodes = {"big": {"GPU": 2.0}, "small": {"GPU": 1.0}}
    grant = granted(pool_state, "1", claim("a", GPU=1), claim("b", GPU=2), nodes=nodes)
    assert grant.kill == ("a-1",)
    places = {start.claim.identity: start.nodes[0] for start in grant.start}
    assert places == {"a": "small", "b": "big"}


TWO_NODES = {"n1": {"CPU": 4.0, "GPU": 2.0}, "n2": {"CPU": 4.0, "GPU": 2.0}}


def test_the_ranks_of_a_worker_are_reserved_on_several_nodes_or_not_at_all(pool_state):
    spread = replace(claim("a", (1, 3), GPU=3, CPU=3), ranks=3)
    (start,) = granted(pool_state, "1", spread, nodes=TWO_NODES).start
    assert sorted(start.nodes) == ["n1", "n1", "n2"], "a second one has no room for all"
    assert ask(pool_state, "2", claim("b", GPU=2), nodes=TWO_NODES) is None
    pool_state.release("2", 0.0)
    (other,) = granted(pool_state, "3", claim("c", GPU=1), nodes=TWO_NODES).start
    assert other.nodes == ("n2",)
    pool_state.release("3", 0.0)
    pool_state.record_nodes(start.worker, ("n2", "n2", "n1"))
    (other,) = granted(pool_state, "4", claim("d", GPU=1), nodes=TWO_NODES).start
    assert other.nodes == ("n1",), "where Ray has placed them counts"
    _, again = pool_state.replace(start.worker, spread, {"n1": TWO_NODES["n1"]})
    assert again is not None
    assert again.nodes == ("", "", ""), "Ray waits for room"
    (share, *_) = replace(
        claim("e", **{"GPU": 24, "accelerator_type:H100": 0.001}), ranks=24
    ).shares
    assert share == {"GPU": 1, "accelerator_type:H100": 0.0001}, "Ray would round less to 0"


# Expiry and restart


def test_a_lease_expires_without_heartbeats_and_is_not_learnt_again(pool_state):
    ask(pool_state, "1", claim("a", GPU=1))
    beat = LeaseRecord("1", "run-1", (claim("a", GPU=1),), 0.0)
    assert pool_state.heartbeat(beat, 20.0)
    assert pool_state.expired(20.0 + LEASE_SECONDS) == []
    assert pool_state.expired(21.0 + LEASE_SECONDS) == ["1"]
    pool_state.release("1", 51.0)
    assert not pool_state.heartbeat(beat, 52.0), "its queued calls were revoked"
    assert not pool_state.leases


def test_a_restarted_pool_manager_learns_leases_from_the_workers(pool_state):
    """A lease whose driver died meanwhile expires; the others have what their drivers say."""
    for number in "12":
        pool_state.adopt(f"a-{number}", (claim("a", GPU=1), ("n1",), {f"run-{number}-07"}), 0.0)
    pool_state.adopt("b-1", (claim("b", CPU=1), ("n1",), {"run-1-07"}), 0.0)
    pool_state.adopt("c-1", (claim("c", idle=1, CPU=1), ("n1",), set()), 0.0)
    assert pool_state.expired_pools(5.0) == ["c"]
    assert pool_state.leases["run-1-07"].workers == ("a-1", "b-1")
    for wanted in "ab":
        assert ask(pool_state, "3", claim(wanted, (9, 9), GPU=1, CPU=1), now=1.0) is None
        assert pool_state.blocking_runs("3") == ["run-1", "run-2"]
        pool_state.release("3", 1.0)
    beat = LeaseRecord("run-1-07", "run-1", (claim("a", GPU=1),), 0.0, workers=("a-1", "a-3"))
    for now in (5.0, 20.0):
        assert pool_state.heartbeat(beat, now)
        assert pool_state.leases["run-1-07"].workers == ("a-1", "a-3")
    assert pool_state.expired(LEASE_SECONDS + 1) == ["run-2-07"]
    assert pool_state.leases["run-2-07"].workers == ("a-2",), "its calls there are revoked"


def test_idle_pools_make_room_and_their_dead_workers_are_forgotten(pool_state):
    for worker, idle_since in (("a-1", 2.0), ("a-2", 2.0), ("b-1", 1.0), ("c-1", 0.0)):
        kind = {"CPU": 1} if worker == "c-1" else {"GPU": 1}
        leases = {"run-07"} if worker == "b-1" else set()
        pool_state.adopt(worker, (claim(worker[0], **kind), ("n1",), leases), idle_since)
    assert pool_state.idle() == ["c", "a"]
    assert pool_state.idle_competitors(claim("d", GPU=1)) == ["a"]
    pool_state.remove_dead_idle({"a-2", "c-1"})
    workers = {name: set(pool.workers) for name, pool in pool_state.pools.items()}
    assert workers == {"a": {"a-2"}, "b": {"b-1"}, "c": {"c-1"}}, "its run replaces b-1"


# Lost workers


def test_two_runs_that_lose_a_shared_worker_get_the_same_heir(pool_state):
    lost = granted(pool_state, "1", claim("a", GPU=1)).workers["a"][0]
    ask(pool_state, "2", claim("a", GPU=1))
    replacement, start = pool_state.replace(lost, claim("a", GPU=1), ONE)
    assert start is not None
    assert start.nodes == ("n1",)
    assert pool_state.replace(lost, claim("a", GPU=1), ONE) == (replacement, None)
    next_heir, start = pool_state.replace(replacement, claim("a", GPU=1), ONE)
    assert start is not None
    assert pool_state.replace(lost, claim("a", GPU=1), ONE) == (next_heir, None)
    assert sizes(pool_state) == {"a": 1}


def test_a_worker_of_a_pool_that_was_evicted_by_force_is_replaced_too(pool_state):
    lost = granted(pool_state, "1", claim("a", GPU=1)).workers["a"][0]
    pool_state.remove_workers([lost])
    replacement, start = pool_state.replace(lost, claim("a", GPU=1), ONE)
    assert start is not None
    assert list(pool_state.pools["a"].workers) == [replacement]


def test_what_died_of_an_idle_pool_is_struck_off(pool_state):
    granted(pool_state, "1", claim("a", GPU=1))
    idle = granted(pool_state, "2", claim("b", (2, 2), CPU=1))
    pool_state.release("2", 0.0)
    pool_state.remove_dead_idle({idle.workers["b"][0]})
    assert sizes(pool_state) == {"a": 1, "b": 1}, "a is for its own run to replace"


# Draining nodes


@pytest.fixture
def drained(pool_state: PoolState) -> PoolState:
    """Two leases share a worker on the node d, which drains, and one on n1; an idle one is on d."""
    for worker, node in {"a-1": "d", "a-2": "n1"}.items():
        pool_state.adopt(worker, (claim("a", (2, 2), GPU=1), (node,), set()), 0.0)
    pool_state.adopt("b-1", (claim("b", CPU=1), ("d",), set()), 0.0)
    for id in "12":
        granted(pool_state, id, claim("a", (2, 2), GPU=1))
    pool_state.draining = frozenset("d")
    return pool_state


def test_leased_workers_on_a_draining_node_are_replaced_and_end_when_the_last_lease_leaves(drained):
    (start,) = drained.move(TWO)
    fresh = start.worker
    assert start.nodes == ("n2",)
    assert drained.move(TWO) == [], "once"
    assert drained.moves("1") == drained.moves("2") == {"a-1": fresh}
    assert drained.unused() == ["b-1"]

    assert drained.replace("a-1", claim("a", GPU=1), TWO, "1") == (fresh, None)
    assert set(drained.leases["1"].workers) == {"a-2", fresh}
    assert drained.moves("1") == {}
    assert set(drained.pools["a"].workers) == {"a-1", "a-2", fresh}, "the other lease uses it"
    assert drained.replace("a-1", claim("a", GPU=1), TWO, "2") == (fresh, None)
    assert set(drained.pools["a"].workers) == {"a-2", fresh}


def test_a_draining_node_that_is_lost_takes_nothing_that_was_replaced(drained):
    (start,) = drained.move({"n1": TWO["n1"]})
    assert start.nodes == ("",), "there is no room: Ray waits for it"
    drained.draining = frozenset()  # dead nodes do not drain
    for _ in "12":
        assert drained.replace("a-1", claim("a", GPU=1), TWO, "1") == (start.worker, None)
    assert drained.moves("2") == {}
    assert set(drained.pools["a"].workers) == {"a-2", start.worker}


def test_no_lease_gets_a_worker_on_a_draining_node(drained):
    for id in "12":
        drained.release(id, 0.0)
    assert granted(drained, "3", claim("a", (2, 2), GPU=1), nodes=TWO).workers["a"][0] == "a-2"
    assert sorted(drained.unused()) == ["a-1", "b-1"]


# Room


def test_a_share_of_a_gpu_lies_on_one_gpu():
    assert fits([{"GPU": 2}], [{"GPU": 0.5}] * 4)
    assert not fits([{"GPU": 2}], [{"GPU": 0.6}] * 3), "the rests of two GPUs are no GPU"
    assert not fits([{"GPU": 1}, {"GPU": 1}], [{"GPU": 2}])
    assert fits([{"GPU": 2}], [{"GPU": 0.5}, {"GPU": 1}, {"GPU": 0.5}])


def test_small_bundles_leave_the_large_node_free_and_empty_ones_spread_by_cpus():
    room = FreeResources({"big": {"GPU": 4.0}, "small": {"GPU": 1.0}})
    assert [room.place({"GPU": gpus}) for gpus in (1, 4, 1)] == ["small", "big", None]
    room = FreeResources({"head": {"CPU": 0.0}, "a": {"CPU": 2.0}, "b": {"CPU": 4.0}})
    assert sorted(str(room.place({})) for _ in range(6)) == [*"aabbbb"]


@pytest.mark.parametrize(
    ("bundle", "expected"),
    [({}, 6), ({"CPU": 2}, 3), ({"GPU": 1}, 3), ({"GPU": 1 / 3}, 9), ({"GPU": 1, "CPU": 4}, 1),
     ({"license": 1}, 1), ({"GPU": 4}, 1)],
)  # fmt: skip
def test_as_many_workers_as_use_all_gpus_or_cpus(bundle, expected):
    nodes = ({"CPU": 4, "GPU": 2, "license": 1}, {"CPU": 2, "GPU": 1})
    assert Capacity(nodes, 0).held(bundle) == expected


ONE_GPU = Capacity(({"CPU": 4, "GPU": 1},), 0)
MACHINE = Capacity(({"CPU": 2, "GPU": 1},), 0, is_cluster=False)
TWO_PLUS_ONE = Capacity(({"CPU": 2, "GPU": 1, "memory": 2**30}, {"CPU": 1, "memory": 2**29}), 0)


def here(name: str) -> PoolSpec:
    return replace(spec(name, GPU=1), on_driver=True)


@pytest.mark.parametrize(
    ("capacity", "upstream", "pools", "waves"),
    [
        (ONE_GPU, {"clean": [], "a": ["clean"], "b": ["clean"], "c": ["a"], "j": [*"abc"]},
         {name: spec(name, GPU=1) for name in "abc"}, [["clean", "a"], ["b"], ["c", "j"]]),
        (ONE_GPU, {"a": [], "b": ["a"]}, dict.fromkeys("ab", spec("m", GPU=1)), [["a", "b"]]),
        (replace(ONE_GPU, driver=MACHINE), dict.fromkeys("abc", ()),
         {"a": spec("a", GPU=1), "b": here("b"), "c": here("c")}, [["a", "b"], ["c"]]),
        (Capacity(({"CPU": 1.0},), 0, adds_nodes=True), {"a": [], "b": []},
         {name: spec(name, GPU=1) for name in "ab"}, [["a"], ["b"]]),
    ],
    ids=["what fits together, in order", "stages of one pool", "each place for itself",
         "where nodes may be added, one after another"],
)  # fmt: skip
def test_waves(capacity, upstream, pools, waves):
    assert plan_waves(capacity, list(upstream), upstream, pools) == waves


def test_of_pools_of_one_model_each_end_of_their_size_is_the_largest():
    pools = [spec("m", (1, 8)), spec("other"), spec("m", (2, 2)), spec("m", (1, 3))]
    found = largest(pools)
    assert {name: pool.workers for name, pool in found.items()} == {"m": (2, 8), "other": (1, 1)}


@pytest.mark.parametrize(
    ("amount", "free", "gpus"),
    [
        (0.0, {"0": 1.0}, []),
        (0.2, {"0": 1.0, "1": 1.0 - 0.8}, ["1"]),  # less than 0.2, by rounding
        (0.5, {"0": 1.0, "1": 0.5, "2": 0.4}, ["1"]),
        (2.0, {"0": 1.0, "1": 0.5, "2": 1.0}, ["0", "2"]),
        (1.0, {"0": 0.5, "1": 0.7}, ["1"]),
        (2.0, {"0": 0.5, "1": 0.7, "2": 1.0}, ["2", "1"]),
    ],
)
def test_gpus_for_a_worker_are_the_fullest_with_room_or_else_the_freest(amount, free, gpus):
    assert gpus_for(amount, free) == gpus


def test_a_stage_that_does_not_fit_beside_its_server_is_refused():
    capacity = Capacity(({"CPU": 4}, {"CPU": 4}), 0)
    caller = replace(spec("ask", CPU=1), uses={"llm": "llm"})
    servers = {"llm": spec("llm", (2, 2), CPU=4)}
    with pytest.raises(ComputeError) as caught:
        plan_waves(capacity, ["a"], {"a": []}, {"a": caller}, servers)
    assert "stage 'a' needs 1 of 1 CPU for Ask and 2 of 4 CPU for Llm" in str(caught.value)
    servers = {"llm": spec("llm", (1, 2), CPU=4)}
    assert plan_waves(capacity, ["a"], {"a": []}, {"a": caller}, servers) == [["a"]]


@pytest.mark.parametrize(
    ("capacity", "pool", "message"),
    [
        (ONE_GPU, spec("m", GPU=2), "a worker of 2 GPU; the cluster has 1 GPU (nodes: 1)"),
        (ONE_GPU, spec("m", (2, 3), GPU=1), "concurrency=(1, 3)"),
        (TWO_PLUS_ONE, spec("m", CPU=3), "the cluster has 3 CPU (nodes: 2, each with at most"),
        (TWO_PLUS_ONE, spec("m", **{"memory": 5e12, "accelerator_type:A100": 0.001}), "a worker "
         "of 4,657 GiB of memory, accelerator type A100; the cluster has 1.5 GiB of memory, no "
         "accelerator type A100 (nodes: 2, each with at most 1 GiB of memory, no accelerator"),
        (MACHINE, spec("m", TPU=1), "this machine has 0 TPU for subprocesses"),
        (ONE_GPU, replace(spec("m", (5, 5), CPU=1), server="m"), "asks for 5 replicas of 1 CPU "
         "each; the cluster has 4 CPU (nodes: 1). Declare replicas=(1, 5) to use what is"),
    ],
)  # fmt: skip
def test_more_than_there_is_is_refused(capacity, pool, message):
    needs = (pool.label, pool.workers, pool.bundle, bool(pool.server))
    assert message in str(unsatisfiable(capacity, *needs))
    assert unsatisfiable(replace(capacity, adds_nodes=True), *needs) is None
    assert unsatisfiable(capacity, "M", (1, 1), {"GPU": 1}) is None


def test_ranks_need_as_many_gpus_on_all_nodes_together_and_a_cluster():
    needs = ("M", (1, 1), {"GPU": 4.0})
    nodes = tuple(TWO_NODES.values())
    assert unsatisfiable(Capacity(nodes, 0), *needs) is not None
    assert unsatisfiable(Capacity(nodes, 0), *needs, ranks=4) is None
    assert "4 GPU; the cluster has 2" in str(unsatisfiable(Capacity(nodes[:1], 0), *needs, ranks=4))
    machine = Capacity(nodes, 0, is_cluster=False)
    assert "compute on a cluster" in str(unsatisfiable(machine, *needs, ranks=4))


# Properties

AMOUNTS = st.fixed_dictionaries(
    {},
    optional={
        "GPU": st.sampled_from([0.25, 0.5, 0.6, 1.0, 2.0]),
        "CPU": st.sampled_from([0.5, 1.0, 2.0]),
    },
)
NODES = st.lists(
    st.fixed_dictionaries({"CPU": st.sampled_from([1.0, 2.0, 4.0]), "GPU": st.integers(0, 2)}),
    min_size=1,
    max_size=3,
)
MODELS = st.lists(st.tuples(AMOUNTS, st.floats(1, 100)), min_size=1, max_size=5)
REQUESTS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 2), st.integers(0, 2)), max_size=3),
    min_size=1,
    max_size=8,
)


def over_committed(pool_state: PoolState, nodes) -> list[str]:
    held = {id: {"CPU": 0.0, "GPU": 0.0} for id in nodes}
    for pool in pool_state.pools.values():
        for nodes_of_shares in pool.workers.values():
            for node, share in zip(nodes_of_shares, pool.claim.shares):
                for name, amount in share.items():
                    held[node][name] += amount
    return [id for id in nodes if any(held[id][name] > nodes[id][name] + 1e-6 for name in held[id])]


@settings(max_examples=60)
@given(NODES, MODELS, REQUESTS, st.randoms(use_true_random=False))
def test_never_over_committed_and_nobody_starves(node_list, models, wishes, random):
    nodes = {f"n{i}": node for i, node in enumerate(node_list)}
    requests = []
    for number, wish in enumerate(wishes):
        claims = {}
        for index, least, more in wish:
            bundle, idle = models[index % len(models)]
            identity = f"m{index % len(models)}"
            claims[identity] = claim(identity, (least, least + more), idle, **bundle)
        needed = [c.bundle for c in claims.values() for _ in range(c.workers[0])]
        if fits(node_list, needed):
            requests.append((str(number), tuple(claims.values())))

    pool_state, held, waiting = PoolState(), [], list(requests)
    for now in itertools.count():
        assert now < 40 * (1 + len(requests)), f"{len(waiting)} requests starve"
        if not waiting and not held:
            break
        for id, claims in list(waiting):
            before = {i: dict(pool.workers) for i, pool in pool_state.pools.items()}
            grant = ask(pool_state, id, *claims, nodes=nodes, now=float(now))
            if grant is None:
                assert before == {i: p.workers for i, p in pool_state.pools.items()}, "half granted"
                continue
            leased = {c.identity for lease in pool_state.leases.values() for c in lease.claims}
            mine = {c.identity for c in claims}
            others = {w for i in leased - mine for w in before.get(i, {})}
            assert not others & set(grant.kill), "a leased pool was evicted"
            for c in claims:
                assert c.workers[0] <= len(grant.workers[c.identity]) <= c.workers[1]
            waiting.remove((id, claims))
            held.append(id)
        assert not over_committed(pool_state, nodes)
        if held and random.random() < 0.5:
            pool_state.release(held.pop(random.randrange(len(held))), float(now))
        for identity in pool_state.expired_pools(float(now)):
            pool_state.remove_workers(list(pool_state.pools[identity].workers))


def test_a_request_that_waits_does_not_try_each_of_many_idle_workers(pool_state, monkeypatch):
    """Drivers poll every second, and the pool manager serves them one after the other."""
    nodes = {f"n{i}": {"GPU": 8.0} for i in range(16)}
    granted(pool_state, "1", claim("a", (64, 64), GPU=1), nodes=nodes)
    pool_state.release("1", 1.0)
    granted(pool_state, "2", claim("c", (32, 32), GPU=1), nodes=nodes, now=2.0)
    placed, tries = PoolState._placed, []
    monkeypatch.setattr(
        PoolState, "_placed", lambda self, *given: tries.append(given) or placed(self, *given)
    )
    more = claim("a", (1, 64), GPU=1), claim("b", (97, 97), GPU=1)
    assert ask(pool_state, "3", *more, nodes=nodes, now=3.0) is None
    assert len(tries) == 2, "without an eviction, and with all"
    tries.clear()
    pool_state.release("3", 3.0)
    wanted = claim("a", (1, 64), GPU=1), claim("b", (40, 40), GPU=1)
    assert len(granted(pool_state, "4", *wanted, nodes=nodes, now=3.0).kill) == 8
    assert len(tries) <= 2 + 7 + 1 + 8, "a binary search, then each of those that it found"
